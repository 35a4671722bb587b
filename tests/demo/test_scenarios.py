"""The scenes of the demo: what each is judged by, and that a broken guard is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import pytest
from sqlalchemy import create_engine, insert, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import sessionmaker

from pgfence import schema
from pgfence._demo.bank import SCHEMA
from pgfence._demo.errors import DemoError
from pgfence._demo.scenario import create_engine_for, start_processes
from pgfence._demo.scenarios import contention, election, partitions, paused, retries, slots
from pgfence._demo.workload import Verdict
from support.rows import every_row
from support.servers import database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def stage(dsn: str) -> Iterator[Engine]:
    """An engine for a separate database with the demo's schema and pgfence's tables."""
    with database(dsn, "scene") as own:
        engine = create_engine_for(own)
        with engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA {SCHEMA}"))
        schema.create_all(engine)
        yield engine
        engine.dispose()


def test_without_the_fence_the_scene_of_the_paused_worker_fails(stage: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge reads the tables: a step that got behind the fence too late is a guard that failed."""

    def forge(late: int, late_fenced: int) -> Verdict:
        with stage.begin() as connection:
            connection.execute(text(f"ALTER TABLE {SCHEMA}.fenced_steps DISABLE TRIGGER ALL"))
            connection.execute(text(f"INSERT INTO {SCHEMA}.fenced_steps (token) VALUES (1)"))
            found = connection.scalar(text(paused._LATE.format(table="fenced_steps")))
        assert late_fenced == 0
        return judge(late, found)

    judge = paused._judge
    monkeypatch.setattr(paused, "_judge", forge)
    assert paused.play(stage).verdict is Verdict.GUARD_FAILED


@every_row(
    ("late", "late_fenced", "verdict"),
    [(1, 0, Verdict.OK), (0, 0, Verdict.CONTROL_FAILED), (1, 1, Verdict.GUARD_FAILED), (0, 1, Verdict.GUARD_FAILED)],
)
def test_the_paused_worker_is_judged_by_both_tables(late: int, late_fenced: int, verdict: Verdict) -> None:
    """Nothing late behind the fence, and something late without it, or the scene proves nothing."""
    assert paused._judge(late, late_fenced) is verdict


@every_row(
    ("ran", "runs", "verdict"), [(50, 50, Verdict.OK), (50, 51, Verdict.GUARD_FAILED), (49, 49, Verdict.GUARD_FAILED)]
)
def test_the_slots_are_judged_by_their_runs(ran: int, runs: int, verdict: Verdict) -> None:
    """As many runs as slots, and enough of them."""
    assert slots._judge(ran, runs) is verdict


@every_row(
    ("killed", "resigned", "overlapping", "verdict"),
    [
        (900, 20, 0, Verdict.OK),
        (None, None, 0, Verdict.GUARD_FAILED),
        (900, None, 0, Verdict.GUARD_FAILED),
        (900, 20, 1, Verdict.GUARD_FAILED),
    ],
)
def test_the_election_is_judged_by_its_successors(
    killed: int | None, resigned: int | None, overlapping: int, verdict: Verdict
) -> None:
    """After each fault another candidate must lead, and no former leader may write."""
    assert election._judge(killed, resigned, overlapping) is verdict


def test_a_write_of_a_former_leader_is_counted(stage: Engine) -> None:
    """The table is read: a write of term 1 after the first write of term 2 counts, one before it does not."""
    with stage.begin() as connection:
        connection.execute(text(election._TABLE))
        for term in (1, 1, 2, 1, 2):
            connection.execute(election._WRITE, {"term": term, "leader": "a"})
        assert connection.execute(election._COUNT).one() == (2, 5, 1)


@every_row(
    ("done", "taken", "disordered", "verdict"),
    [
        (True, 4, 0, Verdict.OK),
        (False, 4, 0, Verdict.GUARD_FAILED),
        (True, 0, 0, Verdict.GUARD_FAILED),
        (True, 4, 1, Verdict.GUARD_FAILED),
    ],
)
def test_partitions_are_judged_by_their_owners_and_their_order(
    done: bool, taken: int, disordered: int, verdict: Verdict
) -> None:
    """The others take the partitions of a stopped worker, it gets a share again, and each key has one writer at a time."""
    assert partitions._judge(done=done, taken=taken, disordered=disordered) is verdict


def test_events_out_of_order_and_moved_partitions_are_counted(stage: Engine) -> None:
    """The table is read: a number that was used twice, and the partition that another worker wrote to after the stop."""
    with stage.begin() as connection:
        connection.exec_driver_sql(partitions._TABLE)
        events = [
            ("a", 1, 0, "0"),
            ("b", 1, 1, "0"),
            ("c", 1, 2, "1"),
            ("a", 2, 0, "1"),
            ("a", 2, 0, "0"),
            ("c", 2, 2, "1"),
        ]
        for number, (key, count, part, worker) in enumerate(events):
            if number == 3:
                at = connection.scalar(partitions._NOW)
            values = {"key": key, "number": count, "part": part, "worker": worker, "token": 1}
            connection.execute(partitions._WRITE, values)
        assert connection.execute(partitions._COUNT).one() == (6, 1)
        assert connection.execute(partitions._TAKEN, {"stopped": at, "worker": "0"}).one()[0] == 1


