"""Locks used as those of other libraries, or given something else than they need: the right form is in the message."""

from __future__ import annotations

import asyncio
import re
import warnings
from copy import copy
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import pgfence
from pgfence import UnsupportedServerError, monitoring
from pgfence._api.misuse import HANDLE_NAMES
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINE = create_engine("postgresql+psycopg://nowhere/")
ASYNC_ENGINE = create_async_engine("postgresql+psycopg://nowhere/")

HELD: dict[str, Callable[[], Any]] = {
    "AdvisoryLock": lambda: pgfence.AdvisoryLock(ENGINE, "a"),
    "AsyncAdvisoryLock": lambda: pgfence.AsyncAdvisoryLock(ASYNC_ENGINE, "a"),
    "Lease": lambda: pgfence.Lease(ENGINE, "a", ttl=5),
    "AsyncLease": lambda: pgfence.AsyncLease(ASYNC_ENGINE, "a", ttl=5),
    "Once": lambda: pgfence.Once(ENGINE, "a", cron="0 7 * * *"),
    "AsyncOnce": lambda: pgfence.AsyncOnce(ASYNC_ENGINE, "a", cron="0 7 * * *"),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "TransactionLock": lambda: pgfence.TransactionLock(Session(ENGINE), "a"),
    "AsyncTransactionLock": lambda: pgfence.AsyncTransactionLock(AsyncSession(ASYNC_ENGINE), "a"),
    "IdempotentEffect": lambda: pgfence.IdempotentEffect(ENGINE, "k", scope="a"),
    "AsyncIdempotentEffect": lambda: pgfence.AsyncIdempotentEffect(ASYNC_ENGINE, "k", scope="a"),
}
ALL = HELD | OTHERS


def block_of(kind: str) -> str:
    """Return what the message must say about a block."""
    if "Effect" in kind:
        return r"use run\(fn\)"
    return "use `async with lock.hold" if kind.startswith("Async") else "use `with lock.hold"


@every_row("kind", ALL)
def test_a_noun_is_not_a_context_manager(kind: str) -> None:
    """C018: neither form of `with` enters it, whichever twin it is, and the message has the block that does."""
    noun = ALL[kind]()

    async def enter() -> None:
        async with noun:
            pytest.fail("it was entered")

    with pytest.raises(TypeError, match=f"{kind} is not a context manager: {block_of(kind)}"), noun:
        pytest.fail("it was entered")
    with pytest.raises(TypeError, match=f"{kind} is not an async context manager: {block_of(kind)}"):
        asyncio.run(enter())


@every_row("kind", ALL)
def test_a_noun_is_not_a_decorator(kind: str) -> None:
    """C018: `@AdvisoryLock(...)` raises at the decoration."""
    form = "@lock.wrap" if kind in HELD else r"lock.acquire\(\)` inside" if "Transaction" in kind else r"run\(fn\)"
    with pytest.raises(TypeError, match=f"{kind} is not a function or decorator: use .*{form}"):

        @ALL[kind]()
        def work() -> None: ...


@every_row("kind", ALL)
def test_what_others_have_is_named_where_it_is(kind: str) -> None:
    """`lock.release()` raises an error that names the handle, and hasattr() returns False for it."""
    noun = ALL[kind]()
    missing = "acquire" if "Effect" in kind else "release"
    where = "handle, .*hold" if kind in HELD else "COMMIT or ROLLBACK" if "Transaction" in kind else r"run\(fn\)"
    with pytest.raises(AttributeError, match=f"'{kind}' object has no attribute '{missing}': .*{where}"):
        getattr(noun, missing)
    assert not hasattr(noun, missing)
    assert missing not in dir(noun)
    with pytest.raises(AttributeError, match="attribute 'nothing'$"):
        _ = noun.nothing


