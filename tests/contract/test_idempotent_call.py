"""`idempotent_call` builds the key from the arguments and finds the session by its annotation."""

from __future__ import annotations

import functools
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession  # noqa: TC002
from sqlalchemy.orm import Session  # noqa: TC002

from pgfence.errors import IdempotencyKeyReusedError, IdempotencyMisuseError
from pgfence.idempotency import idempotent_call
from support.keyed import Desk, Receipt

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from sqlalchemy import orm
    from sqlalchemy.ext.asyncio import async_scoped_session

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def desk(world: World, admin: psycopg.Connection[Any]) -> Iterator[Desk]:
    """Sessions of a world, and effects."""
    here = Desk(world, admin)
    yield here
    here.close()


def webhook(desk: Desk) -> Any:
    """Decorate a function of this world."""
    decorate = idempotent_call(key="{event_id}", scope=desk.scope + ":{kind}", payload=["amount"])
    if desk.world.is_async:

        @decorate
        async def asynchronous(
            event_id: str, amount: Decimal, *, session: AsyncSession, kind: str = "order"
        ) -> Receipt:
            """Take an event."""
            return await session.run_sync(desk.charge(event_id))

        return asynchronous

    @decorate
    def sync(event_id: str, amount: Decimal, *, session: Session, kind: str = "order") -> Receipt:
        """Take an event."""
        return desk.charge(event_id)(session)

    return sync


async def test_each_event_is_taken_once(desk: Desk) -> None:
    """C095, C102: by template, with the defaults of the signature; another amount is another request; another kind is another key."""
    call = webhook(desk)
    assert call.__doc__ == "Take an event."

    async def take(*args: Any, **kwargs: Any) -> Any:
        async with desk.world.enter(desk.session()) as session:
            answer = await desk.world.call(call, *args, session=session, **kwargs)
            await desk.world.call(session.commit)
            return answer

    for _ in range(2):
        assert await take("e1", Decimal("1.0")) == Receipt("e1")
    with pytest.raises(IdempotencyKeyReusedError):
        await take("e1", Decimal("2.0"))
    await take("e1", Decimal("2.0"), kind="refund")
    assert desk.effects("e1") == 2


async def test_a_call_without_an_id_is_rejected(desk: Desk) -> None:
    """C108: None in a template would be one key for all calls, and the second would be lost; it is rejected, nothing is done."""
    call = webhook(desk)
    async with desk.world.enter(desk.session()) as session:
        for values in ({"event_id": None}, {"event_id": "e1", "kind": None}):
            with pytest.raises(ValueError, match="is None, so this call has no key"):
                await desk.world.call(call, amount=Decimal(1), session=session, **values)
    assert desk.effects("e1") == 0


def test_the_session_is_found_by_its_annotation() -> None:
    """In quotes, inside Annotated, optional, a scoped one, one that only type checkers import; none, or two, is rejected."""
    decorate = idempotent_call(key="k", scope="s")

    def fine(a: Annotated[Session, "a dependency"], b: int) -> int: ...  # type: ignore[empty-body]

    def optional(a: int, b: Session | None = None) -> int: ...  # type: ignore[empty-body]

    def scoped(a: async_scoped_session[Any]) -> None: ...

    def checkers(a: orm.Session) -> None: ...

    for fn in (fine, optional, scoped, checkers):
        assert callable(decorate(fn))

    def none(a: int) -> None: ...

    def two(a: Session, b: Session) -> None: ...

    for fn in (none, two):
        with pytest.raises(TypeError, match="one parameter annotated as a Session"):
            decorate(fn)


def test_unusable_functions_are_rejected_at_decoration() -> None:
    """Fields and payloads that are no arguments, generators, and results that cannot be stored are rejected."""

    def plain(session: Session, a: int) -> int: ...  # type: ignore[empty-body]

    def generator(session: Session) -> Any:
        yield 1

    def row(session: Session) -> Session: ...  # type: ignore[empty-body]

    with pytest.raises(
        ValueError,
        match=r"'{b}' contains the field {b}, but .*plain\(\) has no argument 'b': its arguments are \(session, a\)\. To",
    ):
        idempotent_call(key="{b}", scope="s")(plain)
    with pytest.raises(ValueError, match="payload contains"):
        idempotent_call(key="{a}", scope="s", payload=["b"])(plain)
    with pytest.raises(TypeError, match=r"payload must be a list of names, such as \['a'\]"):
        idempotent_call(key="{a}", scope="s", payload="a")(plain)
    for fn, told in ((generator, "calling it does not run its body"), (row, "cannot be stored")):
        with pytest.raises(TypeError, match=told):
            idempotent_call(key="k", scope="s")(fn)
    assert functools.partial(idempotent_call(key="{a}", scope="s")(plain))


@pytest.mark.parametrize("world", ["psycopg", "asyncpg"], indirect=True)
@pytest.mark.parametrize("form", ["run", "block", "decorator"])
async def test_a_result_of_another_type_is_rejected_and_not_stored(desk: Desk, form: str) -> None:
    """In each form, sync and async: the error names both types, the transaction is rolled back, and the key is free."""
    sync: bool = not desk.world.is_async

    async def run(session: Any, value: object) -> None:
        async def work() -> Any:
            return value

        await desk.world.call(desk.key(session, "k").run, (lambda: value) if sync else work)

    async def block(session: Any, value: object) -> None:
        async with desk.world.enter(desk.key(session, "k")) as op:
            op.complete(value)

    async def decorator(session: Any, value: object) -> None:
        decorate = idempotent_call(key="k", scope=desk.scope)
        if sync:

            @decorate
            def call(session: Session) -> Receipt:
                return value  # type: ignore[return-value]

            await desk.world.call(call, session)
        else:

            @decorate
            async def call_async(session: AsyncSession) -> Receipt:
                return value  # type: ignore[return-value]

            await desk.world.call(call_async, session)

    use = {"run": run, "block": block, "decorator": decorator}[form]
    message = "declared as Receipt .* but contains a dict"
    async with desk.world.enter(desk.session()) as session:
        with pytest.raises(IdempotencyMisuseError, match=message):
            await use(session, {"key": "k"})
        await desk.world.call(session.rollback)
        await use(session, Receipt("k"))
        await desk.world.call(session.commit)
