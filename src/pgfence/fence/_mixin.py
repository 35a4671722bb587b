"""The mixin for mapped classes. What it does to a Session is in `_flush` and `_statements`, what it knows of a row in `_rows`.

Kept apart from the functions of this package: it needs SQLAlchemy's ORM, and importing pgfence does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, event, text
from sqlalchemy.orm import Session, declared_attr, mapped_column

from pgfence.fence import _flush, _mapping, _statements
from pgfence.fence._rows import MODEL, Guarded, check_settings, on_insert
from pgfence.fence._updates import on_update

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapped

_LAST = 1_000_000


class Fenced(Guarded):
    """A mixin for classes whose rows may be written under a fencing token only.

    ::

        class Entry(Fenced, Base):
            __tablename__ = "entry"
            __fence_resource__ = staticmethod(lambda row: f"close:{row.book}")
            id: Mapped[int] = mapped_column(primary_key=True)
            book: Mapped[str]


        with lease.begin(SessionLocal) as session:
            session.add(Entry(id=1, book="2026-04"))

    For plain declarative classes, MappedAsDataclass (it adds no argument of `__init__`) and SQLModel. It adds a column with
    the highest token that wrote the row; what a program assigns to it does not count.

    Guarantees:
        A Session writes such a row only in a transaction that brought a token for the row's resource, before the change and
        after it: by a flush, whatever hook it calls for the row (also `post_update`, and a DELETE and an INSERT of the same
        key that become one UPDATE), or by insert(), update() and delete() of the class. A write without the token raises an
        error; no row is left out silently. Rows of other classes need no token. With `__fence__ = "gate"` the transaction is
        behind the gate: its token was the newest when it entered and stays the newest until it ends.

        `__fence__ = "row"` needs none of pgfence's tables. The token is that of the gate, if one was entered, otherwise of the
        lease or lock of that name which this task or thread holds. It is compared with the column of each row, which is locked
        first; in AUTOCOMMIT, where the lock does not last, a write raises TransactionStateError.

    Limitations:
        In mode "row" no column can reject a stale INSERT of a new row, stale writes to rows that the newer holder has not
        written, and all stale writes before the newer holder's first one.

        SQL in plain text, a DELETE of the Table and what the server changes on its own (`ON DELETE CASCADE`) are not seen:
        `schema.add_fence` guards against them with a trigger. If the resource depends on the row, or in mode "row", statements
        whose rows cannot be determined in advance (upserts, INSERT from SELECT, most Core statements) raise an error, and in a
        bulk update or delete the rows are read and locked first. The resource may depend on columns only. The reference shows
        each kind of write.

    Attributes:
        __fence_resource__: the resource: a str, or a static method from the row to a str. The configured namespace is added.
        __fence__: "gate" or "row".
        __fence_column__: the column's name in the table; the attribute stays `fence_token`.

    Raises:
        FenceRequiredError: on writing: the transaction brought no token for the resource, or the rows cannot be told.
        StaleFencingTokenError: on writing, in mode "row": a newer token wrote the row. The transaction cannot commit any more.
        LockLostError: on writing, in mode "row": the lease or lock that the token would come from is lost.
        StaleDataError: SQLAlchemy's own; on writing, in mode "row": a row that was to be changed or deleted is gone.
        TypeError, ValueError: on mapping the class: one of the attributes is missing or unusable, or the mapping lets a flush
            write the rows without their tokens. ValueError also for a statement that sets the column itself.
    """

    if TYPE_CHECKING:
        fence_token: Mapped[int]
    else:  # without an annotation: dataclasses and pydantic would make a field of it

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
                # Behind all others, whose defaults the resource may need.
                sort_order=_LAST,
                info={MODEL: cls},
            )


event.listen(Fenced, "instrument_class", _mapping.check_mapping, propagate=True)
event.listen(Fenced, "before_insert", _flush.before_insert, propagate=True)
event.listen(Fenced, "before_update", _flush.before_update, propagate=True)
event.listen(Fenced, "before_delete", _flush.before_delete, propagate=True)
event.listen(Session, "before_flush", _flush.prelock_rows)
event.listen(Session, "do_orm_execute", _statements.guard)
