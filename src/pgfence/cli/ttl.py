"""`pgfence doctor --ttl`: measure renewals and pauses, and advise a TTL."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgfence._admin.connection import translate_statement_error
from pgfence._leases.terms import compute_interval, compute_margin, compute_shortest_ttl
from pgfence._process.clock import clock
from pgfence._sql.addresses import describe_server
from pgfence._sql.errors import ErrorContext, translate_error
from pgfence._sql.renewal_sample import build_sample, read_lease
from pgfence._sql.storage import LEASES, table_names_of
from pgfence.cli.codes import Code, CommandExit
from pgfence.cli.report import write_wrapped
from pgfence.config import config_of
from pgfence.keys import qualify_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from sqlalchemy import Engine

    from pgfence._sql.renewal_sample import RenewalHistory

_CONTEXT = ErrorContext(LEASES, on_primary="Measure on the primary")
TOO_SHORT = 1
"""The exit code if the TTL of the lease is shorter than the shortest TTL for the measured figures."""
_SAMPLES = 100
_SLEEP = 0.02
_MOST_SECONDS = 5.0
_USUAL = 30.0
"""The shortest TTL that is advised, in seconds, because a short sample cannot show that a shorter TTL is enough."""
_RESERVE = 3.0
"""The factor between the shortest TTL and the advice, because a short sample does not include the longest pauses."""
_STEPS = (30, 45, 60, 90, 120, 180, 300, 600, 900, 1800, 3600)


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured durations, in seconds."""

    values: Sequence[float]

    def get_percentile(self, percent: int) -> float:
        """Return the duration that a given percentage of the values does not exceed."""
        return sorted(self.values)[min(len(self.values) - 1, len(self.values) * percent // 100)]

    @property
    def longest(self) -> float:
        """The longest duration."""
        return max(self.values)

    def as_data(self) -> dict[str, float]:
        """Return the number of values, the percentiles and the longest duration, for JSON."""
        figures = {f"p{percent}": round(self.get_percentile(percent), 6) for percent in (50, 99)}
        return {"count": len(self.values), **figures, "longest": round(self.longest, 6)}

    def __str__(self) -> str:
        p50, p99, longest = (_format(each) for each in (self.get_percentile(50), self.get_percentile(99), self.longest))
        return f"{len(self.values)} measured: p50 {p50}, p99 {p99}, longest {longest}"


def advise(engine: Engine, name: str, *, as_json: bool) -> NoReturn:
    """Measure renewals and pauses for up to about 5 seconds, print the advised TTL, and exit.

    Raises:
        ValueError: the name cannot be used.
        PgfenceError: the tables or privileges are missing, or the server did not respond.
    """
    stored = qualify_name(name, config_of(engine).namespace)
    place = table_names_of(engine)
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            lease = read_lease(connection, place, stored)
            sample = build_sample(connection, place)
            sample.run(connection)  # the first run also plans the statement
            renewals, pauses = _measure(lambda: sample.run(connection))
    except Exception as error:
        told = translate_error(error, place, _CONTEXT, engine) or translate_statement_error(engine, error)
        if told is None:
            raise
        raise told from error
    shortest = compute_shortest_ttl(pauses.longest, renewals.longest)
    advice = next((step for step in _STEPS if step >= max(_USUAL, _RESERVE * shortest)), _STEPS[-1])
    too_short = lease is not None and lease.ttl is not None and lease.ttl < shortest
    code = TOO_SHORT if too_short else Code.OK
    if as_json:
        known = None if lease is None else lease._asdict()
        figures = {"renewals": renewals.as_data(), "pauses": pauses.as_data(), "lease": known}
        print(
            json.dumps(
                {"name": name, **figures, "shortest": round(shortest, 3), "advice": advice, "exit_code": int(code)}
            )
        )
    else:
        _show(f"lease {name!r} in {describe_server(engine)}", renewals, pauses, lease, shortest, advice)
    raise CommandExit(code)


def _measure(renew: Callable[[], None]) -> tuple[Sample, Sample]:
    """Return how long renewals take, and how late this process wakes up from sleeps."""
    renewals: list[float] = []
    pauses: list[float] = []
    began = clock()
    while len(renewals) < _SAMPLES and (clock() - began < _MOST_SECONDS or not renewals):
        started = clock()
        renew()
        renewals.append(clock() - started)
        started = clock()
        time.sleep(_SLEEP)
        pauses.append(max(0.0, clock() - started - _SLEEP))
    return Sample(renewals), Sample(pauses)


def _show(
    title: str, renewals: Sample, pauses: Sample, lease: RenewalHistory | None, shortest: float, advice: float
) -> None:
    write_wrapped(title)
    print()
    write_wrapped(f"Renewals: {renewals}.", indent=2)
    write_wrapped(f"Pauses of this process: {pauses}.", indent=2)
    write_wrapped(f"The lease {_describe_lease(lease)}.", indent=2)
    write_wrapped(
        "Not measured: the pauses of your application (its `paused` events, its longest garbage collection, CPU limits and"
        " calls that keep the GIL), and failovers.",
        indent=2,
    )
    print()
    write_wrapped(f"Shortest TTL for these figures: {shortest:.2f} s.")
    write_wrapped(
        f"Advice: {advice:g} s. With this TTL, a lease survives {_format(_compute_outage(advice))} during which the process is paused or the"
        " server does not respond. If the holder dies, the name is available no later than one TTL after the last renewal."
    )
    if lease is not None and lease.ttl is not None and lease.ttl < shortest:
        write_wrapped(f"The TTL of the lease, {lease.ttl:g} s, is too short.")


def _compute_outage(ttl: float) -> float:
    """Return the longest outage that a TTL survives, if it begins when a renewal is due."""
    return ttl - compute_interval(ttl) - compute_margin(ttl)


def _describe_lease(lease: RenewalHistory | None) -> str:
    if lease is None:
        return "was never acquired"
    ttl = "no TTL" if lease.ttl is None else f"a TTL of {lease.ttl:g} s"
    if not lease.held:
        return f"is not held now, and had {ttl} when it was last held"
    return f"is held, and has {ttl}; its last renewal was {lease.age:.1f} s ago"


def _format(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
