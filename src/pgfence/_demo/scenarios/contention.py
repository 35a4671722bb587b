"""Make the same transfers under a lock and with a version, on many accounts and on few, to show when each guard is faster.

Under `TransactionLock`, the later transaction waits before it reads. With a version, the transaction that writes later is retried.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, ForeignKey, MetaData, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgfence._demo.bank import SCHEMA
from pgfence._demo.scenario import Scenario, ScenarioResult, create_engine_for, read_part, say, start_processes
from pgfence._demo.workload import Verdict
from pgfence._process.clock import clock
from pgfence.retrying import run_transaction
from pgfence.transaction import TransactionLock
from pgfence.versions import Versioned, VersionedSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy import Engine

    from pgfence._demo.scenario import ScenarioProcess

PROCESSES = 8
SECONDS = 1.0
MANY, FEW = 1000, 2
_THOUGHT = 0.002
_ATTEMPTS = 1000
_TITLE = f"lock or version, on {MANY:,} accounts and on {FEW}"
_AUDIT = text(f"""
    SELECT count(*) FROM {SCHEMA}.versioned_account AS a
    WHERE balance <> (SELECT coalesce(sum(cents), 0) FROM {SCHEMA}.versioned_entry WHERE account = a.id)
""")


class ContentionBase(DeclarativeBase):
    """The application's models."""

    metadata = MetaData(schema=SCHEMA)


class VersionedAccount(Versioned, ContentionBase):
    """An account; the balance is in cents."""

    __tablename__ = "versioned_account"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int] = mapped_column(BigInteger, default=0)


class VersionedEntry(ContentionBase):
    """One line of the journal."""

    __tablename__ = "versioned_entry"
    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[int] = mapped_column(ForeignKey(VersionedAccount.id))
    cents: Mapped[int]


@dataclass(frozen=True, slots=True)
class Measured:
    """The totals of all processes with one guard on some accounts. `most` is the highest number of attempts for one transfer."""

    transfers: int
    attempts: int
    most: int

    @property
    def retried(self) -> int:
        """The percentage of attempts that were retried."""
        return round(100 * (self.attempts - self.transfers) / self.attempts) if self.attempts else 0


def play(engine: Engine) -> ScenarioResult:
    """Run the processes with each guard, on many accounts first."""
    ContentionBase.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all(VersionedAccount(id=number) for number in range(MANY))
    with start_processes() as start:
        processes = [start(__name__, engine.url, seed=seed) for seed in range(PROCESSES)]
        cells = {
            (accounts, guard): _measure(processes, accounts, guard) for accounts in (MANY, FEW) for guard in GUARDS
        }
    with engine.connect() as connection:
        off = connection.scalar(_AUDIT) or 0
    return ScenarioResult(
        scene="contention",
        title=_TITLE,
        verdict=_judge(cells, off),
        lines=(f"{_format_line(MANY, cells)}.", f"{_format_line(FEW, cells)}; wrong balances: {off or 'none'}."),
        figures=dict(_list_figures(cells, off)),
    )


def _measure(processes: Sequence[ScenarioProcess], accounts: int, guard: str) -> Measured:
    for process in processes:
        process.wait_for("ready")
    for process in processes:
        process.send(accounts=accounts, guard=guard)
    done = [process.wait_for("done") for process in processes]
    return Measured(sum(map(len, done)), sum(map(sum, done)), max(map(max, done)))


def _format_line(accounts: int, cells: dict[tuple[int, str], Measured]) -> str:
    locked, versioned = cells[accounts, "lock"], cells[accounts, "version"]
    return (
        f"{accounts:>5,} accounts: {locked.transfers / SECONDS:,.0f}/s under a lock,"
        f" {versioned.transfers / SECONDS:,.0f}/s by version ({versioned.retried} % of attempts retried,"
        f" up to {versioned.most} per transfer)"
    )


def _list_figures(cells: dict[tuple[int, str], Measured], off: int) -> Iterator[tuple[str, int]]:
    for (accounts, guard), measured in cells.items():
        where = "many" if accounts == MANY else "few"
        yield f"{where}_{guard}", measured.transfers
    yield "many_in_vain_percent", cells[MANY, "version"].retried
    yield "few_in_vain_percent", cells[FEW, "version"].retried
    yield "accounts_off", off


def _judge(cells: dict[tuple[int, str], Measured], off: int) -> Verdict:
    if off or not all(measured.transfers for measured in cells.values()):
        return Verdict.GUARD_FAILED
    # Without a conflict the versions had nothing to prevent.
    return Verdict.OK if cells[FEW, "version"].retried else Verdict.CONTROL_FAILED


def main() -> None:
    """Run one of the processes until it is killed."""
    given = read_part()
    engine = create_engine_for(given["url"])
    sessions = sessionmaker(engine, class_=VersionedSession)
    chance = random.Random(given["seed"])
    with engine.connect():
        pass
    while True:
        say(ready=True)
        cell = read_part()
        move = GUARDS[cell["guard"]]
        attempts, until = [], clock() + SECONDS
        while clock() < until:
            attempts.append(move(sessions, *chance.sample(range(cell["accounts"]), 2)))
        say(done=attempts)


def _move_under_lock(sessions: sessionmaker[VersionedSession], source: int, target: int) -> int:
    with sessions.begin() as session:
        TransactionLock(session, f"account:{source}", f"account:{target}").acquire()
        _move(session, source, target)
    return 1


def _move_by_version(sessions: sessionmaker[VersionedSession], source: int, target: int) -> int:
    attempts = 0

    def move(session: Session) -> None:
        nonlocal attempts
        attempts += 1
        _move(session, source, target)

    run_transaction(sessions, move, attempts=_ATTEMPTS)
    return attempts


def _move(session: Session, source: int, target: int) -> None:
    giver, taker = session.get_one(VersionedAccount, source), session.get_one(VersionedAccount, target)
    time.sleep(_THOUGHT)
    giver.balance -= 100
    taker.balance += 100
    session.add_all([VersionedEntry(account=source, cents=-100), VersionedEntry(account=target, cents=100)])


GUARDS: dict[str, Callable[[sessionmaker[VersionedSession], int, int], int]] = {
    "lock": _move_under_lock,
    "version": _move_by_version,
}
SCENE = Scenario(name="contention", title=_TITLE, play=play)

if __name__ == "__main__":
    main()
