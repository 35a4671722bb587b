"""`AdvisoryLock.connect()` around a longer job: several transactions at one till, which no other process may use during the job.

The job runs on the connection that holds the lock. A process that loses the lock has lost this connection, so it cannot write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from pgfence._demo.bank import TILL, move
from pgfence._demo.workload import Workload
from pgfence.advisory import AdvisoryLock

if TYPE_CHECKING:
    from pgfence._demo.context import WorkerContext

TRANSFERS_OF_A_JOB = 10


def work(context: WorkerContext) -> None:
    """Do one job: several transfers between the accounts of a till."""
    till = context.accounts.till(context.chance)
    key = TILL(till.start)
    context.ask(key.label)
    with AdvisoryLock(context.engine, key).connect() as connection:
        context.note_grant(key.label)
        for _ in range(TRANSFERS_OF_A_JOB):
            source, target = context.accounts.pair_of(till, context.chance)
            with Session(connection) as session, session.begin():
                move(session, source, target, context.pick_amount())
            context.count_move()
    context.note_release(key.label)


ACT = Workload(name="advisory-lock", title="AdvisoryLock.connect()", work=work)
