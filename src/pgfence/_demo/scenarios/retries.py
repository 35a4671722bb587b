"""Request every payment three times while connections are killed: without keys, and with an idempotency key for each payment.

A client that gets no response cannot know whether the payment was made, and retries. Each payment is a row, so payments made
twice are counted in the database.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import MetaData, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgfence._demo.bank import NAMESPACE, SCHEMA
from pgfence._demo.scenario import Scenario, ScenarioResult, create_engine_for, read_part, say, start_processes
from pgfence._demo.worker import is_connection_error
from pgfence._demo.workload import Verdict
from pgfence.config import configure
from pgfence.idempotency import idempotent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.pool import Pool

    from sqlalchemy import Engine

    from pgfence._demo.context import Message

PROCESSES = 8
PAYMENTS = 100
TIMES = 3
_THOUGHT = 0.005
_BETWEEN_FAULTS = 0.02
_PATIENCE = 100
_CLIENT = f"{NAMESPACE} client"
_TITLE = f"{PAYMENTS} payments, each requested {TIMES} times while connections are killed"
_END = text("""
    SELECT count(pg_terminate_backend(pid)) FROM (
        SELECT pid FROM pg_stat_activity
        WHERE application_name = :name AND datname = current_database() AND xact_start IS NOT NULL
        ORDER BY random() LIMIT 1
    ) AS one
""")
_PAID = text(f"""
    SELECT coalesce(sum(times), 0), count(*), count(*) FILTER (WHERE times > 1)
    FROM (SELECT count(*) AS times FROM {SCHEMA}.payment WHERE keyed = :keyed GROUP BY number) AS paid
""")


class RetriesBase(DeclarativeBase):
    """The application's models."""

    metadata = MetaData(schema=SCHEMA)


