"""The fault kit itself: a fault that does not happen would make its test worthless."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from pgfence.testing._processes import pause
from support import standby as standbys
from support.poolers import Swap
from support.processes import alive, family
from support.waiting import FAR

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence.testing._proxy import Proxy
    from support.network import FarServer
    from support.processes import Script
    from support.servers import OwnServer

HOLDER = """
import psycopg
connection = psycopg.connect(sys.argv[1], autocommit=True)
connection.execute("SELECT pg_advisory_lock(4711)")
"""


def connect(dsn: str, **kwargs: Any) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True, **kwargs)


def answers(connection: psycopg.Connection[Any], within: float = 0.3) -> bool:
    """Ask something, and say whether it is answered in time."""
    connection.pgconn.send_query(b"SELECT 1")
    return arrives(connection, within)


def arrives(connection: psycopg.Connection[Any], within: float = 30) -> bool:
    """Say whether the answer to the last question comes in time."""
    end = time.monotonic() + within
    while connection.pgconn.is_busy():
        if time.monotonic() > end:
            return False
        connection.pgconn.consume_input()
        time.sleep(0.005)
    while connection.pgconn.get_result():
        pass
    return True


def test_the_proxy_forwards_by_default(proxy: Proxy) -> None:
    """Several connections go through at once."""
    with connect(proxy.dsn) as one, connect(proxy.dsn) as two:
        assert answers(one)
        assert answers(two)
        assert proxy.connections() == 2


def test_a_cut_resets_old_connections_and_lets_new_ones_in(proxy: Proxy) -> None:
    """Both sides see the end at once."""
    old = connect(proxy.dsn)
    proxy.cut()
    with pytest.raises(psycopg.OperationalError):
        old.execute("SELECT 1")
    old.close()
    with connect(proxy.dsn) as new:
        assert answers(new)


def test_a_black_hole_swallows_and_keeps_the_connection_open(proxy: Proxy) -> None:
    """No answer and no error until it heals; then what was swallowed arrives."""
    with connect(proxy.dsn) as connection:
        proxy.black_hole()
        assert not answers(connection)
        with pytest.raises(psycopg.OperationalError):
            connect(proxy.dsn, connect_timeout=2)
        proxy.heal()
        assert arrives(connection)


def test_a_delay_slows_both_ways(proxy: Proxy) -> None:
    """Each piece waits, there and back."""
    with connect(proxy.dsn) as connection:
        proxy.delay(0.1)
        began = time.monotonic()
        assert answers(connection, within=5)
        assert time.monotonic() - began >= 0.2


def test_a_refusing_proxy_accepts_no_new_connection(proxy: Proxy) -> None:
    """Old connections go on; new ones are refused until it heals."""
    with connect(proxy.dsn) as old:
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError):
            connect(proxy.dsn)
        assert answers(old)
        proxy.heal()
        connect(proxy.dsn).close()


def test_a_half_closed_connection_ends_for_the_client(proxy: Proxy) -> None:
    """The client reads the end of the stream while its own half is open."""
    connection = connect(proxy.dsn)
    proxy.half_close("client")
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    connection.close()


def test_a_half_closed_connection_ends_for_the_server(
    proxy: Proxy, admin: psycopg.Connection[Any], eventually: Callable[..., Any]
) -> None:
    """The server reads the end of the stream, and its session is gone."""
    with connect(proxy.dsn) as connection:
        pid = connection.info.backend_pid
        proxy.half_close("server")
        gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
        eventually(lambda: admin.execute(gone, [pid]).fetchone()[0])


def test_a_cut_cable_is_silent_and_can_be_mended(far_server: FarServer) -> None:
    """Nothing arrives, neither side is notified, and TCP delivers it after the cable is reconnected."""
    with connect(far_server.dsn) as connection:
        assert answers(connection)
        far_server.network.cut()
        assert not answers(connection)
        near = f"host={far_server.folder} port={far_server.port} user=postgres dbname=postgres"
        with connect(near) as socket:
            assert answers(socket), "the server itself is well"
        far_server.network.heal()
        assert arrives(connection)


def test_a_cut_cable_is_noticed_by_the_user_timeout(far_server: FarServer) -> None:
    """The kernel's own budget for unanswered data runs out, as behind a proxy it would not."""
    connection = connect(far_server.dsn, tcp_user_timeout=1000)
    far_server.network.cut()
    began = time.monotonic()
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    assert time.monotonic() - began < FAR
    connection.close()


