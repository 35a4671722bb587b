"""Connect with asyncpg to the primary of a cluster, trying one host after another with a time limit for each.

pip install "pgfence[asyncpg,asyncio]"
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import asyncpg
from sqlalchemy.ext.asyncio import create_async_engine

Connect: TypeAlias = Callable[[], Awaitable[asyncpg.Connection]]

# After one of these errors, the next host is tried. Any other error is raised
# at once, for example if the password is wrong.
NEXT_HOST = (
    OSError,  # includes TimeoutError
    asyncpg.CannotConnectNowError,
    asyncpg.PostgresConnectionError,
    asyncpg.TargetServerAttributeNotMatched,
)


def connect_to_primary(
    hosts: Sequence[str], *, timeout: float = 2.0, **arguments: Any
) -> Connect:
    async def connect() -> asyncpg.Connection:
        reasons: list[str] = []
        for host in hosts:
            try:
                return await asyncpg.connect(
                    host=host,
                    timeout=timeout,
                    target_session_attrs="read-write",
                    **arguments,
                )
            except NEXT_HOST as error:
                reasons.append(f"{host}: {error!r}")
        raise ConnectionError(f"none is a primary: {'; '.join(reasons)}")

    return connect


async_engine = create_async_engine(
    "postgresql+asyncpg:///shop",
    async_creator=connect_to_primary(
        ["db1", "db2", "db3"], user="app", database="shop"
    ),
    pool_pre_ping=True,
)
