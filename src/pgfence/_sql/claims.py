"""Abort the caller's transaction after the loss of a claim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from pgfence._sql.effects import LATE_ATTEMPT
from pgfence._sql.sqlstate import sqlstate_of
from pgfence._sql.transaction import send

if TYPE_CHECKING:
    from sqlalchemy import Connection

_ABORT = f"DO $$BEGIN RAISE EXCEPTION 'pgfence: the claim is lost' USING ERRCODE = '{LATE_ATTEMPT}'; END$$"


def abort_transaction(connection: Connection) -> DBAPIError:
    """Raise an error in the server, and return it. The transaction then cannot commit, even if the caller swallows the error."""
    try:
        send(connection, _ABORT)
    except DBAPIError as error:
        if sqlstate_of(error) != LATE_ATTEMPT:
            raise
        return error
    raise AssertionError("the statement always raises")