@every_row("kind", [kind for kind in ALL if "Effect" not in kind])
def test_arguments_of_the_verbs_go_by_name(kind: str) -> None:
    """`acquire(5)` and `hold(blocking=False)` name the argument that does it."""
    noun = ALL[kind]()
    for verb in {"acquire", "try_acquire", "hold", "connect"} & set(dir(noun)):
        for args, kwargs in (((5,), {}), ((), {"blocking": False}), ((), {"blocking_timeout": 5})):
            got = "5" if args else next(f"{name}={value}" for name, value in kwargs.items())
            with pytest.raises(TypeError, match=rf"{kind}\.{verb}\(\) does not take {got}: .*\(timeout=5\) waits"):
                called = getattr(noun, verb)(*args, **kwargs)
                asyncio.run(called)


@every_row("kind", HELD)
def test_wrap_needs_its_parentheses(kind: str) -> None:
    """`@lock.wrap` raises at the decoration."""
    with pytest.raises(TypeError, match=rf"{kind}\.wrap\(\) does not take <function .*with parentheses"):

        @HELD[kind]().wrap
        def work() -> None: ...


def test_the_hold_of_a_transaction_lock_is_not_a_decorator() -> None:
    """As a decorator of a coroutine function, it would protect nothing."""
    for kind in ("TransactionLock", "AsyncTransactionLock"):
        with pytest.raises(TypeError, match="not a decorator"):
            OTHERS[kind]().hold()(print)


@every_row("several", [("a", "b"), ["a"], {"a"}])
def test_several_names_are_unpacked(several: Any) -> None:
    """A tuple or list is rejected as a name, because its str() would be a different name."""
    for make in (
        lambda: pgfence.AdvisoryLock(ENGINE, several),
        lambda: pgfence.AsyncAdvisoryLock(ASYNC_ENGINE, several),
        lambda: pgfence.TransactionLock(Session(ENGINE), several),
        lambda: pgfence.AsyncTransactionLock(AsyncSession(ASYNC_ENGINE), several),
        lambda: pgfence.TransactionLock.begin(ENGINE, several),
    ):
        with pytest.raises(TypeError, match=r"one by one, as in \*names"):
            make()
    for make in (lambda: pgfence.Lease(ENGINE, several, ttl=5), lambda: pgfence.Once(ENGINE, several, cron="@daily")):
        with pytest.raises(TypeError, match="must be a str"):
            make()
    with pytest.raises(TypeError, match="several resources were passed as a .*: pass a mapping"):
        pgfence.fence(Session(ENGINE), several, 1)


@every_row(
    ("given", "asynchronous"),
    [
        (Session(ENGINE), False),
        (scoped_session(sessionmaker(ENGINE)), False),
        (sessionmaker(ENGINE), False),
        (AsyncSession(ASYNC_ENGINE), True),
        (async_scoped_session(async_sessionmaker(ASYNC_ENGINE), scopefunc=lambda: None), True),
        (async_sessionmaker(ASYNC_ENGINE), True),
    ],
)
def test_a_session_or_its_factory_is_no_engine(given: Any, asynchronous: bool) -> None:
    """A sessionmaker is callable, and must not pass for a function that returns an engine."""
    fitting = "AsyncTransactionLock" if asynchronous else "Use TransactionLock"
    for kind in (pgfence.AdvisoryLock, pgfence.AsyncAdvisoryLock):
        with pytest.raises(TypeError, match=fitting):
            kind(given, "a")
    for kind in (pgfence.Lease, pgfence.AsyncLease):
        with pytest.raises(TypeError, match=rf"Engine, not {type(given).__name__}: .*lease.begin\("):
            kind(given, "a", ttl=5)
    for kind in (pgfence.Once, pgfence.AsyncOnce):
        with pytest.raises(TypeError, match=rf"Engine, not {type(given).__name__}"):
            kind(given, "a", cron="0 7 * * *")
    for kind in (pgfence.IdempotentEffect, pgfence.AsyncIdempotentEffect):
        with pytest.raises(TypeError, match=rf"Engine, not {type(given).__name__}"):
            kind(given, "k", scope="a")


@every_row(
    "given",
    [ENGINE, ASYNC_ENGINE, sessionmaker(ENGINE), async_sessionmaker(ASYNC_ENGINE), "postgresql://nowhere/"],
)
def test_a_transaction_lock_needs_a_transaction(given: Any) -> None:
    """An engine, a factory or a URL has no transaction, so the message refers to begin()."""
    for kind in (pgfence.TransactionLock, pgfence.AsyncTransactionLock):
        with pytest.raises(TypeError, match=r"TransactionLock\.begin\(\)"):
            kind(given, "a")


