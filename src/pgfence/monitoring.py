"""What operators do, as functions: `evict`, `purge`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from pgfence._sql import evict as statements
from pgfence.evicting import order_of, perform, perform_async
from pgfence.purging import expect_batch
from pgfence.purging import purge as purge_all
from pgfence.purging import purge_async as purge_all_async

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence.grants import Holder

__all__ = ["evict", "purge"]


@overload
def evict(
    engine: AsyncEngine, name: str, *, reason: str, actor: str | None = None, dry_run: bool = False
) -> Coroutine[Any, Any, Sequence[Holder]]: ...
@overload
def evict(
    engine: Engine, name: str, *, reason: str, actor: str | None = None, dry_run: bool = False
) -> Sequence[Holder]: ...
def evict(engine: Any, name: str, *, reason: str, actor: str | None = None, dry_run: bool = False) -> Any:
    """End whoever holds a lease or a session lock, fence it off, and write that down, all in one transaction.

    The token goes up in the name's row and in its gate, the lease ends, and a row with reason and actor is written to the
    audit. Writers of the old token that are inside the gate are waited for, at most 2 s; after that no write of the old
    token can commit. A lease's holder is told at its next renewal: its handle is lost, the reason is "evicted". Sessions that
    hold an advisory lock of that name are ended: their holders are told at once, the reason is "killed". A name whose lease
    was released already still gets a higher token, so that a late writer is refused.

    Not promised: that the holder has stopped. What does not go through the name's gate is not fenced.

    Args:
        engine: an Engine, or an AsyncEngine: then await it.
        name: in the configured namespace.
        reason: for the audit; not empty.
        actor: who did it, for the audit; None is this process's user and host.
        dry_run: only look who would be evicted.

    Returns:
        Who was evicted, or would be.

    Raises:
        ValueError: the name, the reason or the actor cannot be used.
        TypeError: one of them is no str, or the engine is none.
        LockTimeoutError: a transaction that writes under the old token is still open; `holders` has the candidates. Nothing
            was done.
        SchemaError: the tables are missing, or this role may not do it. Nothing was done.
        StandbyError: this server takes no writes. Nothing was done.
        UnreachableError: there was no answer; if the connection was lost on the way, look before you try again.
    """
    order = order_of(engine, name, reason=reason, actor=actor)
    work = statements.look if dry_run else statements.evict
    if hasattr(engine, "sync_engine"):
        return perform_async(engine, work, order)
    return perform(engine, work, order).holders


@overload
def purge(engine: AsyncEngine, *, batch: int = 1000) -> Coroutine[Any, Any, int]: ...
@overload
def purge(engine: Engine, *, batch: int = 1000) -> int: ...
def purge(engine: Any, *, batch: int = 1000) -> Any:
    """Take the idempotency keys away whose time is over, in small transactions, and return how many they were.

    An expired key is new to whoever asks for it, purged or not; purging is for the size of the table. Promised: a key whose
    time is not over stays, and so does one whose attempt is at work, whatever its time; nobody waits for the purge longer than
    one batch takes; any number of processes may purge at the same time. All namespaces of the table are purged.

    Not promised: that all are gone afterwards. Keys that expire meanwhile, or that somebody has locked, are left to the next
    purge. The space is used again once autovacuum has been there; the table's files do not shrink.

    Args:
        engine: an Engine, or an AsyncEngine: then await it.
        batch: keys in one transaction, from 1 to 100,000.

    Raises:
        ValueError: batch is out of range.
        TypeError: it is no int, or the engine is none.
        SchemaError: the tables are missing or older than version 2, or this role may not do it: SELECT, UPDATE and DELETE.
        StandbyError: this server takes no writes.
        UnreachableError: there was no answer, or the connection was lost. What was purged before stays so.
    """
    expect_batch(batch)
    if hasattr(engine, "sync_engine"):
        return purge_all_async(engine, batch)
    return purge_all(engine, batch)
