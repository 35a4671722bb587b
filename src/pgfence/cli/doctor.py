"""`pgfence doctor`: examine the server, the role and the settings, and print findings with their fixes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pgfence._admin.doctor.examination import examine
from pgfence.cli import options
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.parser import Command, Option
from pgfence.cli.report import exit_on_error, format_in_color, write_wrapped
from pgfence.cli.running import pooler as pooler_option
from pgfence.cli.server import open_engine
from pgfence.cli.ttl import advise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._admin.doctor.examination import Diagnosis
    from pgfence._admin.doctor.finding import Finding

FOUND = 1
"""The exit code if there are errors or, with `--strict`, warnings."""
_INI = Path("alembic.ini")
_COLORS = {"error": "red", "warning": "yellow", "info": "blue"}
_NAMES = {"error": ("error", "errors"), "warning": ("warning", "warnings"), "info": ("note", "notes")}


@click.command(
    "doctor",
    short_help="Examine the server, the role and the settings.",
    cls=Command,
    examples={
        "pgfence doctor": "Examine the server of DATABASE_URL",
        "pgfence doctor --engine shop.db:engine --strict": "In CI, with the application's engine: fail on warnings, too",
        "pgfence doctor --ttl close:2026-04": "Measure for up to about 5 seconds, and advise a TTL for a lease",
    },
    codes=[
        ("0", "No finding is an error; with --strict, none is an error or a warning."),
        ("1", "A finding is an error; with --strict, an error or a warning; with --ttl, the lease's TTL is too short."),
        ("64", "The command was misused, or the ini file or env.py cannot be read."),
        ("69", "The server did not respond."),
        ("78", "The server is not PostgreSQL, or the driver is not supported."),
    ],
)
@click.option("--strict", cls=Option, heading=options.OUTPUT, is_flag=True, help="Exit with 1 for warnings, too.")
@click.option(
    "--ttl",
    "lease",
    cls=Option,
    metavar="NAME",
    help="Instead of examining the server, measure renewals for up to about 5 seconds, and advise a TTL for the lease NAME.",
)
@click.option(
    "--alembic-ini",
    cls=Option,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Examine the env.py of this ini file, too. Default: alembic.ini, if it exists.",
)
@options.dsn
@options.engine
@pooler_option
@options.namespace
@options.schema
@options.prefix
@options.as_json
def doctor(
    strict: bool,
    lease: str | None,
    alembic_ini: Path | None,
    dsn: str | None,
    engine: str | None,
    pooler: str | None,
    namespace: str | None,
    schema: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Examine the server, the role and the settings, and print what could cause problems with pgfence and how to fix it.

    Use it before the first deployment, in CI, and when something is wrong. The command changes nothing and takes no lock. Run it with the
    URL and the role of the application, because privileges and settings depend on them.
    """
    ini = alembic_ini or (_INI if _INI.is_file() else None)
    given = {"pooler": pooler, "namespace": namespace, "schema": schema, "prefix": prefix}
    try:
        with exit_on_error(), open_engine(dsn, engine, **given) as target:
            if lease is not None:
                advise(target, lease, as_json=as_json)
            diagnosis = examine(target, ini, lambda found: found)
    except ValueError as error:
        raise MisuseError(str(error)) from None
    counted = ("error", "warning") if strict else ("error",)
    code = FOUND if any(finding.severity in counted for finding in diagnosis.findings) else Code.OK
    if as_json:
        print(json.dumps({**asdict(diagnosis), "exit_code": int(code)}))
    else:
        _show(diagnosis)
    raise CommandExit(code)


def _show(diagnosis: Diagnosis) -> None:
    write_wrapped(f"{diagnosis.server}: {diagnosis.version}, as the role {diagnosis.role!r}")
    for finding in diagnosis.findings:
        click.echo()
        click.echo(f"{format_in_color(finding.severity.upper(), _COLORS[finding.severity])}  {finding.code}")
        write_wrapped(finding.found, indent=2)
        write_wrapped(finding.why, indent=2)
        write_wrapped(f"Fix: {finding.fix}", indent=2)
    click.echo()
    write_wrapped(_count(diagnosis.findings, len(diagnosis.checked)))


def _count(findings: Sequence[Finding], checked: int) -> str:
    """Return the last line, which says how many findings of each severity there are."""
    counts = []
    for severity, (one, many) in _NAMES.items():
        number = sum(finding.severity == severity for finding in findings)
        counts += [f"{number} {one if number == 1 else many}"] if number else []
    return f"{', '.join(counts) or 'No findings'}; checked for {checked} kinds of findings."
