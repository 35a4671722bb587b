"""`pgfence key`: show the key of a name."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pgfence.cli.codes import MisuseError
from pgfence.cli.options import Json, Namespace  # noqa: TC001 - typer reads them when it runs
from pgfence.keys import LockKey


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("key")(key)


def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a lock.")],
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Show the number that a name stands for, as pg_locks shows it. Asks no server."""
    try:
        value = LockKey.of(name, namespace=namespace or "").value
    except ValueError as error:
        raise MisuseError(str(error)) from None
    unsigned = value % (1 << 64)
    shown = {"key": value, "classid": unsigned >> 32, "objid": unsigned & 0xFFFFFFFF, "objsubid": 1}
    if as_json:
        print(json.dumps({"name": name, "namespace": namespace or "", **shown}))
    else:
        for what, number in shown.items():
            print(f"{what:<9}{number}")
