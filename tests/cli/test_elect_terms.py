"""`pgfence elect`: what one host says about its terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine

from pgfence.cli.elect import ElectOptions, Restart, _FleetMember
from pgfence.cli.report import Console, Report
from pgfence.cli.supervise import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class LostAtOnce:
    """An election whose term begins and is lost before the command can be started."""

    term = None

    def stand(self, *, on_gained: Callable[[], None], **_: object) -> LostAtOnce:
        on_gained()
        return self

    def resign(self) -> None: ...


def test_a_term_that_is_lost_before_the_command_starts_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """Not only that the host is a candidate again, but why."""
    name = "scheduler"
    options = ElectOptions(name, ["true"], None, None, None, None, None, None, None, 15, None, Restart.ALWAYS, 10)
    engine = create_engine("postgresql+psycopg://")
    report = Report(name)
    with Supervisor(grace=1) as supervisor:
        member = _FleetMember(options, Console(), {}, supervisor, engine)
        election: Any = LostAtOnce()
        member._election = election
        assert member._serve_term(report) is None
        member._describe(report, 1)
    engine.dispose()
    assert capfd.readouterr().err == (
        f"pgfence: the term of {name!r} was lost before the command was started\n"
        "pgfence: this host becomes a candidate again in 1 s\n"
    )
