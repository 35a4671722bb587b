"""Ask the leader of an election to resign."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pgfence._sql import activity, evict
from pgfence._sql.encoding import translate_text_errors
from pgfence._sql.errors import ErrorContext
from pgfence._sql.params import call, style_of
from pgfence._sql.storage import LIMITS
from pgfence.keys import unqualify_name

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from pgfence._sql.storage import TableNames
    from pgfence.keys import LockKey
    from pgfence.types import Holder


@dataclass(frozen=True, slots=True)
class ResignRequest:
    """A request to the leader of an election, by its stored name, to resign. The reason and the actor are for the audit table."""

    name: str
    key: LockKey
    place: TableNames
    reason: str
    actor: str

    context: ClassVar[ErrorContext] = ErrorContext(LIMITS, on_primary="Ask on the primary")


def ask_to_resign(connection: Connection, request: ResignRequest) -> Holder | None:
    """Ask the leader to resign, in a separate transaction, and return the leader, or None if there is no leader.

    Raises:
        ValueError: the holder of the name is not the leader of an election; nothing was done.
    """
    order = evict.EvictionRequest(request.name, request.key, request.place, request.reason, request.actor)
    with connection.begin():
        found = evict.look(connection, order)
        style = style_of(connection.dialect)
        text = f"SELECT r.token FROM {call(request.place, style, 'ask_to_resign_v1', 'text, text, text, text')} AS r"
        detail = json.dumps({"token": found.token, "holders": [evict.to_data(holder) for holder in found.holders]})
        args = (request.name, request.actor, request.reason, detail)
        with translate_text_errors(connection, args):
            asked = connection.exec_driver_sql(text, args).one_or_none()
        if asked is None:
            return None
        if asked[0] is None:
            kind = activity.describe_kind(found.holders[0].kind if found.holders else "lease")
            raise ValueError(
                f"{unqualify_name(request.name)!r} is held by {kind}, not by the leader of an election: only a leader can be"
                " asked to resign. To end this hold, use evict()"
            )
        return next((holder for holder in found.holders if holder.token == asked[0]), None)
