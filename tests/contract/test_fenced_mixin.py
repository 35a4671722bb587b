"""A Session writes rows of a `Fenced` class only under their token, in flushes and in statements."""

from __future__ import annotations

import asyncio
import secrets
from datetime import date
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import ForeignKey, delete, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from pgfence.config import configure
from pgfence.errors import FenceRequiredError, StaleFencingTokenError, TransactionStateError
from pgfence.fence import Fenced, fence
from pgfence.lease import AsyncLease, Lease
from support.fenced_models import KINDS, by_book, entry, on_session, under

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

    from support.worlds import World

pytestmark = [pytest.mark.one_driver, pytest.mark.usefixtures("tables")]


def rows(session: Session, cls: Any) -> list[tuple[Any, ...]]:
    columns = (cls.id, cls.book, cls.amount, cls.fence_token)
    return [tuple(row) for row in session.execute(select(*columns).order_by(cls.id))]


def own(cls: Any, token: int) -> dict[str, int]:
    """The token for a class of one resource."""
    return {cls.__fence_resource__: token}


def adding(cls: Any, *ids: int, book: str = "a") -> Callable[[Session], None]:
    return lambda session: session.add_all([cls(id=number, book=book) for number in ids])


@pytest.fixture
def book() -> str:
    """The name of a book that no other test uses."""
    return f"book:{secrets.token_hex(6)}"


# ------------------------------------------------------------ the flush


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["gate", "row"])
async def test_a_flush_writes_the_token_into_every_row(world: World, kind: str, mode: str) -> None:
    """Rows that are added or changed inside the gate get its token, and other rows keep theirs."""
    engine = world.engine()
    cls = await entry(world, engine, kind, mode=mode)
    await under(world, engine, own(cls, 3), adding(cls, 1, 2))

    def change(session: Session) -> None:
        session.get_one(cls, 1).amount = 7

    await under(world, engine, own(cls, 5), change)
    found = await on_session(world, engine, lambda session: rows(session, cls))
    assert found == [(1, "a", 7, 5), (2, "a", 0, 3)]


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["gate", "row"])
@pytest.mark.parametrize("act", ["add", "change", "delete"])
async def test_a_flush_outside_a_fence_is_rejected(world: World, kind: str, mode: str, act: str) -> None:
    """Without a token nothing of a guarded class is written, and the error names class and resource."""
    engine = world.engine()
    cls = await entry(world, engine, kind, mode=mode)
    await under(world, engine, own(cls, 3), adding(cls, 1))

    def work(session: Session) -> None:
        if act == "add":
            session.add(cls(id=2, book="a"))
        elif act == "change":
            session.get_one(cls, 1).amount = 7
        else:
            session.delete(session.get_one(cls, 1))

    with pytest.raises(FenceRequiredError, match="Entry is fenced by") as refused:
        await under(world, engine, {}, work)
    assert refused.value.resource == cls.__fence_resource__
    assert await on_session(world, engine, lambda session: rows(session, cls)) == [(1, "a", 0, 3)]


async def test_the_token_of_another_resource_does_not_count(world: World) -> None:
    """A transaction that entered another gate is rejected like one that entered none."""
    engine = world.engine()
    cls = await entry(world, engine)
    with pytest.raises(FenceRequiredError):
        await under(world, engine, {"other:" + cls.__fence_resource__: 9}, adding(cls, 1))


async def test_a_gate_left_with_a_savepoint_does_not_count(world: World) -> None:
    """What was entered inside a savepoint that was rolled back lets nothing through."""
    engine = world.engine()
    cls = await entry(world, engine)

    def work(session: Session) -> None:
        savepoint = session.begin_nested()
        fence(session, own(cls, 3), after_reads=True)
        savepoint.rollback()
        session.add(cls(id=1, book="a"))
        session.flush()

    with pytest.raises(FenceRequiredError):
        await on_session(world, engine, work)


async def test_what_a_program_assigns_to_the_token_does_not_count(world: World) -> None:
    """The fence overwrites an assigned token, in a new row and in a changed one."""
    engine = world.engine()
    cls = await entry(world, engine)

    def work(session: Session) -> None:
        row = cls(id=1, book="a")
        row.fence_token = 99
        session.add(row)
        session.flush()
        assert row.fence_token == 3
        row.fence_token = 98

    await under(world, engine, own(cls, 3), work)
    assert await on_session(world, engine, lambda session: rows(session, cls)) == [(1, "a", 0, 3)]


async def test_a_stale_holder_is_rejected_at_the_gate(world: World) -> None:
    """With a newer token in the gate, an older one writes nothing."""
    engine = world.engine()
    cls = await entry(world, engine)
    await under(world, engine, own(cls, 5), adding(cls, 1))
    with pytest.raises(StaleFencingTokenError):
        await under(world, engine, own(cls, 4), adding(cls, 2))


