"""The mixins for mapped classes. What a Session makes of them is in `_session`, what bulk statements do in `_statements`.

Kept apart from the functions of this package: it needs SQLAlchemy's ORM, and importing pgfence does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from sqlalchemy import BigInteger, FetchedValue, Uuid, event, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import declared_attr, mapped_column, validates

from pgfence.versions import _statements  # noqa: F401
from pgfence.versions._batch import VersionedMapper
from pgfence.versions._mapping import ATTRIBUTE, MODES, VersionedBase, version_in

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapped, Mapper

_LAST = 1_000_000


def _validated(cls: type[VersionedBase]) -> None:
    if cls.__version_mode__ not in MODES:
        raise ValueError(
            f"{cls.__name__}.__version_mode__ must be one of {', '.join(MODES)}, not {cls.__version_mode__!r}"
        )
    if not isinstance(cls.__version_column__, str) or not cls.__version_column__:
        raise TypeError(f"{cls.__name__}.__version_column__ must be the name of a column")


class _Guarded(VersionedBase):
    __mapper_cls__ = VersionedMapper

    @validates(ATTRIBUTE)
    def _refuse_assigned(self, _name: str, value: Any) -> Any:
        if value != version_in(self):
            raise AttributeError(
                f"{type(self).__name__}.{ATTRIBUTE} is counted by itself, and an assigned one would guard nothing: to check the"
                " version that a client has seen, use load_for_version(session, Model, pk, expected)"
            )
        return value


class Versioned(_Guarded):
    """A mixin for classes whose rows have a version: an UPDATE or DELETE applies to the version that was read, or fails."""

    if TYPE_CHECKING:
        version: Mapped[int]
    else:  # without an annotation: dataclasses and pydantic would make a field of it

        @declared_attr
        def version(cls):  # noqa: ANN202, N805
            _validated(cls)
            if cls.__version_mode__ == "server":
                return mapped_column(
                    cls.__version_column__,
                    BigInteger,
                    nullable=False,
                    server_default=text("1"),
                    server_onupdate=FetchedValue(),
                    sort_order=_LAST,
                )
            return mapped_column(cls.__version_column__, BigInteger, nullable=False, insert_default=1, sort_order=_LAST)


class VersionedUUID(_Guarded):
    """`Versioned` with a random version: it tells a row from one that was deleted and made again under the same key."""

    if TYPE_CHECKING:
        version: Mapped[UUID]
    else:

        @declared_attr
        def version(cls):  # noqa: ANN202, N805
            _validated(cls)
            return mapped_column(cls.__version_column__, Uuid, nullable=False, insert_default=uuid4, sort_order=_LAST)


def _configure(mapper: Mapper[Any], cls: type[Any]) -> None:
    if mapper.inherits is not None and issubclass(mapper.inherits.class_, VersionedBase):
        return
    if mapper.version_id_col is not None:
        raise ArgumentError(f"{cls.__name__} has two version columns: leave version_id_col out, or the mixin")
    mapper.version_id_col = mapper.local_table.c[cls.__version_column__]
    if cls.__version_mode__ == "server":
        mapper.version_id_generator = False
    elif issubclass(cls, VersionedUUID):
        mapper.version_id_generator = lambda _: uuid4()


event.listen(VersionedBase, "instrument_class", _configure, propagate=True)