def test_the_wrong_twin_is_named() -> None:
    """Sync and async engines and sessions go to their own half."""
    for make, fitting in (
        (lambda: pgfence.AdvisoryLock(ASYNC_ENGINE, "a"), "AsyncAdvisoryLock"),
        (lambda: pgfence.AsyncAdvisoryLock(ENGINE, "a"), "use AdvisoryLock"),
        (lambda: pgfence.TransactionLock(AsyncSession(ASYNC_ENGINE), "a"), "AsyncTransactionLock"),
        (
            lambda: pgfence.AsyncTransactionLock(Session(ENGINE), "a"),
            "use TransactionLock for sync sessions and connections",
        ),
        (lambda: pgfence.TransactionLock(ASYNC_ENGINE, "a"), r"use AsyncTransactionLock\.begin\(\)"),
        (lambda: pgfence.AsyncTransactionLock(ENGINE, "a"), r"use TransactionLock\.begin\(\)"),
        (lambda: pgfence.Lease(ASYNC_ENGINE, "a", ttl=5), r"create_engine\(\), or the async counterpart of Lease"),
        (
            lambda: pgfence.AsyncLease(ENGINE, "a", ttl=5),
            r"create_async_engine\(\), or the sync counterpart of AsyncLease",
        ),
        (lambda: pgfence.ReadWriteLock(ASYNC_ENGINE, "a"), "^ReadWriteLock needs an Engine.*async counterpart"),
        (lambda: pgfence.AsyncReadWriteLock(ENGINE, "a"), "^AsyncReadWriteLock needs an AsyncEngine.*sync counterpart"),
        (lambda: pgfence.ReadWriteLock(Session(ENGINE), "a"), "^ReadWriteLock needs an Engine.*pass the engine"),
        (pgfence.ReadWriteLock(lambda: ASYNC_ENGINE, "a").read.acquire, "use AsyncReadWriteLock"),
        (lambda: pgfence.Election(ASYNC_ENGINE, "a"), "^Election needs an Engine"),
        (lambda: pgfence.AsyncElection(ENGINE, "a"), "^AsyncElection needs an AsyncEngine"),
        (lambda: pgfence.Partitions(ASYNC_ENGINE, "a", 2), "^Partitions needs an Engine"),
        (lambda: pgfence.AsyncPartitions(ENGINE, "a", 2), "^AsyncPartitions needs an AsyncEngine"),
        (lambda: pgfence.IdempotentEffect(ASYNC_ENGINE, "k", scope="a"), "async counterpart"),
        (lambda: pgfence.Lease(create_engine("postgresql+asyncpg://nowhere/"), "a", ttl=5), "create_async_engine"),
    ):
        with pytest.raises(TypeError, match=fitting):
            make()


def test_messages_name_no_private_class() -> None:
    """The locks of a ReadWriteLock are named as the caller knows them, and held() names what it needs."""
    with pytest.raises(TypeError, match=r"^ReadWriteLock\.write\.acquire\(\) does not take 5"):
        pgfence.ReadWriteLock(ENGINE, "a").write.acquire(5)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^held\(\) takes the connection from connect\(\), not Session"):
        pgfence.held(Session(ENGINE))  # type: ignore[call-overload]


@every_row(
    ("given", "advice"),
    [
        (7, "not int: use str\\(\\) if you mean its text"),
        (("a", "b"), "not tuple: pass one of its items"),
        (b"a", "not bytes: use decode\\(\\), because str\\(\\) would return another text"),
        (None, "not NoneType: str\\(\\) would return the text 'None'"),
        (pgfence.LockKey.of("a"), "not LockKey: pass the name itself"),
    ],
)
def test_the_name_of_a_lease_is_one_text(given: Any, advice: str) -> None:
    """Another object is rejected with advice that a lease accepts."""
    with pytest.raises(TypeError, match=advice):
        pgfence.Lease(ENGINE, given, ttl=5)