@pytest.mark.every_driver
async def test_five_hundred_rows_are_flushed_in_few_statements(world: World) -> None:
    """The mixin keeps the batching of a flush: the guard costs no statement for each row, in either mode."""
    engine = world.engine()
    for mode in ("gate", "row"):
        cls = await entry(world, engine, mode=mode)
        await under(world, engine, own(cls, 3), adding(cls, *range(500)))

        def work(session: Session, cls: Any = cls) -> int:
            found = list(session.scalars(select(cls)))
            for row in found:
                row.amount = 1
            sent: list[str] = []
            _listen(session, sent)
            session.flush()
            return len(sent)

        assert await under(world, engine, own(cls, 3), work) <= 3


def _listen(session: Session, sent: list[str]) -> None:
    from sqlalchemy import event

    event.listen(
        session.connection(), "before_cursor_execute", lambda _c, _cursor, statement, *_: sent.append(statement)
    )


# ------------------------------------------------------------ the resource is a function of the row


@pytest.mark.parametrize("kind", KINDS)
async def test_each_row_needs_the_token_of_its_own_resource(world: World, kind: str, book: str) -> None:
    """Rows of two books need both tokens, and each carries its own."""
    engine = world.engine()
    cls = await entry(world, engine, kind, resource=by_book)
    one, two = book + ":1", book + ":2"

    def work(session: Session) -> None:
        session.add_all([cls(id=1, book=one), cls(id=2, book=two)])

    with pytest.raises(FenceRequiredError) as refused:
        await under(world, engine, {one: 3}, work)
    assert refused.value.resource == two
    await under(world, engine, {one: 3, two: 4}, work)
    assert await on_session(world, engine, lambda session: rows(session, cls)) == [(1, one, 0, 3), (2, two, 0, 4)]


@pytest.mark.parametrize("loaded", [True, False])
async def test_moving_a_row_needs_the_tokens_of_both_resources(world: World, loaded: bool, book: str) -> None:
    """Moving a row out of a book writes to that book too, even if its old value was never loaded."""
    engine = world.engine()
    cls = await entry(world, engine, resource=by_book)
    one, two = book + ":1", book + ":2"
    await under(world, engine, {one: 3}, adding(cls, 1, book=one))

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        if not loaded:
            session.expire(row)
        row.book = two

    for token in ({two: 4}, {one: 3}):
        with pytest.raises(FenceRequiredError):
            await under(world, engine, token, work)
    await under(world, engine, {one: 3, two: 4}, work)
    assert await on_session(world, engine, lambda session: rows(session, cls)) == [(1, two, 0, 4)]


async def test_a_deleted_row_counts_by_what_stands_in_the_table(world: World, book: str) -> None:
    """Changing a row's book in memory before deleting the row does not bypass the gate."""
    engine = world.engine()
    cls = await entry(world, engine, resource=by_book)
    await under(world, engine, {book: 3}, adding(cls, 1, book=book))

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        row.book = book + ":mine"
        session.delete(row)

    with pytest.raises(FenceRequiredError):
        await under(world, engine, {book + ":mine": 9}, work)
    await under(world, engine, {book: 3}, work)
    assert await on_session(world, engine, lambda session: rows(session, cls)) == []


async def test_a_resource_that_is_not_text_is_rejected(world: World) -> None:
    """A function that returns anything but a str is named in a TypeError."""
    engine = world.engine()
    cls = await entry(world, engine, resource=lambda row: row.id)
    with pytest.raises(TypeError, match="Entry.__fence_resource__ must return a str"):
        await under(world, engine, {"1": 1}, adding(cls, 1))


# ------------------------------------------------------------ statements of the class

STATEMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "insert": lambda cls: (insert(cls).values(id=9, book="a"),),
    "insert many": lambda cls: (insert(cls), [{"id": 8, "book": "a"}, {"id": 9, "book": "a"}]),
    "insert values": lambda cls: (insert(cls).values([{"id": 8, "book": "a"}, {"id": 9, "book": "a"}]),),
    "update": lambda cls: (update(cls).where(cls.id == 1).values(amount=7),),
    "update by key": lambda cls: (update(cls), [{"id": 1, "amount": 7}, {"id": 2, "amount": 8}]),
    "delete": lambda cls: (delete(cls).where(cls.id == 1),),
}


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("mode", ["gate", "row"])
@pytest.mark.parametrize("resource", [None, by_book], ids=["constant", "by row"])
async def test_a_statement_of_the_class_needs_a_token_and_writes_it(
    world: World, statement: str, mode: str, resource: Any
) -> None:
    """Bulk inserts, updates and deletes are rejected outside a fence; inside, the rows they write carry the token."""
    engine = world.engine()
    cls = await entry(world, engine, mode=mode, resource=resource)
    tokens = {cls.__fence_resource__ if resource is None else "a": 0}

    def own_of(token: int) -> dict[str, int]:
        return dict.fromkeys(tokens, token)

    # Other tests write to a book of this name too: only a larger token than theirs enters.
    newest = await _newest(world, engine, *tokens)
    await under(world, engine, own_of(newest + 1), adding(cls, 1, 2))

    def work(session: Session) -> None:
        session.execute(*STATEMENTS[statement](cls))

    with pytest.raises(FenceRequiredError):
        await under(world, engine, {}, work)
    before = [(1, "a", 0, newest + 1), (2, "a", 0, newest + 1)]
    assert await on_session(world, engine, lambda session: rows(session, cls)) == before
    await under(world, engine, own_of(newest + 2), work)
    found = await on_session(world, engine, lambda session: rows(session, cls))
    assert set(found) - set(before) == {(*row, newest + 2) for row in AFTER[statement]}
    assert len(found) == len(before) + len(AFTER[statement]) * ("insert" in statement) - (statement == "delete")


