"""`record=` also records an error of the last flush; a rollback inside the work is an error."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence.errors import IdempotencyMisuseError
from support.keyed import Desk, Receipt

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


class Base(DeclarativeBase):
    """Of the one class."""


class Order(Base):
    """A row that is never written."""

    __tablename__ = f"order_{secrets.token_hex(6)}"
    id: Mapped[int] = mapped_column(primary_key=True)


class Declined(Exception):
    """A result that is an error."""


@event.listens_for(Order, "before_insert")
def decline(*_: Any) -> None:
    raise Declined(7)


@pytest.fixture
def desk(world: World, admin: psycopg.Connection[Any]) -> Iterator[Desk]:
    """Sessions of a world, and effects."""
    here = Desk(world, admin)
    yield here
    here.close()


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("record", [Declined, LookupError])
async def test_an_error_of_the_last_flush_is_recorded_too(desk: Desk, record: type[Exception]) -> None:
    """C101: a row that is added last is written after the function; its error is recorded if it is one of the named ones."""

    def work(session: Any) -> Receipt:
        receipt = desk.charge("k")(session)
        session.add(Order(id=1))
        return receipt

    for replay in (False, True):
        async with desk.world.enter(desk.session()) as session:
            key = desk.key(session, "k", record=[record])
            with pytest.raises(Declined) as caught:
                await desk.world.call(key.run, desk.body(session, work))
            recorded = record is Declined
            assert hasattr(caught.value, "__notes__") == (replay and recorded)
            await desk.world.call(session.commit if recorded else session.rollback)
    assert desk.effects() == 0


@pytest.mark.parametrize("end", ["rollback", "commit", "close"])
async def test_work_that_ends_the_transaction_is_rejected(desk: Desk, end: str) -> None:
    """C101: with `record` as without it, and nothing is stored."""
    with pytest.raises(IdempotencyMisuseError, match="must be rolled back" if end == "commit" else "no longer claimed"):
        await desk.pay("k", record=[Declined], work=lambda session: (getattr(session, end)(), Receipt("k"))[1])
    assert desk.effects() == 0
    await desk.pay("k")
