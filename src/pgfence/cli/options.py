"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Dsn = Annotated[str | None, typer.Option(help="Database URL. Everybody on this host can read it: no password.")]
EnginePath = Annotated[
    str | None, typer.Option(metavar="MODULE:ATTR", help="An Engine, or a function that returns one.")
]
Namespace = Annotated[
    str | None, typer.Option(help="Goes into the key, so that two applications in one database never meet.")
]
Schema = Annotated[str | None, typer.Option(help="Of pgfence's tables. Default: the search path's.")]
Prefix = Annotated[str | None, typer.Option(help="Of pgfence's tables. Default: pgfence_.")]
Json = Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")]
