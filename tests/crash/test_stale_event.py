"""The watcher believes a hang-up only of the session that it is about."""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence import AdvisoryLock
from pgfence._process.monitor import HAS_HANGUP, MONITOR

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg


@pytest.mark.skipif(not HAS_HANGUP, reason="this kernel does not tell of a hang-up")
def test_a_late_hang_up_spares_the_session_with_the_same_descriptor(
    dsn: str, name: str, admin: psycopg.Connection[Any], eventually: Callable[..., Any]
) -> None:
    """C042: the event of a dead session is fetched, its descriptor is reused by a living one, and that one stays held."""
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    dead, living = AdvisoryLock(engine, f"{name}:1").acquire(), AdvisoryLock(engine, f"{name}:2").acquire()
    one, two = dead._hold.session, living._hold.session
    number = one.dup
    with MONITOR._lock:  # stands for a watcher that is not scheduled between its event and its lock
        admin.execute("SELECT pg_terminate_backend(%s, 2000)", [one.pid])
        deadline = time.monotonic() + 5
        while MONITOR._epoll is not None and not MONITOR._epoll.poll(0) and time.monotonic() < deadline:
            pass  # until the kernel has told it
        MONITOR.unwatch(one)
        MONITOR.unwatch(two)
        MONITOR.watch(two, two.driver.fileno())
        assert two.dup == number
    assert not living.wait_lost(timeout=0.5)
    assert living.state == "held"
    living.release()
    one.on_connection_lost("killed")  # nobody watches it any more
    eventually(lambda: dead.lost)
    with pytest.raises(Exception, match="was lost"):
        dead.release()
    engine.dispose()


@pytest.mark.skipif(not HAS_HANGUP, reason="this kernel does not tell of a hang-up")
def test_a_stale_event_does_not_keep_the_monitor_awake(
    dsn: str, name: str, admin: psycopg.Connection[Any], eventually: Callable[..., Any]
) -> None:
    """An interrupt closes a watched descriptor and leaves its event: the monitor still sleeps, and sees other events."""
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    held = AdvisoryLock(engine, name).acquire()
    near, far = socket.socketpair()

    def watched() -> str:
        with MONITOR._lock:
            return Path(f"/proc/self/fdinfo/{MONITOR._epoll.fileno()}").read_text()

    with MONITOR._lock:
        torn = os.dup(near.fileno())
        MONITOR._epoll.register(torn, select.EPOLLRDHUP)
        os.close(torn)
    far.close()
    eventually(lambda: f"tfd: {torn:8d} " not in watched())
    admin.execute("SELECT pg_terminate_backend(%s, 2000)", [held._hold.session.pid])
    eventually(lambda: held.lost)
    with pytest.raises(Exception, match="was lost"):
        held.release()
    near.close()
    engine.dispose()
