"""The statements of a session lock, as texts and against a server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgfence._sql import advisory, server, transaction
from pgfence._sql.advisory import LockSql
from pgfence._sql.key_arrays import encode_keys
from pgfence._sql.storage import TableNames
from pgfence._sql.ticket_queue import (
    CHECK_TICKETS,
    COUNT_TICKETS,
    HAS_TICKETS,
    LEAVE,
    build_look,
    build_wait_for_keys,
    build_wait_for_turn,
)
from pgfence.keys import LockKey, resolve
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._sql.params import ParamStyle

STYLES: tuple[ParamStyle, ...] = ("format", "numeric")
SETS = {
    "one": resolve([LockKey.raw(-5)], ""),
    "pair": resolve([LockKey.pair(-1, 2)], ""),
    "many": resolve([LockKey.raw(5), LockKey.raw(-5), LockKey.pair(-1, -2), LockKey.pair(2**31 - 1, 7)], ""),
    "hundreds": resolve([LockKey.raw(n) for n in range(300)], ""),
}
each_set = pytest.mark.parametrize("keys", SETS.values(), ids=SETS)
each_style = pytest.mark.parametrize("style", STYLES)

whole = st.integers(-(2**63), 2**63 - 1).map(LockKey.raw)
pairs = st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1)).map(
    lambda two: LockKey.pair(*two)
)

# Not functions, though an opening bracket may follow.
WORDS = {
    "as",
    "materialized",
    "cast",
    "extract",
    "filter",
    "from",
    "in",
    "operator",
    "over",
    "values",
    "where",
    "with",
    "t",
    "u",
    "o",
    "and",
    "or",
    "not",
    "select",
    "perform",
    "if",
    "exists",
    "nullif",
    "greatest",
    "coalesce",
    "between",
}


def texts() -> list[str]:
    """Every text that is sent for a lock, with sample keys."""
    found = [text for style in STYLES for text in advisory._TEXTS[style]]
    blocks = [
        text
        for keys in SETS.values()
        for text in (
            *build_wait_for_turn(keys, 250, has_ticket=False),
            *build_wait_for_keys(keys, 250),
        )
    ]
    looks = [build_look(0, 1, style, gives_sign=sign)[0] for style in STYLES for sign in (False, True)]
    return [*found, *blocks, *looks, HAS_TICKETS.format("1"), CHECK_TICKETS, COUNT_TICKETS, LEAVE]


@every_row(
    "text",
    [*texts(), server.READ_FACTS, *(server.build_set_up(TableNames(), style) for style in ("format", "numeric"))],
)
def test_every_function_is_named_with_its_schema(text: str) -> None:
    """A search path cannot put another function in the place of PostgreSQL's own."""
    called = re.findall(r"(?<![\w.])([a-z_]\w*)\s?\(", text, re.IGNORECASE)
    assert [name for name in called if name.lower() not in WORDS] == []


@every_row("text", texts())
def test_locks_are_never_taken_by_a_filter_or_under_a_limit(text: str) -> None:
    """C034: no lock function in a WHERE or JOIN condition, no LIMIT, no ORDER BY that could pull rows through one."""
    assert not re.search(r"\b(LIMIT|FETCH|OFFSET)\b", text)
    for condition in re.findall(r"\b(?:WHERE|ON|HAVING)\s(.*?)(?:\)|$)", text):
        assert "advisory_" not in condition


@each_style
@each_set
def test_values_are_bound_as_the_driver_marks_them(keys: Any, style: ParamStyle) -> None:
    """Each text has as many parameter markers as values, and contains no key."""
    sql = LockSql(keys, style)
    for text, args in (
        (sql.try_text, (7, *sql.unlock_args)),
        (sql.wait_text, sql.wait_args(250)),
        (sql.unlock_text, sql.unlock_args),
    ):
        marks = text.count("%s") if style == "format" else len(set(re.findall(r"\$\d+", text)))
        assert marks == len(args)
        assert not re.search(r"\d{5,}", text.replace(str(2**20 - 1), ""))  # the last ticket of a queue


@given(st.lists(st.one_of(whole, pairs), min_size=1, max_size=6), st.integers(1, 2**31 - 1))
def test_only_integers_stand_in_the_block(keys: list[LockKey], limit: int) -> None:
    """Rule 17: a DO block takes no parameters; it contains int64 literals, quoted, and nothing else from outside."""
    numbers = r"'-?\d{1,19}'::bigint|'\{(-?\d{1,19},?)*\}'::bigint\[\]|'\d+'(?=, true)"
    for build in (lambda *args: build_wait_for_turn(*args, has_ticket=False), build_wait_for_keys):
        first, second = (
            [re.sub(numbers, "?", text) for text in build(some, n)]
            for some, n in ((resolve([*keys, LockKey.raw(1), LockKey.raw(2)], ""), limit), (SETS["many"], 1))
        )
        assert first == second
        assert all(text.count("$$") in (0, 2) for text in first)


