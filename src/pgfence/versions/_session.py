"""The Session that says of a conflict which rows it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from pgfence.versions import _batch, _conflicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Engine


class VersionedSession(Session):
    """A Session whose conflicts are a VersionConflictError that names the rows."""

    def __init__(
        self,
        bind: Engine | Connection | None = None,
        *,
        bulk: Literal["bump", "refuse", "ignore"] = "bump",
        conflict_check: Literal["row", "batch"] = "row",
        **session_options: Any,
    ) -> None:
        super().__init__(bind, **session_options)
        self.bulk = bulk
        self.conflict_check = conflict_check
        if conflict_check == "batch":
            _batch.watch(self)

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """Flush, and name the rows that somebody else has written.

        Raises:
            VersionConflictError: rows are not at the version they were read at.
        """
        expected = _conflicts.remember(self)
        try:
            if self.conflict_check == "batch":
                with _batch.flushing(self):
                    super().flush(objects)
            else:
                super().flush(objects)
        except StaleDataError as error:
            raise _conflicts.told(self, expected, error) from error
