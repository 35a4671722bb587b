"""The control, without a guard. If two processes read the same balance, the second write overwrites the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._demo.bank import move
from pgfence._demo.workload import Workload, loses_money

if TYPE_CHECKING:
    from pgfence._demo.context import WorkerContext


def work(context: WorkerContext) -> None:
    """Make one transfer."""
    source, target = context.accounts.pair(context.chance)
    with context.sessions.begin() as session:
        move(session, source, target, context.pick_amount())
    context.count_move()


ACT = Workload(name="unguarded", title="no guard (control)", work=work, check=loses_money)
