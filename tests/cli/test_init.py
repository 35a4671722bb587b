"""`pgfence init`: what it creates, keeps and rejects."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config

from pgfence.cli import main
from pgfence.cli.codes import Code

TEMPLATES = ("async", "multitenant", "sync")


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty directory, plain text, and the import path put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("template", TEMPLATES)
def test_it_makes_a_whole_environment(template: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The ini file beside it finds it from any directory; one line says what comes next, none with --quiet."""
    assert main(["init", "migrations", "--template", template]) == Code.OK
    made = sorted(path.name for path in Path("migrations").iterdir())
    assert made == ["README", "env.py", "script.py.mako", "versions"]
    assert "script_location = %(here)s/migrations" in Path("alembic.ini").read_text(encoding="utf-8")
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert main(["init", "other", "-t", template, "-c", "other.ini", "--quiet"]) == Code.OK
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("template", TEMPLATES)
def test_alembic_itself_takes_a_template_by_its_path(template: str, capfd: pytest.CaptureFixture[str]) -> None:
    """--path prints the folder for `alembic init -t`, which creates the same files, once for each template."""
    assert main(["init", "--path", "--template", template]) == Code.OK
    folder = capfd.readouterr().out.strip()
    assert main(["init", "ours", "--quiet", "-c", "ours.ini", "-t", template]) == Code.OK
    command.init(Config("alembic.ini"), "theirs", template=folder)
    for name in ("env.py", "script.py.mako"):
        assert Path("ours", name).read_text(encoding="utf-8") == Path("theirs", name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[alembic]\n", "script_location is missing"),
        ("[alembic]\nscript_location = %(here)s/old\n", "old: `alembic` does not use migrations"),
        ("no ini", "script_location is unreadable"),
    ],
)
def test_an_existing_ini_file_is_kept_with_a_warning(text: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It may hold what the project needs; `alembic` would go on in the old environment, without the lock."""
    Path("alembic.ini").write_text(text, encoding="utf-8")
    assert main(["init", "migrations", "--quiet"]) == Code.OK
    assert Path("alembic.ini").read_text(encoding="utf-8") == text
    err = capfd.readouterr().err
    assert said in err
    assert err.endswith("until you set script_location = %(here)s/migrations\n")


def test_the_ini_file_may_be_in_a_new_directory() -> None:
    """Beside the environment, or in it."""
    assert main(["init", "sub/migrations", "-c", "sub/alembic.ini", "--quiet"]) == Code.OK
    assert main(["init", "other", "-c", "other/alembic.ini", "--quiet"]) == Code.OK
    assert "script_location = %(here)s\n" in Path("other/alembic.ini").read_text(encoding="utf-8")


def test_an_ini_file_that_names_the_new_environment_is_enough(capfd: pytest.CaptureFixture[str]) -> None:
    """The file was created before, or manually."""
    Path("alembic.ini").write_text("[alembic]\nscript_location = %(here)s/migrations\n", encoding="utf-8")
    assert main(["init", "migrations"]) == Code.OK
    assert "created migrations. Next: set target_metadata" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["migrations"], "'migrations' already exists and is not an empty directory: choose another name for DIR"),
        (["file"], "'file' already exists"),
        ([], "DIR is missing: give the directory to create"),
        (["new", "--template", "django"], "--template must be one of async, multitenant, sync"),
        (["file/below"], "cannot create 'file"),
        (["10%new"], "'10%new' contains a percent sign"),
        (["new", "-c", "none/alembic.ini"], "the directory 'none' does not exist"),
        (["new", "-c", "migrations"], "'migrations' is not a file"),
    ],
)
def test_a_path_that_cannot_be_created_is_misuse(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written over, and the message says what is wrong."""
    Path("migrations").mkdir()
    Path("migrations", "env.py").write_text("mine", encoding="utf-8")
    Path("file").write_text("mine", encoding="utf-8")
    assert main(["init", *words]) == Code.MISUSE
    assert said in capfd.readouterr().err
    assert Path("migrations", "env.py").read_text(encoding="utf-8") == "mine"
    assert not Path("new").exists()


def test_without_alembic_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Alembic is an optional dependency."""
    monkeypatch.setitem(sys.modules, "alembic.config", None)
    monkeypatch.setitem(sys.modules, "alembic", None)
    assert main(["init", "migrations"]) == Code.REFUSED
    assert "pip install 'pgfence[alembic]'" in capfd.readouterr().err
