"""The page about permissions: the privileges in its table are enough for each feature, and each of them is needed."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session

from pgfence import (
    AdvisoryLock,
    Election,
    IdempotentEffect,
    Lease,
    LockKey,
    LockTimeoutError,
    Once,
    Partitions,
    RateLimit,
    SchemaError,
    Semaphore,
    TransactionLock,
    fenced,
    idempotent,
    monitoring,
    schema,
)
from pgfence._process.coroutines import run_sync
from support.servers import database, role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "permissions.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([^|]+?) \| ((?:[A-Z, ]+ on `|as for)[^|]+?) \|$", PAGE, re.MULTILINE))


def hold_lease(engine: Engine) -> None:
    for one in (Lease(engine, "a", ttl=5), Once(engine, "b", every=timedelta(hours=1))):
        with one.hold():
            pass


def hold_permit(engine: Engine) -> None:
    with Semaphore(engine, "p", permits=2, ttl=5, fair=True).hold():
        pass


def own_partitions(engine: Engine) -> None:
    one = Partitions(engine, "q", 2, ttl=5)
    with one.join(lambda _, held: held.wait_lost()) as worker:
        if not worker.owned:  # the worker has logged that it lacks a privilege, which it cannot raise
            run_sync(worker._balancer._balance)
        assert one.owner_of(0)


def resize_partitions(engine: Engine) -> None:
    Partitions(engine, "free", 2, ttl=5).resize(3)


def take_from_rate_limit(engine: Engine) -> None:
    limit = RateLimit(engine, "r", limit=2, per=60)
    assert limit.try_take()
    limit.change(limit=1, per=60)


def enter_gate(engine: Engine) -> None:
    with engine.connect() as connection, fenced(connection, "gate", 1):
        pass


def save_checkpoint(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("SELECT pgfence_enter_gates_v1(ARRAY['c'], ARRAY[1])"))
        connection.execute(text("SELECT pgfence_save_checkpoint_v1('c', 1, '{}')"))


def claim_key(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        idempotent(session, "k", scope="s").run(lambda: 1)


def run_effect(engine: Engine) -> None:
    IdempotentEffect(engine, "e", scope="s", ttl=5).run(lambda attempt: 1)


def evict(engine: Engine) -> None:
    monitoring.evict(engine, "held", reason="a test", actor="test")


def free_key(engine: Engine) -> None:
    assert monitoring.free_key(engine, "s", "stuck", reason="a test", actor="test")


def lead(engine: Engine) -> None:
    with Election(engine, "elected", ttl=5).lead() as term:
        term.renew()


def ask_to_resign(engine: Engine) -> None:
    asked = monitoring.ask_to_resign(engine, "leading", reason="a test", actor="test")
    assert asked is not None


def list_holds(engine: Engine) -> None:
    if any("GRANT SELECT" in sentence for sentence in monitoring.ps(engine).hidden):
        raise SchemaError("the list is not complete")


USES: dict[str, Callable[[Engine], object]] = {
    "leases, `AdvisoryLock(token=True)`, `Once`": hold_lease,
    "`Semaphore`": hold_permit,
    "`RateLimit`": take_from_rate_limit,
    "`Partitions`": own_partitions,
    "`Partitions.resize()`": resize_partitions,
    "`Election`, [`pgfence elect`](../how-to/keep-one-copy-running.md)": lead,
    "`monitoring.ask_to_resign()`, `pgfence evict --ask`": ask_to_resign,
    "fenced transactions, and writers to a fenced table": enter_gate,
    "`checkpoint()`": save_checkpoint,
    "`idempotent`": claim_key,
    "`IdempotentEffect`, the middlewares": run_effect,
    "[`pgfence ps`](who-holds-what.md), to list everything": list_holds,
    "[`pgfence purge`](purge-keys.md)": monitoring.purge,
    "[`pgfence keys`](it-is-stuck.md#free-a-stuck-idempotency-key)": monitoring.stuck_keys,
    "[`pgfence keys free`](it-is-stuck.md#free-a-stuck-idempotency-key)": free_key,
    "[`pgfence evict`](it-is-stuck.md#evict-a-holder)": evict,
    "[`pgfence audit`](../reference/cli.md#pgfence-audit)": monitoring.audit,
    "reading the state of a lease (`holders()`, `is_held()`)": lambda engine: Lease(engine, "held", ttl=5).holders(),
}


SAME_AS = {
    "as for fenced transactions": "fenced transactions, and writers to a fenced table",
    "as for leases": "leases, `AdvisoryLock(token=True)`, `Once`",
}


def list_grants(feature: str) -> list[str]:
    """Return the GRANTs that the page lists for a feature, one for each table and privilege."""
    grants = []
    for part in ROWS[feature].split("; "):
        if part in SAME_AS:
            grants += list_grants(SAME_AS[part])
            continue
        privileges, tables = re.sub(r"`change\(\)` also ", "", part).split(" on ")
        grants += [
            f"{privilege} ON {table}"
            for table in re.findall(r"`(\w+)`", tables)
            for privilege in privileges.split(", ")
        ]
    return grants


@pytest.fixture
def owner(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A superuser in a database with our tables, a held lease and a key whose attempt has failed."""

    def fail(_attempt: object) -> None:
        raise ConnectionError

    with database(dsn, "permissions") as own, psycopg.connect(own, autocommit=True) as connection:
        engine = create_engine(make_url(own).set(drivername="postgresql+psycopg"))
        schema.create_all(engine)
        with suppress(ConnectionError):
            IdempotentEffect(engine, "stuck", scope="s", ttl=30, takeover=False).run(fail)
        held = Lease(engine, "held", ttl=30).acquire()
        term = Election(engine, "leading", ttl=30).campaign()
        yield connection
        held.abandon()
        term.abandon()
        engine.dispose()


