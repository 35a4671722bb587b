"""Optional settings, which an application sets once for each engine."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

from pgfence._process.clock import Seconds, seconds
from pgfence._process.events import EventHub
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine
    from sqlalchemy.engine.interfaces import Dialect
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence.types import Event

PoolerSetting: TypeAlias = Literal["auto", "direct", "session", "transaction"]

_ATTRIBUTE = "_pgfence_config"
_UNPINNED = "_pgfence_default_config"
_EVENTS = "_pgfence_events"

LONGEST_PREFIX = 40
"""The maximum length of a prefix in bytes. PostgreSQL names have at most 63 bytes, and pgfence's longest name needs 23 of them."""


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
    events: EventHub = field(default_factory=EventHub, compare=False, repr=False)
    """The listeners that are notified of events, including `on_event`. Telemetry can be added at any time."""


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
    """Configure how pgfence uses an engine. Call this function once for each engine, before the first use of the engine.

    A second call with the same values does nothing, so every part of an application may repeat the call. The settings apply to
    this engine and its `execution_options()` copies in this process. Other processes must configure their own engines.

    Args:
        engine: the engine on which locks are requested.
        namespace: included in every key computed from a name, so that two applications in one database do not share locks. It
            does not apply to `LockKey` objects, which contain their own namespace.
        schema: the schema of pgfence's tables, for the primitives that need them. None means that the search path determines the
            schema.
        prefix: the prefix of the tables' names, at most 40 bytes.
        default_timeout: how many seconds a call with `timeout=None` waits, and how many a transaction waits at a gate if its
            session has no `lock_timeout`; `math.inf` waits indefinitely. While the thread or task holds a session lock or a lease,
            a request for another one waits at most 60 s by default.
        lock_engine: a separate engine for session locks, for example with a direct URL if `engine` uses a pooler; or a function
            that returns one.
        max_lock_connections: the maximum number of connections that session locks of this process use at a time. Two
            separate limits of the same size apply to the connections of leases and to those of effects. Further requests wait for
            a connection until their timeout.
        pooler: the pooler between client and server. "auto" and "direct" reject session locks if a pooler is detected.
            "session" asserts that the pooler gives each client a dedicated server session. "transaction" rejects session locks,
            unless there is a `lock_engine`, whose own `pooler` setting then applies.
        on_event: called with every `Event`, in the thread or task in which the event happens. The function must return quickly:
            some events happen on the thread that renews leases, and no lease of the engine is renewed while the function runs.
            Exceptions that it raises are logged.

    Raises:
        ValueError: a value is out of range, or the engine was already configured with other values or is already in use.
        TypeError: a value has the wrong type.
    """
    LockKey.of("any", namespace=namespace)
    _expect(max_lock_connections, int, "max_lock_connections", "an int")
    if max_lock_connections < 1:
        raise ValueError(f"max_lock_connections must be 1 or more, not {max_lock_connections}")
    if pooler not in get_args(PoolerSetting):
        raise ValueError(f"pooler must be one of {', '.join(map(repr, get_args(PoolerSetting)))}, not {pooler!r}")
    expect_place(schema, prefix)
    if lock_engine is not None and not callable(lock_engine):
        _get_dialect(lock_engine, "lock_engine must be an Engine, an AsyncEngine or a function that returns one")
    if on_event is not None and not callable(on_event):
        raise TypeError(f"on_event must be a function, not {type(on_event).__name__}")
    if inspect.iscoroutinefunction(on_event) or inspect.iscoroutinefunction(type(on_event).__call__):
        raise TypeError(
            "on_event must not be a coroutine function: pgfence does not await it, so no event would be handled"
        )
    new = Config(
        namespace=namespace,
        schema=schema,
        prefix=prefix,
        default_timeout=seconds(default_timeout, "default_timeout"),
        lock_engine=lock_engine,
        max_lock_connections=max_lock_connections,
        pooler=pooler,
        on_event=on_event,
        events=events_of(engine),
    )
    home = vars(_get_dialect(engine))
    if home.setdefault(_ATTRIBUTE, new) != new:
        raise ValueError(
            "this engine already has other settings: call configure() once, before the first use of the engine"
        )
    new.events.set_listener(on_event)


def expect_place(schema: str | None, prefix: str) -> None:
    """Raise an error if the schema or the prefix cannot be used for pgfence's tables.

    Raises:
        ValueError: the schema is empty, the prefix is too long, or one of them contains NUL.
        TypeError: schema or prefix has the wrong type.
    """
    _expect(prefix, str, "prefix", "a str")
    _expect(schema, (str, type(None)), "schema", "a str or None")
    if schema == "":
        raise ValueError("schema must not be empty: pass None to use the search path")
    if len(prefix.encode()) > LONGEST_PREFIX:
        raise ValueError(
            f"prefix must not be longer than {LONGEST_PREFIX} bytes, because PostgreSQL would otherwise truncate the names of the tables"
        )
    if "\0" in prefix + (schema or ""):
        raise ValueError("schema and prefix must not contain NUL")


class HasDialect(Protocol):
    """An Engine, AsyncEngine, Connection or AsyncConnection."""

    @property
    def dialect(self) -> Dialect:
        """The SQLAlchemy dialect."""
        ...


def config_of(thing: HasDialect, *, pin: bool = False) -> Config:
    """Return the settings for an Engine, AsyncEngine, Connection or AsyncConnection.

    With `pin`, the settings can no longer be changed, because something depends on them from now on.
    """
    # The settings are stored on the dialect, which an engine shares with its execution_options() copies, Connections and
    # Sessions. The settings are garbage-collected with the engine.
    home = vars(_get_dialect(thing))
    if (found := home.get(_ATTRIBUTE)) is not None:
        known: Config = found
        return known
    default: Config = home.get(_UNPINNED) or home.setdefault(_UNPINNED, Config(events=events_of(thing)))
    config: Config = home.setdefault(_ATTRIBUTE, default) if pin else default
    return config


def events_of(thing: HasDialect) -> EventHub:
    """Return the hub that receives the events of an engine. It can be used before the engine's settings exist."""
    home = vars(_get_dialect(thing))
    hub: EventHub = home.get(_EVENTS) or home.setdefault(_EVENTS, EventHub())
    return hub


def _expect(value: object, kind: type | tuple[type, ...], what: str, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{what} must be {wanted}, not {type(value).__name__}")


def _get_dialect(thing: HasDialect, wanted: str = "expected an Engine or AsyncEngine") -> Dialect:
    try:
        dialect: Dialect = thing.dialect
    except AttributeError:
        raise TypeError(f"{wanted}, not {type(thing).__name__}") from None
    return dialect
