"""The record of one grant: four states, one change, one notification."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import pytest

from pgfence._holds.hold import Hold, format_names
from pgfence._holds.queue import Contender, LocalQueue, QueueEntry
from pgfence._process.lifecycle import MUTEX
from pgfence._sql.advisory import LockSql
from pgfence.errors import LockLostError, LockNotHeldError
from pgfence.keys import LockKey


def make(*names: str) -> Hold[Any]:
    names = names or ("job",)
    keys = tuple(sorted(LockKey.of(name) for name in names))
    sql = LockSql(keys, "format")
    return Hold(names, sql, QueueEntry(sql.places, Contender("thread"), LocalQueue()), object())


def released(hold: Hold[Any]) -> bool:
    with MUTEX:
        return hold.begin_release()


def test_a_new_hold_is_held() -> None:
    """Held, with the sorted keys of its ticket, and check() is silent."""
    hold = make("b", "a")
    assert (hold.state, hold.names, hold.keys) == ("held", ("b", "a"), tuple(sorted(map(LockKey.of, "ab"))))
    hold.check()


def test_unknown_is_neither_held_nor_lost() -> None:
    """Without a response yet, check() does not raise, the state is "unknown", and both outcomes are possible."""
    hold = make()
    hold.in_doubt = True
    assert hold.state == "unknown"
    hold.check()
    hold.in_doubt = False
    assert hold.state == "held"
    hold.in_doubt = True
    hold.lose("cut off")
    assert hold.state == "lost"


def test_a_loss_is_final_and_reported_once() -> None:
    """The first reason stays, each listener is called once, a late one at once."""
    hold, told = make(), []
    hold.subscribe(lambda: told.append("early"))
    assert hold.lose("cut off")
    assert not hold.lose("killed")
    assert (hold.reason, hold.state, told) == ("cut off", "lost", ["early"])
    hold.subscribe(lambda: told.append("late"))
    assert told == ["early", "late"]
    assert "it was lost (cut off)" in str(hold.not_held_error())


def test_what_is_released_cannot_be_lost() -> None:
    """After a release no listener is called, and check() raises that it is not held."""
    hold, told = make(), []
    hold.subscribe(lambda: told.append("lost"))
    assert released(hold)
    assert not hold.lose("killed")
    assert (hold.state, hold.reason, told) == ("released", None, [])
    with pytest.raises(LockNotHeldError, match=r"'job'.*released"):
        hold.check()


def test_a_lost_hold_stays_lost_after_its_release() -> None:
    """Its release begins once, and its state remains "lost"."""
    hold = make()
    hold.lose("killed")
    assert released(hold)
    assert not released(hold)
    assert hold.state == "lost"
    with pytest.raises(LockLostError):
        hold.check()


def test_a_failing_listener_is_logged_and_the_lock_works(caplog: pytest.LogCaptureFixture) -> None:
    """The other listeners are still called, and the hold stays lost."""
    hold, told = make(), []

    def fail() -> None:
        raise RuntimeError("listener")

    hold.subscribe(fail)
    hold.subscribe(lambda: told.append("second"))
    with caplog.at_level(logging.ERROR, "pgfence.advisory"):
        assert hold.lose("killed")
    assert told == ["second"]
    assert "listener" in caplog.text


def test_listeners_run_without_a_lock_of_pgfence() -> None:
    """A listener may use the machinery itself: the mutex is free while it runs."""
    hold, free = make(), []
    hold.subscribe(lambda: free.append(MUTEX.acquire(blocking=False)))
    hold.lose("killed")
    if free == [True]:
        MUTEX.release()
    assert free == [True]


def test_the_lost_error_names_lock_and_reason() -> None:
    """The error has the names and the reason, and says what the loss means for work done since."""
    hold = make("a", "b")
    hold.lose("cut off")
    with pytest.raises(LockLostError, match=r"'a', 'b' was lost.*cannot be reached") as caught:
        hold.check()
    assert (caught.value.names, caught.value.reason) == (("a", "b"), "cut off")


def test_a_forked_child_holds_nothing() -> None:
    """C012: the record of another process counts as released from the start."""
    hold = make()
    hold.pid = os.getpid() + 1
    assert hold.state == "released"
    assert not hold.lose("killed")
    assert not released(hold)
    with pytest.raises(LockNotHeldError, match="forked child"):
        hold.check()
    lost = make()
    lost.lose("killed")
    lost.pid = os.getpid() + 1
    assert lost.state == "released"
    with pytest.raises(LockNotHeldError):
        lost.check()


def test_of_many_threads_exactly_one_may_release_or_lose() -> None:
    """Of concurrent losses and releases one wins, and a listener is called only if the loss does."""
    for _ in range(200):
        hold, told, wins = make(), [], []
        hold.subscribe(lambda told=told: told.append("lost"))
        start = threading.Barrier(3)

        def lose(hold: Hold[Any] = hold, wins: list[str] = wins, start: threading.Barrier = start) -> None:
            start.wait()
            if hold.lose("killed"):
                wins.append("lost")

        def release(hold: Hold[Any] = hold, wins: list[str] = wins, start: threading.Barrier = start) -> None:
            start.wait()
            if released(hold):
                wins.append("released")

        threads = [threading.Thread(target=target) for target in (lose, release, release)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wins.count("released") == 1
        assert told == ["lost"] * wins.count("lost")
        assert hold.state == ("lost" if told else "released")


def test_names_are_quoted_in_messages() -> None:
    """Quotes make spaces, commas and empty names visible."""
    assert format_names(("a b", "c,d")) == "'a b', 'c,d'"
