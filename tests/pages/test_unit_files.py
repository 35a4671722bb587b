"""The page about cron jobs: the commands of its crontab, systemd unit and Kubernetes manifest are extracted and run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from sqlalchemy import make_url

from support import pages
from support.servers import database

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "run-a-cron-job.md").read_text(encoding="utf-8")


def found(pattern: str) -> str:
    """Return the only match of a pattern on the page, its continuation lines joined."""
    (one,) = re.findall(pattern, PAGE, re.MULTILINE)
    return one.replace("\\\n", "")


class Host(NamedTuple):
    """A host as the page describes it: a virtual environment, a program in /srv, and a service called billing."""

    home: Path
    environment: dict[str, str]

    def run(self, *words: str) -> int:
        """Run a command of the page, and return its exit code."""
        here = [self.local(word) for word in words]
        done = subprocess.run(
            here, cwd=self.home, env=self.environment, capture_output=True, text=True, timeout=50, check=False
        )
        assert "Traceback" not in done.stderr
        return done.returncode

    def local(self, text: str) -> str:
        """Return a text of the page with the paths of this host."""
        return text.replace("/srv/venv/bin/", "").replace("/srv/", f"{self.home}/")

    def bills(self) -> int:
        """Return how often the job has run."""
        return (self.home / "bills").read_text().count("\n")


@pytest.fixture
def host(dsn: str, tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "bill.py").write_text("open('bills', 'a').write('billed\\n')")
    (tmp_path / "bills").touch()
    with database(dsn, "cron") as own:
        pages.install(own)
        url = make_url(own)
        service = {
            "host": url.host,
            "port": url.port,
            "user": url.username,
            "password": url.password,
            "dbname": url.database,
        }
        lines = [f"{name}={value}" for name, value in service.items() if value]
        (tmp_path / "services").write_text("\n".join(["[billing]", *lines, ""]))
        known = {
            name: value for name, value in pages.environment(own).items() if not name.startswith(("PG", "DATABASE"))
        }
        yield Host(tmp_path, known | {"PGSERVICEFILE": str(tmp_path / "services")})


def test_the_crontab_entry_runs_once_a_day(host: Host) -> None:
    """The script that cron starts runs the job; on the second host of the day it exits with the code for busy."""
    host.environment["PGSERVICE"] = found(r"^PGSERVICE=(\w+)$")
    command = shlex.split(found(r"^0,20,40 2-4 \* \* \*  (.+)$"))
    script = Path(host.local(command[0]))
    script.parent.mkdir()
    script.write_text(host.local(found(r"^```sh\n((?:.+\n)+)```$")))
    script.chmod(0o755)
    assert [host.run(*command), host.run(*command), host.bills()] == [0, 75, 1]


def test_the_unit_of_systemd_runs_once_a_day(host: Host) -> None:
    """Its command exits with 0, or with the code that the unit counts as a success."""
    host.environment["PGSERVICE"] = found(r"^Environment=PGSERVICE=(\w+)$")
    command = shlex.split(found(r"^ExecStart=((?:.+\\\n)*.+)$"))
    success = int(found(r"^SuccessExitStatus=(\d+)$"))
    assert [host.run(*command), host.run(*command), host.bills()] == [0, success, 1]


def test_the_container_of_kubernetes_runs_once_a_day(host: Host) -> None:
    """Its command counts as a success either way, and has time to stop the job before the container is killed."""
    host.environment["PGSERVICE"] = "billing"
    command = json.loads(found(r"^ +command: (\[[^\]]+\])$"))
    assert [host.run(*command), host.run(*command), host.bills()] == [0, 0, 1]
    assert int(command[command.index("--grace") + 1]) < int(found(r"terminationGracePeriodSeconds: (\d+)$"))
