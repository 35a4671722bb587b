"""`pgfence evict`: show the holder of a name, ask for confirmation, and evict the holder or ask it to resign."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from pgfence._admin import requests
from pgfence._sql import evict as statements
from pgfence._sql import resign
from pgfence._sql.activity import describe_kind
from pgfence.cli import options
from pgfence.cli.codes import Code, MisuseError
from pgfence.cli.parser import Command, Option
from pgfence.cli.report import AdminReport, as_data, confirm, expect_answer, misuse_of, run_reported
from pgfence.cli.server import open_engine

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from pgfence._sql.evict import Found
    from pgfence.types import Holder


@click.command(
    "evict",
    short_help="End the current hold on a name.",
    cls=Command,
    arguments={"NAME": "Name of what is held, such as a lease or an advisory lock."},
    examples={
        'pgfence evict close:2026-04 --reason "look" --dry-run': "Only show the holder",
        'pgfence evict close:2026-04 --reason "hung since 3 a.m."': "Show the holder; end its hold if you confirm",
        'pgfence evict --ask scheduler --reason "deploy" --yes': "Ask the leader of an election to resign",
    },
    codes=[
        ("0", "The holder was evicted; with --ask, it was asked to resign; with --dry-run, it was shown."),
        (
            "64",
            (
                "The command was misused, or there is no terminal and --yes is missing; NAME is a whole semaphore or a whole set "
                "of partitions instead of one permit or partition; with --ask, the holder is not the leader of an election."
            ),
        ),
        ("67", "No lease and no advisory lock has that name; with --ask, there is no leader. Nothing was done."),
        ("69", "The server did not respond."),
        ("75", "A transaction that writes under the token is still open, or the holder has changed. Nothing was done."),
        ("77", "You did not confirm. Nothing was done."),
        ("78", "Tables or permissions are missing, or the server is read-only. Nothing was done."),
    ],
)
@click.argument("name", metavar="NAME")
@click.option(
    "--ask",
    cls=Option,
    is_flag=True,
    help="Ask the leader of an election to stop its work and resign, instead of evicting it.",
)
@options.reason
@options.actor
@click.option(
    "--dry-run",
    cls=Option,
    heading=options.AUDIT,
    is_flag=True,
    help="Only show the holder, and what the command would do.",
)
@options.yes
@options.add_database_options
@options.as_json
def evict(
    name: str,
    ask: bool,
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
    """End the current hold on NAME. From then on, PostgreSQL rejects the token of that hold, if it has one.

    Use it when a holder hangs and other processes need its lock or lease. The command shows the holder and asks for
    confirmation. With --ask, the leader of an election is asked to stop its work and resign; a leader that hangs does not respond.
    """
    with open_engine(dsn, engine, namespace=namespace, schema=schema, prefix=prefix) as target:
        report = (_Request if ask else _Eviction)(target, name, reason, actor).run(dry_run=dry_run, yes=yes)
    found = report.found
    data: dict[str, object] = {
        "token": found.token if found else None,
        "newest": found.newest if found else None,
        "holders": [_as_data(holder) for holder in found.holders] if found else [],
    }
    report.show(as_json=as_json, target={"name": name}, found=data)


class _Eviction:
    """One call of `pgfence evict`."""

    question = "Evict?"

    def __init__(self, engine: Engine, name: str, reason: str, actor: str | None) -> None:
        self._engine = engine
        self._name = name
        try:
            self._order = requests.build_eviction_request(engine, name, reason=reason, actor=actor)
        except ValueError as error:
            raise misuse_of(error) from None

    def run(self, *, dry_run: bool, yes: bool) -> AdminReport[Found]:
        expect_answer(dry_run=dry_run, yes=yes)
        return run_reported(lambda: self._run(dry_run=dry_run, yes=yes))

    def _run(self, *, dry_run: bool, yes: bool) -> AdminReport[Found]:
        try:
            seen = requests.perform(self._engine, statements.look, self._order)
        except ValueError as error:
            raise MisuseError(str(error)) from None
        if (nobody := self._describe_absence(seen)) is not None:
            return AdminReport("nobody", Code.NOBODY, [nobody], seen)
        if dry_run:
            return AdminReport(
                "seen", Code.OK, [*self._list_holders(seen), f"Nothing was done.{self._describe_plan(seen)}"], seen
            )
        if not yes and not confirm(self._list_holders(seen), self.question):
            return AdminReport("declined", Code.DECLINED, ["nothing was done"], seen)
        return self._perform(seen)

    def _describe_absence(self, seen: Found) -> str | None:
        """Return the message for the case that there is nothing to do, otherwise None."""
        if seen.token is None and not seen.holders:
            return f"No lease and no advisory lock has the name {self._name!r}, so there is nothing to evict."
        return None

    def _perform(self, seen: Found) -> AdminReport[Found]:
        # The holder may change before the user confirms. Evict only the holder that was shown.
        order = replace(self._order, only=seen)
        found = requests.perform(self._engine, statements.evict, order)
        if found.newest is None:
            who = (
                f"the name is now held by {' and by '.join(map(str, found.holders))}"
                if found.holders
                else "no process holds the name now"
            )
            return AdminReport(
                "changed",
                Code.BUSY,
                [f"the holder of {self._name!r} has changed, so nothing was done; {who}"],
                found,
            )
        raised = (
            f" From now on, token {found.token} is rejected; the newest token is {found.newest}." if found.token else ""
        )
        done = (
            ("The holder was evicted. " if len(found.holders) == 1 else "The holders were evicted. ")
            if found.holders
            else ""
        )
        done += "The eviction is recorded in the audit table."
        return AdminReport("evicted", Code.OK, [*self._list_holders(found), done + raised], found)

    def _describe_plan(self, seen: Found) -> str:
        """Return what the call would do without --dry-run."""
        sessions = {"advisory", "session lock"}
        kinds = sorted({holder.kind for holder in seen.holders} - sessions)
        # A session that holds the key in both modes is listed twice.
        backends = dict.fromkeys(str(holder.backend_pid) for holder in seen.holders if holder.kind in sessions)
        steps = [f"end the {' and the '.join(kinds)}"] if kinds else []
        steps += [f"terminate the session of backend {' and of backend '.join(backends)}"] if backends else []
        if not steps:  # nothing is held, but the last holder may still write with its token
            steps = [f"increment the token, so that PostgreSQL rejects token {seen.token}"]
        return f" Without --dry-run, the command would {' and '.join(steps)}."

    def _list_holders(self, found: Found) -> list[str]:
        if not found.holders:
            return [
                f"No lease and no session holds {self._name!r} at this moment; the last token of this name is {found.token}."
            ]
        return [f"{self._name!r} is held by {_describe(holder)}." for holder in found.holders]


class _Request(_Eviction):
    """One call of `pgfence evict --ask`."""

    question = "Ask it to resign?"

    def _describe_plan(self, seen: Found) -> str:
        return " Without --dry-run, the command would ask it to resign."

    def _describe_absence(self, seen: Found) -> str | None:
        if not seen.holders:
            return f"No process leads the election {self._name!r}, so there is no leader to ask."
        if all(holder.kind != "term" for holder in seen.holders):
            raise MisuseError(
                f"{self._name!r} is held by {describe_kind(seen.holders[0].kind)}, not by the leader of an election: omit --ask"
                " to evict the holder"
            )
        return None

    def _perform(self, seen: Found) -> AdminReport[Found]:
        order = self._order
        request = resign.ResignRequest(order.name, order.key, order.place, order.reason, order.actor)
        try:
            leader = requests.perform(self._engine, resign.ask_to_resign, request)
        except ValueError:
            raise MisuseError(
                f"a holder of a different kind has taken {self._name!r} since its leader was shown, so nothing was done: omit --ask to"
                " evict the holder"
            ) from None
        if leader is None:
            return AdminReport(
                "nobody",
                Code.NOBODY,
                [f"No process leads the election {self._name!r} any more, so nothing was done."],
                seen,
            )
        found = replace(seen, holders=(leader,), token=leader.token)
        done = "The leader was asked to resign. The request is recorded in the audit table."
        return AdminReport("asked", Code.OK, [*self._list_holders(found), done], found)


def _describe(holder: Holder) -> str:
    purpose = f", for {holder.purpose!r}" if holder.purpose else ""
    until = f", until {holder.expires_at.isoformat(timespec='seconds')}" if holder.expires_at else ""
    return f"{describe_kind(holder.kind)} of {holder}{until}{purpose}"


def _as_data(holder: Holder) -> dict[str, object]:
    until = holder.expires_at.isoformat() if holder.expires_at else None
    return {"kind": holder.kind, **as_data(holder), "token": holder.token, "expires_at": until}
