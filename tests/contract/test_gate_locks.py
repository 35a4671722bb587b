"""The locks of a gate: every newer holder waits for every transaction inside, whichever functions and isolation levels they use."""

from __future__ import annotations

import random
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from support import installations as tables
from support.installations import TableNames
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEVELS = ("read committed", "repeatable read", "serializable")
ENTER = "SELECT pgfence_enter_gate_v1('{name}', {token})"
OLD_ENTER = "SELECT old_enter_gate_v1('{name}', {token})"
# The first gate that a transaction enters with a setting has an advisory lock, others with the same setting have row locks.
SECOND = "SELECT pgfence_enter_gate_v1(alike('{name}'), 1), pgfence_enter_gate_v1('{name}', {token})"
LEASE = "SELECT pgfence_acquire_lease_v1('{name}', gen_random_uuid()::text, 60, 0, 0, NULL, '', '', 1, '', NULL)"

INSIDE = {
    **{f"enters, {level}": (level, ENTER) for level in LEVELS},
    "enters a second gate of one setting": (LEVELS[0], SECOND),
    "enters by version 3": (LEVELS[0], OLD_ENTER),
    "writes past the gate": (LEVELS[0], "SELECT claim('{name}', {token}); UPDATE fenced SET n = n"),
    "writes past the gate, repeatable read": (LEVELS[1], "SELECT claim('{name}', {token}); UPDATE fenced SET n = n"),
    "writes a row past the gate": (LEVELS[0], "SELECT claim('{name}', {token}); UPDATE fenced_by_row SET n = n"),
    "writes past the gate by version 3": (LEVELS[0], "SELECT claim('{name}', {token}); UPDATE old_fenced SET n = n"),
}
"""How a transaction gets inside with its token, and its isolation level."""

NEWER = {
    **{f"enters, {level}": (level, ENTER) for level in LEVELS},
    "enters by version 3": (LEVELS[0], OLD_ENTER),
    "enters by version 3, serializable": (LEVELS[2], OLD_ENTER),
    "evicts": (LEVELS[0], f"{LEASE}; SELECT pgfence_evict_lease_v2('{{name}}', '', '', NULL)"),
    "evicts by version 1": (LEVELS[0], f"{LEASE}; SELECT pgfence_evict_lease_v1('{{name}}', '', '', NULL)"),
    "updates the row": (LEVELS[0], "UPDATE pgfence_gate SET token = {token} WHERE resource = '{name}'"),
    "deletes the row": (LEVELS[0], "DELETE FROM pgfence_gate WHERE resource = '{name}'"),
}
"""How the token of a gate is raised, and the isolation level."""

MARK = "md5('pgfence_gate'::regclass::oid::text || ' ' || p_name)"
HELPERS = (
    f"""CREATE FUNCTION claim(p_name text, p_token int) RETURNS text LANGUAGE sql AS $$
        SELECT set_config('pgfence.f' || left({MARK}, 2), {MARK} || ' ' || p_token || ',', true) $$""",
    f"""CREATE FUNCTION alike(p_name text) RETURNS text LANGUAGE sql AS $$
        SELECT n FROM generate_series(1, 10000) AS i, LATERAL (SELECT 'other ' || i) AS o(n)
        WHERE left({MARK.replace("p_name", "n")}, 2) = left({MARK}, 2) LIMIT 1 $$""",
)


class Session:
    """A session that enters one gate in different ways."""

    def __init__(self, dsn: str, place: str, name: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True, options=f"-c search_path={place}")
        self.pid = self.connection.info.backend_pid
        self.name = name

    def begin(self, way: tuple[str, str], token: int) -> str:
        """Begin a transaction and send the statements. Return the SQLSTATE that rejects them; "" if there is none."""
        self.run(f"BEGIN ISOLATION LEVEL {way[0]}")
        return self.send(way, token)

    def send(self, way: tuple[str, str], token: int) -> str:
        """Send the statements in the open transaction. Return the SQLSTATE that rejects them, or ""."""
        try:
            for statement in way[1].split("; "):
                self.run(statement.format(name=self.name, token=token))
        except psycopg.Error as error:
            return error.sqlstate or "?"
        return ""

    def run(self, statement: str) -> Any:
        cursor = self.connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else None

    def write(self) -> None:
        """Write to the fenced table."""
        self.run("UPDATE fenced SET n = n + 1")


