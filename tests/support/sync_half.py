"""The sync half at work, to be run where greenlet is missing: `python sync_half.py [URL]`, else on an embedded server."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from pgfence import AdvisoryLock, TransactionLock, embedded


def main(url: str) -> None:
    engine = create_engine(url)
    lock = AdvisoryLock(engine, "alone")
    with lock.hold(timeout=5) as held:
        held.check()
        assert lock.is_held()
    with lock.connect() as connection:
        connection.execute(text("SELECT 1"))
        connection.commit()
    with TransactionLock.begin(engine, "alone", timeout=5) as connection:
        assert lock.is_held()
    with Session(engine) as session:
        assert TransactionLock(session, "alone").try_acquire()
        session.commit()
    assert not lock.is_held()
    engine.dispose()


if __name__ == "__main__":
    with nullcontext(sys.argv[1]) if sys.argv[1:] else embedded.server(fsync=False) as address:
        main(address)
