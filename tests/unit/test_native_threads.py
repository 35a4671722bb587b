"""Without native threads the heartbeat cannot run, and an error says so before a lease is requested."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import create_engine

from pgfence._leases.heartbeat.service import heartbeat_of
from pgfence._process.threads import require_native_threads
from pgfence.config import Config
from pgfence.errors import PgfenceError


def patched(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


@pytest.mark.parametrize(
    ("name", "members", "way"),
    [
        (
            "gevent.monkey",
            {"is_module_patched": lambda name: name == "queue"},
            r"`queue`.*patch_all\(thread=False, select",
        ),
        (
            "eventlet.patcher",
            {"is_monkey_patched": lambda name: name == "socket"},
            r"`socket`.*monkey_patch\(thread=False",
        ),
        ("uwsgi", {"opt": {"http": b":8000"}}, "--enable-threads"),
        ("uwsgi", {"opt": {b"http": b":8000"}}, "--enable-threads"),
    ],
)
def test_a_process_without_native_threads_is_rejected_with_advice(
    monkeypatch: pytest.MonkeyPatch, name: str, members: dict[str, Any], way: str
) -> None:
    """Patched threads and uWSGI without threads are rejected, with the option or call that helps."""
    monkeypatch.setitem(sys.modules, name, patched(name, **members))
    with pytest.raises(PgfenceError, match=way):
        heartbeat_of(create_engine("postgresql+psycopg://"), Config())


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("gevent.monkey", {"is_module_patched": lambda _: False}),
        ("eventlet.patcher", {"is_monkey_patched": lambda _: False}),
        ("uwsgi", {"opt": {b"enable-threads": True}}),
        ("uwsgi", {"opt": {"threads": b"4"}}),
    ],
)
def test_a_process_with_native_threads_is_fine(
    monkeypatch: pytest.MonkeyPatch, name: str, members: dict[str, Any]
) -> None:
    """The package gevent, installed or patching other modules, is accepted, and so is uWSGI with threads."""
    monkeypatch.setitem(sys.modules, name, patched(name, **members))
    require_native_threads()


def test_here_threads_are_native() -> None:
    """The check accepts an ordinary process."""
    require_native_threads()