@pytest.fixture(scope="module")
def place(dsn: str) -> Iterator[str]:
    """The schema of an installation that has the functions of version 3 too, as sessions have that notice no upgrade."""
    here = TableNames(f"gates_{secrets.token_hex(6)}")
    with psycopg.connect(dsn, autocommit=True, options=f"-c search_path={here.schema}") as connection:
        for statement in (*tables.build_creation(here), *tables.build_old_gate(here), *HELPERS):
            connection.execute(statement.encode())
        for table in ("fenced", "old_fenced", "fenced_by_row"):
            connection.execute(f"CREATE TABLE {table} (n int); INSERT INTO {table} VALUES (0)".encode())
        yield str(here.schema)
        connection.execute(f"DROP SCHEMA {here.schema} CASCADE".encode())


@pytest.fixture
def sessions(dsn: str, place: str, name: str) -> Iterator[Callable[[], Session]]:
    """A function that returns a session at a gate whose newest token is 1, and that guards the fenced tables."""
    opened: list[Session] = []

    def another() -> Session:
        opened.append(Session(dsn, place, name))
        return opened[-1]

    first = another()
    first.run(SECOND.format(name=name, token=1))
    for table, event, function in (
        ("fenced", "BEFORE UPDATE ON fenced", "pgfence_fence_table_v1"),
        ("old_fenced", "BEFORE UPDATE ON old_fenced", "old_fence_table_v1"),
        ("fenced_by_row", "AFTER UPDATE ON fenced_by_row FOR EACH ROW", "pgfence_fence_row_v1"),
    ):
        first.run(f"CREATE OR REPLACE TRIGGER {table} {event} EXECUTE FUNCTION {function}('{name}')")
    yield another
    for one in opened:
        one.connection.close()


def waits(admin: psycopg.Connection[Any], session: Session) -> bool:
    row = admin.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [session.pid]).fetchone()
    return row is not None and row[0]


@pytest.mark.parametrize("newer", NEWER)
@pytest.mark.parametrize("inside", INSIDE)
def test_a_newer_holder_waits_for_a_transaction_inside(
    sessions: Callable[[], Session], admin: psycopg.Connection[Any], inside: str, newer: str
) -> None:
    """C100: however each of them gets in, the newer one waits for the older one's end, and the older one may write until then."""
    old, new = sessions(), sessions()
    assert old.begin(INSIDE[inside], 1) == ""
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(new.begin, NEWER[newer], 2)
        eventually(lambda: waits(admin, new) or entering.done())
        assert not entering.done()
        old.write()
        old.run("COMMIT")
        assert entering.result() == ""
    new.run("COMMIT")
    assert old.begin(INSIDE[inside], 1) == ("" if newer == "deletes the row" else "PF001")


@pytest.mark.parametrize("newer", [way for way in NEWER if way != "deletes the row"])
@pytest.mark.parametrize("inside", INSIDE)
def test_an_older_writer_waits_for_a_newer_holder_and_is_rejected(
    sessions: Callable[[], Session], admin: psycopg.Connection[Any], inside: str, newer: str
) -> None:
    """C100: it gets in neither beside the newer transaction nor after its commit."""
    old, new = sessions(), sessions()
    assert new.begin(NEWER[newer], 2) == ""
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(old.begin, INSIDE[inside], 1)
        eventually(lambda: waits(admin, old) or entering.done())
        assert not entering.done()
        new.run("COMMIT")
        assert entering.result() == ("PF001" if INSIDE[inside][0] == LEVELS[0] else "40001")