AFTER: dict[str, list[tuple[int, str, int]]] = {
    "insert": [(9, "a", 0)],
    "insert many": [(8, "a", 0), (9, "a", 0)],
    "insert values": [(8, "a", 0), (9, "a", 0)],
    "update": [(1, "a", 7)],
    "update by key": [(1, "a", 7), (2, "a", 8)],
    "delete": [],
}


async def _newest(world: World, engine: Any, resource: str) -> int:
    found = text("SELECT COALESCE(max(token), 0) FROM pgfence_gate WHERE resource = :r")
    return await on_session(world, engine, lambda session: session.scalar(found, {"r": resource}))


@pytest.mark.parametrize("many", ["values", "sets of parameters"])
async def test_each_row_of_a_bulk_insert_needs_the_token_of_its_own_resource(
    world: World, many: str, book: str
) -> None:
    """Rows of two books in one statement need both tokens, and each carries its own."""
    engine = world.engine()
    cls = await entry(world, engine, resource=by_book)
    one, two = book + ":1", book + ":2"
    given = [{"id": 1, "book": one}, {"id": 2, "book": two}, {"id": 3, "book": one}]

    def work(session: Session) -> None:
        session.execute(*((insert(cls).values(given),) if many == "values" else (insert(cls), given)))

    for token in ({one: 3}, {two: 4}):
        with pytest.raises(FenceRequiredError):
            await under(world, engine, token, work)
    await under(world, engine, {one: 3, two: 4}, work)
    found = await on_session(world, engine, lambda session: rows(session, cls))
    assert found == [(1, one, 0, 3), (2, two, 0, 4), (3, one, 0, 3)]


@pytest.mark.parametrize("synchronize", ["auto", "evaluate", "fetch", False])
async def test_a_bulk_update_keeps_objects_of_the_session_usable(world: World, synchronize: Any, book: str) -> None:
    """With any synchronization strategy, an object that was loaded can be changed and flushed afterwards."""
    engine = world.engine()
    cls = await entry(world, engine, resource=by_book)
    await under(world, engine, {book: 3}, adding(cls, 1, 2, book=book))

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        changed = update(cls).where(cls.amount == 0).values(amount=cls.amount + 5)
        done = session.execute(changed, execution_options={"synchronize_session": synchronize})
        assert done.rowcount == 2
        row.book = row.book
        row.amount = 6

    await under(world, engine, {book: 4}, work)
    found = await on_session(world, engine, lambda session: rows(session, cls))
    assert found == [(1, book, 6, 4), (2, book, 5, 4)]


@pytest.mark.parametrize("value", ["plain", "expression", "parameter"])
async def test_a_bulk_update_that_moves_rows_needs_both_tokens(world: World, value: str, book: str) -> None:
    """The new resource is looked at too, whether the statement says it as a value, an expression or a parameter."""
    engine = world.engine()
    cls = await entry(world, engine, resource=by_book)
    one, two = book + ":1", book + ":12"
    await under(world, engine, {one: 3}, adding(cls, 1, book=one))

    def work(session: Session) -> None:
        statement = update(cls).where(cls.id == 1)
        if value == "parameter":
            session.execute(statement, {"book": two})
        else:
            session.execute(statement.values(book=two if value == "plain" else cls.book + "2"))

    for token in ({one: 3}, {two: 4}):
        with pytest.raises(FenceRequiredError):
            await under(world, engine, token, work)
    await under(world, engine, {one: 3, two: 4}, work)
    assert await on_session(world, engine, lambda session: rows(session, cls)) == [(1, two, 0, 4)]


