"""`pgfence keys`: list unfinished idempotency keys; `pgfence keys free` lets the next caller start a new attempt."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from pgfence import monitoring
from pgfence._admin import stuck_keys
from pgfence._admin.requests import perform
from pgfence._sql import stuck_keys as statements
from pgfence.cli import options
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.parser import SECONDS, Command, Group, Option
from pgfence.cli.report import (
    AdminReport,
    confirm,
    exit_on_error,
    expect_answer,
    format_columns,
    misuse_of,
    run_reported,
)
from pgfence.cli.running import check_seconds
from pgfence.cli.server import open_engine
from pgfence.config import config_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

    from pgfence._admin.stuck_keys import StuckKey


@click.group(
    "keys",
    short_help="List unfinished idempotency keys, or free one.",
    cls=Group,
    invoke_without_command=True,
    examples={
        "pgfence keys --older-than 900": "Keys that were first claimed at least 15 minutes ago",
        "pgfence keys --scope checkout --json": "Keys whose scope begins with checkout, as JSON",
    },
    codes=[
        ("0", "The unfinished keys were listed; there may be none."),
        ("64", "Misuse."),
        ("69", "The server did not respond."),
        ("78", "Tables or permissions are missing."),
    ],
)
@click.option(
    "--scope",
    cls=Option,
    heading="Filter",
    default="",
    metavar="TEXT",
    help="List only keys whose scope begins with TEXT.",
)
@click.option(
    "--older-than",
    cls=Option,
    heading="Filter",
    type=SECONDS,
    default=0.0,
    metavar="SECONDS",
    help="List only keys that were first claimed at least SECONDS ago.",
)
@options.add_database_options
@options.as_json
@click.pass_context
def keys(
    context: click.Context,
    scope: str,
    older_than: float,
    dsn: str | None,
    engine: str | None,
    namespace: str | None,
    schema: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """List idempotency keys whose effect was started but not finished, with the attempts that are running or lost.

    Use it when requests with a key get "in progress" responses for too long. The command takes no lock and never
    shows stored results. It lists only the keys of one namespace (see --namespace) or, if there is none, those without one.
    """
    if context.invoked_subcommand is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        if given := [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
            raise _misplaced_error(given[0], context.invoked_subcommand)
        return
    check_seconds(older_than, "--older-than")
    with open_engine(dsn, engine, namespace=namespace, schema=schema, prefix=prefix) as target, exit_on_error():
        try:
            found = monitoring.stuck_keys(target, older_than=older_than, prefix=scope)
            space = config_of(target).namespace
        except ValueError as error:
            raise MisuseError(str(error)) from None
    if as_json:
        print(json.dumps({"keys": [_as_data(key) for key in found]}))
    else:
        print("\n".join(_format_table(found)) if found else _describe_nothing(scope, older_than, space))
    raise CommandExit(Code.OK)


def _describe_nothing(scope: str, older_than: float, namespace: str) -> str:
    """Return the message for an empty list. It repeats the options, which may have excluded other keys."""
    where = f"in the namespace {namespace!r}" if namespace else "without a namespace"
    asked = [f"whose scope begins with {scope!r}"] if scope else []
    asked += [f"that were first claimed at least {older_than:g} s ago"] if older_than else []
    if not asked:
        return f"No unfinished keys {where}."
    return f"No unfinished keys {where} among those {' and '.join(asked)}. Other keys were not searched."


@keys.command(
    "free",
    short_help="Let the next caller of a key start a new attempt.",
    cls=Command,
    arguments={
        "SCOPE": "Scope of the key, as the application passes it.",
        "KEY": "The key, as the client sent it.",
    },
    examples={
        'pgfence keys free checkout order-1001 --reason "no such charge"': "Show the attempt; free the key if you confirm",
    },
    codes=[
        ("0", "The key was freed or, with --dry-run, shown."),
        ("64", "The command was misused, or there is no terminal and --yes is missing."),
        ("67", "The key is unknown, finished or free. Nothing was done."),
        ("69", "The server did not respond."),
        ("75", "The result is being stored, or another attempt has started. Nothing was done."),
        ("77", "You did not confirm. Nothing was done."),
        ("78", "Tables or permissions are missing, or the server is read-only. Nothing was done."),
    ],
)
@click.argument("scope", metavar="SCOPE")
@click.argument("key", metavar="KEY")
@options.reason
@options.actor
@click.option("--dry-run", cls=Option, heading=options.AUDIT, is_flag=True, help="Only show the attempt.")
@options.yes
@options.add_database_options
@options.as_json
def free(
    scope: str,
    key: str,
    reason: str,
    actor: str | None,
    dry_run: bool,
    yes: bool,
    dsn: str | None,
    engine: str | None,
    namespace: str | None,
    schema: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Free KEY, so that the next caller starts a new attempt immediately.

    The command shows the attempt and asks for confirmation.

    Use it for a key that `pgfence keys` lists. The command does not undo what the attempt did outside the
    database, so check its effects first.
    """
    with open_engine(dsn, engine, namespace=namespace, schema=schema, prefix=prefix) as target:
        report = _Freeing(target, scope, key, reason, actor).run(dry_run=dry_run, yes=yes)
    found = report.found and _as_data(report.found)
    report.show(as_json=as_json, target={"scope": scope, "key": key}, found={"found": found})


