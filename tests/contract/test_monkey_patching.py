"""Under gevent and eventlet, locks and leases are rejected before anything is sent, and the call that is advised works."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script

pytestmark = pytest.mark.usefixtures("tables")

PROGRAM = """
import sys
{patch}
import subprocess, time
from sqlalchemy import create_engine
from pgfence import AdvisoryLock, Lease, PgfenceError

dsn, name = sys.argv[1:3]
engine = create_engine("postgresql+psycopg://" + dsn.split("://", 1)[1])
for one in (AdvisoryLock(engine, name), Lease(engine, name + ":lease", ttl=3)):
    try:
        held = one.acquire(timeout=20)
    except PgfenceError as error:
        say("rejected", error)
        continue
    if isinstance(one, Lease):
        before = held.expires_at
        while held.expires_at == before:
            held.check()
            time.sleep(0.01)
        held.release()
        say("renewed")
    else:
        say("holds", held._hold.session.pid)
        while not held.lost:
            time.sleep(0.01)
        say(held.loss_reason)
"""
HOW = {
    "gevent": ("from gevent import monkey", "monkey.patch_all({})"),
    "eventlet": ("import eventlet", "eventlet.monkey_patch({})"),
}


def patching(library: str, options: str) -> str:
    first, call = HOW[library]
    return PROGRAM.format(patch=f"import warnings; warnings.simplefilter('ignore')\n{first}\n{call.format(options)}")


@pytest.mark.parametrize("library", HOW)
def test_a_patched_process_gets_an_error_that_says_what_works(
    script: Callable[..., Script], dsn: str, name: str, library: str, admin: psycopg.Connection[Any]
) -> None:
    """patch_all() is rejected for both kinds; with the options of the message a loss is noticed and a lease renewed."""
    patched = script(patching(library, ""), dsn, name)
    first, second = patched.read_line(), patched.read_line()
    assert first == second
    advice = re.search(r"\w+\.\w+\((thread=False.*?)\)", first)
    assert advice is not None, first
    working = script(patching(library, advice[1]), dsn, name)
    word, pid = working.read_line().split()
    assert word == "holds"
    admin.execute("SELECT pg_terminate_backend(%s)", [int(pid)])
    assert working.read_line() == "killed"
    assert working.read_line() == "renewed"


@pytest.mark.parametrize("module", ["select", "queue"])
def test_each_replaced_module_is_found(script: Callable[..., Script], dsn: str, name: str, module: str) -> None:
    """One replaced module that pgfence's threads need is enough, even if `threading` is unchanged."""
    code = PROGRAM.format(patch=f"from gevent import monkey\nmonkey.patch_{module}()")
    assert f"gevent has replaced `{module}`" in script(code, dsn, name).read_line()
