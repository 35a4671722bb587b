"""`pgfence release-leaked`: end the idle sessions that hold advisory locks that pgfence did not take."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from pgfence._admin.leaks import build_release_request
from pgfence._admin.requests import perform
from pgfence._sql import leaks
from pgfence.cli import options
from pgfence.cli.codes import Code
from pgfence.cli.parser import SECONDS, Command, Option
from pgfence.cli.report import AdminReport, confirm, expect_answer, misuse_of, run_reported
from pgfence.cli.running import check_seconds
from pgfence.cli.server import open_engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Engine

    from pgfence._sql.leaks import LeakedSession, ReleaseRequest

_LISTED = 5
_QUERY = 60
_HIDDEN = "This role cannot see the sessions of other roles. To allow this, run GRANT pg_read_all_stats TO <role>."


@click.command(
    "release-leaked",
    short_help="End idle sessions that hold leaked advisory locks.",
    cls=Command,
    examples={
        'pgfence release-leaked --reason "look" --dry-run': "Only list the sessions",
        'pgfence release-leaked --reason "leaked by the old importer"': "List the sessions, and end them if you confirm",
    },
    codes=[
        ("0", "The sessions were ended or, with --dry-run, shown."),
        ("64", "The command was misused, or there is no terminal and --yes is missing."),
        ("67", "No session that holds a leaked lock has been idle for that long. Nothing was done."),
        ("69", "The server did not respond."),
        ("75", "All of the sessions were used again, or have ended, since they were shown. Nothing was done."),
        ("77", "You did not confirm. Nothing was done."),
        ("78", "A permission is missing, or the server is read-only."),
    ],
)
@click.option(
    "--idle-for",
    cls=Option,
    heading="Filter",
    type=SECONDS,
    default=leaks.IDLE_FOR,
    metavar="SECONDS",
    help=f"End only sessions that have been idle for at least SECONDS. Default: {leaks.IDLE_FOR:g}.",
)
@options.reason
@options.actor
@click.option("--dry-run", cls=Option, heading=options.AUDIT, is_flag=True, help="Only show the sessions.")
@options.yes
@options.add_table_options
@options.as_json
def release_leaked(
    idle_for: float,
    reason: str,
    actor: str | None,
    dry_run: bool,
    yes: bool,
    dsn: str | None,
    engine: str | None,
    schema: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """End the idle sessions that hold advisory locks that pgfence did not take.

    The command shows the sessions and asks for confirmation.

    Use it when `pgfence doctor` reports leaked locks, that is, locks that a session still held when it was returned to a
    connection pool or a pooler. PostgreSQL does not record whether a program still needs a lock, so check the list first.
    A program that holds a lock on an idle session while it works on another connection looks the same in the list. For a
    lock that pgfence took, use `pgfence evict`.
    """
    check_seconds(idle_for, "--idle-for")
    with open_engine(dsn, engine, schema=schema, prefix=prefix) as target:
        report = _Release(target, reason, actor, idle_for).run(dry_run=dry_run, yes=yes)
    found = [_as_data(session) for session in report.found or ()]
    report.show(as_json=as_json, target={}, found={"sessions": found})


class _Release:
    """One call of `pgfence release-leaked`."""

    def __init__(self, engine: Engine, reason: str, actor: str | None, idle_for: float) -> None:
        self._engine = engine
        try:
            self._order: ReleaseRequest = build_release_request(engine, reason=reason, actor=actor, idle_for=idle_for)
        except ValueError as error:
            raise misuse_of(error) from None

    def run(self, *, dry_run: bool, yes: bool) -> AdminReport[Sequence[LeakedSession]]:
        expect_answer(dry_run=dry_run, yes=yes)
        return run_reported(lambda: self._run(dry_run=dry_run, yes=yes))

    def _run(self, *, dry_run: bool, yes: bool) -> AdminReport[Sequence[LeakedSession]]:
        seen = perform(self._engine, leaks.look, self._order)
        if not seen:
            nothing = f"No session that holds a leaked lock has been idle for at least {self._order.idle_for:g} s."
            hidden = [] if perform(self._engine, leaks.is_reader_of_all_stats, self._order) else [_HIDDEN]
            return AdminReport("nobody", Code.NOBODY, [nothing, *hidden], seen)
        lines = [_format_line(session) for session in seen]
        if dry_run:
            return AdminReport("seen", Code.OK, [*lines, "Nothing was done."], seen)
        if not yes and not confirm(lines, "End this session?" if len(seen) == 1 else "End these sessions?"):
            return AdminReport("declined", Code.DECLINED, ["nothing was done"], seen)
        # A session may be used again before the user confirms. End only the sessions that were shown.
        done = perform(self._engine, leaks.release, replace(self._order, only=seen))
        if not done.sessions:
            changed = (
                "the session was used again, or has ended, since it was shown, so nothing was done"
                if len(seen) == 1
                else "all of the sessions were used again, or have ended, since they were shown, so nothing was done"
            )
            return AdminReport("changed", Code.BUSY, [changed], seen)
        recorded = (
            " and recorded this in the audit table"
            if done.audited
            else ". There is no audit table, so this was not recorded"
        )
        ended = f"Ended {len(done.sessions)} of {len(seen)} {'session' if len(seen) == 1 else 'sessions'}{recorded}."
        return AdminReport("released", Code.OK, [*map(_format_line, done.sessions), ended], done.sessions)


def _format_line(session: LeakedSession) -> str:
    holder = session.holders[0]
    keys = [
        str(one.key.value) if one.key.space == "bigint" else "({}, {})".format(*one.key.halves)
        for one in session.holders[:_LISTED]
        if one.key is not None
    ]
    more = f" and {len(session.holders) - _LISTED} more" if len(session.holders) > _LISTED else ""
    query = " ".join(session.query.split())
    last = query[:_QUERY] + ("..." if len(query) > _QUERY else "")
    return f"{holder}: {'key' if len(session.holders) == 1 else 'keys'} {', '.join(keys)}{more}; last statement: {last}"


def _as_data(session: LeakedSession) -> Mapping[str, object]:
    holder = session.holders[0]
    return {
        "backend_pid": session.backend_pid,
        "application_name": holder.application_name,
        "host": holder.host,
        "since": holder.since and holder.since.isoformat(),
        "last_statement": session.query,
        "locks": [
            {"key": one.key.value, "space": one.key.space, "mode": one.mode}
            for one in session.holders
            if one.key is not None
        ],
    }
