"""Settings: kept with the engine, found from every object that belongs to it, set once."""

from __future__ import annotations

import gc
import math
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgfence.config import DEFAULT, Config, config_of, configure
from support.rows import every_row

if TYPE_CHECKING:
    from sqlalchemy import Engine

URL = "postgresql+psycopg://app:secret@127.0.0.1:1/app"


@pytest.fixture
def engine() -> Engine:
    """An engine that is never connected."""
    return create_engine(URL)


def test_nothing_configured_means_the_defaults(engine: Engine) -> None:
    """An engine that was never configured has the documented defaults."""
    assert config_of(engine) == DEFAULT
    assert config_of(engine).events is not DEFAULT.events
    assert (
        Config(
            namespace="",
            schema=None,
            prefix="pgfence_",
            default_timeout=30.0,
            lock_engine=None,
            max_lock_connections=20,
            pooler="auto",
            on_event=None,
        )
        == DEFAULT
    )


def test_every_setting_is_found_again(engine: Engine) -> None:
    """config_of() returns what was passed to configure(), with times in seconds."""
    other, heard = create_engine(URL), []
    configure(
        engine,
        namespace="bank",
        schema="ops",
        prefix="lock_",
        default_timeout=timedelta(minutes=2),
        lock_engine=other,
        max_lock_connections=3,
        pooler="session",
        on_event=heard.append,
    )
    assert config_of(engine) == Config("bank", "ops", "lock_", 120.0, other, 3, "session", heard.append)


def test_the_same_values_twice_are_welcome(engine: Engine) -> None:
    """Every part of an application may repeat the call; 30 and a timedelta of 30 seconds are the same."""
    configure(engine, namespace="bank", default_timeout=30)
    configure(engine, namespace="bank", default_timeout=timedelta(seconds=30))
    assert config_of(engine).namespace == "bank"


def test_the_defaults_spelt_out_are_a_setting_too(engine: Engine) -> None:
    """configure() without values fixes the defaults: other values afterwards are rejected."""
    configure(engine)
    configure(engine)
    with pytest.raises(ValueError, match=r"call configure\(\) once"):
        configure(engine, namespace="bank")


def test_other_values_are_rejected_and_change_nothing(engine: Engine) -> None:
    """A second call with another value raises, and the first values stay."""
    configure(engine, namespace="bank", max_lock_connections=3)
    with pytest.raises(ValueError, match=r"call configure\(\) once"):
        configure(engine, namespace="bank", max_lock_connections=4)
    assert config_of(engine).max_lock_connections == 3


def test_two_engines_have_two_settings(engine: Engine) -> None:
    """An engine created from the same URL is another engine, with its own settings."""
    other = create_engine(URL)
    configure(engine, namespace="one")
    configure(other, namespace="two")
    assert (config_of(engine).namespace, config_of(other).namespace) == ("one", "two")


def test_settings_are_found_from_copies_and_binds(engine: Engine) -> None:
    """An execution_options() copy and the bind of a Session, scoped or not, lead to the settings, before or after configure()."""
    early = engine.execution_options(isolation_level="AUTOCOMMIT")
    configure(engine, namespace="bank")
    late = early.execution_options(logging_token="x")
    session, scoped = Session(engine), scoped_session(sessionmaker(late))
    for thing in (engine, early, late, session.get_bind(), scoped.get_bind(), Session(early).get_bind()):
        assert config_of(thing).namespace == "bank"


def test_a_copy_configures_the_whole_engine(engine: Engine) -> None:
    """A copy is the same engine: settings made through it apply to the original, and other values are rejected."""
    configure(engine.execution_options(logging_token="x"), namespace="bank")
    assert config_of(engine).namespace == "bank"
    with pytest.raises(ValueError, match=r"call configure\(\) once"):
        configure(engine, namespace="other")