def _misplaced_error(parameter: str, command: str) -> MisuseError:
    """Return the error for an option of `pgfence keys` that precedes a subcommand."""
    option = "--json" if parameter == "as_json" else f"--{parameter.replace('_', '-')}"
    if any(option in each.opts for each in keys.commands[command].params):
        return MisuseError(f"write {option} after `{command}`")
    return MisuseError(f"`pgfence keys {command}` has no option {option}: omit it, or omit `{command}` to list keys")


class _Freeing:
    """One call of `pgfence keys free`."""

    def __init__(self, engine: Engine, scope: str, key: str, reason: str, actor: str | None) -> None:
        self._engine = engine
        try:
            self._order = stuck_keys.build_free_key_request(engine, scope, key, reason=reason, actor=actor)
        except ValueError as error:
            raise misuse_of(error) from None

    def run(self, *, dry_run: bool, yes: bool) -> AdminReport[StuckKey]:
        expect_answer(dry_run=dry_run, yes=yes)
        return run_reported(lambda: self._run(dry_run=dry_run, yes=yes))

    def _run(self, *, dry_run: bool, yes: bool) -> AdminReport[StuckKey]:
        row = perform(self._engine, statements.find, self._order)
        if row is None:
            nothing = f"Nothing is stuck under {self._order}: the key is unknown, finished or free."
            return AdminReport("nobody", Code.NOBODY, [nothing])
        seen = stuck_keys.to_stuck_key(row)
        if dry_run:
            return AdminReport("seen", Code.OK, [_format_line(seen), "Nothing was done."], seen)
        if not yes and not confirm([_format_line(seen)], "Free this key?"):
            return AdminReport("declined", Code.DECLINED, ["nothing was done"], seen)
        # Another attempt may start before the user confirms. Free only the attempt that was shown.
        freed = perform(self._engine, statements.free, replace(self._order, only=row))
        if freed is None or freed.claim_id != row.claim_id:
            now = None if freed is None else stuck_keys.to_stuck_key(freed)
            said = f"another attempt has started, so nothing was done: {now}"
            if now is None:
                said = f"{self._order} is no longer stuck, so nothing was done"
            return AdminReport("changed", Code.BUSY, [said], now)
        done = f"The key was freed. The change is recorded in the audit table. The next caller runs attempt {seen.attempt + 1}."
        return AdminReport("freed", Code.OK, [_format_line(seen), done], seen)


def _format_line(key: StuckKey) -> str:
    steps = f", done: {', '.join(key.steps)}" if key.steps else ""
    until = "until" if key.state == "running" else "since"
    return f"{key} {until} {key.locked_until.isoformat(timespec='seconds')}, begun {key.since.isoformat(timespec='seconds')}{steps}"


def _format_table(found: Sequence[StuckKey]) -> list[str]:
    """Return a line of titles and a line for each key, with all values in full."""
    rows: list[tuple[str, ...]] = [("STATE", "ATTEMPT", "BEGUN", "LOCKED UNTIL", "OWNER", "STEPS DONE", "SCOPE", "KEY")]
    for key in found:
        times = (at.isoformat(timespec="seconds") for at in (key.since, key.locked_until))
        who = f"{key.owner or '-'}@{key.host or '-'}:{key.pid or '-'}"
        rows.append((key.state, str(key.attempt), *times, who, ",".join(key.steps) or "-", key.scope, key.key))
    return format_columns(rows)


def _as_data(key: StuckKey) -> dict[str, object]:
    known = ("scope", "key", "state", "attempt", "steps", "owner", "host", "pid")
    times = {name: getattr(key, name).isoformat() for name in ("since", "locked_until", "expires_at")}
    return {name: getattr(key, name) for name in known} | times
