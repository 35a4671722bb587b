"""The control: no guard. Two processes read one balance, and the second write wipes out the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._demo.bank import move
from pgfence._demo.workload import Workload, loses_money

if TYPE_CHECKING:
    from pgfence._demo.context import WorkerContext


def work(desk: WorkerContext) -> None:
    """Make one transfer."""
    source, target = desk.accounts.pair(desk.chance)
    with desk.sessions.begin() as session:
        move(session, source, target, desk.pick_amount())
    desk.count_move()


ACT = Workload(name="unguarded", title="no guard (control)", work=work, check=loses_money)
