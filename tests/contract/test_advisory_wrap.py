"""AdvisoryLock.wrap(): names from arguments, and what happens if the lock is held or the server is unreachable."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import pgfence
from pgfence.config import configure
from pgfence.errors import LockLostError, LockNotHeldError, LockTimeoutError, UnreachableError
from pgfence.keys import LockKey
from support.locking import elsewhere, is_free, labelled, lock, sessions, terminate
from support.rows import every_row
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


@dataclass
class Tenant:
    id: int
    parts: tuple[str, ...] = ("north", "south")


def work_of(world: World, seen: list[Any]) -> Callable[..., Any]:
    """A function of the world's kind with many kinds of arguments; it records the names it runs under."""

    def note(*args: Any) -> str:
        seen.append(pgfence.current(world.pick(pgfence.Held, pgfence.AsyncHeld)).names)
        return f"done {args}"

    def sync(a: Any, b: Any = "default", *args: Any, c: Any = 3, **rest: Any) -> str:
        """Doc."""
        return note(a, b)

    async def asynchronous(a: Any, b: Any = "default", *args: Any, c: Any = 3, **rest: Any) -> str:
        """Doc."""
        return note(a, b)

    return world.pick(sync, asynchronous)


async def test_a_call_runs_under_the_lock(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A call returns its result, current() returns the handle inside it, and the lock is free afterwards."""
    engine, free = world.engine(), []

    def sync(fail: bool) -> str:
        free.append(is_free(admin, name))
        assert pgfence.current(pgfence.Held).state == "held"
        return 1 / 0 if fail else "result"

    async def asynchronous(fail: bool) -> str:
        free.append(is_free(admin, name))
        assert pgfence.current(pgfence.AsyncHeld).state == "held"
        return 1 / 0 if fail else "result"

    guarded = lock(world, engine, name).wrap()(world.pick(sync, asynchronous))
    assert await world.call(guarded, fail=False) == "result"
    with pytest.raises(ZeroDivisionError):
        await world.call(guarded, True)
    assert free == [False, False]
    assert is_free(admin, name)
    with pytest.raises(LockNotHeldError):
        await world.call(pgfence.current, world.pick(pgfence.Held, pgfence.AsyncHeld))


async def test_names_come_from_the_arguments(world: World, name: str) -> None:
    """A name may use positional and keyword arguments, defaults, attributes, items, formats, braces and ready keys."""
    engine, seen = world.engine(), []
    key = LockKey.raw(77)
    for names, args, kwargs, expected in (
        (["{a}"], ("x",), {}, ("x",)),
        (["{a}:{b}"], (), {"a": "x", "b": "y"}, ("x:y",)),
        (["{a}:{b}"], ("x",), {}, ("x:default",)),
        (["{a.id:05d}"], (Tenant(42),), {}, ("00042",)),
        (["{a.parts[1]}"], (Tenant(42),), {}, ("south",)),
        (["{a[k]!r}"], ({"k": "v"},), {}, ("'v'",)),
        (["{a}", "fixed", key], ("x",), {}, ("x", "fixed", "key 77")),
        (["{{{a}}}"], ("x",), {}, ("{x}",)),
        (["{{literal}}"], ("x",), {}, ("{literal}",)),
        (["{c}"], ("x", "y", "z"), {"c": 9}, ("9",)),
        (["{extra}"], ("x",), {"extra": "e"}, ("e",)),
        (["{args[0]}"], ("x", "y", "z"), {}, ("z",)),
        (["no field"], ("x",), {}, ("no field",)),
    ):
        prefixed = [f"{name} {n}" if isinstance(n, str) else n for n in names]
        guarded = lock(world, engine, *prefixed).wrap()(work_of(world, seen))
        await world.call(guarded, *args, **kwargs)
        assert seen.pop() == tuple(f"{name} {n}" if isinstance(n, str) and n != "key 77" else n for n in expected)


@every_row("template", ["{missing}", "{0}", "{}", "{a", "{missing.attribute}", "{a:{missing}}"])
async def test_a_template_that_cannot_work_fails_at_decoration(world: World, template: str) -> None:
    """An unknown field, a number or an unmatched brace is a ValueError at decoration that names the arguments."""

    def sync(a: int) -> None:
        """A function without **kwargs."""

    async def asynchronous(a: int) -> None:
        """A function without **kwargs."""

    with pytest.raises(ValueError):
        lock(world, world.engine(), template).wrap()(world.pick(sync, asynchronous))


async def test_methods_are_guarded_with_self(world: World, name: str) -> None:
    """Fields of the name may refer to attributes of self."""
    engine = world.engine()

    class Service:
        tenant = Tenant(5)

        def sync(self) -> tuple[str, ...]:
            return pgfence.current(pgfence.Held).names

        async def asynchronous(self) -> tuple[str, ...]:
            return pgfence.current(pgfence.AsyncHeld).names

        guarded_sync = None

    method = world.pick(Service.sync, Service.asynchronous)
    Service.guarded = lock(world, engine, name + ":{self.tenant.id}").wrap()(method)
    assert await world.call(Service().guarded) == (name + ":5",)


async def test_wrong_arguments_are_the_functions_own_error(world: World, name: str) -> None:
    """Arguments that do not fit the signature raise TypeError, with and without fields in the name."""
    engine, seen = world.engine(), []
    for template in (name, name + "{a}"):
        with pytest.raises(TypeError):
            await world.call(lock(world, engine, template).wrap()(work_of(world, seen)))
    assert seen == []


async def test_outside_of_wrap_braces_are_text(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """In acquire and hold, braces in a name are literal text."""
    async with world.enter(lock(world, world.engine(), name + "{a}").hold()) as held:
        assert held.names == (name + "{a}",)


async def test_the_wrapped_function_looks_like_itself(world: World, name: str) -> None:
    """The wrapper has the function's name, docstring and signature, and stays a coroutine function if it was one."""
    function = work_of(world, [])
    guarded = lock(world, world.engine(), name).wrap()(function)
    assert (guarded.__name__, guarded.__doc__) == (function.__name__, "Doc.")
    assert inspect.signature(guarded) == inspect.signature(function)
    assert inspect.iscoroutinefunction(guarded) == world.is_async


async def test_a_name_that_is_no_template_is_named(world: World, name: str) -> None:
    """A single brace raises an error that shows the name and says how to write a literal brace."""
    decorate = lock(world, world.engine(), f"{name}:{{").wrap()
    with pytest.raises(ValueError, match=f"{name}:{{' is not a valid template .*To write a literal brace, double it"):
        decorate(work_of(world, []))
    with pytest.raises(
        ValueError, match=rf"'{name}:{{}}' contains the field {{}}, but a field must name an argument of"
    ):
        lock(world, world.engine(), f"{name}:{{}}").wrap()(work_of(world, []))


async def test_functions_that_a_lock_cannot_cover_are_rejected(world: World, name: str) -> None:
    """C014: a sync lock on a coroutine function, an async lock on a plain one, or a generator raises TypeError."""
    decorate = lock(world, world.engine(), name).wrap()

    def generator() -> Any:
        yield

    async def async_generator() -> Any:
        yield

    def sync() -> None:
        """Plain."""

    async def asynchronous() -> None:
        """Plain."""

    for wrong in (generator, async_generator, world.pick(asynchronous, sync)):
        with pytest.raises(TypeError):
            decorate(wrong)


async def test_busy_raises_after_the_wait(world: World, name: str, dsn: str) -> None:
    """By default, LockTimeoutError is raised after the configured or given timeout."""
    engine, seen = world.engine(), []
    configure(engine, default_timeout=0.1)
    with elsewhere(dsn, name):
        for timeout, expected in ((None, 0.1), (0.2, 0.2), (0, 0)):
            with pytest.raises(LockTimeoutError) as caught:
                await world.call(lock(world, engine, name).wrap(timeout=timeout)(work_of(world, seen)), 1)
            assert caught.value.timeout == expected
    assert seen == []


async def test_busy_skips_without_waiting(world: World, name: str, dsn: str) -> None:
    """busy="skip" returns None at once; with a timeout it waits that long first."""
    engine, seen = world.engine(), []
    guarded = lock(world, engine, name).wrap(busy="skip")(work_of(world, seen))
    patient = lock(world, engine, name).wrap(busy="skip", timeout=0.3)(work_of(world, seen))
    assert await world.call(guarded, 1) == "done (1, 'default')"
    with elsewhere(dsn, name):
        start = time.monotonic()
        assert await world.call(guarded, 1) is None
        assert time.monotonic() - start < FAR
        assert await world.call(patient, 1) is None
        assert time.monotonic() - start > 0.3
    assert len(seen) == 1


async def test_busy_may_choose_the_exception(world: World, name: str, dsn: str) -> None:
    """A callable receives the LockTimeoutError and returns or raises the exception to raise; the cause is kept."""

    class Conflict(Exception):
        """The HTTP response of a web framework."""

    def returned(error: LockTimeoutError) -> Exception:
        return Conflict(error.names, [seen.application_name for seen in error.holders])

    def raised(error: LockTimeoutError) -> Exception:
        raise Conflict(error.names, [seen.application_name for seen in error.holders])

    engine = world.engine()
    with elsewhere(dsn, name, label="other-deploy"):
        for busy in (returned, raised):
            start = time.monotonic()
            with pytest.raises(Conflict) as caught:
                await world.call(lock(world, engine, name).wrap(busy=busy)(work_of(world, [])), 1)
            assert time.monotonic() - start < FAR
            assert caught.value.args == ((name,), ["other-deploy"])
            assert isinstance(caught.value.__cause__ or caught.value.__context__, LockTimeoutError)


async def test_contradicting_options_are_rejected(world: World, name: str) -> None:
    """unreachable="skip" without busy="skip", and unknown values, raise ValueError before anything is decorated."""
    one = lock(world, world.engine(), name)
    for wrong in (
        {"unreachable": "skip"},
        {"unreachable": "skip", "busy": ValueError},
        {"busy": "wait"},
        {"unreachable": "ignore"},
    ):
        with pytest.raises(ValueError):
            one.wrap(**wrong)


def nowhere() -> str:
    """A DSN without a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return f"postgresql://user:s3cret@127.0.0.1:{port}/nothing"


@pytest.mark.every_driver
async def test_without_a_server_the_author_decides(world: World, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a server, "raise" raises UnreachableError, "run" runs without the lock, and "skip" returns None."""
    engine, ran = world.engine(dsn=nowhere()), []

    def sync() -> str:
        ran.append(1)
        return "ran"

    async def asynchronous() -> str:
        ran.append(1)
        return "ran"

    function = world.pick(sync, asynchronous)
    one = lock(world, engine, name)
    with pytest.raises(UnreachableError) as caught:
        await world.call(one.wrap()(function))
    assert "s3cret" not in str(caught.value)
    assert (ran, caught.value.retryable) == ([], True)
    with caplog.at_level(logging.WARNING, "pgfence"):
        assert await world.call(one.wrap(busy="skip", unreachable="skip")(function)) is None
        assert ran == []
        assert await world.call(one.wrap(unreachable="run")(function)) == "ran"
        assert await world.call(one.wrap(busy="skip", unreachable="run")(function)) == "ran"
    assert ran == [1, 1]
    assert sum("UNPROTECTED" in record.getMessage() for record in caplog.records) == 2
    assert "s3cret" not in caplog.text


async def test_an_unreachable_server_of_the_function_itself_is_its_own_error(world: World, name: str) -> None:
    """Only errors of the lock itself are handled: an error of the body propagates, and the body does not run twice."""
    ran = []

    def sync() -> None:
        ran.append(1)
        raise UnreachableError("another server")

    async def asynchronous() -> None:
        sync()

    guarded = lock(world, world.engine(), name).wrap(busy="skip", unreachable="run")(world.pick(sync, asynchronous))
    with pytest.raises(UnreachableError, match="another server"):
        await world.call(guarded)
    assert ran == [1]


async def test_a_timeout_of_the_function_itself_is_its_own_error(world: World, name: str) -> None:
    """A LockTimeoutError raised inside the body is not mistaken for this lock being busy."""

    def sync() -> None:
        raise LockTimeoutError("inner")

    async def asynchronous() -> None:
        raise LockTimeoutError("inner")

    guarded = lock(world, world.engine(), name).wrap(busy="skip")(world.pick(sync, asynchronous))
    with pytest.raises(LockTimeoutError, match="inner"):
        await world.call(guarded)


async def test_a_loss_inside_the_call_is_raised(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A loss cancels an async body, and a sync one is only notified at its end; both raise LockLostError."""
    engine, after = labelled(world, name), []

    def kill() -> None:
        terminate(admin, sessions(admin, name)[0].pid)

    def sync() -> None:
        kill()
        held = pgfence.current(pgfence.Held)
        end = time.monotonic() + 5
        while not held.lost and time.monotonic() < end:
            time.sleep(0.005)
        after.append(held.lost)

    async def asynchronous() -> None:
        kill()
        await asyncio.sleep(5)
        after.append("not cancelled")

    with pytest.raises(LockLostError):
        await world.call(lock(world, engine, name).wrap()(world.pick(sync, asynchronous)))
    assert after == world.pick([True], [])
    await eventually(lambda: is_free(admin, name))


async def test_the_engine_may_be_found_at_each_call(world: World, name: str) -> None:
    """For app factories, a function that returns the engine is called at each call, not at decoration."""
    asked: list[int] = []
    engine = world.engine()

    def find() -> Any:
        asked.append(1)
        return engine

    guarded = lock(world, find, name).wrap()(work_of(world, []))
    assert asked == []
    await world.call(guarded, 1)
    await world.call(guarded, 2)
    assert len(asked) == 2


async def test_calls_of_one_function_with_different_names_do_not_meet(world: World, name: str) -> None:
    """Calls for two tenants run at the same time, and two calls for one tenant one after the other."""
    engine, inside, overlaps = world.engine(), [], []

    def enter(tenant: int) -> None:
        overlaps.append(sorted([*inside, tenant]))
        inside.append(tenant)

    def sync(tenant: int) -> None:
        enter(tenant)
        time.sleep(0.05)
        inside.remove(tenant)

    async def asynchronous(tenant: int) -> None:
        enter(tenant)
        await asyncio.sleep(0.05)
        inside.remove(tenant)

    guarded = lock(world, engine, name + ":{tenant}").wrap(timeout=10)(world.pick(sync, asynchronous))
    await asyncio.gather(*(world.other().call(guarded, tenant) for tenant in (1, 1, 2, 2)))
    assert [1, 2] in overlaps
    assert [1, 1] not in overlaps
    assert [2, 2] not in overlaps
