"""The advisory lock, the lease or the slot that `pgfence run` holds while the command runs."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from pgfence._leases.terms import SHORTEST_TTL
from pgfence.advisory import AdvisoryLock
from pgfence.cli.codes import MisuseError
from pgfence.config import config_of
from pgfence.fence.handles import FencedHeld, HeldLease
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from pgfence._api.handles import Held
    from pgfence._leases.grant import RepeatedRelease
    from pgfence.cli.report import Report
    from pgfence.lease import Lease
    from pgfence.once import Once, Slot

PERIODS = {"day": timedelta(days=1), "hour": timedelta(hours=1), "minute": timedelta(minutes=1)}
DEFAULT_TTL = 60.0
DAY = 86_400.0

# The environment variables that tell the command its token, its slot, and whether an earlier attempt at the slot was not finished.
TOKEN_VARIABLE = "PGFENCE_TOKEN"  # noqa: S105
SLOT_VARIABLE = "PGFENCE_SLOT"
RESUMED_VARIABLE = "PGFENCE_RESUMED"
VARIABLES = frozenset({TOKEN_VARIABLE, SLOT_VARIABLE, RESUMED_VARIABLE})


class Terms(NamedTuple):
    """The lock options of a command line. A value that was not given is None. Times are in seconds."""

    lease: bool = False
    once_per: str | None = None
    tz: str | None = None
    ttl: float | None = None
    min_hold: float | None = None
    max_hold: float | None = None

    def check(self) -> None:
        """Raise MisuseError if options exclude each other, an option needs another one, or the TTL is out of range."""
        if self.lease and self.once_per is not None:
            raise MisuseError("use --once-per or --lease, not both: --once-per already holds a lease")
        if self.tz is not None and self.once_per is None:
            raise MisuseError("--tz needs --once-per: it sets the time zone of the slots")
        timed = {"--ttl": self.ttl, "--min-hold": self.min_hold, "--max-hold": self.max_hold}
        given = [option for option, value in timed.items() if value is not None]
        if given and not (self.lease or self.once_per is not None):
            ways = "--lease" if given[0] == "--min-hold" else "--lease or --once-per"
            raise MisuseError(f"{given[0]} needs {ways}: an advisory lock does not expire")
        if self.min_hold is not None and self.once_per is not None:
            raise MisuseError("--min-hold needs --lease: a slot runs once, however short the command is")
        if self.ttl is not None:
            check_ttl(self.ttl)


def check_ttl(ttl: float) -> None:
    """Raise MisuseError if a TTL is too short, too long or not a number."""
    if not SHORTEST_TTL <= ttl <= DAY:
        raise MisuseError(
            f"--ttl must be from {SHORTEST_TTL:g} to {DAY:.0f} seconds, not {ttl:g}. The TTL does not limit how long the command"
            " runs, because the lease is renewed"
        )


def lock_on(
    engine: Engine, name: str, namespace: str | None, terms: Terms, report: Report
) -> Once | Lease | AdvisoryLock[Held]:
    """Create the lock, lease or slot to acquire.

    Raises:
        MisuseError: the name or one of the options cannot be used.
    """
    ttl = DEFAULT_TTL if terms.ttl is None else terms.ttl
    try:
        if terms.once_per is not None:
            return _create_once(engine, name, namespace, terms, ttl)
        if terms.lease:
            return _create_lease(engine, name, namespace, terms, ttl)
        key = LockKey.of(name, namespace=config_of(engine).namespace if namespace is None else namespace)
    except ValueError as error:
        raise MisuseError(rename_arguments(str(error))) from None
    report.key = key.value
    return AdvisoryLock(engine, key)


def _create_once(engine: Engine, name: str, namespace: str | None, terms: Terms, ttl: float) -> Once:
    from pgfence.once import Once

    tz, step = "UTC" if terms.tz is None else terms.tz, PERIODS.get(terms.once_per or "")
    if step is not None:
        return Once(engine, name, every=step, tz=tz, ttl=ttl, max_hold=terms.max_hold, namespace=namespace)
    assert terms.once_per is not None
    return Once(engine, name, cron=terms.once_per, tz=tz, ttl=ttl, max_hold=terms.max_hold, namespace=namespace)


def _create_lease(engine: Engine, name: str, namespace: str | None, terms: Terms, ttl: float) -> Lease:
    from pgfence.lease import Lease

    least = terms.min_hold or 0.0
    return Lease(engine, name, ttl=ttl, max_hold=terms.max_hold, min_hold=least, namespace=namespace)


def rename_arguments(message: str) -> str:
    """Replace the names of arguments in a message with the names of options."""
    if message.startswith("cron="):
        return f"--once-per={message.removeprefix('cron=')}. Or use one of: {', '.join(PERIODS)}"
    if message.startswith("tz="):
        return f"--{message}"
    if not _TIMES.match(message):
        return message
    message = message.replace("pass None", "omit it")
    return _TIMES.sub(lambda found: f"--{found[1].replace('_', '-')}", message)


_TIMES = re.compile(r"\b(?:the )?(ttl|min_hold|max_hold)\b")


def build_variables(held: Held | None) -> dict[str, str]:
    """Return the environment variables that describe the hold to the command."""
    told: dict[str, str] = {}
    if isinstance(held, FencedHeld):
        told[TOKEN_VARIABLE] = str(held.token)
    if (slot := _find_slot(held)) is not None:
        told[SLOT_VARIABLE] = slot.slot.isoformat()
        told[RESUMED_VARIABLE] = str(int(slot.resumed))
    return told


def _find_slot(held: Held | None) -> Slot | None:
    if not isinstance(held, HeldLease):
        return None
    from pgfence.once import Slot

    return held if isinstance(held, Slot) else None


def note(held: Held, report: Report) -> None:
    """Record the token and the slot of a hold in the report."""
    if isinstance(held, FencedHeld):
        report.token = held.token
    if (slot := _find_slot(held)) is not None:
        report.slot = slot.slot.isoformat()
        report.resumed = slot.resumed


def find_repeated_release(held: Held | None) -> RepeatedRelease | None:
    """Return the release that pgfence repeats until the server responds, or None if no release is pending.

    Until the release gets a response, the slot may not be recorded as done.
    """
    slot = _find_slot(held)
    return None if slot is None else slot._grant.repeated_release


class CommandFailedError(Exception):
    """The command of a slot has failed, so the slot is free for another attempt."""


def give_back(held: Held, *, well: bool) -> None:
    """Release the hold. A slot is recorded as done only if the command succeeded.

    Raises:
        LockLostError: the lock was lost before the release.
    """
    if not well and (slot := _find_slot(held)) is not None:
        slot.check()
        slot.__exit__(CommandFailedError, CommandFailedError(), None)
    else:
        held.release()
