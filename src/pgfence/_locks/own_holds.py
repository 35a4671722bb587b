"""Detect a caller that waits for a lock that it holds itself, through another engine or on another connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pgfence._holds.hold import Hold, format_names
from pgfence._sql import activity, server
from pgfence.errors import SelfDeadlockError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from sqlalchemy import Connection

    from pgfence._connections.connection import LockConnection
    from pgfence._holds.queue import Contender, LocalQueue
    from pgfence._sql.storage import TableNames
    from pgfence.keys import LockKey
    from pgfence.types import Holder


class Contended(Protocol):
    """A request, with the queues in which it waits, and the row of the lease table, if it uses one."""

    @property
    def places(self) -> Sequence[Hashable]: ...
    @property
    def row(self) -> tuple[TableNames, str] | None: ...


def is_held_by(owner: Contender, queue: LocalQueue, wanted: Contended) -> bool:
    """Return whether a contender holds one of the requested keys, or another lock of this engine on the same row."""
    if not owner.holds:
        return False
    places, row = set(wanted.places), wanted.row
    for hold in tuple(owner.holds):
        theirs = hold.entry.queue
        same_place = theirs is queue and not places.isdisjoint(hold.entry.places)
        # A lease and a session lock with a token wait in different queues, but exclude each other because they share a row.
        same_row = row is not None and theirs.home is queue.home is not None and hold.row == row
        if (same_place or same_row) and not hold.dropped and hold.state in ("held", "unknown"):
            return True
    return False


def find_holds_on(owner: Contender, keys: Sequence[LockKey]) -> list[Hold[LockConnection]]:
    """Return a contender's session locks on any of these keys, in any database."""
    # The queue of this process only shows holds taken through the same engine. Holds through other engines are found by
    # comparing them with the holders that the server reports.
    wanted = set(keys)
    return [
        hold
        for hold in tuple(owner.holds)
        if isinstance(hold, Hold) and not wanted.isdisjoint(hold.keys) and not hold.dropped and hold.state == "held"
    ]


def find_self_deadlock(
    owner: Contender,
    names: tuple[str, ...],
    holds: Sequence[Hold[LockConnection]],
    found: Sequence[Holder],
    started: str,
) -> SelfDeadlockError | None:
    """Return the error if a contender would wait for a lock that it holds itself, or None if other sessions hold that lock.

    `holds` are its own session locks on the keys, and `found` the holders of the keys in the database where it would wait.
    `started` is the start time of its server, which is compared because another server may use the same backend pid.
    """
    there = {(holder.key, holder.backend_pid) for holder in found}
    own = tuple(
        name
        for hold in holds
        if hold.session.facts.started == started and any((key, hold.session.pid) in there for key in hold.keys)
        for name in hold.names
    )
    if not own:
        return None
    return SelfDeadlockError(
        f"waiting for {format_names(names)} would deadlock: this {owner.kind} itself holds {format_names(own)} as a session"
        " lock on another connection. Pass the handle on or, with an AdvisoryLock, work on the lock's own connection"
        " (AdvisoryLock.connect())",
        names=names,
    )


def find_hold_elsewhere(
    owner: Contender, connection: Connection, names: tuple[str, ...], keys: Sequence[LockKey]
) -> SelfDeadlockError | None:
    """Return the error if the contender would wait on this connection for a lock that it holds on another connection.

    The check takes two round trips if the contender holds one of the keys on another connection, and none otherwise.
    """
    here = connection.connection.dbapi_connection
    holds = [hold for hold in find_holds_on(owner, keys) if hold.session.dbapi_connection is not here]
    if not holds:
        return None
    return find_self_deadlock(
        owner, names, holds, activity.find_holders(connection, keys), server.read_start_time(connection)
    )
