"""What operators do, as functions: `evict`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from pgfence._sql import evict as statements
from pgfence.evicting import order_of, perform, perform_async

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence.grants import Holder

__all__ = ["evict"]


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