def test_the_page_has_a_row_for_each_feature() -> None:
    """The table and this file list the same features."""
    assert sorted(ROWS) == sorted(USES)


@pytest.mark.parametrize("feature", USES)
def test_the_listed_privileges_are_enough(feature: str, dsn: str, owner: psycopg.Connection[Any]) -> None:
    """A role with exactly the privileges of the page can use the feature, and without them it is denied."""
    with role(owner, dsn, {}) as login:
        url = make_url(login).set(drivername="postgresql+psycopg", database=owner.info.dbname)
        engine = create_engine(url)
        with pytest.raises((SchemaError, ProgrammingError)):
            USES[feature](engine)
        for grant in list_grants(feature):
            owner.execute(f"GRANT {grant} TO {url.username}".encode())
        USES[feature](engine)
        engine.dispose()


def test_only_a_wait_for_a_session_lock_needs_plpgsql(dsn: str, owner: psycopg.Connection[Any], name: str) -> None:
    """Without USAGE on the language a wait raises the driver's error, and a try and a transaction lock work."""
    owner.execute("REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC")
    with role(owner, dsn, {}) as login:
        url = make_url(login).set(drivername="postgresql+psycopg", database=owner.info.dbname)
        engine = create_engine(url)
        lock = AdvisoryLock(engine, name)
        owner.execute("SELECT pg_advisory_lock(%s)", [LockKey.of(name).value])
        assert lock.try_acquire() is None
        with pytest.raises(psycopg.Error, match="permission denied for language plpgsql"):
            lock.acquire(timeout=20)
        with engine.begin() as connection, pytest.raises(LockTimeoutError):
            TransactionLock(connection, name).acquire(timeout=1)
        owner.execute(f"GRANT USAGE ON LANGUAGE plpgsql TO {url.username}".encode())
        with pytest.raises(LockTimeoutError):
            lock.acquire(timeout=1)
        engine.dispose()