@pytest.mark.parametrize("inside", INSIDE)
def test_a_snapshot_older_than_the_newer_holders_commit_opens_no_gate(
    sessions: Callable[[], Session], inside: str
) -> None:
    """C016: read at the level of such a transaction, the gate still has its token."""
    old, new = sessions(), sessions()
    old.run(f"BEGIN ISOLATION LEVEL {INSIDE[inside][0]}")
    old.run("SELECT FROM pgfence_gate")
    assert new.begin(NEWER["enters, read committed"], 2) == ""
    new.run("COMMIT")
    assert old.send(INSIDE[inside], 1) == ("PF001" if INSIDE[inside][0] == LEVELS[0] else "40001")


@pytest.mark.parametrize("newer", ["enters, read committed", "enters by version 3", "evicts"])
@pytest.mark.parametrize("inside", INSIDE)
def test_an_older_writer_gets_in_after_a_newer_holder_rolled_back(
    sessions: Callable[[], Session], admin: psycopg.Connection[Any], inside: str, newer: str
) -> None:
    """After a newer holder rolls back, the older writer enters, and the next newer holder waits for it."""
    old, new = sessions(), sessions()
    assert new.begin(NEWER[newer], 2) == ""
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(old.begin, INSIDE[inside], 1)
        eventually(lambda: waits(admin, old) or entering.done())
        new.run("ROLLBACK")
        assert entering.result() == ""
        again = pool.submit(new.begin, NEWER[newer], 2)
        eventually(lambda: waits(admin, new) or again.done())
        assert not again.done()
        old.write()
        old.run("COMMIT")
        assert again.result() == ""


@pytest.mark.parametrize("second", INSIDE)
@pytest.mark.parametrize("first", INSIDE)
def test_writers_with_one_token_are_inside_side_by_side(
    sessions: Callable[[], Session], first: str, second: str
) -> None:
    """Writers with the same token do not wait for each other, whichever way they enter."""
    one, other = sessions(), sessions()
    for session, way in ((one, first), (other, second)):
        session.run("SET lock_timeout = '5s'")
        # They write no row that the other one has written.
        assert session.begin((INSIDE[way][0], INSIDE[way][1].replace("SET n = n", "SET n = n WHERE false")), 1) == ""


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_writers_of_a_new_holder_wait_for_its_first_transaction(
    sessions: Callable[[], Session], admin: psycopg.Connection[Any], end: str
) -> None:
    """The first transaction raises the gate's token. The next one with this token enters when the first one has ended."""
    first, second = sessions(), sessions()
    assert first.begin(INSIDE["enters, read committed"], 2) == ""
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(second.begin, INSIDE["enters, read committed"], 2)
        eventually(lambda: waits(admin, second))
        assert not entering.done()
        first.run(end)
        assert entering.result() == ""
    second.run("COMMIT")


def test_writers_in_read_committed_leave_no_lock_on_the_row(sessions: Callable[[], Session]) -> None:
    """In READ COMMITTED writers do not lock the gate's row, so no multixact is written; in REPEATABLE READ they do."""
    locker = "SELECT xmax <> 0 FROM pgfence_gate WHERE resource = '{}'"
    writers = [sessions() for _ in range(4)]
    for writer in writers:
        assert writer.begin(INSIDE["enters, read committed"], 1) == ""
        writer.run("UPDATE fenced SET n = n WHERE false")
    assert writers[0].run(locker.format(writers[0].name)) == [(False,)]
    writers[0].run("COMMIT")
    assert writers[0].begin(INSIDE["enters, repeatable read"], 1) == ""
    assert writers[0].run(locker.format(writers[0].name)) == [(True,)]


def test_a_write_inside_the_gate_takes_no_further_advisory_lock(sessions: Callable[[], Session]) -> None:
    """The trigger gets the lock again that the transaction holds, and leaves the gate's row as it is."""
    writer = sessions()
    taken = f"SELECT count(*) FROM pg_locks WHERE locktype IN ('advisory', 'tuple') AND pid = {writer.pid}"
    assert writer.begin(INSIDE["enters, read committed"], 1) == ""
    assert writer.run(taken) == [(1,)]
    for _ in range(3):
        writer.write()
    assert writer.run(taken) == [(1,)]
    assert writer.run(f"SELECT xmax::text FROM pgfence_gate WHERE resource = '{writer.name}'") == [("0",)]


