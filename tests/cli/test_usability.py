"""Every command: its help has examples and fits a terminal, a mistake is one line, and a closed pipe is no error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete

from pgfence.cli import app, main
from pgfence.cli.report import format_in_color
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

_CONTEXT = click.Context(app.pgfence, info_name="pgfence")


def list_commands() -> Iterator[tuple[list[str], click.Command]]:
    """Yield the words and the parser of every command and subcommand."""
    for name in app.MODULES:
        command = app.pgfence.get_command(_CONTEXT, name)
        assert command is not None
        yield [name], command
        if isinstance(command, click.Group):
            yield from (([name, inner], found) for inner, found in command.commands.items())


COMMANDS = list(list_commands())


@every_row(("words", "command"), COMMANDS)
def test_the_help_of_every_command_has_examples_and_fits_80_columns(
    words: list[str], command: click.Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples that begin with the command, exit codes, and a sentence about when to use it; plain ASCII."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    text, _, examples = shown.partition("\nExamples:\n")
    assert f"\n    pgfence {' '.join(words)}" in examples.partition("\nExit codes:\n")[0]
    assert "\nExit codes:\n" in examples
    assert max(map(len, shown.splitlines())) <= 80, shown
    assert shown.isascii()
    assert command.get_short_help_str(60) in " ".join(text.split()) or command.short_help


@every_row(("words", "command"), COMMANDS)
def test_a_mistake_with_any_option_is_one_line(
    words: list[str], command: click.Command, capfd: pytest.CaptureFixture[str]
) -> None:
    """An unknown option, and a value that is no text, for each option that takes one: 64 and no traceback."""
    wrong = [["--nonsense"]]
    for option in command.params:
        if isinstance(option, click.Option) and not option.is_flag and not isinstance(option.type, click.Path):
            wrong.append([option.opts[0], "\udcff"])
    for added in wrong:
        # What the command needs is there, so that it is this mistake which is reported. Of two values, the last one counts.
        required = [each for each in command.params if each.required]
        options = [word for each in required if isinstance(each, click.Option) for word in (each.opts[0], "x")]
        arguments = [
            w for e in required if isinstance(e, click.Argument) for w in (["--", "true"] if e.nargs == -1 else ["x"])
        ]
        assert main([*words, *options, *added, *arguments]) == 64, (words, added)
        out, err = capfd.readouterr()
        assert (out, err.count("\n"), err.startswith("pgfence: error: ")) == ("", 1, True), err
        assert added[0] in err, err


@every_row("words", [["--help"], ["install", "--sql"], ["key", "a"]])
def test_a_reader_that_has_ended_ends_the_command(words: list[str]) -> None:
    """As in `pgfence ps | head -1`: no message, and the exit code of SIGPIPE."""
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "pgfence", *words]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_full_disk_and_an_old_terminal_are_no_traceback() -> None:
    """A full disk is one line and 74. What the encoding of the terminal does not have is written as an escape."""
    command = [sys.executable, "-m", "pgfence", "init", "--path"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (74, "pgfence: error: cannot write to stdout: No space left on device\n")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from pgfence.cli import main; print; sys.argv = ['', '--version']; main(); print('\\u00e9')",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout.endswith("\\xe9\n")


def test_colors_are_for_terminals_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR, as at no-color.org: any value that is not empty."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\x1b[" in format_in_color("x", "red")
    monkeypatch.setenv("NO_COLOR", "1")
    assert format_in_color("x", "red") == "x"
    monkeypatch.undo()
    assert format_in_color("x", "red") == "x"


@every_row(
    ("words", "begun", "offered"),
    [
        ([], "ev", "evict"),
        (["doctor"], "--str", "--strict"),
        (["keys"], "fr", "free"),
        (["audit", "--action"], "ev", "evict"),
        (["run", "--wait", "5"], "--on-b", "--on-busy"),
        (["elect", "--restart"], "al", "always"),
    ],
)
def test_shells_complete_commands_options_and_values(words: list[str], begun: str, offered: str) -> None:
    """By Click, with the variable that the manual names."""
    completion = BashComplete(app.pgfence, {}, "pgfence", "_PGFENCE_COMPLETE")
    assert offered in [item.value for item in completion.get_completions(words, begun)]
