"""The cost of an idempotency key: a durable transaction of one INSERT with and without it, and a replay against one SELECT."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks import report, rounds
from benchmarks.place import server
from pgfence import schema
from pgfence._values.codec import Codec
from pgfence.effects import IdempotentEffect
from pgfence.idempotency import idempotent

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from benchmarks.place import Place
    from benchmarks.rounds import Make, Medians

INSERT = sa.text("INSERT INTO effect (n) VALUES (:n)")
SELECT = sa.text("SELECT result FROM answer WHERE scope = :scope AND key = :key")
CLAIM = sa.text("INSERT INTO answer VALUES (:scope, :key) ON CONFLICT DO NOTHING")
STORE = sa.text("UPDATE answer SET result = cast(:result AS jsonb) WHERE scope = :scope AND key = :key")
DELAY = {"commit_delay": "1000", "commit_siblings": "0"}
SLOW = "with commits that take a millisecond longer"
LIMIT = 200e-6
HAND = "a handwritten key"
KEYED, EFFECT, REPLAY = "pgfence, idempotent()", "pgfence, IdempotentEffect", "pgfence, a replay"
NUMBERS = itertools.count()


@dataclass
class Line:
    """One line of a result."""

    ident: UUID = field(default_factory=uuid4)
    amount: Decimal = Decimal("12.30")
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    note: str = "as agreed, to be delivered with the next shipment"


def bare(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)

    def cycle() -> None:
        with Session(engine) as session, session.begin():
            session.execute(INSERT, {"n": next(NUMBERS)})

    return cycle


def keyed(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)

    def cycle() -> None:
        with Session(engine) as session, session.begin():
            number = next(NUMBERS)

            def work() -> int:
                session.execute(INSERT, {"n": number})
                return number

            idempotent(session, f"request {number}", scope="pay", payload={"n": number}, result=int).run(work)

    return cycle


def by_hand(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)

    def cycle() -> None:
        with Session(engine) as session, session.begin():
            number = next(NUMBERS)
            key = {"scope": "pay", "key": f"request {number}"}
            session.execute(CLAIM, key)
            session.execute(INSERT, {"n": number})
            session.execute(STORE, key | {"result": str(number)})

    return cycle


def selected(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)

    def cycle() -> None:
        with Session(engine) as session, session.begin():
            session.execute(SELECT, {"scope": "pay", "key": "old"}).scalar_one()

    return cycle


def replayed(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)

    def cycle() -> None:
        with Session(engine) as session, session.begin():
            idempotent(session, "old", scope="pay", payload={"n": 1}, result=int).run(lambda: 1)

    cycle()
    return cycle


def effect(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)

    def cycle() -> None:
        number = next(NUMBERS)
        IdempotentEffect(engine, f"effect {number}", scope="pay", payload={"n": number}, result=int).run(
            lambda _: number
        )

    return cycle


def run(quick: bool) -> dict[str, Any]:
    """Measure the work, the replay and the codec."""
    whole = rounds.Effort.of(quick=quick)
    effort = rounds.Effort(max(2, whole.sets // 2), whole.cycles, whole.warm)  # a commit is slow
    bars, tables = [], []
    with_key: dict[str, Make] = {"bare": bare, KEYED: keyed, HAND: by_hand}
    insert, twice = (
        "a transaction of one INSERT under a key, against a handwritten key",
        "an effect that does nothing, against a bare INSERT",
    )
    pairs: tuple[tuple[str, str, str, float, dict[str, Make]], ...] = (
        (KEYED, HAND, insert, 1.2, with_key),
        (EFFECT, "bare", twice, 2.3, {"bare": bare, EFFECT: effect}),
        (REPLAY, "bare", "a replay, against one SELECT", 1.2, {"bare": selected, REPLAY: replayed}),
    )
    slow = tuple((name, base, f"{what}, {SLOW}", limit, field) for name, base, what, limit, field in pairs[:2])
    for settings, measured in (({}, pairs), (DELAY, slow)):
        with server(durable=True, **settings) as place:
            _prepare(place)
            for name, base, what, limit, field in measured:
                medians = rounds.alternate(place, field | {"bare, again": field["bare"]}, effort)
                bars.append(report.bar(what, f"at most {limit}x", rounds.ratio(medians, name, base), limit, "x"))
                bars.append(report.null_test(rounds.ratio(medians, "bare, again", "bare"), what))
                tables.append(_table(what, medians))
    bars += _codec()
    return {
        "scenario": "idempotency",
        "title": "Idempotency keys",
        "method": (
            "One cycle is a transaction of an ORM Session, with fsync. One INSERT with Core is measured in three"
            " ways: bare, as the work of a key with a payload, and with a handwritten key, that is, between an INSERT"
            " into a table of keys and an UPDATE of that table. An effect needs one commit for the claim and one for the result. A replay is"
            " compared with a SELECT by primary key. The cost of a key or an effect depends mostly on how long a commit"
            " takes, so both are measured again with a `commit_delay` of one millisecond. The encoded and"
            " decoded result is a list of dataclasses."
        ),
        "bars": bars,
        "tables": tables,
        "skipped": {},
    }


def _prepare(place: Place) -> None:
    engine = sa.create_engine(place.url())
    schema.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (n bigint PRIMARY KEY)")
        connection.exec_driver_sql("CREATE TABLE answer (scope text, key text, result jsonb, PRIMARY KEY (scope, key))")
        connection.exec_driver_sql("INSERT INTO answer VALUES ('pay', 'old', '1')")
    engine.dispose()


def _table(what: str, medians: Medians) -> dict[str, Any]:
    rows = [
        (
            one,
            f"{rounds.ratio(medians, one, 'bare'):.2f}x",
            rounds.spread(medians, one, "bare"),
            f"{statistics.median(medians[one]) * 1e3:.2f} ms",
        )
        for one in medians
    ]
    return report.table(what[0].upper() + what[1:], ("Contestant", "Ratio", "Middle half of the sets", "A cycle"), rows)


def _codec() -> list[dict[str, Any]]:
    codec = Codec.of(list[Line])
    lines = [Line() for _ in range(36)]
    text = codec.encode(lines)
    size = len(json.dumps(json.loads(text))) / 1000
    return [
        report.bar(f"a result of {size:.1f} kB: {what}", "under 200 µs", _median(work) * 1e6, LIMIT * 1e6, " µs")
        for what, work in (("encoded", lambda: codec.encode(lines)), ("decoded", lambda: codec.decode(text)))
    ]


def _median(work: Callable[[], object]) -> float:
    took = []
    for _ in range(200):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return statistics.median(took)
