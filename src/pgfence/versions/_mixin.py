"""The mixins for mapped classes. `_flush` implements their effect on a flush, and `_statements` their effect on other statements.

This module is separate from the functions of this package because it needs SQLAlchemy's ORM, which importing pgfence does not
load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4

from sqlalchemy import BigInteger, FetchedValue, Table, Uuid, event, text
from sqlalchemy.orm import Mapper, RelationshipDirection, declared_attr, mapped_column, validates

from pgfence._api.inputs import check_choice
from pgfence.versions import _relationships, _statements  # noqa: F401
from pgfence.versions._assigned import assigned_error
from pgfence.versions._mapper import VersionedMapper
from pgfence.versions._mapping import ATTRIBUTE, MODES, VersionedBase, get_version_in, get_version_table, is_versioned
from pgfence.versions._rows import Xid

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapped, MappedColumn
    from sqlalchemy.types import TypeEngine

_T = TypeVar("_T")
_LAST = 1_000_000
_OURS = "pgfence_version"
XMIN = "xmin"


class _Guarded(VersionedBase):
    __mapper_cls__ = VersionedMapper

    @validates(ATTRIBUTE, include_removes=True)
    def _reject_assigned(self, _name: str, value: object, deleted: bool) -> object:
        if deleted or value != get_version_in(self):
            raise assigned_error(type(self))
        return value


class Versioned(_Guarded):
    """A mixin that gives the rows of a mapped class a version.

    An UPDATE or DELETE applies to the version that was read, or raises an error.

    ::

        class Page(Versioned, Base):
            __tablename__ = "page"
            id: Mapped[int] = mapped_column(primary_key=True)
            title: Mapped[str]


        with Session() as session:  # a sessionmaker(engine, class_=VersionedSession)
            session.get_one(Page, 1).title = "new"
            session.commit()  # VersionConflictError if the row has changed since it was read

    Use the mixin for plain declarative classes, MappedAsDataclass (it adds no `__init__` argument), SQLModel and
    Flask-SQLAlchemy. With joined or single-table inheritance, put it on the base class. A new row has version 1, and each UPDATE
    adds 1.

    Guarantees: a flush changes or deletes a row only at the version at which its instance was read, and otherwise raises an
    error. An update() of the class increments the version of every row that it writes, or is rejected; see `bulk` of
    `VersionedSession`.

    The version is loaded together with any other columns. If columns were loaded without it, for example by SQL text that omits
    it, a write of the row is rejected.

    Limitations: nothing is guaranteed about instances whose row is read again before the flush, because they then have the newer
    version. After a commit, expired instances are read again. Statements outside the ORM are not counted, unless
    `__version_mode__ = "server"`, whose trigger counts them. Changes of rows that belong to this one are not counted, unless
    `__version_relationships__` names their relationship and a flush writes them.

    `__version_mode__ = "xmin"` uses the id of the last transaction that wrote the row; PostgreSQL stores this id in each row. This
    mode needs no column and detects every writer. It is only for the work of one session, because the id changes with a dump or a
    rewrite of the table, and is the same for several writes of one transaction. Therefore, `etag` and `merge()` reject this mode.

    Attributes:
        __version_mode__: what maintains the version. With "client", it is this program; with "server", the trigger of
            `schema.add_version_trigger`; and with "xmin", PostgreSQL itself.
        __version_column__: the name of the column in the table. The attribute is always `version`.
        __version_relationships__: names of one-to-many and many-to-many relationships. A flush that adds, removes or deletes rows
            of such a relationship or, for one-to-many, changes or moves them, counts as one change of this row. The relationship
            may join on any mapped columns. The version of a row that owns this one does not change with it. A subclass that sets
            the attribute replaces the list of its base; `(*Document.__version_relationships__, "lines")` extends it.

    Raises:
        VersionConflictError: on writing in a `VersionedSession`, if the row is at another version or was deleted.
        StaleDataError: SQLAlchemy's own error, which a plain Session raises instead of VersionConflictError.
        AttributeError: on assigning `version`, even in the constructor and in SQLModel's `model_validate` and `sqlmodel_update`,
            because the assignment would check nothing; use `load_for_version`. A version that a library drops, because it is not
            in the library's own list of fields, is not detected.
        VersionRequiredError: on writing, if columns of the row were read without its version.
        SchemaError: on writing, if the row's version is NULL, or, in mode "server", if the trigger is missing. `command` contains
            the statements or the call that fix it.
        TypeError, ValueError: on mapping the class, if an attribute is unusable, there are two version columns, or a relationship
            writes rows by statements that compare no version: `post_update` with a foreign key in the table of a joined subclass,
            or a table of versioned rows as `secondary`. ValueError is also raised for a name in `__version_relationships__` that
            is not a relationship, or whose relationship is many-to-one or `viewonly`, has an aliased class as its target, or
            joins on columns that are not mapped.
    """

    if TYPE_CHECKING:
        version: Mapped[int]
    else:  # There is no annotation, because dataclasses and pydantic would make it a field.

        @declared_attr
        def version(cls):  # noqa: ANN202, N805
            _check_settings(cls)
            if cls.__version_mode__ == "xmin":
                return _make_column(
                    XMIN, Xid, system=True, server_default=FetchedValue(), server_onupdate=FetchedValue()
                )
            if cls.__version_mode__ == "server":
                counted = {"server_default": text("1"), "server_onupdate": FetchedValue()}
                return _make_column(cls.__version_column__, BigInteger, **counted)
            return _make_column(cls.__version_column__, BigInteger, insert_default=1)


class VersionedUUID(_Guarded):
    """A mixin that gives the rows of a mapped class a random UUID as their version, instead of the number of `Versioned`.

    The UUID distinguishes a row that was deleted and created again under the same key from the original row, but does not show
    how often a row was written. Otherwise, the mixin works like `Versioned` in the mode "client".

    Attributes:
        __version_column__: the column's name in the table; the attribute is always `version`.
        __version_relationships__: names of relationships whose changes count as changes of this row, as in `Versioned`.
    """

    if TYPE_CHECKING:
        version: Mapped[UUID]
    else:

        @declared_attr
        def version(cls):  # noqa: ANN202, N805
            _check_settings(cls)
            if cls.__version_mode__ != "client":
                raise ValueError(
                    f"{cls.__name__}.__version_mode__ is {cls.__version_mode__!r}, but VersionedUUID supports only the mode 'client':"
                    " use Versioned for the other modes"
                )
            return _make_column(cls.__version_column__, Uuid, insert_default=uuid4)


def _make_column(name: str, kind: type[TypeEngine[_T]], **options: Any) -> MappedColumn[_T]:
    # The column comes last, so that an INSERT with values by position remains correct.
    return mapped_column(name, kind, nullable=False, info={_OURS: True}, sort_order=_LAST, **options)


def _check_settings(cls: type[VersionedBase]) -> None:
    check_choice(f"{cls.__name__}.__version_mode__", cls.__version_mode__, MODES)
    name: object = cls.__version_column__
    if not isinstance(name, str) or not name:
        raise TypeError(f"{cls.__name__}.__version_column__ must be the name of a column, not {name!r}")


def _configure(mapper: Mapper[object], cls: type[VersionedBase]) -> None:
    """Make the mixin's column the one that SQLAlchemy compares, whatever `__mapper_args__` a class has."""
    if mapper.inherits is not None and not mapper.concrete:
        _check_inherited(mapper, cls, mapper.inherits)
        return
    if mapper.version_id_col is not None and not mapper.concrete:
        raise _two_columns_error(cls, "remove version_id_col from __mapper_args__")
    if {Versioned, VersionedUUID} <= set(cls.__mro__):
        raise _two_columns_error(cls, "use either Versioned or VersionedUUID")
    table = mapper.local_table
    name = XMIN if cls.__version_mode__ == "xmin" else cls.__version_column__
    if mapper.concrete and name not in table.c:
        raise TypeError(
            f"{cls.__name__} uses concrete inheritance from a class whose version column is in another table: put the"
            " mixin on each of the classes, and shared attributes on a base that is not mapped"
        )
    if name not in table.c or _OURS not in table.c[name].info:
        raise TypeError(
            f"{cls.__name__} has no version column, or one that the mixin did not create: leave the attribute {ATTRIBUTE!r} to the"
            " mixin, and set __version_column__ if its column must have another name"
        )
    if name == XMIN and isinstance(table, Table) and table.dialect_options["postgresql"]["partition_by"]:
        raise ValueError(
            f"{cls.__name__}: PostgreSQL does not return the xmin of a row that it inserts into the partitioned table"
            f" {table.fullname!r}: use the mode 'client' or 'server'"
        )
    mapper.version_id_col = table.c[name]
    if cls.__version_mode__ != "client":
        mapper.version_id_generator = False
    elif issubclass(cls, VersionedUUID):
        mapper.version_id_generator = lambda _: uuid4()


