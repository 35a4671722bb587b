"""`insert_once` inserts a row once per unique key, and later callers get the existing row."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import ForeignKey, Index, UniqueConstraint, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, relationship

from pgfence.errors import IdempotencyInProgressError
from pgfence.idempotency import insert_once
from support.keyed import Desk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins

CALLERS = 10


class Base(DeclarativeBase):
    """Of the tables here."""


SUFFIX = secrets.token_hex(6)


class Customer(Base):
    """A customer that pays."""

    __tablename__ = f"customer_{SUFFIX}"
    id: Mapped[int] = mapped_column(primary_key=True)


class Payment(Base):
    """A row with three unique keys."""

    __tablename__ = f"payment_{SUFFIX}"
    __table_args__ = (
        UniqueConstraint("tenant", "number"),
        Index(f"ix_{SUFFIX}", "note", unique=True, postgresql_where="note <> ''"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column("Order, Id", unique=True)
    tenant: Mapped[str] = mapped_column(default="a")
    number: Mapped[int | None]
    note: Mapped[str] = mapped_column(default="")
    amount: Mapped[int] = mapped_column(default=0)
    customer_id: Mapped[int | None] = mapped_column(ForeignKey(Customer.id))
    customer: Mapped[Customer | None] = relationship()


class Account(Base):
    """A table of two classes, with keys that PostgreSQL looks at later, or through a function, or backwards."""

    __tablename__ = f"account_{SUFFIX}"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    number: Mapped[int] = mapped_column()
    mail: Mapped[str] = mapped_column(default="m")
    later: Mapped[int] = mapped_column(default=1)
    __table_args__ = (
        UniqueConstraint("later", deferrable=True, initially="DEFERRED"),
        Index(f"ix_mail_{SUFFIX}", func.lower(mail), unique=True),
        Index(f"ix_number_{SUFFIX}", number.desc(), unique=True),
    )
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_abstract": True}  # noqa: RUF012


class Card(Account):
    """One of them."""

    __mapper_args__ = {"polymorphic_identity": "card"}  # noqa: RUF012


class Wire(Account):
    """The other."""

    __mapper_args__ = {"polymorphic_identity": "wire"}  # noqa: RUF012


class Data(MappedAsDataclass, DeclarativeBase):
    """Of mapped dataclasses."""


class Setting(Data):
    """With a natural key."""

    __tablename__ = f"setting_{SUFFIX}"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


@pytest.fixture
def desk(world: World, admin: psycopg.Connection[Any]) -> Iterator[Desk]:
    """Sessions of a world, and the tables."""
    here = Desk(world, admin, pool_size=CALLERS)
    engine = here.plain()
    for metadata in (Base.metadata, Data.metadata):
        metadata.create_all(engine)
    yield here
    for metadata in (Base.metadata, Data.metadata):
        metadata.drop_all(engine)
    engine.dispose()
    here.close()


def row(**values: Any) -> Payment:
    return Payment(**({"order_id": 7, "tenant": "a"} | values))


async def count(desk: Desk) -> int:
    async with desk.world.enter(desk.session()) as session:
        return int(await desk.on(session, lambda one: one.scalar(select(func.count()).select_from(Payment))))


@pytest.mark.every_driver
async def test_the_first_caller_inserts_and_the_others_get_its_row(desk: Desk) -> None:
    """C095, C096: of ten concurrent callers one inserts the row, none gets an IntegrityError, and all commit."""

    async def call(number: int) -> tuple[bool, int]:
        who = desk.world.contender()
        async with who.enter(desk.session(expire_on_commit=False)) as session:
            mine = row(amount=number, customer=Customer())
            found = await who.call(insert_once, session, mine, [Payment.order_id])
            await who.call(session.commit)
            return found is mine, found.amount

    answers = await asyncio.gather(*map(call, range(1, CALLERS + 1)))
    assert sum(won for won, _ in answers) == 1
    assert len({amount for _, amount in answers}) == 1
    assert await count(desk) == 1


async def test_a_second_insert_waits_for_the_first(desk: Desk, eventually: Any) -> None:
    """A second insert waits for the first to commit, and inserts the row itself if the first rolls back."""
    other = desk.world.other()

    async def second() -> int:
        async with other.enter(desk.session(expire_on_commit=False)) as session:
            found = await other.call(insert_once, session, row(amount=2), ["order_id"])
            await other.call(session.commit)
            return int(found.amount)

    for end, amount in (("rollback", 2), ("commit", 2)):
        async with desk.world.enter(desk.session(expire_on_commit=False)) as session:
            mine = await desk.world.call(insert_once, session, row(amount=1), ["order_id"])
            task = None
            if end == "rollback":
                assert mine.amount == 1
                task = asyncio.create_task(second())
                await eventually(lambda: desk.blocked() == 1)
            await desk.world.call(getattr(session, end))
            assert (await task if task else mine.amount) == amount
    assert await count(desk) == 1


async def test_the_second_transaction_keeps_its_other_changes(desk: Desk) -> None:
    """C096: pending rows are stored, and the instance that lost is not and belongs to no session."""
    async with desk.world.enter(desk.session()) as session:
        await desk.world.call(insert_once, session, row(), ["order_id"])
        await desk.world.call(session.commit)
    async with desk.world.enter(desk.session()) as session:
        session.add(row(order_id=8))
        lost = row()
        session.add(lost)
        found = await desk.world.call(insert_once, session, lost, [Payment.order_id])
        assert found is not lost
        assert lost not in session
        await desk.world.call(session.commit)
    assert await count(desk) == 2


@pytest.mark.every_driver
async def test_a_violation_of_another_constraint_is_raised_unchanged(desk: Desk) -> None:
    """C096: a foreign key, or another unique key, is not taken for the named one; the transaction is usable."""
    async with desk.world.enter(desk.session()) as session:
        await desk.world.call(insert_once, session, row(number=1), ["tenant", "number"])
        for wrong in (row(number=2), row(order_id=9, number=9, customer_id=-1)):
            with pytest.raises(IntegrityError) as error:
                await desk.world.call(insert_once, session, wrong, [Payment.tenant, Payment.number])
            assert not hasattr(error.value, "__notes__")  # which are about a row with the named key
        await desk.world.call(session.commit)
    assert await count(desk) == 1


@pytest.mark.every_driver
async def test_a_row_outside_the_snapshot_is_reported(desk: Desk) -> None:
    """In REPEATABLE READ a row that was committed since is neither inserted again nor an IntegrityError."""
    async with desk.world.enter(desk.session()) as session:
        await desk.world.call(session.connection, execution_options={"isolation_level": "REPEATABLE READ"})
        await desk.on(session, lambda one: one.scalars(select(Payment)).all())
        other = desk.world.other()
        async with other.enter(desk.session()) as winner:
            await other.call(insert_once, winner, row(), ["order_id"])
            await other.call(winner.commit)
        with pytest.raises(IdempotencyInProgressError, match="order_id 7") as caught:
            await desk.world.call(insert_once, session, row(), ["order_id"])
        assert caught.value.sqlstate == "40001"
        session.add(row(order_id=8))
        await desk.world.call(session.commit)
    assert await count(desk) == 2


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_row_outside_the_snapshot_is_reported_after_a_wait(desk: Desk, eventually: Any, level: str) -> None:
    """C096: in SERIALIZABLE, where the server raises its own error, too; the transaction is usable."""
    other = desk.world.other()

    async def second() -> None:
        async with other.enter(desk.session()) as session:
            await other.call(session.connection, execution_options={"isolation_level": level})
            await desk.on(session, lambda one: one.scalars(select(Payment)).all(), other)
            with pytest.raises(IdempotencyInProgressError, match="order_id 7") as caught:
                await other.call(insert_once, session, row(), ["order_id"])
            assert caught.value.sqlstate == "40001"
            await desk.on(session, lambda one: one.scalars(select(1)).all(), other)
            await other.call(session.rollback)

    async with desk.world.enter(desk.session()) as session:
        await desk.world.call(session.connection, execution_options={"isolation_level": level})
        await desk.world.call(insert_once, session, row(), ["order_id"])
        task = asyncio.create_task(second())
        await eventually(lambda: desk.blocked() == 1 or task.done())
        await desk.world.call(session.commit)
        await task
    assert await count(desk) == 1


@pytest.mark.every_driver
async def test_an_error_of_pending_rows_is_not_taken_for_the_instances(desk: Desk) -> None:
    """C096: with autoflush off it is sent by the savepoint; the same constraint, of another row."""
    async with desk.world.enter(desk.session(autoflush=False)) as session:
        await desk.world.call(insert_once, session, row(), ["order_id"])
        await desk.world.call(session.commit)
        session.add(row())
        with pytest.raises(IntegrityError):
            await desk.world.call(insert_once, session, row(order_id=8), ["order_id"])
        await desk.world.call(session.rollback)
    assert await count(desk) == 1


async def test_a_row_of_another_class_with_the_key_is_an_integrity_error(desk: Desk) -> None:
    """C096: no new transaction would find it either, so none is asked for; the transaction stays usable."""
    async with desk.world.enter(desk.session()) as session:
        first = await desk.world.call(insert_once, session, Card(number=1), [Account.number])
        assert await desk.world.call(insert_once, session, Card(number=1, mail="n", later=2), ["number"]) is first
        with pytest.raises(IntegrityError) as told:
            await desk.world.call(insert_once, session, Wire(number=1, mail="n", later=2), ["number"])
        assert "does not find" in told.value.__notes__[0]
        await desk.world.call(session.commit)


@pytest.mark.every_driver
async def test_a_row_hidden_by_row_level_security_is_not_invented(
    desk: Desk, role: Callable[..., str], eventually: Any
) -> None:
    """C096: the server does not say which key it was: a row that can be seen is returned, for another the error stays."""
    engine, table = desk.world.engine(dsn=role()), Payment.__tablename__
    for statement in (
        f"GRANT SELECT, INSERT ON {table} TO {engine.url.username}",
        f"GRANT USAGE ON SEQUENCE {table}_id_seq TO {engine.url.username}",
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
        f"CREATE POLICY own ON {table} USING (tenant = 'a') WITH CHECK (true)",
    ):
        desk.admin.execute(statement.encode())
    other, kind = desk.world.other(), desk.world.pick(Session, AsyncSession)

    async def second(order_id: int) -> int:
        async with other.enter(kind(engine, expire_on_commit=False)) as session:
            try:
                return int((await other.call(insert_once, session, row(order_id=order_id), ["order_id"])).amount)
            finally:
                await other.call(session.commit)

    async with desk.world.enter(desk.session()) as session:
        await desk.world.call(insert_once, session, row(amount=1), ["order_id"])
        task = asyncio.create_task(second(7))
        await eventually(lambda: desk.blocked() == 1)
        await desk.world.call(session.commit)
        assert await task == 1
        await desk.world.call(insert_once, session, row(order_id=8, tenant="b"), ["order_id"])
        await desk.world.call(session.commit)
    with pytest.raises(IntegrityError) as told:
        await second(8)
    assert not hasattr(told.value, "__notes__")


async def test_a_mapped_dataclass_with_a_natural_key(desk: Desk) -> None:
    """The primary key can be the unique key, also of a mapped dataclass."""
    async with desk.world.enter(desk.session()) as session:
        first = await desk.world.call(insert_once, session, Setting("a", "1"), [Setting.name])
        again = await desk.world.call(insert_once, session, Setting("a", "2"), ["name"])
        assert again is first
        assert again.value == "1"


def test_a_key_that_is_not_unique_is_rejected() -> None:
    """Missing, partial, functional and deferred keys, None, unknown names and stored instances are rejected."""
    session = Session()
    for key in (["amount"], [], ["tenant"], ["note"], ["tenant", "number", "id"], ["nothing"]):
        with pytest.raises(ValueError, match="declares no|has no column"):
            insert_once(session, row(note="n", amount=1, number=1, id=1), key)
    for name in ("mail", "later"):
        with pytest.raises(ValueError, match="declares no"):
            insert_once(session, Card(number=1, mail="m", later=1), [name])
    with pytest.raises(ValueError, match="is None"):
        insert_once(session, row(), ["tenant", "number"])
    with pytest.raises(ValueError, match="Setting.name is not an attribute of Payment"):
        insert_once(session, row(), [Setting.name])
    wrong: tuple[Any, ...] = (
        (object(), ["a"], "mapped class"),
        (Payment, ["order_id"], "mapped class"),
        (row(), "order_id", "list of attributes"),
        (row(), Payment.order_id, "list of attributes, such as .Payment.order_id"),
    )
    for instance, key, told in wrong:
        with pytest.raises(TypeError, match=told):
            insert_once(session, instance, key)
    with pytest.raises(TypeError, match="a Session"):
        insert_once(None, row(), ["order_id"])  # type: ignore[call-overload]
