"""The mixin for mapped classes. `_flush` and `_statements` check what a Session writes; `_rows` determines a row's resource.

This module is separate from the functions of this package because it needs SQLAlchemy's ORM, which importing pgfence does not
load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, event, text
from sqlalchemy.orm import Mapper, RelationshipDirection, Session, declared_attr, mapped_column

from pgfence.fence import _flush, _statements
from pgfence.fence._rows import ATTRIBUTE, MODEL, Guarded, check_settings, column_of, has_single_resource, on_insert
from pgfence.fence._updates import on_update

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapped, RelationshipProperty

_LAST = 1_000_000
_SETTINGS = ("__fence__", "__fence_resource__", "__fence_column__")


class Fenced(Guarded):
    """A mixin that allows writes to the rows of a mapped class only under a fencing token.

    ::

        class Entry(Fenced, Base):
            __tablename__ = "entry"
            __fence_resource__ = staticmethod(lambda row: f"close:{row.book}")
            id: Mapped[int] = mapped_column(primary_key=True)
            book: Mapped[str]


        with lease.begin(SessionLocal) as session:
            session.add(Entry(id=1, book="2026-04"))

    Use the mixin for plain declarative classes, MappedAsDataclass (it adds no `__init__` argument) and SQLModel. It adds a column
    with the highest token under which the row was written. Values that the program assigns to the attribute are ignored.

    Guarantees:
        A Session writes such a row only in a transaction that has a token for the row's resources before and after the change.
        The rule applies to a flush, whatever hook it calls for the row (including `post_update`, and a DELETE and an INSERT of
        the same key that become one UPDATE), and to insert(), update() and delete() of the class. A write without the token
        raises an error. No row is skipped silently. Rows of other classes need no token. With `__fence__ = "gate"`, the
        transaction has entered the gate, so its token was the newest at that time and stays the newest until the transaction
        ends.

        `__fence__ = "row"` needs none of pgfence's tables. The transaction's token is that of the gate, if it has entered one.
        Otherwise, it is that of the lease or lock that this task or thread holds under the resource's name. The token is compared
        with the column of each row, which is locked first.

    Limitations:
        In mode "row", the column cannot reject stale INSERTs of new rows, stale writes to rows that the newer holder has not
        written, or any stale write before the newer holder's first write.

        The mixin does not detect SQL in plain text, a DELETE that is built from the Table, or changes that the server makes itself
        (`ON DELETE CASCADE`). `schema.add_fence` guards against them with a trigger. If the resource depends on the row, or in mode
        "row", statements whose rows cannot be determined in advance (upserts, INSERT from SELECT, most Core statements) raise an
        error. The rows of a bulk update or delete are read and locked first. The resource may depend only on columns. The
        reference shows each kind of write.

    Attributes:
        __fence_resource__: the resource, as a str or as a static method that returns it for a row. The configured namespace is
            added.
        __fence__: "gate" or "row".
        __fence_column__: the name of the column in the table. The attribute is always `fence_token`.

    Raises:
        FenceRequiredError: on writing, if the transaction has no token for the resource, or the rows cannot be determined.
        StaleFencingTokenError: on writing in mode "row", if the row was written under a newer token. The transaction can no
            longer commit.
        TransactionStateError: on writing in mode "row" in autocommit, where a row lock does not last.
        LockLostError: on writing in mode "row", if the lease or lock that the token would come from is lost.
        StaleDataError: SQLAlchemy's own error, on writing in mode "row", if a row to be changed or deleted no longer exists.
        TypeError, ValueError: on mapping the class, if one of the attributes is missing or unusable, or a flush could write the
            rows without their tokens. A statement that sets the column itself also raises ValueError.
    """

    if TYPE_CHECKING:
        fence_token: Mapped[int]
    else:  # The column has no annotation, because dataclasses and pydantic would make it a field.

        @declared_attr
        def fence_token(cls):  # noqa: ANN202, N805
            check_settings(cls)
            return mapped_column(
                cls.__fence_column__,
                BigInteger,
                nullable=False,
                server_default=text("0"),
                insert_default=lambda context: on_insert(cls, context),
                onupdate=lambda context: on_update(cls, context),
                # This column comes last, because the resource may need the defaults of other columns.
                sort_order=_LAST,
                info={MODEL: cls},
            )


# ------------------------------------------------------------ mappings that cannot be fenced


def check_mapping(mapper: Mapper[object], cls: type[Guarded]) -> None:
    """Raise an error unless the table of a class has the mixin's column and all classes of its rows have the same settings."""
    base = None if mapper.concrete else mapper.inherits
    if base is not None and issubclass(base.class_, Guarded):
        _check_same_settings(cls, base.class_)
        return
    if base is not None and base.local_table is mapper.local_table:
        raise TypeError(
            f"{cls.__name__} is fenced, but {base.class_.__name__}, whose table it shares, is not, so a write through"
            f" {base.class_.__name__} would need no token: put the mixin on the base class"
        )
    column = mapper.local_table.c.get(cls.__fence_column__)
    if column is None or MODEL not in column.info:
        raise TypeError(
            f"{cls.__name__} has no fencing column, or one that the mixin did not create: leave the attribute {ATTRIBUTE!r} to the"
            " mixin; with concrete inheritance, put the mixin on each class, and shared attributes on a base that is not mapped"
        )