def test_a_balance_that_differs_from_its_journal_is_found(stage: Engine) -> None:
    """The tables are read: a balance that was changed without an entry is off, one as it was booked is not."""
    contention.ContentionBase.metadata.create_all(stage)
    with stage.begin() as connection:
        connection.execute(insert(contention.VersionedAccount), [{"id": 0, "balance": 7}, {"id": 1, "balance": 7}])
        connection.execute(insert(contention.VersionedEntry), [{"account": 0, "cents": 3}, {"account": 0, "cents": 4}])
        assert connection.scalar(contention._AUDIT) == 1


@every_row(
    ("transfers", "in_vain", "off", "verdict"),
    [
        (9, 3, 0, Verdict.OK),
        (9, 3, 1, Verdict.GUARD_FAILED),
        (0, 0, 0, Verdict.GUARD_FAILED),
        (9, 0, 0, Verdict.CONTROL_FAILED),
    ],
)
def test_contention_is_judged_by_the_journal_and_by_its_conflicts(
    transfers: int, in_vain: int, off: int, verdict: Verdict
) -> None:
    """Every balance is as booked, every guard let transfers through, and there was a conflict to guard against."""
    measured = contention.Measured(transfers, transfers + in_vain, 2)
    cells = {
        (accounts, guard): measured for accounts in (contention.MANY, contention.FEW) for guard in contention.GUARDS
    }
    assert contention._judge(cells, off) is verdict


def storm(**other: int) -> retries.Storm:
    known = {"made": retries.PAYMENTS, "paid": retries.PAYMENTS, "twice": 0, "sent": 320, "ended": 20, "differ": 0}
    return retries.Storm(**known | other)


@every_row(
    ("plain", "keyed", "verdict"),
    [
        ({}, {}, Verdict.OK),
        ({}, {"made": retries.PAYMENTS + 1, "twice": 1}, Verdict.GUARD_FAILED),
        ({}, {"made": retries.PAYMENTS - 1, "paid": retries.PAYMENTS - 1}, Verdict.GUARD_FAILED),
        ({}, {"differ": 1}, Verdict.GUARD_FAILED),
        ({"made": retries.PAYMENTS, "twice": 0}, {}, Verdict.CONTROL_FAILED),
        ({}, {"ended": 0}, Verdict.CONTROL_FAILED),
    ],
)
def test_retries_are_judged_by_what_was_paid(plain: dict[str, int], keyed: dict[str, int], verdict: Verdict) -> None:
    """With keys each payment is made once with one receipt; without them at least one is made twice."""
    assert retries._judge(storm(**{"made": 300, "twice": 100} | plain), storm(**keyed)) is verdict


def test_what_was_paid_is_counted_in_the_table(stage: Engine) -> None:
    """A payment made twice and a client with another receipt are counted; rows of the other run are not."""
    retries.RetriesBase.metadata.create_all(stage)
    rows = [{"number": number, "keyed": True} for number in (1, 2, 2)] + [{"number": 1, "keyed": False}]
    with stage.begin() as connection:
        connection.execute(insert(retries.Payment), rows)
    answers = [(1, 1, 1), (1, 1, 2), (2, 2, 1), (2, 3, 1)]
    found = retries._run_storm(stage, {"answers": answers, "ended": 7}, keyed=True)
    assert found == retries.Storm(made=3, paid=2, twice=1, sent=5, ended=7, differ=1)


def test_a_client_gives_up_on_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops retrying, because the process that would end it may be gone."""
    engine = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    monkeypatch.setattr(retries, "_PATIENCE", 3)
    monkeypatch.setattr(retries._Client, "sessions", sessionmaker(engine), raising=False)
    with pytest.raises(OperationalError):
        retries._ask_plainly(7)


def test_clients_end_with_the_process_that_forked_them(stage: Engine, eventually: Callable[..., Any]) -> None:
    """SIGKILL of that process leaves none of them running."""
    retries.RetriesBase.metadata.create_all(stage)
    with start_processes() as start:
        process = psutil.Process(start(retries.__name__, stage.url).popen.pid)
        eventually(lambda: len(process.children()) == retries.PROCESSES)
        clients = process.children()
        with stage.connect() as connection:
            eventually(lambda: connection.execute(text(f"SELECT 1 FROM {SCHEMA}.payment")).first())
    eventually(lambda: not any(map(alive, clients)))


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_process_that_ends_unexpectedly_is_reported(dsn: str) -> None:
    """A process that fails raises a DemoError with its last line of output, and the wait ends."""
    engine: Any = create_engine(dsn)
    with start_processes() as start, pytest.raises(DemoError, match="NoSuchModule|No module"):
        start("pgfence._demo.no_such_module", engine.url).read_message()
    engine.dispose()
