"""`pgfence keys`: idempotency keys that were begun and not finished; `pgfence keys free` lets the next caller begin."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pgfence import monitoring
from pgfence._admin import stuck_keys
from pgfence._admin.requests import perform
from pgfence._sql import stuck_keys as statements
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.options import Dsn, EnginePath, Json, Namespace, Prefix, Schema  # noqa: TC001 - typer reads them when it runs
from pgfence.cli.report import AdminReport, Console, choose_code, confirm, expect_answer, run_reported
from pgfence.cli.server import open_engine
from pgfence.config import config_of
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Engine

    from pgfence._admin.stuck_keys import StuckKey

_OLDER = typer.Option(metavar="SECONDS", help="Only keys that were claimed so long ago.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
    group.callback(
        epilog="Exit codes: 0 shown, also if there is none; 64 misuse; 69 unreachable; 78 not allowed there."
    )(keys)
    group.command(
        "free",
        epilog="Exit codes: 0 freed, or seen with --dry-run; 64 misuse; 67 nothing is stuck under that key; 69 unreachable;"
        " 75 its result is being stored, or another attempt has it by now; 77 not confirmed; 78 not allowed there.",
    )(free)
    app.add_typer(group, name="keys")


def keys(
    context: typer.Context,
    scope: Annotated[str, typer.Option(metavar="TEXT", help="Only scopes that begin so.")] = "",
    older_than: Annotated[float, _OLDER] = 0.0,
    dsn: Dsn = None,
    engine: EnginePath = None,
    namespace: Namespace = None,
    schema: Schema = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Show the keys whose effect was begun and not finished: attempts that are at work, and attempts that were lost.

    Takes no lock, and shows nothing that is stored under a key. The server is named as for the other commands.
    """
    if context.invoked_subcommand is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        if given := [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
            raise MisuseError(f"write {_build_option(given[0])} behind {context.invoked_subcommand}")
        return
    with open_engine(dsn, engine, namespace=namespace, schema=schema, prefix=prefix) as target:
        try:
            found = monitoring.stuck_keys(target, older_than=older_than, prefix=scope)
            space = config_of(target).namespace
        except ValueError as error:
            raise MisuseError(str(error)) from None
        except PgfenceError as error:
            Console().warn(str(error))
            raise CommandExit(choose_code(error)) from error
    if as_json:
        print(json.dumps({"keys": [_as_data(key) for key in found]}))
    else:
        print("\n".join(_format_table(found)) if found else _describe_nothing(scope, older_than, space))
    raise CommandExit(Code.OK)


def _describe_nothing(scope: str, older_than: float, namespace: str) -> str:
    """Return what it means that none was found: of those that were not asked for it says nothing."""
    where = f"in the namespace {namespace!r}" if namespace else "without a namespace"
    asked = [f"whose scope begins with {scope!r}"] if scope else []
    asked += [f"that was claimed {older_than:g} s ago or before"] if older_than else []
    if not asked:
        return f"Every key {where} that was begun is finished or free."
    return f"No key {where} {' and '.join(asked)} is stuck. Others were not looked at."


def free(
    scope: Annotated[str, typer.Argument(metavar="SCOPE", help="Of the key, as the application gives it.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="As the client sent it.")],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for the audit.")],
    actor: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Who, for the audit. Default: this user on this host.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be freed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dsn: Dsn = None,
    engine: EnginePath = None,
    namespace: Namespace = None,
    schema: Schema = None,
    prefix: Prefix = None,
    as_json: Json = False,
) -> None:
    """Let the next caller of KEY begin at once, though an attempt was lost or is at work. Shows the attempt and asks first.

    What that attempt has done outside of the database is not undone: look there first.
    """
    with open_engine(dsn, engine, namespace=namespace, schema=schema, prefix=prefix) as target:
        report = _Freeing(target, scope, key, reason, actor).run(dry_run=dry_run, yes=yes)
    found = report.found and _as_data(report.found)
    report.show(as_json=as_json, target={"scope": scope, "key": key}, found={"found": found})


def _build_option(parameter: str) -> str:
    return "--json" if parameter == "as_json" else f"--{parameter.replace('_', '-')}"


class _Freeing:
    """One call of the command."""

    def __init__(self, engine: Engine, scope: str, key: str, reason: str, actor: str | None) -> None:
        self._engine = engine
        try:
            self._order = stuck_keys.build_free_key_request(engine, scope, key, reason=reason, actor=actor)
        except ValueError as error:
            raise MisuseError(str(error)) from None

    def run(self, *, dry_run: bool, yes: bool) -> AdminReport[StuckKey]:
        expect_answer(dry_run=dry_run, yes=yes)
        return run_reported(lambda: self._run(dry_run=dry_run, yes=yes))

    def _run(self, *, dry_run: bool, yes: bool) -> AdminReport[StuckKey]:
        row = perform(self._engine, statements.find, self._order)
        if row is None:
            nothing = f"Nothing is stuck under {self._order}: it is unknown, finished or free."
            return AdminReport("nobody", Code.NOBODY, [nothing])
        seen = stuck_keys.to_stuck_key(row)
        if dry_run:
            return AdminReport("seen", Code.OK, [_format_line(seen), "Nothing was done."], seen)
        if not yes and not confirm([_format_line(seen)], "Free it?"):
            return AdminReport("declined", Code.DECLINED, ["nothing was done"], seen)
        # Between look, answer and this another attempt may have begun: that one was not meant.
        freed = perform(self._engine, statements.free, replace(self._order, only=row))
        if freed is None or freed.claim_id != row.claim_id:
            now = None if freed is None else stuck_keys.to_stuck_key(freed)
            said = f"something happened meanwhile, and nothing was done: now {now or 'nothing is stuck there'}"
            return AdminReport("changed", Code.BUSY, [said], now)
        done = f"Freed, and written to the audit. The next caller is attempt {seen.attempt + 1}."
        return AdminReport("freed", Code.OK, [_format_line(seen), done], seen)


def _format_line(key: StuckKey) -> str:
    steps = f", done: {', '.join(key.steps)}" if key.steps else ""
    until = "until" if key.state == "running" else "since"
    return f"{key} {until} {key.locked_until.isoformat(timespec='seconds')}, begun {key.since.isoformat(timespec='seconds')}{steps}"


def _format_table(found: Sequence[StuckKey]) -> Iterator[str]:
    """Yield a line for each key below a line of titles; nothing is cut off."""
    rows: list[tuple[str, ...]] = [("STATE", "ATTEMPT", "BEGUN", "LOCKED UNTIL", "OWNER", "STEPS DONE", "SCOPE", "KEY")]
    for key in found:
        times = (at.isoformat(timespec="seconds") for at in (key.since, key.locked_until))
        who = f"{key.owner or '-'}@{key.host or '-'}:{key.pid or '-'}"
        rows.append((key.state, str(key.attempt), *times, who, ",".join(key.steps) or "-", key.scope, key.key))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _as_data(key: StuckKey) -> dict[str, object]:
    known = ("scope", "key", "state", "attempt", "steps", "owner", "host", "pid")
    times = {name: getattr(key, name).isoformat() for name in ("since", "locked_until", "expires_at")}
    return {name: getattr(key, name) for name in known} | times