def _check_same_settings(cls: type[Guarded], base: type[Guarded]) -> None:
    for name in _SETTINGS:
        if getattr(cls, name) != getattr(base, name):
            raise TypeError(
                f"{cls.__name__} and {base.__name__} write the same rows and have different values of {name}: set it on"
                f" {base.__name__}; a resource function can distinguish subclasses by the discriminator column"
            )


def _check_relationships(mapper: Mapper[object], _cls: type[object]) -> None:
    for prop in mapper.relationships:
        if prop.viewonly:
            continue
        if prop.secondary is not None:
            _reject_fenced_secondary(prop)
        elif prop.post_update:
            _check_post_update(prop)


def _reject_fenced_secondary(prop: RelationshipProperty[object]) -> None:
    """Raise an error if a flush would write rows of a fenced class as rows of a secondary table, without checking a token."""
    for mapper in prop.parent.registry.mappers:
        if issubclass(mapper.class_, Guarded) and prop.secondary in mapper.tables:
            raise TypeError(
                f"{prop} writes rows of {mapper.class_.__name__} as its secondary table, without checking their tokens: pass"
                f" viewonly=True, and write the rows as objects of {mapper.class_.__name__}"
            )


def _check_post_update(prop: RelationshipProperty[object]) -> None:
    """Raise an error if a `post_update` writes a table other than the one with the fencing column."""
    to_many = prop.direction is RelationshipDirection.ONETOMANY
    written = prop.mapper if to_many else prop.parent
    if not issubclass(written.class_, Guarded):
        return
    columns = [remote if to_many else local for local, remote in prop.local_remote_pairs or ()]
    if any(column.table is not column_of(written).table for column in columns):
        raise TypeError(
            f"{prop} has post_update and writes a table of {written.class_.__name__} without the fencing column, so that the"
            " UPDATE would need no token: remove post_update, or put the foreign key into the table of the base class"
        )
    if not has_single_resource(written.class_):
        # The UPDATE may move a row to another resource after the flush has written it.
        event.listen(written.class_, "after_insert", _flush.forget_token, propagate=True)
        event.listen(written.class_, "after_update", _flush.forget_token, propagate=True)


event.listen(Fenced, "instrument_class", check_mapping, propagate=True)
event.listen(Fenced, "before_insert", _flush.before_insert, propagate=True)
event.listen(Fenced, "before_update", _flush.before_update, propagate=True)
event.listen(Fenced, "before_delete", _flush.before_delete, propagate=True)
event.listen(Session, "before_flush", _flush.prelock_rows)
event.listen(Session, "do_orm_execute", _statements.guard)
event.listen(Mapper, "mapper_configured", _check_relationships)
