"""`in_transaction` makes a function a retried transaction; unusable arguments are rejected at once."""

from __future__ import annotations

import functools
import inspect
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from pgfence.errors import UnreachableError
from pgfence.retrying import in_transaction, run_transaction
from support.transactions import factory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from sqlalchemy.ext.asyncio import AsyncSession

    from support.retrying import Row
    from support.worlds import World

pytestmark = pytest.mark.twins

UNUSED = sessionmaker(create_engine("postgresql+psycopg://nobody@nowhere.invalid/none"))
UNUSED_ASYNC = async_sessionmaker()


async def test_a_decorated_function_is_a_transaction(world: World, row: Row) -> None:
    """Called without the session, it commits, returns what the function returned, and runs again after a conflict."""
    made = factory(world, world.engine())
    calls: list[int] = []

    def add(session: Session, times: int, *, by: int = 1) -> int:
        """Add something."""
        calls.append(times)
        n = 0
        for _ in range(times * by):
            n = row.add_one(session)
        if len(calls) == 1:
            row.overtake()
        return n

    async def add_async(session: AsyncSession, times: int, *, by: int = 1) -> int:
        """Add something."""
        return await session.run_sync(add, times, by=by)

    plain = world.pick(add, add_async)
    decorated = in_transaction(made, attempts=2)(plain)
    assert await world.call(decorated, 2, by=3) == 106
    assert row.n() == 106
    assert calls == [2, 2]
    assert decorated.__name__ == plain.__name__
    assert decorated.__doc__ == "Add something."
    assert decorated.__wrapped__ is plain
    assert str(inspect.signature(decorated)) == "(times: 'int', *, by: 'int' = 1) -> 'int'"
    assert inspect.iscoroutinefunction(decorated) == world.is_async


def works(session: Session) -> None:
    raise AssertionError(session)


async def works_async(session: AsyncSession) -> None:
    raise AssertionError(session)


def generator(session: Session) -> Iterator[int]:
    yield session.info["x"]


async def generator_async(session: AsyncSession) -> AsyncIterator[int]:
    yield session.info["x"]


def asks(session: Session, attempt: int) -> None:
    raise AssertionError(session, attempt)


def alone() -> None:
    raise AssertionError


def by_name(*, session: Session) -> None:
    raise AssertionError(session)


class Service:
    """A class with methods that take a session after their own first argument."""

    def method(self, session: Session) -> None:
        raise AssertionError(session)

    @classmethod
    def of_class(cls, session: Session) -> None:
        raise AssertionError(session)


@pytest.mark.parametrize(
    ("source", "fn", "match"),
    [
        (create_engine("postgresql+psycopg://"), works, "sessionmaker or an async_sessionmaker, not Engine"),
        (None, works, "not NoneType"),
        (Session, works, "not type"),
        (UNUSED, None, "fn must be a function"),
        (UNUSED, works_async, "async_sessionmaker"),
        (UNUSED, functools.partial(works_async), "async_sessionmaker"),
        (UNUSED, generator, "generator function"),
        (UNUSED_ASYNC, generator_async, "generator function"),
        (UNUSED, alone, "first argument"),
        (UNUSED, by_name, "first argument"),
        (UNUSED, Service.method, "a method gets its instance"),
        (UNUSED, Service.of_class.__func__, "a method gets its instance"),  # type: ignore[attr-defined]
    ],
    ids=(
        "an engine",
        "nothing",
        "a class",
        "no function",
        "a coroutine function",
        "a partial of one",
        "a generator",
        "an async generator",
        "no argument",
        "no positional argument",
        "a method",
        "a class method",
    ),
)
def test_unusable_arguments_are_rejected_at_once(source: Any, fn: Any, match: str) -> None:
    """Unusable factories and functions raise TypeError at decoration, before anything runs."""
    with pytest.raises(TypeError, match=match):
        run_transaction(source, fn)
    with pytest.raises(TypeError, match=match if fn is not None else "function"):
        in_transaction(source)(fn)


def test_an_attempt_argument_is_rejected_with_the_right_form() -> None:
    """The TypeError for an `attempt` argument says that the session has the number."""
    with pytest.raises(TypeError, match=r"also requires 'attempt'.*session\.info\['pgfence_attempt'\]"):
        run_transaction(UNUSED, asks)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"attempts": 0}, ValueError),
        ({"attempts": True}, TypeError),
        ({"attempts": 2.0}, TypeError),
        ({"timeout": -1}, ValueError),
        ({"timeout": "3"}, TypeError),
    ],
    ids=str,
)
def test_wrong_bounds_are_rejected_at_once(options: dict[str, Any], error: type[Exception]) -> None:
    """Attempts that are not an int of 1 or more, and invalid timeouts, are rejected at decoration."""
    with pytest.raises(error, match=next(iter(options))):
        run_transaction(UNUSED, works, **options)
    with pytest.raises(error, match=next(iter(options))):
        in_transaction(UNUSED, **options)


async def test_a_result_of_the_other_world_rolls_back(world: World, row: Row) -> None:
    """A lambda hides its result: a coroutine in a sync call, or none in an async one, is rejected and rolled back."""
    made = factory(world, world.engine())

    def hidden(session: Any) -> Any:
        if not world.is_async:
            row.add_one(session)
            session.flush()
            return works_async(session)
        return 7

    message = (
        "must be awaitable: use async def"
        if world.is_async
        else "must not return a coroutine: pass an async_sessionmaker"
    )
    with pytest.raises(TypeError, match=message):
        await world.call(run_transaction, made, hidden)
    assert row.n() == 0


def test_a_message_never_shows_what_was_bound() -> None:
    """The arguments of a functools.partial may be secrets: the function's name is enough."""

    def enter(session: Session, attempt: int, *, password: str) -> None:
        raise AssertionError(session, attempt, password)

    secret = secrets.token_hex(8)
    with pytest.raises(TypeError, match=r"enter\(\) is called only with the session") as caught:
        run_transaction(UNUSED, functools.partial(enter, password=secret))
    assert secret not in str(caught.value)


@pytest.mark.every_driver
async def test_a_server_that_is_away_is_not_retried(world: World) -> None:
    """A server that cannot be reached is not a conflict: one attempt, and UnreachableError."""
    calls: list[int] = []

    def sync(session: Any) -> None:
        calls.append(1)
        session.execute(text("SELECT 1"))

    async def asynchronous(session: Any) -> None:
        calls.append(1)
        await session.execute(text("SELECT 1"))

    made = factory(world, world.engine(dsn="postgresql://nobody:x@127.0.0.1:1/none"))
    with pytest.raises(UnreachableError):
        await world.call(run_transaction, made, world.pick(sync, asynchronous))
    assert calls == [1]