@each_set
def test_all_waits_come_before_all_holds(keys: Any) -> None:
    """Rule 2: locked key by key, a timeout would leave some of them held."""
    order = re.findall(r"pg_advisory(_xact)?_lock\(", build_wait_for_keys(keys, 250)[0])
    assert order == sorted(order, reverse=True)
    assert set(order) == {"_xact", ""}


def rows(connection: psycopg.Connection[Any], text: str, args: Any = None) -> list[Any]:
    return connection.execute(text, args).fetchall()


def run(connection: psycopg.Connection[Any], statements: tuple[str, ...]) -> bool:
    """Run statements as one, as a session does, and return whether the last one returned a row."""
    cursor = connection.execute("; ".join(statements))
    while cursor.nextset():
        pass
    return cursor.fetchone() is not None


@pytest.fixture
def session(dsn: str) -> Any:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@each_set
def test_each_returns_one_row(keys: Any, session: psycopg.Connection[Any], advisory_rows: Callable[[], Any]) -> None:
    """A driver may fetch one row and stop there: what is not computed by then is never locked."""
    sql, pid = LockSql(keys, "format"), session.info.backend_pid
    assert [row[0] for row in rows(session, sql.try_text, (pid, *sql.unlock_args))] == [True]
    assert len(advisory_rows()) == len(keys)
    assert [row[0] for row in rows(session, sql.unlock_text, sql.unlock_args)] == [True]
    assert advisory_rows() == []
    assert len(rows(session, sql.wait_text, sql.wait_args(250))) == 1
    assert len(advisory_rows()) == len(keys)
    assert [row[0] for row in rows(session, sql.unlock_text, sql.unlock_args)] == [True]
    assert run(session, build_wait_for_turn(keys, 250, has_ticket=False))
    assert run(session, build_wait_for_keys(keys, 250))
    assert len(advisory_rows()) == len(keys)
    assert [row[0] for row in rows(session, sql.unlock_text, sql.unlock_args)] == [True]
    assert advisory_rows() == []


@each_set
def test_a_try_on_another_backend_takes_nothing(
    keys: Any, session: psycopg.Connection[Any], advisory_rows: Callable[[], Any]
) -> None:
    """C019: through a pooler the statement may reach another backend, where it returns null."""
    sql = LockSql(keys, "format")
    assert [row[0] for row in rows(session, sql.try_text, (session.info.backend_pid + 1, *sql.unlock_args))] == [None]
    assert advisory_rows() == []


@each_set
def test_an_unlock_of_what_is_not_held_is_false(keys: Any, session: psycopg.Connection[Any]) -> None:
    """C005: the result is false even if only the last of the keys is not held."""
    sql = LockSql(keys, "format")
    assert [row[0] for row in rows(session, sql.unlock_text, sql.unlock_args)] == [False]
    session.execute(sql.try_text, (session.info.backend_pid, *sql.unlock_args))
    last = LockSql(keys[-1:], "format")
    session.execute(last.unlock_text, last.unlock_args)
    assert [row[0] for row in rows(session, sql.unlock_text, sql.unlock_args)] == [False]


@each_set
def test_a_wait_that_times_out_holds_nothing(
    keys: Any, dsn: str, session: psycopg.Connection[Any], advisory_rows: Callable[[], Any]
) -> None:
    """Rule 2: 55P03 from the first form, an empty result from the quiet one, also after an earlier grant."""
    sql, last = LockSql(keys, "format"), LockSql(keys[-1:], "format")
    run(session, build_wait_for_turn(keys, 250, has_ticket=False))
    run(session, build_wait_for_keys(keys, 250))
    session.execute(sql.unlock_text, sql.unlock_args)
    with psycopg.connect(dsn, autocommit=True) as holder:
        holder.execute(last.try_text, (holder.info.backend_pid, *last.unlock_args))
        with pytest.raises(psycopg.errors.LockNotAvailable):
            session.execute(sql.wait_text, sql.wait_args(5))
        assert len(advisory_rows()) == 1
        assert run(session, build_wait_for_turn(keys, 5, has_ticket=False))
        assert not run(session, build_wait_for_keys(keys, 5))
        assert len(advisory_rows()) == 3  # the ticket and the clock of the waiter, beside the lock of the holder
        assert rows(session, LEAVE)[0][0] is True
        assert len(advisory_rows()) == 1
        holder.execute(last.unlock_text, last.unlock_args)
    assert rows(session, "SHOW lock_timeout") == [("0",)]


def test_the_keys_of_a_set_are_taken_in_its_order(dsn: str, session: psycopg.Connection[Any]) -> None:
    """C032: all clients lock them in the same order, so the first rejection stops the try before the keys after it."""
    keys = SETS["many"]
    first, sql = LockSql(keys[:1], "format"), LockSql(keys, "format")
    with psycopg.connect(dsn, autocommit=True) as holder:
        holder.execute(first.try_text, (holder.info.backend_pid, *first.unlock_args))
        (answer,) = rows(session, sql.try_text, (session.info.backend_pid, *sql.unlock_args))
        assert answer[0] is False
        assert answer[1] == 0
        holder.execute(first.unlock_text, first.unlock_args)