def test_settings_are_found_from_a_connection() -> None:
    """A Connection, also one with execution options, leads to the settings of its engine."""
    engine = create_engine("sqlite://")
    configure(engine, namespace="bank")
    with engine.connect() as connection:
        assert config_of(connection).namespace == "bank"
        assert config_of(connection.execution_options(logging_token="x")).namespace == "bank"
        assert config_of(Session(connection).get_bind()).namespace == "bank"
    engine.dispose()


def test_settings_are_found_from_the_async_side() -> None:
    """An AsyncEngine, its sync engine, a copy and the bind of an AsyncSession share one setting."""
    engine = create_async_engine(URL)
    configure(engine, namespace="bank")
    copy = engine.execution_options(logging_token="x")
    session = async_sessionmaker(engine)()
    for thing in (
        engine,
        engine.sync_engine,
        copy,
        session.get_bind(),
        AsyncSession(copy).get_bind(),
    ):
        assert config_of(thing).namespace == "bank"
    with pytest.raises(ValueError, match=r"call configure\(\) once"):
        configure(engine.sync_engine, namespace="other")


def test_settings_do_not_keep_an_engine_alive() -> None:
    """An unused engine is collected, also if its settings refer back to it."""

    def made_and_configured() -> weakref.ref[Engine]:
        engine = create_engine(URL)
        configure(engine, lock_engine=lambda: engine)
        return weakref.ref(engine)

    gone = made_and_configured()
    gc.collect()
    assert gone() is None


@every_row(
    ("bad", "error"),
    [
        ({"namespace": 7}, TypeError),
        ({"namespace": None}, TypeError),
        ({"namespace": "a\x1fb"}, ValueError),
        ({"namespace": "a\x00"}, ValueError),
        ({"namespace": "\ud800"}, ValueError),
        ({"schema": 7}, TypeError),
        ({"schema": ""}, ValueError),
        ({"prefix": None}, TypeError),
        ({"prefix": b"x"}, TypeError),
        ({"default_timeout": None}, TypeError),
        ({"default_timeout": "30"}, TypeError),
        ({"default_timeout": True}, TypeError),
        ({"default_timeout": -1}, ValueError),
        ({"default_timeout": math.nan}, ValueError),
        ({"lock_engine": "postgresql://app:secret@db/app"}, TypeError),
        ({"lock_engine": 7}, TypeError),
        ({"max_lock_connections": 0}, ValueError),
        ({"max_lock_connections": -1}, ValueError),
        ({"max_lock_connections": True}, TypeError),
        ({"max_lock_connections": 2.0}, TypeError),
        ({"pooler": "pgbouncer"}, ValueError),
        ({"pooler": None}, ValueError),
        ({"on_event": "print"}, TypeError),
        ({"on_event": AsyncMock()}, TypeError),
    ],
)
def test_a_bad_value_is_rejected_and_leaves_nothing_set(
    engine: Engine, bad: dict[str, Any], error: type[Exception]
) -> None:
    """Each argument is checked before anything is stored, and no message shows a password."""
    with pytest.raises(error) as caught:
        configure(engine, **bad)
    assert "secret" not in str(caught.value)
    assert config_of(engine) == DEFAULT
    assert config_of(engine).events is not DEFAULT.events


@pytest.mark.parametrize("value", [0, math.inf])
def test_not_waiting_and_waiting_for_ever_are_defaults_one_may_choose(engine: Engine, value: float) -> None:
    """0 and math.inf are accepted as default timeouts."""
    configure(engine, default_timeout=value)
    assert config_of(engine).default_timeout == value


@every_row("thing", ["postgresql://app:secret@db/app", None, 7, create_engine])
def test_only_an_engine_can_be_configured(thing: object) -> None:
    """A URL or a function raises TypeError, and the message does not contain its text."""
    for call in (configure, config_of):
        with pytest.raises(TypeError, match="Engine") as caught:
            call(thing)
        assert "secret" not in str(caught.value)
