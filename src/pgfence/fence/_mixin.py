"""The mixin for mapped classes. What it does to a Session is in `_flush` and `_statements`, what it knows of a row in `_rows`.

Kept apart from the functions of this package: it needs SQLAlchemy's ORM, and importing pgfence does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, event, text
from sqlalchemy.orm import Session, declared_attr, mapped_column

from pgfence.fence import _flush, _statements
from pgfence.fence._rows import MODEL, Guarded, on_insert, on_update, validated

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

    Promised: a Session writes such a row, by a flush or by insert(), update() and delete() of the class, single or batched,
    only in a transaction that brought a token for the row's resource, before the change and after it. A write that is refused
    is an error, never a row that was left out. With `__fence__ = "gate"` the transaction is behind the gate, so its token was
    the newest when it entered and stays so until it ends.

    `__fence__ = "row"` needs no table of pgfence's beside these rows: the token is that of the gate, if one was entered, else
    of the lease or lock of that name which this task or thread holds, and it is compared with the column of each row, locked,
    before it is changed. It lets through what no column can tell: a stale writer's INSERT, also of a row that the newer holder
    has deleted; its writes to rows that the newer holder has not written; and all of it until the newer holder's first write.

    Not promised: anything about SQL in plain text, and about deletes of the Table rather than of the class:
    `schema.add_fence` puts a trigger there. For classes of a row's resource or of mode "row", statements whose rows cannot be
    told before they run (upserts, INSERT from SELECT, Core updates) are refused. In a bulk update or delete of theirs the
    rows are read and locked first; the resource may look at columns only, and at values that are set before the statement runs.

    Attributes:
        __fence_resource__: the resource: a str, or a static method from the row to a str. The configured namespace is added.
        __fence__: "gate" or "row".
        __fence_column__: the column's name in the table; the attribute stays `fence_token`.

    Raises:
        FenceRequiredError: on writing: the transaction brought no token for the resource, or the rows cannot be told.
        StaleFencingTokenError: on writing, in mode "row": a newer token wrote the row. The transaction cannot commit any more.
        LockLostError: on writing, in mode "row": the lease or lock that the token would come from is lost.
        StaleDataError: SQLAlchemy's own; on writing, in mode "row": a row that was to be changed or deleted is gone.
        TypeError, ValueError: on mapping the class: one of the attributes is missing or unusable. ValueError
            also for a statement that sets the column itself.
    """

    if TYPE_CHECKING:
        fence_token: Mapped[int]
    else:  # without an annotation: dataclasses and pydantic would make a field of it

        @declared_attr
        def fence_token(cls):  # noqa: ANN202, N805
            validated(cls)
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


event.listen(Fenced, "before_insert", _flush.before_insert, propagate=True)
event.listen(Fenced, "before_update", _flush.before_update, propagate=True)
event.listen(Fenced, "before_delete", _flush.before_delete, propagate=True)
event.listen(Session, "before_flush", _flush.lock_ahead)
event.listen(Session, "do_orm_execute", _statements.guard)