def test_a_frozen_backend_is_connected_and_deaf(own_server: OwnServer) -> None:
    """SIGSTOP keeps the socket open; SIGCONT brings the answer."""
    with connect(own_server.dsn) as connection:
        assert connection.info.backend_pid in family(own_server.pid)
        with pause(connection.info.backend_pid):
            assert not answers(connection)
        assert arrives(connection)


def test_a_killed_script_frees_what_its_session_held(
    script: Callable[..., Script], dsn: str, advisory_rows: Callable[[], list[Any]], eventually: Callable[..., Any]
) -> None:
    """Without children the server sees the end of the connection at once."""
    holder = script(HOLDER + "say('held'); park()", dsn)
    holder.wait_for("held")
    assert len(advisory_rows()) == 1
    holder.kill()
    eventually(lambda: not advisory_rows())


def test_a_living_forked_child_keeps_the_session_of_a_killed_script(
    script: Callable[..., Script], dsn: str, advisory_rows: Callable[[], list[Any]], eventually: Callable[..., Any]
) -> None:
    """The child shares the socket: this is the trap that a test of the real thing needs."""
    holder = script(HOLDER + "fork_child(); say('held'); park()", dsn)
    holder.wait_for("held")
    holder.kill()
    assert not alive(holder.pid)
    assert alive(holder.child)
    assert len(advisory_rows()) == 1
    os.kill(holder.child, signal.SIGKILL)
    eventually(lambda: not advisory_rows())


def test_a_script_that_may_go_on_succeeds(script: Callable[..., Script]) -> None:
    """`park()` ends and so does the script."""
    running = script("say('here'); park(); sys.exit(3)")
    running.wait_for("here")
    assert running.go_on() == 3


def test_a_standby_follows_and_can_be_promoted(own_server: OwnServer, eventually: Callable[..., Any]) -> None:
    """It answers reads as a standby, gets what its primary writes, and becomes a primary."""
    with (
        standbys.standby(own_server) as standby,
        connect(own_server.dsn) as primary,
        connect(standby.dsn) as copy,
    ):
        assert copy.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
        primary.execute("CREATE TABLE written AS SELECT 1")
        eventually(lambda: copy.execute("SELECT to_regclass('written') IS NOT NULL").fetchone()[0], 20)
        standby.promote()
        assert copy.execute("SELECT pg_is_in_recovery()").fetchone() == (False,)


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_pgbouncer_pools_as_asked(pgbouncer: Callable[..., str], mode: str) -> None:
    """Two idle clients share one server session in transaction mode, and never in session mode."""
    through = pgbouncer(mode)
    with connect(through, prepare_threshold=None) as one, connect(through, prepare_threshold=None) as two:
        pids = {each.execute("SELECT pg_backend_pid()").fetchone()[0] for each in (one, two)}
    assert len(pids) == (1 if mode == "transaction" else 2)


def test_swap_changes_the_session_with_every_transaction(dsn: str) -> None:
    """Each transaction, and in autocommit each statement, is on the other session."""
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: Swap(dsn), use_native_hstore=False, poolclass=NullPool
    )
    pid = text("SELECT pg_backend_pid()")
    with engine.connect() as connection:
        first = connection.scalar(pid)
        assert connection.scalar(pid) == first
        connection.commit()
        assert connection.scalar(pid) != first
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        assert connection.scalar(pid) != connection.scalar(pid)