@pytest.mark.parametrize("act", ["update", "delete"])
async def test_a_bulk_statement_over_several_resources_needs_all_tokens(world: World, act: str, book: str) -> None:
    """One row of another book makes the whole statement an error: no row is left out."""
    engine = world.engine()
    cls = await entry(world, engine, resource=by_book)
    one, two = book + ":1", book + ":2"
    both = {one: 3, two: 4}

    def fill(session: Session) -> None:
        session.add_all([cls(id=1, book=one), cls(id=2, book=two)])

    def work(session: Session) -> None:
        session.execute(update(cls).values(amount=7) if act == "update" else delete(cls))

    await under(world, engine, both, fill)
    with pytest.raises(FenceRequiredError):
        await under(world, engine, {one: 3}, work)
    await under(world, engine, both, work)
    found = await on_session(world, engine, lambda session: rows(session, cls))
    assert found == ([(1, one, 7, 3), (2, two, 7, 4)] if act == "update" else [])


async def test_a_bulk_statement_without_rows_needs_no_token_of_theirs(world: World, book: str) -> None:
    """If no row matches, nothing is rejected and nothing written."""
    engine = world.engine()
    cls = await entry(world, engine, resource=by_book)

    def work(session: Session) -> int:
        return session.execute(update(cls).where(cls.book == book).values(amount=7)).rowcount

    assert await under(world, engine, {}, work) == 0


REFUSED: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "insert from select": lambda cls: (
        insert(cls).from_select(["id", "book", "amount"], select(cls.id + 100, cls.book, cls.amount)),
    ),
    "upsert": lambda cls: (
        upsert(cls).values(id=1, book="a").on_conflict_do_update(index_elements=["id"], set_={"amount": 9}),
    ),
}


@pytest.mark.parametrize("statement", REFUSED)
@pytest.mark.parametrize("mode", ["gate", "row"])
async def test_a_statement_whose_rows_are_unknown_is_rejected(
    world: World, statement: str, mode: str, book: str
) -> None:
    """A statement whose rows are not known raises an error that says what to do instead."""
    engine = world.engine()
    cls = await entry(world, engine, mode=mode, resource=by_book)
    await under(world, engine, {book: 3}, adding(cls, 1, book=book))

    def work(session: Session) -> None:
        session.execute(*REFUSED[statement](cls))

    with pytest.raises(FenceRequiredError, match="cannot be determined"):
        await under(world, engine, {book: 3}, work)
    assert await on_session(world, engine, lambda session: rows(session, cls)) == [(1, book, 0, 3)]


async def test_an_insert_from_select_without_defaults_says_which_option_to_omit(world: World) -> None:
    """With one resource the rows are known, but include_defaults=False leaves the token out."""
    engine = world.engine()
    cls = await entry(world, engine)
    columns = ["id", "book", "amount"]
    statement = insert(cls).from_select(columns, select(cls.id + 100, cls.book, cls.amount), include_defaults=False)

    def work(session: Session) -> None:
        session.execute(statement)

    with pytest.raises(FenceRequiredError, match=r"writes no token: .* without include_defaults=False$"):
        await under(world, engine, own(cls, 3), work)


@pytest.mark.parametrize("statement", REFUSED)
async def test_behind_the_gate_of_one_resource_such_statements_pass(world: World, statement: str) -> None:
    """Where all rows belong to one resource whose gate was entered, it does not matter which rows they are."""
    engine = world.engine()
    cls = await entry(world, engine)
    await under(world, engine, own(cls, 3), adding(cls, 1))

    def work(session: Session) -> None:
        session.execute(*REFUSED[statement](cls))

    with pytest.raises(FenceRequiredError):
        await under(world, engine, {}, work)
    await under(world, engine, own(cls, 4), work)
    found = await on_session(world, engine, lambda session: rows(session, cls))
    assert found == ([(1, "a", 9, 4)] if statement == "upsert" else [(1, "a", 0, 3), (101, "a", 0, 4)])


@pytest.mark.parametrize(
    "made",
    [
        lambda cls: (insert(cls).values(id=2, book="a", fence_token=99),),
        lambda cls: (insert(cls), [{"id": 2, "book": "a", "fence_token": 99}]),
        lambda cls: (
            insert(cls).from_select(["id", "book", "amount", "fence_token"], select(cls.id, cls.book, 0, 99)),
        ),
        lambda cls: (update(cls).values(fence_token=99),),
        lambda cls: (update(cls).values({cls.fence_token: 99}),),
        lambda cls: (update(cls), [{"id": 1, "fence_token": 99}]),
    ],
)
async def test_a_statement_that_sets_the_token_itself_is_rejected(world: World, made: Any) -> None:
    """Only the fence writes the column that says which token wrote a row."""
    engine = world.engine()
    cls = await entry(world, engine)
    with pytest.raises(ValueError, match="is set by pgfence"):
        await under(world, engine, own(cls, 3), lambda session: session.execute(*made(cls)))


