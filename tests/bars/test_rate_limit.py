"""Rate limits under many processes: no window holds more takes than the limit."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.crews import FULL, crew, report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import psycopg

PROCESSES, TAKES = (50, 20_000) if FULL else (5, 300)
LIMIT, PER = 50, 0.1

WORK = """
from pgfence import RateLimit

def work(number):
    limit = RateLimit(create_engine(url, pool_size=1), arguments[0], limit=int(arguments[1]), per=float(arguments[2]))
    while True:
        units, before = random.randrange(1, 4), time.monotonic()
        if random.random() < 0.5:
            taken = limit.try_take(units)
        else:
            before = time.monotonic()
            with contextlib.suppress(LockTimeoutError):
                limit.wait(units, timeout=60)
                taken = True
        if taken:
            note("take", units, before, time.monotonic())
"""


@contextmanager
def recorded_moments(admin: psycopg.Connection[Any]) -> Iterator[None]:
    """Record the moment of every unit that is taken, of which pgfence keeps only the last ones."""
    admin.execute("CREATE TABLE rate_history (name text, taken_at timestamptz)")
    admin.execute(
        "CREATE FUNCTION record_take() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
        " INSERT INTO rate_history VALUES (NEW.name, NEW.taken_at); RETURN NULL; END$$"
    )
    admin.execute(
        "CREATE TRIGGER record_take AFTER INSERT OR UPDATE ON pgfence_rate_take FOR EACH ROW EXECUTE FUNCTION record_take()"
    )
    try:
        yield
    finally:
        admin.execute("DROP FUNCTION record_take() CASCADE")
        admin.execute("DROP TABLE rate_history")


@pytest.mark.usefixtures("tables")
@pytest.mark.timeout(600 if FULL else 60)
def test_no_window_holds_more_than_the_limit(
    name: str, dsn: str, admin: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """Every take's moment is checked, by the server's clock, and by when the callers began to ask and had the response."""
    with recorded_moments(admin):
        with crew(dsn, tmp_path, WORK, PROCESSES, name, LIMIT, PER) as workers:
            took = workers.run_until(lambda: workers.count("take") >= TAKES, lambda: None, 60, 500)
        taken = [(int(units), float(before), float(after)) for units, before, after in workers.read("take")]
        query = "SELECT (extract(epoch FROM taken_at) * 1000000)::bigint FROM rate_history WHERE name = %s ORDER BY 1"
        moments = [moment for (moment,) in admin.execute(query, [name])]
    assert workers.count("error") == 0
    # A worker that is killed between its take and its note leaves none.
    assert 0 <= len(moments) - sum(units for units, *_ in taken) <= 3 * PROCESSES
    assert count_above(moments) == 0
    assert find_fullest(taken) <= LIMIT
    report(
        f"rate limit of {LIMIT} per {PER} s",
        processes=PROCESSES,
        takes=len(taken),
        units=len(moments),
        windows_above=0,
        shortest_time_of_51_units=min(later - earlier for earlier, later in zip(moments, moments[LIMIT:], strict=False))
        / 1e6,
        takes_per_second=round(len(taken) / took),
    )


def count_above(moments: list[int]) -> int:
    """Return how many windows that begin with a take hold more units than the limit, by the moments that the server stored."""
    return sum(later - earlier < PER * 1_000_000 for earlier, later in zip(moments, moments[LIMIT:], strict=False))


def find_fullest(taken: list[tuple[int, float, float]]) -> int:
    """Return the most units that were certainly taken in one window, by the callers' clock."""
    ordered, most = sorted(taken, key=lambda take: take[1]), 0
    for first, (_, start, _) in enumerate(ordered):
        inside = 0
        for units, before, after in ordered[first:]:
            if before >= start + PER:
                break
            inside += units if after < start + PER else 0
        most = max(most, inside)
    return most
