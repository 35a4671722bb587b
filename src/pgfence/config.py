"""What an application may set once, kept with its engine. Nothing here is needed for the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

from pgfence._process.clock import Seconds, seconds
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine
    from sqlalchemy.engine.interfaces import Dialect
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence.types import Event

PoolerSetting: TypeAlias = Literal["auto", "direct", "session", "transaction"]

_ATTRIBUTE = "_pgfence_config"

LONGEST_PREFIX = 40
"""Names in PostgreSQL have 63 bytes at most, and the longest of ours needs what is left."""


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one engine; see `configure`."""

    namespace: str = ""
    schema: str | None = None
    prefix: str = "pgfence_"
    default_timeout: float = 30.0
    lock_engine: Engine | AsyncEngine | Callable[[], Engine | AsyncEngine] | None = None
    max_lock_connections: int = 20
    pooler: PoolerSetting = "auto"
    on_event: Callable[[Event], object] | None = None


DEFAULT = Config()


def configure(
    engine: Engine | AsyncEngine,
    *,
    namespace: str = "",
    schema: str | None = None,
    prefix: str = "pgfence_",
    default_timeout: Seconds = 30,
    lock_engine: Engine | AsyncEngine | Callable[[], Engine | AsyncEngine] | None = None,
    max_lock_connections: int = 20,
    pooler: PoolerSetting = "auto",
    on_event: Callable[[Event], object] | None = None,
) -> None:
    """Set what pgfence should know about an engine, once, before its first use.

    A second call with the same values does nothing, so that every part of an application may repeat it. The settings hold
    for this engine and its `execution_options()` copies, in this process; another process has to configure its own.

    Args:
        engine: the engine that locks are asked for with.
        namespace: goes into every key made from a name, so that two applications in one database never meet. A ready
            LockKey has its own and is not moved by it.
        schema: of the tables, for the primitives that need some; None leaves it to the search path.
        prefix: of the tables' names.
        default_timeout: seconds that a wait lasts when a call says `timeout=None`; `math.inf` for ever.
        lock_engine: where session locks are taken instead, e.g. a direct URL beside a pooled one; or a function that
            returns it.
        max_lock_connections: how many connections session locks of this process may use at a time. Whoever comes later
            waits its turn within its timeout.
        pooler: what stands in between. "auto" refuses session locks when a pooler shows; "session" is your word that it
            gives each client a server session of its own; "transaction" refuses them at once, unless there is a
            `lock_engine`, whose own `pooler` setting applies then.
        on_event: called with every `Event`.

    Raises:
        ValueError: a value is out of range; the engine was configured with other values; or it is in use already.
        TypeError: a value has the wrong type.
    """
    LockKey.of("any", namespace=namespace)
    _expect(max_lock_connections, int, "max_lock_connections")
    if max_lock_connections < 1:
        raise ValueError("max_lock_connections must be 1 or more")
    if pooler not in get_args(PoolerSetting):
        raise ValueError(f"pooler must be one of {', '.join(get_args(PoolerSetting))}, not {pooler!r}")
    expect_place(schema, prefix)
    if lock_engine is not None and not callable(lock_engine):
        _get_dialect(lock_engine)
    if on_event is not None and not callable(on_event):
        raise TypeError("on_event must be callable")
    new = Config(
        namespace=namespace,
        schema=schema,
        prefix=prefix,
        default_timeout=seconds(default_timeout, "default_timeout"),
        lock_engine=lock_engine,
        max_lock_connections=max_lock_connections,
        pooler=pooler,
        on_event=on_event,
    )
    home = vars(_get_dialect(engine))
    if home.setdefault(_ATTRIBUTE, new) != new:
        raise ValueError("this engine already has other settings: configure it once, before its first use")


def expect_place(schema: str | None, prefix: str) -> None:
    """Raise if our tables could not be found there by these names.

    Raises:
        ValueError: the schema is empty, the prefix too long, or one of them holds NUL.
        TypeError: one has the wrong type.
    """
    _expect(prefix, str, "prefix")
    _expect(schema, (str, type(None)), "schema")
    if schema == "":
        raise ValueError("schema must not be empty: None leaves it to the search path")
    if len(prefix.encode()) > LONGEST_PREFIX:
        raise ValueError(f"prefix must not be longer than {LONGEST_PREFIX} bytes: the server would cut our names short")
    if "\0" in prefix + (schema or ""):
        raise ValueError("schema and prefix must not contain NUL")


class HasDialect(Protocol):
    """An Engine, AsyncEngine, Connection or AsyncConnection."""

    @property
    def dialect(self) -> Dialect:
        """What SQLAlchemy knows of the server and its driver."""
        ...


def config_of(thing: HasDialect, *, pin: bool = False) -> Config:
    """Return the settings for an Engine, AsyncEngine, Connection or AsyncConnection.

    Args:
        thing: where to look.
        pin: from now on something lives by them, so that other values come too late.
    """
    # On the dialect: the copies that execution_options() makes of an engine, its Connections and Sessions all share it, and the
    # settings are collected with the engine.
    home = vars(_get_dialect(thing))
    config: Config = home.setdefault(_ATTRIBUTE, DEFAULT) if pin else home.get(_ATTRIBUTE, DEFAULT)
    return config


def _expect(value: object, kind: type | tuple[type, ...], what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{what} has the wrong type: {type(value).__name__}")


def _get_dialect(thing: HasDialect) -> Dialect:
    try:
        dialect: Dialect = thing.dialect
    except AttributeError:
        raise TypeError(f"an Engine or AsyncEngine is needed, not {type(thing).__name__}") from None
    return dialect