@pytest.mark.parametrize("shared", ["", "_shared"])
def test_another_program_that_locks_the_number_of_a_gate_lets_nobody_in(
    sessions: Callable[[], Session], admin: psycopg.Connection[Any], shared: str
) -> None:
    """Writers use the row lock, a newer holder waits for the program too, and an older writer stays out."""
    old, new, stranger = sessions(), sessions(), sessions()
    key = f"hashtextextended('{old.name}', 'pgfence_gate'::regclass::oid::bigint)"
    stranger.run(f"SELECT pg_advisory_lock{shared}({key})")
    assert old.begin(INSIDE["enters, read committed"], 1) == ""
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(new.begin, NEWER["enters, read committed"], 2)
        eventually(lambda: waits(admin, new))
        old.write()
        old.run("COMMIT")
        eventually(lambda: admin.execute("SELECT pg_blocking_pids(%s)", [new.pid]).fetchone() == ([stranger.pid],))
        stranger.run("SELECT pg_advisory_unlock_all()")
        assert entering.result() == ""
    new.run("COMMIT")
    stranger.run(f"SELECT pg_advisory_lock{shared}({key})")
    assert old.begin(INSIDE["enters, read committed"], 1) == "PF001"


@pytest.mark.parametrize("newer", ["enters, read committed", "enters by version 3", "evicts", "updates the row"])
def test_a_holder_that_enters_between_look_and_lock_is_noticed(
    sessions: Callable[[], Session], admin: psycopg.Connection[Any], place: str, newer: str
) -> None:
    """The row is read again after the lock was granted, in a statement that sees what was committed until then."""
    old, new = sessions(), sessions()
    # The function itself, but it waits for a lock of this test before it tries its own.
    function = str(old.run("SELECT pg_get_functiondef('pgfence_enter_gate_v1'::regproc)")[0][0])
    tried = "pg_catalog.pg_try_advisory_xact_lock_shared("
    assert function.count(tried) == 1
    old.run(function.replace(tried, f"{place}.pause_and_try(").replace("enter_gate_v1(", "enter_slowly(", 1))
    old.run(
        "CREATE OR REPLACE FUNCTION pause_and_try(bigint) RETURNS boolean LANGUAGE sql AS"
        " 'SELECT pg_advisory_xact_lock(4711); SELECT pg_try_advisory_xact_lock_shared($1)'"
    )
    with ThreadPoolExecutor(1) as pool:
        with admin.transaction():
            admin.execute("SELECT pg_advisory_xact_lock(4711)")
            entering = pool.submit(old.begin, (LEVELS[0], "SELECT pgfence_enter_slowly('{name}', {token})"), 1)
            eventually(lambda: waits(admin, old))
            assert new.begin(NEWER[newer], 2) == ""
            new.run("COMMIT")
        assert entering.result() == "PF001"


def test_a_savepoint_that_is_rolled_back_leaves_the_gate(sessions: Callable[[], Session]) -> None:
    """Entered inside it: newer holders need not wait. Entered before it: they do, though it was checked inside."""
    old, new = sessions(), sessions()
    new.run("SET lock_timeout = '100ms'")
    old.run("BEGIN; SAVEPOINT one")
    old.run(ENTER.format(name=old.name, token=1))
    old.run("ROLLBACK TO one")
    assert new.begin(NEWER["enters, read committed"], 2) == ""
    new.run("ROLLBACK")
    old.run(ENTER.format(name=old.name, token=1))
    old.run("SAVEPOINT two")
    old.write()
    old.run("ROLLBACK TO two")
    assert new.begin(NEWER["enters, read committed"], 2) == "PF003"


