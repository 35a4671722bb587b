"""The one mapper that overrides private attributes of SQLAlchemy, and the reason why.

A flush sends the UPDATEs of a mapper with a version column one by one (`_emit_update_statements` in
`sqlalchemy/orm/persistence.py`), whatever the dialect can do, and no event, option or Session hook changes that. A bulk
UPDATE in `before_flush` would run ahead of `before_update` listeners, of the foreign keys that relationships copy, and of
the INSERTs that it depends on. So a batch flush hides the version column while it writes, and `_batch` compares the versions.

Private and overridden, as read in SQLAlchemy 2.0.40 to 2.0.58 and 2.1.7 to 2.1.9 (`nox -s sqlalchemy_next` runs the tests on
newer ones):

- `_version_id_prop`, `_version_id_has_server_side_value`: follow the hidden column
- `_memo`: keeps the UPDATE, post-UPDATE and DELETE of each table, which are exchanged for those of `_sent`
- `_validate_polymorphic_identity`: called for each row after all `before_insert` and `before_update` listeners
- `_should_undefer_in_wildcard`: columns that are loaded in spite of `load_only()` and `defer()`
- `Update._execute_on_connection`, `Delete._execute_on_connection`: in `_sent`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy.orm import Mapper
from sqlalchemy.util import HasMemoized, memoized_property

from pgfence.versions._batch import NOW, get_emitting
from pgfence.versions._flush import prepare_row
from pgfence.versions._sent import SentDelete, SentPostUpdate, SentUpdate

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import ColumnElement

    from pgfence._orm import State

    RowCheck: TypeAlias = Callable[..., None] | None


_SENT: dict[str, type[SentUpdate | SentDelete]] = {
    "update": SentUpdate,
    "post_update": SentPostUpdate,
    "delete": SentDelete,
}


class VersionedMapper(Mapper[object]):
    """A mapper that has no version column while a batch flush writes."""

    @property
    def version_id_col(self) -> ColumnElement[object] | None:
        # Asked several times for each row of a flush.
        flush = NOW.get()
        return None if flush is not None and flush.emitting and self.batches else self.__dict__["version_id_col"]

    @version_id_col.setter
    def version_id_col(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, given: ColumnElement[object] | None
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
    def _version_id_prop(self) -> object:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.version_id_col is None else self._kept[0]

    @property
    def _version_id_has_server_side_value(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # SQLAlchemy would make each UPDATE anew to add the RETURNING; here it is in the one that is kept.
        return self.version_id_col is not None and self._kept[1] and not self.batches

    @HasMemoized.memoized_attribute
    def _should_undefer_in_wildcard(self) -> set[ColumnElement[Any]]:
        # Whatever load_only() and defer() leave out: a version that is read after the rest would let a change in between be lost.
        found = self.__dict__["version_id_col"]
        cols: set[ColumnElement[Any]] = super()._should_undefer_in_wildcard
        return cols if found is None else {*cols, found}

    @memoized_property
    def _kept(self) -> tuple[object, bool]:
        """What Mapper keeps once it was asked: asked here while there is a version column."""
        return super()._version_id_prop, super()._version_id_has_server_side_value

    @property
    def _validate_polymorphic_identity(self) -> RowCheck:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What SQLAlchemy calls for each row that it inserts or updates, when all listeners of before_update have run."""
        return _prepare_row

    @_validate_polymorphic_identity.setter
    def _validate_polymorphic_identity(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, given: RowCheck
    ) -> None:
        # A subclass takes over what its base returns.
        if given is not _prepare_row:
            self.__dict__["_check"] = given

    @memoized_property
    def identity_check(self) -> RowCheck:
        """SQLAlchemy's look at the polymorphic identity of a row that is about to be written."""
        return next(
            (mapper.__dict__["_check"] for mapper in self.iterate_to_root() if "_check" in mapper.__dict__), None
        )

    def _memo(self, key: Any, callable_: Callable[[], Any]) -> Any:
        version, batch = self.__dict__["version_id_col"], get_emitting()
        kind = _SENT.get(key[0])
        if version is None or kind is None or key[1] is not version.table:
            # An UPDATE without the version must not be taken from here by a flush that relies on it.
            return super()._memo(("batch", key) if batch else key, callable_)

        def make() -> Any:
            return kind.of(callable_(), self, batches=self.batches)

        if batch and self.batches:
            return super()._memo(("batch", key), make)
        if key[0] != "delete" and self.batches and self._kept[1]:
            return super()._memo(key, lambda: make().return_defaults(version))
        return super()._memo(key, make)


def _prepare_row(mapper: Mapper[object], state: State, values: dict[str, object]) -> None:
    assert isinstance(mapper, VersionedMapper)
    if (check := mapper.identity_check) is not None:
        check(mapper, state, values)
    prepare_row(mapper, state)