# ------------------------------------------------------------ past the class


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("resource", [None, by_book], ids=["constant", "by row"])
async def test_legacy_bulk_methods_need_a_token_too(world: World, resource: Any, book: str) -> None:
    """`bulk_save_objects` and `bulk_insert_mappings` call no hook, so the column's default checks the token."""
    engine = world.engine()
    cls = await entry(world, engine, resource=resource)
    tokens = {book: 3} if resource else own(cls, 3)

    def work(session: Session) -> None:
        session.bulk_save_objects([cls(id=1, book=book)])
        session.bulk_insert_mappings(cls, [{"id": 2, "book": book}, {"id": 3, "book": book}])

    with pytest.raises(FenceRequiredError):
        await under(world, engine, {}, work)
    await under(world, engine, tokens, work)
    found = await on_session(world, engine, lambda session: rows(session, cls))
    assert found == [(number, book, 0, 3) for number in (1, 2, 3)]


@pytest.mark.every_driver
async def test_inserts_and_updates_of_the_table_need_a_token_too(world: World) -> None:
    """Core statements on the Table pass inside the gate and are rejected outside; those of mode "row" always."""
    engine = world.engine()
    for mode in ("gate", "row"):
        cls = await entry(world, engine, mode=mode)
        table = cls.__table__
        change = update(table).values(amount=7)
        new = insert(table).values(id=1, book="a", amount=0)
        for statement in (new, change):
            with pytest.raises(FenceRequiredError):
                await under(world, engine, {}, lambda session, s=statement: session.execute(s))
        await under(world, engine, own(cls, 3), lambda session, s=new: session.execute(s))
        if mode == "gate":
            await under(world, engine, own(cls, 4), lambda session, s=change: session.execute(s))
        else:
            with pytest.raises(FenceRequiredError, match=r"cannot be determined .*session\.execute\(update\(Entry\)"):
                await under(world, engine, own(cls, 4), lambda session, s=change: session.execute(s))
        found = await on_session(world, engine, lambda session, cls=cls: rows(session, cls))
        assert found == [(1, "a", 7, 4) if mode == "gate" else (1, "a", 0, 3)]


# ------------------------------------------------------------ mode "row"

STALE: dict[str, Callable[[Session, Any], Any]] = {
    "change": lambda session, cls: setattr(session.get_one(cls, 1), "amount", 9),
    "delete": lambda session, cls: session.delete(session.get_one(cls, 1)),
    "bulk update": lambda session, cls: session.execute(update(cls).values(amount=9)),
    "bulk update by key": lambda session, cls: session.execute(
        update(cls), [{"id": 2, "amount": 9}, {"id": 1, "amount": 9}]
    ),
    "bulk delete": lambda session, cls: session.execute(delete(cls)),
}


async def _set_back(world: World, engine: Any, cls: Any) -> None:
    """Delete the gate, so that only the column can reject a write."""
    gone = text("DELETE FROM pgfence_gate WHERE resource = :r")
    await on_session(
        world, engine, lambda session: (session.execute(gone, {"r": cls.__fence_resource__}), session.commit())
    )


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("act", STALE)
async def test_a_row_written_under_a_newer_token_is_rejected_to_an_older_one(world: World, act: str) -> None:
    """In mode "row" one such row makes the statement an error, the others stay as they were, and no commit is possible."""
    engine = world.engine()
    cls = await entry(world, engine, mode="row")
    await under(world, engine, own(cls, 3), adding(cls, 2))
    await under(world, engine, own(cls, 5), adding(cls, 1))
    await _set_back(world, engine, cls)

    def work(session: Session) -> None:
        fence(session, own(cls, 4))
        with pytest.raises(StaleFencingTokenError, match="a newer holder has taken over") as refused:
            (STALE[act](session, cls), session.flush())
        assert (refused.value.token, refused.value.newest) == (4, 5)
        with pytest.raises((StaleFencingTokenError, PendingRollbackError)):
            session.commit()
        session.rollback()
        session.execute(select(cls)).all()

    await on_session(world, engine, work)
    assert await on_session(world, engine, lambda session: rows(session, cls)) == [(1, "a", 0, 5), (2, "a", 0, 3)]