def test_the_one_writer_that_is_in_the_way_is_named(sessions: Callable[[], Session]) -> None:
    """The error does not name a writer in another gate, or a session that has only read the table of gates."""
    old, new, elsewhere, reader = sessions(), sessions(), sessions(), sessions()
    elsewhere.begin((LEVELS[0], "SELECT pgfence_enter_gate_v1('{name} elsewhere', {token})"), 1)
    reader.run("BEGIN")
    reader.run("SELECT FROM pgfence_gate")
    old.begin(INSIDE["enters, read committed"], 1)
    new.run("SET lock_timeout = '50ms'")
    with pytest.raises(psycopg.Error) as rejected:
        new.run(ENTER.format(name=new.name, token=2))
    assert rejected.value.sqlstate == "PF003"
    detail = str(rejected.value.diag.message_detail)
    assert f'"pid":{old.pid},' in detail
    assert not any(str(other.pid) in detail for other in (elsewhere, reader))


def test_a_transaction_that_takes_no_writes_does_not_get_in(sessions: Callable[[], Session]) -> None:
    """A read-only transaction cannot enter, even if the gate exists with the right token."""
    old = sessions()
    old.run("BEGIN READ ONLY")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        old.run(ENTER.format(name=old.name, token=1))


def test_sessions_of_a_new_holder_that_start_together_do_not_deadlock(sessions: Callable[[], Session]) -> None:
    """Six sessions enter with each new token at the same moment: all get in, and none is the victim of a deadlock."""
    writers = [sessions() for _ in range(6)]

    def enter(writer: Session, token: int) -> str:
        state = writer.begin(INSIDE["enters, read committed"], token)
        writer.run("COMMIT")
        return state

    with ThreadPoolExecutor(len(writers)) as pool:
        for token in range(2, 22):
            entered = [pool.submit(enter, one, token) for one in writers]
            assert [each.result() for each in entered] == [""] * len(writers)


def test_in_a_crowd_of_every_kind_tokens_never_go_back(sessions: Callable[[], Session]) -> None:
    """Six sessions, by functions and levels at random, tokens up and down: no write follows one with a newer token."""
    ways = [way for way in INSIDE.values() if "claim" not in way[1]]
    first = sessions()
    first.run("DROP TABLE IF EXISTS log; CREATE TABLE log (id bigserial, token int)")

    def write(writer: Session, seed: int) -> list[str]:
        dice, states = random.Random(seed), []
        for step in range(40):
            token = max(1, step // 2 + dice.randint(-2, 2))
            states.append(writer.begin(dice.choice(ways), token))
            if not states[-1]:
                insert = f"INSERT INTO log (token) SELECT {token} FROM pg_sleep(random() * 0.002); COMMIT"
                states[-1] = writer.send((LEVELS[0], insert), token)
            writer.run("ROLLBACK")
        return states

    with ThreadPoolExecutor(6) as pool:
        writing = [pool.submit(write, sessions(), seed) for seed in range(6)]
        states = [state for each in writing for state in each.result()]
    order = [token for (token,) in first.run("SELECT token FROM log ORDER BY id")]
    assert order == sorted(order)
    assert set(states) <= {"", "PF001", "40001"}
    assert len(order) == states.count("") > 20


def test_thousands_of_gates_take_few_places_in_the_lock_table(sessions: Callable[[], Session]) -> None:
    """A transaction in thousands of gates holds at most 256 advisory locks, and newer holders wait at each gate."""
    old, new = sessions(), sessions()
    gates = f"SELECT array_agg('{old.name} ' || i) AS n, array_agg(1::bigint) AS t FROM generate_series(1, 2000) AS i"
    enter = f"SELECT pgfence_enter_gates_v1(n, t) FROM ({gates}) AS g"
    old.run(enter)
    old.run("BEGIN")
    old.run(enter)
    ((taken,),) = old.run(f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = {old.pid}")
    assert 200 < taken <= 256
    new.run("SET lock_timeout = '10ms'")
    for number in range(1, 2000, 97):
        with pytest.raises(psycopg.Error) as rejected:
            new.run(f"SELECT pgfence_enter_gate_v1('{old.name} {number}', 2)")
        assert rejected.value.sqlstate == "PF003"
