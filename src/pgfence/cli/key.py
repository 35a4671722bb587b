"""`pgfence key`: print the key of a name."""

from __future__ import annotations

import json

import click

from pgfence.cli import options
from pgfence.cli.codes import MisuseError
from pgfence.cli.parser import Command
from pgfence.keys import LockKey


@click.command(
    "key",
    short_help="Print the 64-bit key of a lock name.",
    cls=Command,
    arguments={"NAME": "Name of a lock."},
    examples={
        "pgfence key nightly-billing --namespace shop": "The key of a name in a namespace",
    },
    codes=[("0", "The key was printed."), ("64", "Misuse: the name or the namespace cannot be used.")],
)
@click.argument("name", metavar="NAME")
@options.namespace
@options.as_json
def key(name: str, namespace: str | None, as_json: bool) -> None:
    """Print the 64-bit key of a lock name, as pg_locks shows it.

    Use it to find a lock in pg_locks or in the server's log. It does not contact a server.
    """
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
