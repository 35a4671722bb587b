"""The command line's parser, with the command that was asked for: each of them is loaded only if it is."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

_HOMES = {
    "run": "run_command",
    "demo": "demo_command",
    "install": "install",
    "init": "init",
    "evict": "evict",
    "keys": "keys",
    "purge": "purge",
    "key": "key",
}


def create_app(words: Sequence[str]) -> typer.Typer:
    """Return the parser for a command line: with its command, or with all of them if it does not begin with one."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(pgfence)
    for name in words[:1] if words and words[0] in _HOMES else _HOMES:
        import_module(f"pgfence.cli.{_HOMES[name]}").register(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"pgfence {version('pgfence')}")
        raise typer.Exit


def pgfence(
    _version_: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Coordination through the PostgreSQL you already have."""