class Payment(RetriesBase):
    """One payment that was made. The table has no constraint against a second row for the same payment."""

    __tablename__ = "payment"
    id: Mapped[int] = mapped_column(primary_key=True)
    keyed: Mapped[bool]
    number: Mapped[int]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The result that a client receives."""

    payment: int


class ClientAnswer(NamedTuple):
    """The result of one request.

    Attributes:
        number: number of the payment.
        receipt: id of its row, as the client received it.
        sent: how often the request was sent until the client got a response.
    """

    number: int
    receipt: int
    sent: int


@dataclass(frozen=True, slots=True)
class Storm:
    """The totals of all requests.

    Attributes:
        made: payments that were made.
        paid: distinct numbers among them.
        twice: numbers that were paid more than once.
        sent: requests, including those that were sent again.
        ended: connections that were killed inside a transaction.
        differ: numbers whose clients received different receipts.
    """

    made: int
    paid: int
    twice: int
    sent: int
    ended: int
    differ: int


def play(engine: Engine) -> ScenarioResult:
    """Run the clients without keys, then with keys."""
    RetriesBase.metadata.create_all(engine)
    with start_processes() as start:
        process = start(__name__, engine.url)
        plain, keyed = (
            _run_storm(engine, process.wait_for(what), keyed=what == "keyed") for what in ("plain", "keyed")
        )
    return ScenarioResult(
        scene="retries",
        title=_TITLE,
        verdict=_judge(plain, keyed),
        lines=tuple(_format_lines(plain, keyed)),
        figures=dict(_list_figures(plain, keyed)),
    )


def _format_lines(plain: Storm, keyed: Storm) -> Iterator[str]:
    yield (
        f"{PAYMENTS} payments, requested {TIMES} times each, without keys: {plain.made} made,"
        f" {plain.twice} of {plain.paid} more than once."
    )
    yield (
        f"With keys: {keyed.made} made, {keyed.twice or 'none'} more than once, {keyed.differ or 'none'} with differing receipts;"
        f" {keyed.ended} of {keyed.sent} transactions lost their connection."
    )


def _run_storm(engine: Engine, told: Message, *, keyed: bool) -> Storm:
    with engine.connect() as connection:
        made, paid, twice = connection.execute(_PAID, {"keyed": keyed}).one()
    answers = [ClientAnswer(*answer) for answer in told["answers"]]
    receipts = {(answer.number, answer.receipt) for answer in answers}
    return Storm(
        made=int(made),
        paid=paid,
        twice=twice,
        sent=sum(answer.sent for answer in answers),
        ended=told["ended"],
        differ=len(receipts) - len({answer.number for answer in answers}),
    )


def _list_figures(plain: Storm, keyed: Storm) -> Iterator[tuple[str, int]]:
    for name, storm in (("plain", plain), ("keyed", keyed)):
        yield f"{name}_made", storm.made
        yield f"{name}_twice", storm.twice
        yield f"{name}_sent", storm.sent
        yield f"{name}_ended", storm.ended
    yield "differ", keyed.differ


def _judge(plain: Storm, keyed: Storm) -> Verdict:
    if not keyed.made == keyed.paid == PAYMENTS or keyed.differ:
        return Verdict.GUARD_FAILED
    return Verdict.OK if plain.twice and keyed.ended else Verdict.CONTROL_FAILED


def main() -> None:
    """Fork the clients, and kill their connections while they send requests."""
    url = read_part()["url"]
    # Neighbours in the list go to different processes, so that several processes request the same payment at the same time.
    requests = [number for number in range(PAYMENTS) for _ in range(TIMES)]
    with get_context("fork").Pool(PROCESSES, _open, (url,)) as pool:
        engine = create_engine_for(url)
        for what, ask in ASKS.items():
            say(**{what: _play_one(pool, engine, ask, requests)})


def _play_one(pool: Pool, engine: Engine, ask: Callable[[int], ClientAnswer], requests: list[int]) -> Message:
    working, ended = pool.map_async(ask, requests, chunksize=1), 0
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not working.ready():
            working.wait(_BETWEEN_FAULTS)
            ended += connection.scalar(_END, {"name": _CLIENT}) or 0
    return {"answers": working.get(), "ended": ended}


def _open(url: str) -> None:
    engine = create_engine(url, pool_size=1, connect_args={"application_name": _CLIENT})
    configure(engine, schema=SCHEMA, namespace=NAMESPACE)
    _Client.sessions = sessionmaker(engine)


class _Client:
    """Keeps the Session factory of one client process."""

    sessions: sessionmaker[Session]


def _ask_plainly(number: int) -> ClientAnswer:
    return _ask_server(number, lambda session: _pay(session, number, keyed=False))


def _ask_with_a_key(number: int) -> ClientAnswer:
    def pay(session: Session) -> Receipt:
        key = idempotent(session, f"payment-{number}", scope="retries", payload={"number": number}, result=Receipt)
        return key.run(lambda: _pay(session, number, keyed=True))

    return _ask_server(number, pay)


def _ask_server(number: int, pay: Callable[[Session], Receipt]) -> ClientAnswer:
    """Send a request until the client gets a response. Give up after `_PATIENCE` attempts, because the server may have stopped."""
    for sent in count(1):
        try:
            with _Client.sessions.begin() as session:
                receipt = pay(session)
        except Exception as error:
            if not is_connection_error(error) or sent == _PATIENCE:
                raise
        else:
            return ClientAnswer(number, receipt.payment, sent)
    raise AssertionError  # unreachable, because the last attempt returns or raises


def _pay(session: Session, number: int, *, keyed: bool) -> Receipt:
    payment = Payment(number=number, keyed=keyed)
    session.add(payment)
    session.flush()
    time.sleep(_THOUGHT)
    return Receipt(payment.id)


ASKS: dict[str, Callable[[int], ClientAnswer]] = {"plain": _ask_plainly, "keyed": _ask_with_a_key}
SCENE = Scenario(name="retries", title=_TITLE, play=play)

if __name__ == "__main__":
    main()
