"""Guarded transfers by many processes: is an update lost? The other figures show the cost of each guard.

Each transfer reads two balances, computes in the program and writes both back, the textbook way to lose updates. The journal is
the check: the balances must be equal to its sums.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks import report
from benchmarks.place import server
from pgfence import AdvisoryLock, TransactionLock

if TYPE_CHECKING:
    from threading import Barrier

ACCOUNTS = 20
"""Few accounts, so that nearly every transfer conflicts with another one."""
SCHEMA = """
    CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL);
    CREATE TABLE journal (payer int NOT NULL, payee int NOT NULL, amount int NOT NULL);
    INSERT INTO account SELECT n, 1000000 FROM generate_series(1, {0}) AS n
"""
LOST = """
    SELECT sum(abs(balance - 1000000 - moved)) FROM account, LATERAL (
        SELECT coalesce(sum(CASE WHEN payee = id THEN amount ELSE -amount END), 0) AS moved
        FROM journal WHERE id IN (payer, payee)) AS j
"""
READ = sa.text("SELECT id, balance FROM account WHERE id IN (:payer, :payee)")
WRITE = sa.text("UPDATE account SET balance = :balance WHERE id = :id")
NOTE = sa.text("INSERT INTO journal VALUES (:payer, :payee, :amount)")


def run(quick: bool) -> dict[str, Any]:
    """Move money with each of the guards, and without one as a control."""
    transfers, processes = (100, 2) if quick else (100_000, 8)
    rows, bars = [], []
    for guard, share in (("none", 0.02), ("TransactionLock", 1.0), ("AdvisoryLock.hold()", 0.2)):
        number = max(100, int(transfers * share))
        lost, took = _act(guard, number, processes)
        rows.append((guard, f"{number:,}", f"{lost:,}", f"{number / took:,.0f}/s"))
        if guard != "none":
            bars.append(report.bar(f"balance lost in {number:,} transfers, {guard}", "0", lost, 0, digits=0))
    return {
        "scenario": "transfers",
        "title": "Guarded transfers",
        "method": (
            f"{processes} processes transfer money between {ACCOUNTS} accounts by reading, computing and writing."
            ' The column "Lost" is the sum of the differences between balances and journal. Without a guard,'
            " which is the control, this sum must not be 0."
        ),
        "bars": bars,
        "tables": [report.table("Transfers", ("Guard", "Transfers", "Lost", "Rate"), rows)],
        "skipped": {},
    }


def _act(guard: str, transfers: int, processes: int) -> tuple[int, float]:
    each_one = transfers // processes
    context = multiprocessing.get_context("spawn")
    with server() as place, place.connect() as connection:
        connection.execute(SCHEMA.format(ACCOUNTS))
        ready = context.Barrier(processes + 1)
        arguments = (place.url().render_as_string(hide_password=False), guard, each_one, ready)
        crowd = [context.Process(target=_work, args=(*arguments, number)) for number in range(processes)]
        for each in crowd:
            each.start()
        ready.wait(60)
        start = time.monotonic()
        for each in crowd:
            each.join()
        took = time.monotonic() - start
        if failed := [each.exitcode for each in crowd if each.exitcode]:
            raise RuntimeError(f"workers ended with {failed}")
        (done,) = connection.execute("SELECT count(*) FROM journal").fetchone() or (0,)
        (lost,) = connection.execute(LOST).fetchone() or (0,)
    if done != each_one * processes:
        raise RuntimeError(f"the journal has {done} entries")
    return int(lost), took


def _work(url: str, guard: str, transfers: int, ready: Barrier, number: int) -> None:
    engine = sa.create_engine(url)
    with engine.connect():
        ready.wait(60)
    chance = random.Random(number)
    transfer = {"none": _unguarded, "TransactionLock": _in_transaction, "AdvisoryLock.hold()": _in_session}[guard]
    for _ in range(transfers):
        payer, payee = chance.sample(range(1, ACCOUNTS + 1), 2)
        transfer(engine, payer, payee, chance.randint(1, 100))


def _move(session: Session, payer: int, payee: int, amount: int) -> None:
    both = {"payer": payer, "payee": payee}
    balances = dict(session.execute(READ, both).tuples().all())
    for account, change in sorted(((payer, -amount), (payee, amount))):
        session.execute(WRITE, {"id": account, "balance": balances[account] + change})
    session.execute(NOTE, both | {"amount": amount})


def _unguarded(engine: sa.Engine, payer: int, payee: int, amount: int) -> None:
    with Session(engine) as session, session.begin():
        _move(session, payer, payee, amount)


def _in_transaction(engine: sa.Engine, payer: int, payee: int, amount: int) -> None:
    with Session(engine) as session, session.begin():
        TransactionLock(session, f"account:{payer}", f"account:{payee}").acquire(timeout=60)
        _move(session, payer, payee, amount)


def _in_session(engine: sa.Engine, payer: int, payee: int, amount: int) -> None:
    lock: Any = AdvisoryLock(engine, f"account:{payer}", f"account:{payee}")
    with lock.hold(timeout=60):
        _unguarded(engine, payer, payee, amount)
