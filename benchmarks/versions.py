"""The cost of a version: a flush with one, compared with the same flush without, or with SQLAlchemy's `version_id_col`."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks import picture, report, rounds
from benchmarks.place import server
from benchmarks.wire import counted
from pgfence import schema
from pgfence.versions import Versioned, VersionedSession, _statements

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from benchmarks.place import Place
    from benchmarks.rounds import Make

MANY = 1000
SIZES = (2, 100, MANY)


class Base(DeclarativeBase):
    """The base of this scenario's classes: a number to increment, and rows for three sessions."""


class Columns:
    """The columns that all classes have."""

    id: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int] = mapped_column(default=0)
    title: Mapped[str] = mapped_column(default="")


class Plain(Columns, Base):
    __tablename__ = "plain"


class Bare(Columns, Base):
    __tablename__ = "bare"
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class Counted(Versioned, Columns, Base):
    __tablename__ = "counted"


class Triggered(Versioned, Columns, Base):
    __tablename__ = "triggered"
    __version_mode__ = "server"


def flush(cls: type[Any], number: int, make: Callable[[Any], Session] = Session, place: int = 0) -> Make:
    """Increment rows that the session has loaded, and commit. Contestants on one table use different rows of it."""

    def contestant(where: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(where.url())
        stack.callback(engine.dispose)
        session = stack.enter_context(make(engine))
        session.expire_on_commit = False
        rows = session.scalars(sa.select(cls).order_by(cls.id).offset(place * MANY).limit(number)).all()
        session.commit()

        def cycle() -> None:
            for row in rows:
                row.n += 1
            session.commit()

        return cycle

    return contestant


def in_batch(engine: Any) -> Session:
    return VersionedSession(engine, conflict_check="batch")


def in_rows(engine: Any) -> Session:
    return VersionedSession(engine, conflict_check="row")


ONE = {
    "unversioned": flush(Plain, 1),
    "unversioned, again": flush(Plain, 1),
    "bare version_id_col": flush(Bare, 1),
    "Versioned in a Session": flush(Counted, 1),
    "Versioned in a VersionedSession": flush(Counted, 1, VersionedSession, 1),
    "Versioned in server mode, in a VersionedSession": flush(Triggered, 1, VersionedSession),
    'Versioned, conflict_check="batch"': flush(Counted, 1, in_batch, 2),
}


LINES = {"pgfence, Versioned": "Versioned in a VersionedSession", "version_id_col": "bare version_id_col"}


def several(number: int) -> dict[str, Make]:
    """Return the contestants that flush several rows."""
    return {
        "unversioned": flush(Plain, number),
        "unversioned, again": flush(Plain, number),
        "bare version_id_col": flush(Bare, number),
        "Versioned in a VersionedSession": flush(Counted, number, VersionedSession),
        'Versioned, conflict_check="batch"': flush(Counted, number, in_batch, 1),
        'Versioned, conflict_check="row"': flush(Counted, number, in_rows, 2),
        "Versioned in server mode, in a VersionedSession": flush(Triggered, number, VersionedSession),
    }


def run(quick: bool) -> dict[str, Any]:
    """Measure flushes of 1, 2, 100 and 1,000 rows, and statements of a class without a version."""
    effort = rounds.Effort.of(quick=quick)
    with server() as place:
        _prepare(place)
        one = rounds.alternate(place, ONE, effort)
        many = {}
        for number in SIZES:
            share = 1 + number // 20
            some = rounds.Effort(max(2, effort.sets // 3), max(5, effort.cycles // share), max(2, effort.warm // share))
            many[number] = rounds.alternate(place, several(number), some)
        trips = {number: _count_trips(place, VersionedSession, number) for number in (1, *SIZES)}
        trips_of_unversioned = _count_trips(place, Session, MANY, Plain)
        hook = _hook(place, 100 if quick else 4000)
    versioned, triggered = "Versioned in a VersionedSession", "Versioned in server mode, in a VersionedSession"
    bars = [
        _bar("one versioned row, against a bare version_id_col", one, versioned, "bare version_id_col", 1.15),
        _bar("server mode, one row, against a bare version_id_col", one, triggered, "bare version_id_col", 1.2),
        *[
            _bar(f"{number:,} versioned rows, against unversioned ones", many[number], versioned, "unversioned", 1.6)
            for number in SIZES
        ],
        *[
            report.bar(
                f"round trips of a flush of {number:,} row{'s' if number > 1 else ''}",
                f"at most {trips_of_unversioned}",
                found,
                trips_of_unversioned,
                "",
                digits=0,
            )
            for number, found in trips.items()
        ],
        report.bar(
            "a transaction of statements on an unversioned class, with the hook", "at most 1.05x", hook, 1.05, "x"
        ),
        report.null_test(rounds.ratio(one, "unversioned, again", "unversioned"), "a flush of one row"),
        *[
            report.null_test(rounds.ratio(found, "unversioned, again", "unversioned"), f"a flush of {number:,} rows")
            for number, found in many.items()
        ],
    ]
    return {
        "scenario": "versions",
        "title": "Versions",
        "method": (
            "One cycle increments a number in rows that the session has loaded, and commits. The hook is"
            " pgfence's listener for ORM statements (`do_orm_execute`). Its cost is measured with a transaction of"
            " one SELECT and one UPDATE by primary key, alternately with and without the hook. Round trips are those"
            " of a whole transaction, counted by a proxy."
        ),
        "bars": bars,
        "tables": [
            _table("A flush of one row", one),
            *[_table(f"A flush of {number:,} rows", found) for number, found in many.items()],
        ],
        "skipped": {},
        "pictures": [
            picture.curves(
                "benchmark-versions",
                "rows in a flush",
                (1, *SIZES),
                {
                    "ratio to unversioned rows": {
                        label: [rounds.ratio(found, name, "unversioned") for found in (one, *many.values())]
                        for label, name in LINES.items()
                    }
                },
            )
        ],
    }


def _count_trips(place: Place, make: Callable[[Any], Session], number: int, cls: type[Any] = Counted) -> int:
    """Return the round trips of a transaction that flushes rows which the session has loaded."""
    with counted(place.url()) as (url, counter):
        engine = sa.create_engine(url)
        with make(engine) as session:
            session.expire_on_commit = False
            rows = session.scalars(sa.select(cls).order_by(cls.id).limit(number)).all()
            session.commit()
            before = counter.trips
            for row in rows:
                row.n += 1
            session.commit()
            found = counter.trips - before
        engine.dispose()
    return found


def _bar(what: str, medians: rounds.Medians, name: str, base: str, limit: float) -> dict[str, Any]:
    return report.bar(what, f"at most {limit}x", rounds.ratio(medians, name, base), limit, "x")


def _table(title: str, medians: rounds.Medians) -> dict[str, Any]:
    rows = [
        (name, f"{rounds.ratio(medians, name, 'unversioned'):.2f}x", rounds.spread(medians, name, "unversioned"))
        for name in medians
    ]
    return report.table(title, ("Contestant", "Ratio", "Middle half of the sets"), rows)


def _prepare(place: Place) -> None:
    engine = sa.create_engine(place.url())
    Base.metadata.create_all(engine)
    schema.add_version_trigger(engine, Triggered)
    with Session(engine) as session:
        for cls in (Plain, Bare, Counted, Triggered):
            session.add_all([cls(id=number) for number in range(3 * MANY)])
        session.commit()
    engine.dispose()


def _hook(place: Place, times: int) -> float:
    """Return the cost of statements of a class without a version with the hook, compared with none."""
    engine = sa.create_engine(place.url())
    took: dict[bool, list[float]] = {True: [], False: []}
    for number in range(times):
        with_it = number % 2 == 0
        if not with_it:
            event.remove(Session, "do_orm_execute", _statements.guard)
        start = time.perf_counter()
        with Session(engine) as session:
            session.scalars(sa.select(Plain).where(Plain.id == 1)).one()
            session.execute(sa.update(Plain).where(Plain.id == 1).values(n=Plain.n + 1))
            session.commit()
        took[with_it].append(time.perf_counter() - start)
        if not with_it:
            event.listen(Session, "do_orm_execute", _statements.guard)
    engine.dispose()
    return statistics.median(took[True]) / statistics.median(took[False])
