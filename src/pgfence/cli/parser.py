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


def find_close_match(word: str, known: Sequence[str]) -> str | None:
    """Return the most similar of the known words, or None if none is similar."""
    from difflib import get_close_matches  # a millisecond that `pgfence run` does not need

    return next(iter(get_close_matches(word, known, n=1)), None)


class _Seconds(click.types.FloatParamType):
    """A number of seconds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds", param, ctx)


SECONDS = _Seconds()


class Option(click.Option):
    """An option that `--help` lists under a heading."""

    def __init__(self, *args: Any, heading: str = "Options", **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self.heading = heading


class Command(click.Command):
    """A command whose help has headings.

    `usage` is the usage line after the command's name; None lets Click write it. `arguments` and `examples` map positional
    arguments and command lines to their descriptions.
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
        try:
            left = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(self._describe_unknown_option(ctx, error), ctx) from None
        for parameter in self.get_params(ctx):
            value = ctx.params.get(parameter.name or "")
            # The message does not contain the value, which may include a password.
            if isinstance(parameter, click.Option) and isinstance(value, str) and not is_unicode(value):
                raise MisuseError(f"{parameter.opts[0]} must be valid Unicode")
        return left

    def _describe_unknown_option(self, ctx: click.Context, error: click.NoSuchOption) -> str:
        """Return the message for an unknown option, with a suggestion only if the name of an option is similar."""
        # Click compares the names with their dashes, so that almost every short name is similar to every other.
        wanted = error.option_name.lstrip("-")
        known = [name.lstrip("-") for each in self.get_params(ctx) for name in each.opts if name.startswith("--")]
        close = find_close_match(wanted, known) if error.option_name.startswith("--") else None
        return f"No such option {error.option_name!r}{f' (did you mean --{close}?)' if close else ''}"

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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand. The error for an unknown name suggests a similar name, if there is one."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            close = find_close_match(args[0], self.list_commands(ctx))
            if close:
                ctx.fail(f"No such command {args[0]!r} (did you mean {close}?).")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options and commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
