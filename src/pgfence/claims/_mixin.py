"""The mixin for mapped classes whose rows are claimed for longer than a transaction.

This module is separate from the functions of this package because it needs SQLAlchemy's ORM, which importing pgfence does not
load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, DateTime, Text, event
from sqlalchemy.orm import declared_attr, mapped_column
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.base import PassiveFlag

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection
    from sqlalchemy.orm import Mapped, Mapper

TOKEN, UNTIL, OWNER = COLUMNS = ("claim_token", "claimed_until", "claimed_by")
_LAST = 1_000_000


class Claimable:
    """A mixin that gives the rows of a mapped class claims that outlive the transaction.

    ::

        class Job(Claimable, Base):
            __tablename__ = "job"
            id: Mapped[int] = mapped_column(primary_key=True)
            state: Mapped[str] = mapped_column(default="new")


        with SessionLocal() as session:  # a sessionmaker(engine, expire_on_commit=False)
            jobs = claim(session, Job, Job.state == "new", order_by=Job.id, ttl=60)
            session.commit()
            for job in jobs:
                send_mail(job)  # no transaction is open
                job.state = "done"
                finish_claim(session, job)
                session.commit()

    Use the mixin for plain declarative classes, MappedAsDataclass (it adds no `__init__` argument) and SQLModel. With joined or
    single-table inheritance, put it on the base class. Leave its columns to `claim`, `extend_claim` and `finish_claim`: a flush
    that would change them in an existing row raises ValueError.

    Guarantees: a row has one claim at a time, until `claimed_until` by the server's clock. An expired claim is replaced by
    the next call of `claim`, without any cleanup job. A claim that was replaced cannot be extended or finished.

    Limitations: nothing is guaranteed about the work itself. After a claim has expired, its owner may still be running while the
    next owner starts. Writes of the row that are committed without `extend_claim` or `finish_claim` in the same transaction are
    not protected either.

    Attributes:
        claim_token: the number of claims that the row has had, or None if it has never been claimed. It only grows.
        claimed_until: when the claim expires or expired, or None if the row was never claimed or its last claim was finished.
        claimed_by: host, process id and a random number for the call of `claim`, or None if `claimed_until` is None.
    """

    if TYPE_CHECKING:
        claim_token: Mapped[int | None]
        claimed_until: Mapped[datetime | None]
        claimed_by: Mapped[str | None]
    else:  # The columns have no annotations, because dataclasses and pydantic would make them fields.

        @declared_attr
        def claim_token(cls):  # noqa: ANN202, N805
            return mapped_column(TOKEN, BigInteger, nullable=True, sort_order=_LAST)

        @declared_attr
        def claimed_until(cls):  # noqa: ANN202, N805
            return mapped_column(UNTIL, DateTime(timezone=True), nullable=True, sort_order=_LAST)

        @declared_attr
        def claimed_by(cls):  # noqa: ANN202, N805
            return mapped_column(OWNER, Text, nullable=True, sort_order=_LAST)


def _reject_assigned(_mapper: Mapper[object], _connection: Connection, row: object) -> None:
    """Raise an error if a flush would write the columns, for example after Session.merge() of an instance with an older claim."""
    state = instance_state(row)
    for name in COLUMNS:
        if state.get_history(name, PassiveFlag.PASSIVE_NO_INITIALIZE).has_changes():
            raise ValueError(
                f"{type(row).__name__}.{name} was assigned, or merged from another instance: only claim(), extend_claim() and"
                " finish_claim() write this column. Pass them the instance that claim() returned; an update() can clear a claim"
            )


event.listen(Claimable, "before_update", _reject_assigned, propagate=True)