def _check_inherited(mapper: Mapper[object], cls: type[VersionedBase], base: Mapper[object]) -> None:
    if not issubclass(base.class_, VersionedBase):
        raise TypeError(
            f"{cls.__name__} has a version, but its base class {base.class_.__name__} has none, so a change of the columns in"
            f" the table {base.local_table.description!r} would not count: put the mixin on the base class"
        )
    if cls.__version_mode__ != base.class_.__version_mode__:
        raise ValueError(
            f"{cls.__name__} and {base.class_.__name__} have different values of __version_mode__: set it only on"
            f" {base.class_.__name__}"
        )
    if cls.__version_mode__ == "xmin" and mapper.local_table is not base.local_table:
        raise ValueError(
            f"{cls.__name__}: an UPDATE of the table {mapper.local_table.description!r} alone does not change xmin in the table"
            f" {base.local_table.description!r}: with joined inheritance, use the mode 'client' or 'server'"
        )


def _two_columns_error(cls: type[VersionedBase], way: str) -> TypeError:
    return TypeError(f"{cls.__name__} has two version columns: {way}")


def _check_relationships(mapper: Mapper[object], cls: type[VersionedBase]) -> None:
    """Reject relationships that write versioned rows by statements which compare and increment no version."""
    for prop in mapper.relationships:
        if prop.viewonly:
            continue
        named = f"{cls.__name__}.{prop.key}"
        written: Mapper[object] = mapper if prop.direction is RelationshipDirection.MANYTOONE else prop.mapper
        if prop.post_update and is_versioned(written):
            table = get_version_table(written)
            for _, column in prop.synchronize_pairs:
                if column.table is not table and not column.primary_key:
                    raise TypeError(
                        f"{named} has post_update, which writes '{column}' and leaves the table {table.fullname!r}, which has the"
                        f" version, unchanged: put the foreign key into {table.fullname!r}, or remove post_update"
                    )
        found = None if prop.secondary is None else _statements.find_mapper_of_table(prop.secondary)
        if found is not None:
            raise TypeError(
                f"{named} adds and deletes rows of {found.class_.__name__} as its secondary table, without checking their"
                f" versions: pass viewonly=True, and write through a relationship to {found.class_.__name__}"
            )


event.listen(VersionedBase, "instrument_class", _configure, propagate=True)
# All classes are checked, because a class without a version can have a relationship to a class with one.
event.listen(Mapper, "mapper_configured", _check_relationships)