@pytest.mark.parametrize("act", ["change", "delete", "bulk update by key"])
async def test_writing_a_deleted_row_is_an_error_in_mode_row(world: World, act: str) -> None:
    """A row that was deleted in the meantime is an error, because the newer holder may insert it again."""
    engine = world.engine()
    cls = await entry(world, engine, mode="row")
    await under(world, engine, own(cls, 3), adding(cls, 1))

    def work(session: Session) -> None:
        row = session.get_one(cls, 1)
        session.execute(text(f"DELETE FROM {cls.__tablename__}"))
        if act == "change":
            row.amount = 9
        elif act == "delete":
            session.delete(row)
        else:
            session.execute(update(cls), [{"id": 1, "amount": 9}])
        session.flush()

    with pytest.raises(StaleDataError):
        await under(world, engine, own(cls, 3), work)


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("act", [act for act in STALE if act != "bulk update by key"])
async def test_a_stale_writer_waits_for_the_newer_one_and_is_rejected(
    world: World, act: str, dsn: str, eventually: Callable[..., Any]
) -> None:
    """In mode "row" the column is read behind the row's lock: what the newer holder has not committed yet counts."""
    engine = world.engine()
    cls = await entry(world, engine, mode="row")
    await under(world, engine, own(cls, 3), adding(cls, 1, 2))
    with psycopg.connect(dsn) as newer:
        newer.execute(f"UPDATE {cls.__tablename__} SET amount = 5, fence_token = 5 WHERE id = 1")
        stale = asyncio.create_task(under(world, engine, own(cls, 3), lambda session: STALE[act](session, cls)))
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND %s = ANY(pg_blocking_pids(pid))"
        with psycopg.connect(dsn, autocommit=True) as watcher:
            pid = newer.info.backend_pid
            await asyncio.to_thread(eventually, lambda: watcher.execute(waits, (pid,)).fetchone()[0])
    with pytest.raises(StaleFencingTokenError):
        await stale
    assert await on_session(world, engine, lambda session: rows(session, cls)) == [(1, "a", 5, 5), (2, "a", 0, 3)]


@pytest.mark.twins
async def test_a_row_that_comes_to_match_meanwhile_is_left_alone(
    world: World, dsn: str, eventually: Callable[..., Any]
) -> None:
    """A bulk update writes only rows that it has read and locked, none that a newer holder made match since."""
    engine = world.engine()
    cls = await entry(world, engine, mode="row")
    await under(world, engine, own(cls, 3), adding(cls, 1, 2))
    with psycopg.connect(dsn) as newer:
        # The stale statement waits for row 1; meanwhile row 2 comes to match.
        newer.execute(f"SELECT FROM {cls.__tablename__} WHERE id = 1 FOR UPDATE")
        newer.execute(f"UPDATE {cls.__tablename__} SET amount = 5, fence_token = 5 WHERE id = 2")
        change = update(cls).where(cls.amount.in_([5, 0]), (cls.id == 1) | (cls.amount == 5)).values(amount=9)
        stale = asyncio.create_task(under(world, engine, own(cls, 3), lambda session: session.execute(change)))
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND %s = ANY(pg_blocking_pids(pid))"
        with psycopg.connect(dsn, autocommit=True) as watcher:
            pid = newer.info.backend_pid
            await asyncio.to_thread(eventually, lambda: watcher.execute(waits, (pid,)).fetchone()[0])
    await stale
    assert await on_session(world, engine, lambda session: rows(session, cls)) == [(1, "a", 9, 3), (2, "a", 5, 5)]


def _again(session: Session, cls: Any) -> None:
    session.add(cls(id=1, book="a", amount=9))


LET_THROUGH: dict[str, tuple[Callable[[Session, Any], Any], Callable[[Session, Any], Any]]] = {
    "an insert": (STALE["change"], lambda session, cls: session.add(cls(id=3, book="a"))),
    "a row put back": (STALE["delete"], _again),
    "another row": (STALE["change"], lambda session, cls: setattr(session.get_one(cls, 2), "amount", 9)),
    "before the first write": (lambda session, cls: session.get_one(cls, 1), STALE["change"]),
}


@pytest.mark.parametrize("case", LET_THROUGH)
@pytest.mark.parametrize("mode", ["row", "gate"])
async def test_mode_row_lets_through_what_no_column_can_tell(world: World, mode: str, case: str) -> None:
    """Mode "row" accepts writes that the column cannot detect, as documented; mode "gate" rejects each of them."""
    engine = world.engine()
    cls = await entry(world, engine, mode=mode)
    await under(world, engine, own(cls, 3), adding(cls, 1, 2))
    newer, stale = LET_THROUGH[case]
    await under(world, engine, own(cls, 5), lambda session: newer(session, cls))
    if mode == "row":
        await _set_back(world, engine, cls)
        await under(world, engine, own(cls, 4), lambda session: stale(session, cls))
    else:
        with pytest.raises(StaleFencingTokenError):
            await under(world, engine, own(cls, 4), lambda session: stale(session, cls))


@pytest.mark.twins
async def test_mode_row_takes_the_token_of_a_lease_that_is_held_here(world: World, name: str) -> None:
    """No table of pgfence's is needed beside the rows: the lease may be in another database, or in another schema."""
    elsewhere = world.engine()
    configure(elsewhere, schema="nowhere")
    cls = await entry(world, elsewhere, mode="row", resource=lambda row: row.book)
    lease = world.pick(Lease, AsyncLease)(world.engine(), name, ttl=30)
    async with world.enter(lease.hold()) as held:
        await under(world, elsewhere, {}, adding(cls, 1, book=name))
        with pytest.raises(FenceRequiredError):
            await under(world, elsewhere, {}, adding(cls, 2, book=name + ":other"))
        token = held.token
    found = await on_session(world, elsewhere, lambda session: rows(session, cls))
    assert found == [(1, name, 0, token)]
    with pytest.raises(FenceRequiredError):
        await under(world, elsewhere, {}, adding(cls, 2, book=name))


