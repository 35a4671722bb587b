"""Reader/writer locks: writers are served although readers overlap, and never beside a reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.crews import FULL, crew, find_most_at_once, find_quantile, report

if TYPE_CHECKING:
    from pathlib import Path

READERS, WRITERS = 8, 4
# Shorter than, about as long as, and longer than a waiter's first slice in the server.
ROWS = [(0.2, 200), (0.6, 200), (1.2, 100)] if FULL else [(0.3, 4)]

WORK = """
from pgfence import ReadWriteLock

name, readers, hold = arguments[0], int(arguments[1]), float(arguments[2])

def work(number):
    engine = create_engine(url)
    ReadWriteLock(engine, f"{name} {number}").read.acquire().release()  # connects
    lock = ReadWriteLock(engine, name)
    time.sleep(hold * number / readers)  # so that there is a reader at every moment
    while True:
        asked = time.monotonic()
        with (lock.read if number < readers else lock.write).hold(timeout=120):
            begun = time.monotonic()
            time.sleep(hold if number < readers else 0.005)
            ended = time.monotonic()
        note("read" if number < readers else "write", asked, begun, ended, time.monotonic())
        if number >= readers:
            time.sleep(random.uniform(0, 2 * hold))
"""


@pytest.mark.timeout(900 if FULL else 90)
@pytest.mark.parametrize(("hold", "writes"), ROWS)
def test_writers_are_served_between_overlapping_readers(
    name: str, dsn: str, tmp_path: Path, hold: float, writes: int
) -> None:
    """Eight readers that overlap and four writers, each a process: nobody reads or writes beside a writer, and all get on."""
    with crew(dsn, tmp_path, WORK, READERS + WRITERS, name, READERS, hold) as workers:
        took = workers.run_until(lambda: workers.count("write") >= writes, lambda: None, 60, 800)
    reads, written = ([tuple(map(float, words)) for words in workers.read(what)] for what in ("read", "write"))
    assert workers.count("error") == 0
    spans = [(begun, ended) for _, begun, ended, _ in written]
    assert find_most_at_once(spans) == 1
    assert not [write for write in spans if any(max(write[0], read[1]) < min(write[1], read[2]) for read in reads)]
    longest = max(released - begun for _, begun, _, released in reads)
    waits = [begun - asked for asked, begun, *_ in written]
    report(
        f"reader/writer lock, reads of {hold} s",
        writes=len(written),
        reads=len(reads),
        readers_at_once=find_most_at_once([(begun, ended) for _, begun, ended, _ in reads]),
        longest_read=longest,
        writers_p50=find_quantile(waits, 0.5),
        writers_p99=find_quantile(waits, 0.99),
        longest_wait_in_reads=max(waits) / longest,
        waits_above_two_reads=sum(wait > 2 * longest for wait in waits),
        seconds=took,
    )
