"""The common parts of the parsers of all commands. `--help` lists options under headings, then examples and exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pgfence.cli.codes import MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def is_unicode(text: str) -> bool:
    """Return whether all bytes of a text from the command line could be decoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Option(click.Option):
    """An option that `--help` lists under a heading."""

    def __init__(self, *args: Any, heading: str = "Options", **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.heading = heading


class Command(click.Command):
    """A command whose help has headings.

    Args:
        *args: the arguments of `click.Command`.
        usage: the usage line after the command's name; None lets Click write it.
        arguments: name and description of each positional argument.
        examples: command lines, each with a description.
        codes: exit codes and their meanings.
        **attrs: the keyword arguments of `click.Command`.
    """

    def __init__(
        self,
        *args: Any,
        usage: str | None = None,
        arguments: Mapping[str, str] | None = None,
        examples: Mapping[str, str] | None = None,
        codes: Sequence[tuple[str, str]] = (),
        **attrs: Any,
    ) -> None:
        super().__init__(*args, **attrs)
        self._usage = usage
        self._arguments = arguments or {}
        self._examples = examples or {}
        self._codes = codes

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and reject options whose bytes could not be decoded."""
        left = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx):
            value = ctx.params.get(parameter.name or "")
            # The message does not contain the value, which may include a password.
            if isinstance(parameter, click.Option) and isinstance(value, str) and not is_unicode(value):
                raise MisuseError(f"{parameter.opts[0]} must be valid Unicode")
        return left

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage line."""
        return super().collect_usage_pieces(ctx) if self._usage is None else [self._usage]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, and the options under their headings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        heading = "Options"
        if self._arguments:
            sections["Arguments"] = list(self._arguments.items())
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if row is not None:
                heading = getattr(parameter, "heading", heading)  # --help comes last, under the last heading
                sections.setdefault(heading, []).append(row)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples and exit codes."""
        if self._examples:
            with formatter.section("Examples"):
                for line, description in self._examples.items():
                    formatter.write_text(f"{description}:")
                    formatter.write(f"{'':{formatter.current_indent + 2}}{line}\n")
        if self._codes:
            with formatter.section("Exit codes"):
                formatter.write_dl(self._codes)


class Group(Command, click.Group):
    """A command that has subcommands."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options and commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