@pytest.mark.every_driver
async def test_mode_row_is_rejected_in_autocommit(world: World, name: str) -> None:
    """Mode "row" is rejected in autocommit, because the row's lock would end before the write."""
    engine = world.engine()
    cls = await entry(world, engine, mode="row", resource=lambda row: row.book)
    lease = world.pick(Lease, AsyncLease)(engine, name, ttl=30)
    async with world.enter(lease.hold()):
        await under(world, engine, {}, adding(cls, 1, book=name))

        def work(session: Session) -> None:
            session.get_one(cls, 1).amount = 9

        with pytest.raises(TransactionStateError, match="autocommit"):
            await under(world, world.engine(isolation_level="AUTOCOMMIT"), {}, work)


@pytest.mark.twins
async def test_a_held_lease_alone_lets_nothing_through_a_gate(world: World, name: str) -> None:
    """In mode "gate" the transaction itself must have entered: holding the lease is not enough."""
    engine = world.engine()
    cls = await entry(world, engine, resource=lambda row: row.book)
    lease = world.pick(Lease, AsyncLease)(engine, name, ttl=30)
    async with world.enter(lease.hold()):
        with pytest.raises(FenceRequiredError):
            await under(world, engine, {}, adding(cls, 1, book=name))


# ------------------------------------------------------------ the class


async def test_the_column_may_have_another_name(world: World) -> None:
    """`__fence_column__` names the column; the attribute stays, in a flush and in statements."""
    engine = world.engine()
    cls = await entry(world, engine, __fence_column__="written_under")
    assert "written_under" in cls.__table__.c
    await under(world, engine, own(cls, 3), adding(cls, 1, 2))
    await under(world, engine, own(cls, 4), lambda s: s.execute(update(cls).where(cls.id == 1).values(amount=7)))
    found = await on_session(world, engine, lambda session: rows(session, cls))
    assert found == [(1, "a", 7, 4), (2, "a", 0, 3)]
    with pytest.raises(ValueError, match="is set by pgfence"):
        await under(world, engine, own(cls, 4), lambda s: s.execute(update(cls).values(written_under=9)))


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"__fence__": "table", "__fence_resource__": "a"}, ValueError, "must be 'gate' or 'row'"),
        ({}, TypeError, "__fence_resource__ must be a str"),
        ({"__fence_resource__": 7}, TypeError, "__fence_resource__ must be a str"),
        ({"__fence_resource__": ""}, ValueError, "must not be empty"),
        ({"__fence_resource__": "a", "__fence_column__": ""}, TypeError, "name of a column"),
    ],
)
@pytest.mark.parametrize("made", KINDS)
def test_a_class_that_cannot_work_is_rejected_when_it_is_mapped(
    options: dict[str, Any], kind: type[Exception], said: str, made: str
) -> None:
    """A wrong mode, a missing or non-str resource and an empty column name raise errors that say what to write."""
    from support import fenced_models

    with pytest.raises(kind, match=said):
        getattr(fenced_models, made)("entry", options)


class Joined(NamedTuple):
    base: Any
    child: Any


async def _joined(world: World, engine: Any, mode: str) -> Joined:
    table = f"entry_{secrets.token_hex(6)}"

    class Base(DeclarativeBase):
        pass

    class Entry(Fenced, Base):
        __tablename__ = table
        __fence__ = mode
        __fence_resource__ = f"books:{table}"
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "entry"}
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]

    class Payment(Entry):
        __tablename__ = f"{table}_payment"
        __mapper_args__: ClassVar = {"polymorphic_identity": "payment"}
        id: Mapped[int] = mapped_column(ForeignKey(Entry.id), primary_key=True)
        amount: Mapped[int] = mapped_column(default=0)

    await on_session(world, engine, lambda session: Base.metadata.create_all(session.connection()) or session.commit())
    return Joined(Entry, Payment)


