"""The mapper of versioned classes: what it tells SQLAlchemy about the version while a flush writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.orm import Mapper
from sqlalchemy.util import HasMemoized, memoized_property

from pgfence.versions._batch import NOW, emitting
from pgfence.versions._flush import turn
from pgfence.versions._sent import SentDelete, SentPostUpdate, SentUpdate

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import InstanceState

_O = TypeVar("_O")

_SENT: dict[str, Any] = {"update": SentUpdate, "post_update": SentPostUpdate, "delete": SentDelete}


class VersionedMapper(Mapper[_O]):
    """A mapper that has no version column while a batch flush writes."""

    @property
    def version_id_col(self) -> ColumnElement[Any] | None:
        # Asked several times for each row of a flush.
        flush = NOW.get()
        return None if flush is not None and flush.emitting and self.batches else self.__dict__["version_id_col"]

    @version_id_col.setter
    def version_id_col(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, given: ColumnElement[Any] | None
    ) -> None:
        self.__dict__["version_id_col"] = given

    @memoized_property
    def batches(self) -> bool:
        """Whether a batch can write this class: it has a column for the version, and its statements are kept as below."""
        found = self.__dict__["version_id_col"]
        return found is not None and not found.system and isinstance(self.base_mapper, VersionedMapper)

    @property
    def confirm_deleted_rows(self) -> bool:
        """Whether SQLAlchemy counts what it deletes. `SentDelete` does, and a table of a subclass has its row with the version."""
        asked: bool = self.__dict__["confirm_deleted_rows"]
        return asked and self.__dict__["version_id_col"] is None

    @confirm_deleted_rows.setter
    def confirm_deleted_rows(self, given: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["confirm_deleted_rows"] = given

    @property
    def _version_id_prop(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.version_id_col is None else self._kept[0]

    @property
    def _version_id_has_server_side_value(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # SQLAlchemy would make each UPDATE anew to add the RETURNING; here it is in the one that is kept.
        return self.version_id_col is not None and self._kept[1] and not self.batches

    @HasMemoized.memoized_attribute
    def _should_undefer_in_wildcard(self) -> set[Any]:
        # Whatever load_only() and defer() leave out: a version that is read after the rest would let a change in between be lost.
        found = self.__dict__["version_id_col"]
        cols: set[Any] = super()._should_undefer_in_wildcard
        return cols if found is None else {*cols, found}

    @memoized_property
    def _kept(self) -> tuple[Any, bool]:
        """What Mapper keeps once it was asked: asked here while there is a version column."""
        return super()._version_id_prop, super()._version_id_has_server_side_value

    @property
    def _validate_polymorphic_identity(self) -> Callable[[Mapper[Any], InstanceState[Any], dict[str, Any]], None]:
        """What SQLAlchemy calls for each row that it inserts or updates, when all listeners of before_update have run."""
        return _turn

    @_validate_polymorphic_identity.setter
    def _validate_polymorphic_identity(self, given: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # A subclass takes over what its base returns.
        if given is not _turn:
            self.__dict__["_check"] = given

    @memoized_property
    def identity_check(self) -> Any:
        """SQLAlchemy's look at the polymorphic identity of a row that is about to be written."""
        return next(
            (mapper.__dict__["_check"] for mapper in self.iterate_to_root() if "_check" in mapper.__dict__), None
        )

    def _memo(self, key: Any, callable_: Callable[[], Any]) -> Any:
        version, batch = self.__dict__["version_id_col"], emitting()
        kind = _SENT.get(key[0])
        if version is None or kind is None or key[1] is not version.table:
            # An UPDATE without the version must not be taken from here by a flush that relies on it.
            return super()._memo(("batch", key) if batch else key, callable_)
        if batch and self.batches:
            return super()._memo(("batch", key), lambda: kind.of(callable_(), self, batches=self.batches))
        if key[0] != "delete" and self.batches and self._kept[1]:
            return super()._memo(key, lambda: kind.of(callable_(), self, batches=self.batches).return_defaults(version))
        return super()._memo(key, lambda: kind.of(callable_(), self, batches=self.batches))


def _turn(mapper: Any, state: InstanceState[Any], values: dict[str, Any]) -> None:
    if (check := mapper.identity_check) is not None:
        check(mapper, state, values)
    turn(mapper, state)