ADMIN: dict[str, Callable[[Any], Any]] = {
    "evict": lambda on: monitoring.evict(on, "a", reason="r"),
    "ask_to_resign": lambda on: monitoring.ask_to_resign(on, "a", reason="r"),
    "free_key": lambda on: monitoring.free_key(on, "s", "k", reason="r"),
    "release_leaked": lambda on: monitoring.release_leaked(on, reason="r"),
    "purge": monitoring.purge,
    "stuck_keys": monitoring.stuck_keys,
    "audit": monitoring.audit,
    "ps": monitoring.ps,
}


@every_row("name", list(ADMIN))
def test_functions_for_operators_name_a_wrong_engine(name: str) -> None:
    """Another database, or an object that is not an engine, raises an error that names it."""
    other = create_engine("sqlite://")
    with pytest.raises(UnsupportedServerError, match="sqlite"):
        ADMIN[name](other)
    with (
        other.connect() as connection,
        pytest.raises(TypeError, match="expected an Engine or AsyncEngine, not Connection"),
    ):
        ADMIN[name](connection)


def idempotent_on(given: Any) -> Any:
    """Ask for a key, and do nothing with it."""
    return pgfence.idempotent(given, "k", scope="s")


@pytest.mark.parametrize(
    ("drop", "form"),
    [
        (lambda: idempotent_on(Session(ENGINE)), r"Use idempotent\(\.\.\.\)\.run\(fn\), or `with idempotent"),
        (lambda: idempotent_on(AsyncSession(ASYNC_ENGINE)), r"Use await idempotent\(.*`async with idempotent"),
        (
            lambda: idempotent_on(AsyncSession(ASYNC_ENGINE)).run(print),
            r"Use await idempotent\(.*`async with idempotent",
        ),
        (
            lambda: pgfence.idempotent_call(key="{k}", scope="s"),
            r"Write @idempotent_call\(\.\.\.\) before the function",
        ),
    ],
    ids=["sync", "async", "not awaited", "decorator"],
)
def test_a_key_that_is_never_used_warns_with_the_right_form(
    monkeypatch: pytest.MonkeyPatch, drop: Callable[[], object], form: str
) -> None:
    """Nothing was done, which looks like success: a RuntimeWarning, as for a coroutine that is never awaited."""
    shown: list[tuple[object, str, str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # A record of Python's warning about the coroutine would keep the key alive.
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, kind, file, *_, **__: shown.append((kind, str(message), file))
        )
        drop()
    ours = [(kind, file) for kind, message, file in shown if re.search(form, message)]
    assert ours == [(RuntimeWarning, __file__)]


def test_a_key_is_used_in_its_own_ways() -> None:
    """As a decorator, as a block of the other kind, or run with the wrong kind of function it raises, and does not warn too."""

    async def enter(key: Any) -> None:
        async with key:
            pytest.fail("it was entered")

    async def work() -> None: ...

    sync, other = (lambda: idempotent_on(Session(ENGINE))), (lambda: idempotent_on(AsyncSession(ASYNC_ENGINE)))
    with pytest.raises(TypeError, match=r"Idem is not a function or decorator: use .*run\(fn\), or .*@idempotent_call"):
        sync()(work)
    with pytest.raises(TypeError, match="Idem is not an async context manager: use .*`with idempotent"):
        asyncio.run(enter(sync()))
    with pytest.raises(TypeError, match="AsyncIdem is not a context manager: use .*`async with idempotent"), other():
        pytest.fail("it was entered")
    with pytest.raises(TypeError, match="needs an AsyncSession"):
        sync().run(work)


def test_right_uses_are_none_of_these() -> None:
    """Keyword arguments pass, and a copy of a lock is a lock."""
    for make in HELD.values():
        lock = make()
        assert lock.hold(timeout=5) is not None
        assert callable(lock.wrap(timeout=5))
        assert type(copy(lock)) is type(lock)


def test_the_names_of_the_handle_are_all_of_them() -> None:
    """What the lock says of a name that belongs to its handle is said of each."""
    assert set(HANDLE_NAMES) == {name for name in dir(pgfence.HeldLease) if not name.startswith("_")}