@pytest.mark.parametrize("mode", ["gate", "row"])
async def test_a_change_of_a_child_table_alone_is_fenced(world: World, mode: str) -> None:
    """With joined inheritance the token is in the table of the base class, and a change of the child writes it there."""
    engine = world.engine()
    cls = await _joined(world, engine, mode)
    await under(world, engine, own(cls.base, 3), lambda session: session.add(cls.child(id=1)))

    def change(session: Session) -> None:
        session.get_one(cls.child, 1).amount = 7

    def bulk(session: Session) -> None:
        session.execute(update(cls.child).where(cls.child.amount == 7).values(amount=8))

    for work in (change, bulk):
        with pytest.raises(FenceRequiredError):
            await under(world, engine, {}, work)
    await under(world, engine, own(cls.base, 4), change)
    if mode == "gate":
        await under(world, engine, own(cls.base, 4), bulk)
    else:
        with pytest.raises(FenceRequiredError, match="does not write"):
            await under(world, engine, own(cls.base, 4), bulk)
    found = select(cls.child.amount, cls.child.fence_token)
    (row,) = await on_session(world, engine, lambda session: session.execute(found).all())
    assert tuple(row) == (8 if mode == "gate" else 7, 4)


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["gate", "row"])
async def test_a_key_may_have_several_columns(world: World, mode: str, book: str) -> None:
    """Rows with a composite primary key of several types are read, locked and bound like others."""
    engine = world.engine()
    table = f"entry_{secrets.token_hex(6)}"

    class Base(DeclarativeBase):
        pass

    class Entry(Fenced, Base):
        __tablename__ = table
        __fence__ = mode
        __fence_resource__ = staticmethod(by_book)
        day: Mapped[date] = mapped_column(primary_key=True)
        ident: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        book: Mapped[str]
        amount: Mapped[int] = mapped_column(default=0)

    await on_session(world, engine, lambda session: Base.metadata.create_all(session.connection()) or session.commit())
    day, keys = date(2026, 4, 1), [uuid4(), uuid4(), uuid4()]

    def fill(session: Session) -> None:
        session.add_all([Entry(day=day, ident=key, book=book) for key in keys])

    def work(session: Session) -> None:
        one, two, three = (session.get_one(Entry, (day, key)) for key in keys)
        one.amount = 1
        session.execute(update(Entry).where(Entry.ident == keys[1]).values(amount=2))
        session.execute(update(Entry), [{"day": day, "ident": keys[2], "amount": 3}])
        session.execute(delete(Entry).where(Entry.day == day, Entry.ident == keys[0]))
        session.expire_all()
        assert (two.amount, three.amount) == (2, 3)

    await under(world, engine, {book: 3}, fill)
    await under(world, engine, {book: 4}, work)
    found = select(Entry.ident, Entry.amount, Entry.fence_token).order_by(Entry.amount)
    answer = await on_session(world, engine, lambda session: session.execute(found).all())
    assert [tuple(row) for row in answer] == [(keys[1], 2, 4), (keys[2], 3, 4)]


async def test_a_method_of_the_class_may_name_the_resource(world: World, book: str) -> None:
    """The function may go through properties and methods, for rows in a flush, their old state, and rows of a statement."""
    engine = world.engine()
    table = f"entry_{secrets.token_hex(6)}"

    class Base(DeclarativeBase):
        pass

    class Entry(Fenced, Base):
        __tablename__ = table
        __fence_resource__ = staticmethod(lambda row: row.name_of("close"))
        id: Mapped[int] = mapped_column(primary_key=True)
        book: Mapped[str]

        @property
        def short(self) -> str:
            return self.book.upper()

        def name_of(self, what: str) -> str:
            return f"{what}:{self.short}"

    await on_session(world, engine, lambda session: Base.metadata.create_all(session.connection()) or session.commit())
    one, two = f"close:{book.upper()}", f"close:{book.upper()}2"

    def work(session: Session) -> None:
        row = session.get_one(Entry, 1)
        row.book = book + "2"
        session.flush()
        session.execute(update(Entry).values(book=book))

    await under(world, engine, {one: 3}, lambda session: session.add(Entry(id=1, book=book)))
    with pytest.raises(FenceRequiredError):
        await under(world, engine, {one: 3}, work)
    await under(world, engine, {one: 3, two: 3}, work)


async def test_the_configured_namespace_is_part_of_the_resource(world: World) -> None:
    """The class and `fence()` mean the same gate in a namespace of the application's own."""
    engine = world.engine()
    configure(engine, namespace="bank")
    cls = await entry(world, engine)
    await under(world, engine, own(cls, 3), adding(cls, 1))
    held = text("SELECT token FROM pgfence_gate WHERE resource = :r")
    stored = f"bank\x1f{cls.__fence_resource__}"
    assert await on_session(world, engine, lambda session: session.scalar(held, {"r": stored})) == 3


def test_the_mixin_adds_no_argument_to_a_dataclass() -> None:
    """A MappedAsDataclass keeps its `__init__`, its repr and its comparison."""
    from dataclasses import fields

    from support import fenced_models

    cls = fenced_models.dataclass("entry", {"__fence_resource__": "a"})
    assert [field.name for field in fields(cls)] == ["id", "book", "amount"]
    assert cls(1, "a") == cls(1, "a")
