"""Programs for separate processes, in every world: written once, async, and made sync where the driver is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.worlds import World

IMPORTS = """
import asyncio, contextlib, os, random, signal, sys, threading, time
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from pgfence import AdvisoryLock, AsyncAdvisoryLock, configure
from pgfence.errors import *
"""
_TO_SYNC = (
    ("asyncio.run(main())", "main()"),
    ("asyncio.run(work())", "work()"),
    ("asyncio.sleep", "time.sleep"),
    ("create_async_engine", "create_engine"),
    ("async ", ""),
    ("await ", ""),
    ("Async", ""),
    ("__aenter__", "__enter__"),
)

_HOLDER = """
async def main():
    engine = create_async_engine(sys.argv[1])
    configure(engine, **{settings})
    lock = AsyncAdvisoryLock(engine, sys.argv[2])
    held = await lock.acquire(timeout=20)
{body}

asyncio.run(main())
"""


def program(world: World, code: str) -> str:
    """Return a program for the driver of a world.

    Args:
        world: which half of the package it uses.
        code: as for an async driver: `async def main()`, `await`, `AsyncAdvisoryLock`, `asyncio.run(main())`.
    """
    if not world.is_async:
        for theirs, ours in _TO_SYNC:
            code = code.replace(theirs, ours)
    return IMPORTS + code


def holder(world: World, body: str = "say('held'); park()", **settings: object) -> str:
    """Return a program that takes the lock `sys.argv[2]` at the URL `sys.argv[1]` and then runs `body`.

    The body sees `engine`, `lock` and `held`; it stands in an async function. The settings are those of `configure`.
    """
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return program(world, _HOLDER.format(body=lines, settings=settings))
