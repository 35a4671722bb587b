"""`TransactionLock` on both accounts: lock, then load; the commit releases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._demo.bank import ACCOUNT, move
from pgfence._demo.workload import Workload
from pgfence.transaction import TransactionLock

if TYPE_CHECKING:
    from pgfence._demo.context import WorkerContext


def work(desk: WorkerContext) -> None:
    """Make one transfer."""
    source, target = desk.accounts.pair(desk.chance)
    with desk.sessions.begin() as session:
        with desk.note_wait():
            TransactionLock(session, ACCOUNT(source), ACCOUNT(target)).acquire()
        move(session, source, target, desk.pick_amount())
    desk.count_move()


ACT = Workload(name="transaction-lock", title="TransactionLock", work=work)
