"""Sessions that write times as an application wants them, on a driver that reads none as we would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg2.extensions
from psycopg.adapt import Loader
from sqlalchemy import event

if TYPE_CHECKING:
    from support.worlds import World

_TIMESTAMPTZ = 1184


def strange(world: World, **options: Any) -> Any:
    """Return an engine of a world, with German dates and a driver that refuses to read a time."""
    german = "server_settings" if world.name == "asyncpg" else "options"
    said = {"DateStyle": "German"} if world.name == "asyncpg" else "-c DateStyle=German"
    engine = world.engine(connect_args={german: said}, **options)
    event.listen(getattr(engine, "sync_engine", engine), "connect", lambda found, _: _READ_NOTHING[world.name](found))
    return engine


def _refuse(*args: Any) -> Any:
    raise AssertionError(f"a time was read: {args}")


class _Refusing(Loader):
    def load(self, data: Any) -> Any:
        return _refuse(data)


def _on_psycopg(found: Any) -> None:
    getattr(found, "driver_connection", found).adapters.register_loader("timestamptz", _Refusing)


def _on_psycopg2(found: Any) -> None:
    refusing = psycopg2.extensions.new_type((_TIMESTAMPTZ,), "REFUSING", _refuse)
    psycopg2.extensions.register_type(refusing, found)


def _on_asyncpg(found: Any) -> None:
    codec = {"schema": "pg_catalog", "encoder": str, "decoder": _refuse, "format": "text"}
    found.run_async(lambda connection: connection.set_type_codec("timestamptz", **codec))


_READ_NOTHING = {
    "psycopg": _on_psycopg,
    "psycopg_async": _on_psycopg,
    "psycopg2": _on_psycopg2,
    "asyncpg": _on_asyncpg,
}
