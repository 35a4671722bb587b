"""What checkers must infer of partitions, and the mistakes that they must report."""

from collections.abc import Mapping

from typing_extensions import assert_type

from app import async_engine, engine, get_async_engine, get_engine
from pgfence import AsyncHeldLease, AsyncPartitions, AsyncWorker, HeldLease, Holder, Partitions, Worker, partition_for


def serve(partition: int, lease: HeldLease) -> None:
    lease.wait_lost(partition)


async def serve_async(partition: int, lease: AsyncHeldLease) -> None:
    await lease.wait_lost(partition)


def own_a_share() -> None:
    orders = Partitions(engine, "orders", 64, hash="murmur2")
    with orders.join(serve, address="10.0.0.7:8000") as worker:
        assert_type(worker, Worker)
        assert_type(worker.owned, Mapping[int, HeldLease])
    assert_type(orders.owner_of(orders.partition_for("account:42")), Holder | None)
    assert_type(partition_for("account:42", 64), int)
    Partitions(get_engine, "orders", 64).resize(128)
    Partitions(engine, "orders", 64, hash="md5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Partitions(async_engine, "orders", 64)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def own_a_share_in_tasks() -> None:
    orders = AsyncPartitions(async_engine, "orders", 64)
    async with orders.join(serve_async, owner="pod-1") as worker:
        assert_type(worker, AsyncWorker)
        assert_type(worker.owned, Mapping[int, AsyncHeldLease])
    assert_type(await orders.owner_of(3), Holder | None)
    await AsyncPartitions(get_async_engine, "orders", 64).resize(128)
    orders.join(serve)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