@each_set
def test_a_try_requests_no_key_after_a_rejected_one(
    keys: Any, dsn: str, session: psycopg.Connection[Any], advisory_rows: Callable[[], Any]
) -> None:
    """C032: it stops at a key in the middle, releases exactly what came before, and no setting makes its plan parallel."""
    sql, middle = LockSql(keys, "format"), len(keys) // 2
    asked = (session.info.backend_pid, *sql.unlock_args)
    newer = session.info.server_version >= 160000
    session.execute(f"SET {'debug_parallel_query' if newer else 'force_parallel_mode'} = on")
    session.execute("SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0")
    with psycopg.connect(dsn, autocommit=True) as holder:
        busy = LockSql(keys[middle : middle + 1], "format")
        holder.execute(busy.try_text, (holder.info.backend_pid, *busy.unlock_args))
        (answer,) = rows(session, sql.try_text, asked)
        assert answer == ((False,) if len(keys) == 1 and keys[0].space == "bigint" else (False, middle))
        plan = "\n".join(line for (line,) in rows(session, f"EXPLAIN (ANALYZE, TIMING off) {sql.try_text}", asked))
        assert "Gather" not in plan
        assert len(answer) == 1 or re.search(rf"Recursive Union .*actual rows={middle + 2}[. ]", plan)
        assert len(advisory_rows()) == 1


def test_no_text_reads_the_list_of_keys_once_for_each_key(session: psycopg.Connection[Any]) -> None:
    """For 300 keys, no step of a plan reads more than 600 rows in all its loops together."""
    keys = SETS["hundreds"]
    sql = LockSql(keys, "format")
    asked = encode_keys(keys, "format")
    for text, args in (
        (sql.try_text, (session.info.backend_pid, *sql.unlock_args)),
        (sql.unlock_text, sql.unlock_args),
        (sql.wait_text, sql.wait_args(250)),
        (sql.unlock_text, sql.unlock_args),
        (transaction._request_many("format", False, False), asked),
    ):
        ((plan,),) = rows(session, f"EXPLAIN (ANALYZE, FORMAT json) {text}", args)
        steps = [plan[0]["Plan"]]
        for step in steps:
            steps += step.get("Plans", ())
            removed = sum(count for key, count in step.items() if key.startswith("Rows Removed"))
            if step.get("Function Name") != "pg_lock_status":  # which reads the locks of all tests on this server
                assert (step["Actual Rows"] + removed) * step["Actual Loops"] <= 2 * len(keys), step


@pytest.mark.parametrize("size", [17, 300])
def test_a_transaction_lock_requests_no_key_after_a_rejected_one(
    dsn: str, size: int, session: psycopg.Connection[Any], advisory_rows: Callable[[], Any]
) -> None:
    """The text for many keys counts what it was granted, and has asked for one more."""
    keys = resolve([LockKey.raw(n) for n in range(size - 5)] + [LockKey.pair(-1, -n) for n in range(5)], "")
    for shared, middle in ((False, size // 2), (True, size - 2)):
        text, asked = transaction._request_many("format", shared, False), encode_keys(keys, "format")
        with session.transaction(), psycopg.connect(dsn, autocommit=True) as holder:
            busy = LockSql(keys[middle : middle + 1], "format")
            holder.execute(busy.try_text, (holder.info.backend_pid, *busy.unlock_args))
            assert rows(session, text, asked) == [(f"{middle} 0 0",)]
            assert len(advisory_rows()) == middle + 1
            plan = "\n".join(line for (line,) in rows(session, f"EXPLAIN (ANALYZE, TIMING off) {text}", asked))
            assert re.search(rf"Recursive Union .*actual rows={middle + 2}[. ]", plan)


def test_a_hostile_search_path_changes_nothing(
    admin: psycopg.Connection[Any], session: psycopg.Connection[Any], advisory_rows: Callable[[], Any]
) -> None:
    """Functions of the same name, in a schema that the search path finds first, are not called."""
    admin.execute("DROP SCHEMA IF EXISTS evil CASCADE; CREATE SCHEMA evil")
    for head in ("pg_try_advisory_lock(bigint)", "pg_advisory_unlock(bigint)"):
        admin.execute(f"CREATE FUNCTION evil.{head} RETURNS boolean LANGUAGE sql AS 'SELECT true'")
    admin.execute("CREATE FUNCTION evil.current_setting(text, boolean) RETURNS text LANGUAGE sql AS $$SELECT 't'$$")
    session.execute("SET search_path = evil, pg_catalog")
    for keys in SETS.values():
        sql = LockSql(keys, "format")
        assert rows(session, sql.try_text, (session.info.backend_pid, *sql.unlock_args))[0][0] is True
        assert len(advisory_rows()) == len(keys)
        assert rows(session, sql.unlock_text, sql.unlock_args)[0][0] is True
        assert run(session, build_wait_for_turn(keys, 250, has_ticket=False))
        assert run(session, build_wait_for_keys(keys, 250))
        assert len(advisory_rows()) == len(keys)
        assert rows(session, sql.unlock_text, sql.unlock_args)[0][0] is True
    admin.execute("DROP SCHEMA evil CASCADE")
