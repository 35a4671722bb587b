"""The template that makes the second start fast, and why it can be trusted."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pgfence.embedded import _binaries, _cluster
from pgfence.errors import UnreachableError
from support.servers import OwnServer, own


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pgfence"


@pytest.fixture(scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(home))
        with own(fsync=False):
            return home


@pytest.fixture
def template(_kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only template of a cache that tests share, created by an earlier start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(_kept))
    (made,) = (_kept / "pgfence").iterdir()
    return made


def test_the_second_start_copies_the_template(template: Path) -> None:
    """The result of initdb is kept and copied; the copy that is kept has no trace of the server that ran."""
    assert not (template / "postmaster.pid").exists()
    with own(fsync=False) as second:
        assert second.password == (template / "pgfence_password").read_text()


def test_a_folder_that_another_start_deleted_is_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed between its making and its lock, a folder is none: the next one is taken."""
    make, removed = tempfile.mkdtemp, list[str]()

    def taken_away(**options: str) -> str:
        folder = make(**options)
        if not removed:
            removed.append(folder)
            Path(folder).rmdir()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", taken_away)
    folder, lock = _cluster.make_run_folder()
    os.close(lock)
    assert folder.is_dir()
    assert str(folder) not in removed
    folder.rmdir()


def test_first_starts_at_once_do_not_collide(cache: Path) -> None:
    """Two first starts race for the template: both start, one template is left."""
    servers = [OwnServer.__new__(OwnServer) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda server: server.__init__(fsync=False), servers))
    for server in servers:
        server.close()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("part", ["global/pg_control", "pg_wal/archive_status", "pgfence_entries"])
def test_an_incomplete_template_is_created_again(template: Path, part: str) -> None:
    """A cleaner of old files may take a part, or an empty folder: the next start does not trust the rest."""
    lost = template / part
    lost.rmdir() if lost.is_dir() else lost.unlink()
    with own(fsync=False) as server:
        assert server.port
    assert lost.exists()
    assert list(template.parent.iterdir()) == [template]


def test_a_start_that_fails_keeps_the_template(template: Path) -> None:
    """A wrong setting is not the template's fault, and another process may be copying it."""
    with pytest.raises(UnreachableError, match="did not start"), own(settings={"max_connections": "-7"}):
        pass
    assert template.exists()


def test_unused_templates_are_deleted(cache: Path) -> None:
    """A template that was not copied for a month is removed when another one is created."""
    old = cache / "pg-9.0-old"
    old.mkdir(parents=True)
    cache.chmod(0o700)
    os.utime(old, (0, 0))
    with own(fsync=False):
        assert not old.exists()


def test_a_cache_that_others_may_write_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a folder open to others nor a link is trusted with what a server is made of."""
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    (tmp_path / "no folder").touch()
    monkeypatch.setattr(_cluster.tempfile, "tempdir", str(tmp_path / "no folder"))
    bindir = _binaries.find()
    assert _cluster._find_template(bindir, _binaries.read_version(bindir)) is None
    cache.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    assert _cluster._find_template(bindir, _binaries.read_version(bindir)) is None
