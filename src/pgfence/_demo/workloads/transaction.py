"""`TransactionLock` on both accounts. A transfer locks first and then loads, and the commit releases the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._demo.bank import ACCOUNT, move
from pgfence._demo.workload import Workload
from pgfence.transaction import TransactionLock

if TYPE_CHECKING:
    from pgfence._demo.context import WorkerContext


def work(context: WorkerContext) -> None:
    """Make one transfer."""
    source, target = context.accounts.pair(context.chance)
    with context.sessions.begin() as session:
        with context.note_wait():
            TransactionLock(session, ACCOUNT(source), ACCOUNT(target)).acquire()
        move(session, source, target, context.pick_amount())
    context.count_move()


ACT = Workload(name="transaction-lock", title="TransactionLock", work=work)
