"""Waits for what the caller itself holds: in this process, and on another connection."""

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
    """What is asked for: the lines it stands in, and the row of the lease table, if it uses one."""

    @property
    def places(self) -> Sequence[Hashable]: ...
    @property
    def row(self) -> tuple[TableNames, str] | None: ...


def is_held_by(owner: Contender, queue: LocalQueue, wanted: Contended) -> bool:
    """Say whether a contender holds what these statements are for, or another lock of this engine on the same row."""
    if not owner.holds:
        return False
    places, row = set(wanted.places), wanted.row
    for hold in tuple(owner.holds):
        theirs = hold.entry.queue
        same_place = theirs is queue and not places.isdisjoint(hold.entry.places)
        # A lease and a session lock with a token wait in different lines, and exclude each other by their row.
        same_row = row is not None and theirs.home is queue.home is not None and hold.row == row
        if (same_place or same_row) and not hold.dropped and hold.state in ("held", "unknown"):
            return True
    return False


def find_holds_on(owner: Contender, keys: Sequence[LockKey]) -> list[Hold[LockConnection]]:
    """Return the session locks of a contender on any of these keys, in whatever database."""
    # The queue of this process shows a hold on another connection only if both locks are taken through one engine. So the holds
    # of the contender are compared with what the server shows.
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
    """Return the error of a wait for a lock that the contender holds itself; None: others hold it.

    Args:
        owner: who is about to wait.
        names: what it waits for.
        holds: its own session locks on those keys.
        found: the holders of those keys in the database where it waits.
        started: when that server was started. A process id alone proves nothing: another server may use the same one.
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
        f"waiting for {format_names(names)} would never end: this {owner.kind} holds {format_names(own)} itself, as an AdvisoryLock on another"
        " connection. Pass the handle on, or work on the lock's own connection (AdvisoryLock.connect())",
        names=names,
    )


def find_hold_elsewhere(
    owner: Contender, connection: Connection, names: tuple[str, ...], keys: Sequence[LockKey]
) -> SelfDeadlockError | None:
    """Return the error of a wait on this connection for a lock that the contender holds itself on another one.

    No round trip unless it holds a session lock on one of the keys, then two.
    """
    here = connection.connection.dbapi_connection
    holds = [hold for hold in find_holds_on(owner, keys) if hold.session.dbapi_connection is not here]
    if not holds:
        return None
    return find_self_deadlock(
        owner, names, holds, activity.find_holders(connection, keys), server.read_start_time(connection)
    )
