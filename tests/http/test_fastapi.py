"""`pgfence.fastapi` in an application of FastAPI, on every driver: locks, keys and responses for errors."""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import anyio.to_thread
import httpx2
import pytest
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Depends,
    FastAPI,
    Form,
    Header,
    HTTPException,
    Request,
    Response,
    Security,
    UploadFile,
    WebSocket,
)
from fastapi.dependencies.models import Dependant
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import OAuth2PasswordBearer
from fastapi.testclient import TestClient
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from starlette.datastructures import UploadFile as StoredFile

from pgfence.asgi import IdempotencyMiddleware
from pgfence.config import configure
from pgfence.errors import (
    AttemptLostError,
    CapacityError,
    DeadlockError,
    IdempotencyInProgressError,
    IdempotencyKeyReusedError,
    LockTimeoutError,
    PgfenceError,
    SchemaError,
    UnreachableError,
    VersionConflictError,
    VersionRequiredError,
)
from pgfence.fastapi import Idempotent, IdempotentCall, Locked, idempotency_key, install_error_handlers
from pgfence.idempotency import AsyncIdem
from pgfence.transaction import TransactionLock
from support.keyed import Desk
from support.waiting import FAR

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import psycopg
    from sqlalchemy.ext.asyncio import AsyncSession

    from support.worlds import World

REFUSES = """
    CREATE OR REPLACE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'refused at commit'; END $$;
    CREATE CONSTRAINT TRIGGER refuses AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION refuses();
"""
pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


class PayIn(BaseModel):
    amount: int
    note: str = ""


@dataclass
class PayOut:
    key: str
    amount: int


class Colour(str, enum.Enum):  # noqa: UP042, as much code of applications has it
    RED = "red"


class Oversold(LockTimeoutError):
    """An application's own error of pgfence."""

    http_status = 409


class Shop:
    """An application with a session of a world, and clients of it."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.app = FastAPI()
        install_error_handlers(self.app)
        self.plain = desk.plain()
        for engine in (desk.engine, self.plain):
            configure(engine, namespace=desk.scope)  # what a test leaves behind belongs to it alone
        self.session = self._async_session if desk.world.is_async else self._sync_session

    async def _async_session(self) -> AsyncIterator[AsyncSession]:
        async with self.desk.session() as session, session.begin():
            yield session

    def _sync_session(self) -> Iterator[Session]:
        with self.desk.session() as session, session.begin():
            yield session

    @asynccontextmanager
    async def client(self, *, raises: bool = False, **headers: str) -> AsyncIterator[httpx2.AsyncClient]:
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=raises)
        async with httpx2.AsyncClient(transport=transport, base_url="http://shop", headers=headers) as client:
            yield client

    def holding(self, name: str) -> Any:
        """Hold a lock from elsewhere for a block."""
        return TransactionLock.begin(self.plain, name)

    def holders(self, name: str) -> int:
        """Return how many hold a lock."""
        with self.plain.connect() as connection:
            return len(TransactionLock(connection, name).holders())

    def refuse_at_commit(self) -> None:
        """Let each commit of an effect fail."""
        self.desk.admin.execute(REFUSES.format(table=self.desk.table.name).encode())

    def locked(self, *names: str, **options: Any) -> Any:
        """Return what `dependencies=` takes."""
        return [Depends(Locked(*names, session=self.session, **options), scope="function")]

    def pays(self, path: str = "/payments", **options: Any) -> None:
        """Serve a payment whose effect is a row."""
        once = Idempotent(**({"session": self.session, "principal": user, "result": PayOut} | options))
        needed, desk = Depends(self.session, scope="function"), self.desk

        def work(session: Any, body: PayIn) -> PayOut:
            session.execute(text(f"INSERT INTO {desk.table.name} VALUES (:amount)"), {"amount": str(body.amount)})
            if body.note == "fails":
                raise HTTPException(503)
            return PayOut(str(uuid.uuid4()), body.amount)

        def pay(
            body: PayIn, call: IdempotentCall[PayOut] = Depends(once, scope="function"), session: Any = needed
        ) -> PayOut:
            return call.run(lambda: work(session, body))

        async def pay_async(
            body: PayIn, call: IdempotentCall[PayOut] = Depends(once, scope="function"), session: Any = needed
        ) -> PayOut:
            async def charge() -> PayOut:
                return await session.run_sync(work, body)

            return await call.run(charge)

        self.app.post(path, status_code=201)(pay_async if desk.world.is_async else pay)


def user(x_user: str | None = Header(default=None)) -> str | None:
    return x_user


def pays_as(knows: Any) -> Any:
    return Security(knows, scopes=["pay"])


async def runs(call: IdempotentCall[Any], value: object) -> Any:
    """Run a piece of work that gives a value, from an async endpoint on a session of either kind."""

    async def work() -> object:
        return value

    if isinstance(call._once, AsyncIdem):
        return await call.run(work)
    return await anyio.to_thread.run_sync(call.run, lambda: value)


@pytest.fixture
def shop(world: World, admin: psycopg.Connection[Any]) -> Iterator[Shop]:
    """An application on a desk of this world."""
    desk = Desk(world, admin, pool_size=10)
    here = Shop(desk)
    yield here
    here.plain.dispose()
    desk.close()


# ---------------------------------------------------------------- locks


@pytest.mark.every_driver
async def test_the_lock_is_held_from_before_the_endpoint_until_its_commit(shop: Shop) -> None:
    """The endpoint finds the lock held in its own transaction; after the response it is free."""
    seen = []

    def closes(account_id: int, session: Any = Depends(shop.session, scope="function")) -> None:
        seen.append((account_id, shop.holders(f"account:{account_id}")))

    shop.app.delete("/accounts/{account_id}", dependencies=shop.locked("account:{account_id}"))(closes)
    async with shop.client() as client:
        assert (await client.delete("/accounts/7")).status_code == 200
    assert seen == [(7, 1)]
    assert shop.holders("account:7") == 0


@pytest.mark.matrix
@pytest.mark.parametrize("path", ["/accounts/7", "/accounts/007", "/accounts/+7"])
async def test_a_busy_lock_is_423_however_the_number_is_written(shop: Shop, path: str) -> None:
    """A path says one number in many ways, and the lock is the one of the number that the endpoint gets."""

    def closes(account_id: int) -> None:
        raise AssertionError

    shop.app.delete("/accounts/{account_id}", dependencies=shop.locked("account:{account_id}", timeout=0))(closes)
    began = time.monotonic()
    with shop.holding("account:7"):
        async with shop.client() as client:
            answer = await client.delete(path)
    assert time.monotonic() - began < FAR  # the default timeout is 30
    assert (answer.status_code, answer.headers["Retry-After"]) == (423, "1")
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert "Send this request again" in problem.pop("detail")
    assert problem == {"title": "Locked", "status": 423, "code": "lock_timeout"}


async def test_a_lock_is_named_by_what_the_endpoint_would_get(shop: Shop) -> None:
    """A UUID in capitals, a member of an enumeration, a parameter that a dependency declares, or one of a router's prefix."""
    one = uuid.uuid4()

    def account(account_id: uuid.UUID) -> uuid.UUID:
        return account_id

    def paints(colour: Colour, shelf: int, account: uuid.UUID = Depends(account)) -> None:
        raise AssertionError

    router = APIRouter(prefix="/{account_id}")
    names = "{account_id}/{colour}/{shelf}"
    router.put("/{colour}", dependencies=shop.locked(names, timeout=0))(paints)
    shop.app.include_router(router, prefix="/shelves/{shelf}")
    with shop.holding(f"{one}/red/3"):
        async with shop.client() as client:
            answer = await client.put(f"/shelves/03/{str(one).upper()}/red")
            assert answer.status_code == 423
            assert (await client.put(f"/shelves/3/{one}/blue")).status_code == 422
            assert (await client.put("/shelves/3/7/red")).status_code == 422


async def test_a_name_that_cannot_be_one_is_the_clients_mistake(shop: Shop) -> None:
    """A text in the path that cannot be part of a name is 422, before anything is requested."""

    def closes(name: str) -> None:
        raise AssertionError

    shop.app.delete("/accounts/{name}", dependencies=shop.locked("account:{name}"))(closes)
    async with shop.client() as client:
        answer = await client.delete("/accounts/a%00b")
    assert (answer.status_code, answer.json()["code"]) == (422, "lock_name_invalid")
    assert answer.json()["detail"].startswith(
        "A parameter of the path cannot be part of the name of a lock: a lock name must "
    )
    assert answer.headers["Content-Type"] == "application/problem+json"


async def test_what_authenticates_in_front_of_the_lock_is_asked_first(shop: Shop) -> None:
    """Dependencies of the decorator run in their order: a stranger does not wait for a lock, nor hold it."""

    def stranger() -> None:
        raise HTTPException(401)

    def closes(account_id: int) -> None:
        raise AssertionError

    needed = [Depends(stranger), *shop.locked("account:{account_id}")]
    shop.app.delete("/accounts/{account_id}", dependencies=needed)(closes)
    with shop.holding("account:7"):
        async with shop.client() as client:
            assert (await client.delete("/accounts/7")).status_code == 401


async def test_waiters_leave_a_thread_to_the_holder(shop: Shop) -> None:
    """With one thread for all sync endpoints a queue for one lock is served, one after the other."""
    done = []

    def closes(account_id: int, session: Any = Depends(shop.session, scope="function")) -> None:
        done.append(account_id)

    needed = shop.locked("account:{account_id}", timeout=10)
    shop.app.delete("/accounts/{account_id}", dependencies=needed)(closes)
    anyio.to_thread.current_default_thread_limiter().total_tokens = 1
    async with shop.client() as client:
        answers = await asyncio.gather(*(client.delete("/accounts/7") for _ in range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert done == [7] * 6


@pytest.mark.every_driver
@pytest.mark.sync_only
async def test_a_request_cancelled_while_it_waits_returns_its_connection(shop: Shop) -> None:
    """The connection is returned when its thread has ended the wait, and not while the thread still uses it."""

    def closes(account_id: int) -> None:
        raise AssertionError

    needed = shop.locked("account:{account_id}", timeout=1)
    shop.app.delete("/accounts/{account_id}", dependencies=needed)(closes)
    with shop.holding("account:7"):
        async with shop.client() as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.delete("/accounts/7")
        assert shop.desk.blocked() == 0
        assert shop.desk.engine.pool.checkedout() == 0
        with shop.desk.engine.connect() as connection:
            assert connection.scalar(text("SELECT 1")) == 1


@pytest.mark.parametrize("world", ["psycopg2"], indirect=True)
async def test_waiters_inside_sync_endpoints_leave_no_thread(shop: Shop) -> None:
    """The control: the response of the request that holds the lock needs a thread, and waiters for its commit occupy all threads."""

    def closes(account_id: int, session: Any = Depends(shop.session, scope="function")) -> int:
        TransactionLock(session, f"account:{account_id}").acquire(timeout=0.5)
        return account_id

    shop.app.delete("/accounts/{account_id}")(closes)
    anyio.to_thread.current_default_thread_limiter().total_tokens = 1
    async with shop.client() as client:
        answers = await asyncio.gather(*(client.delete("/accounts/7") for _ in range(3)))
    assert 423 in [answer.status_code for answer in answers]


async def test_a_session_in_another_scope_is_rejected(shop: Shop) -> None:
    """The endpoint would work in another transaction than the one that is locked, or that has the key."""

    def closes(account_id: int, session: Any = Depends(shop.session)) -> None:
        raise AssertionError

    once = Idempotent(session=shop.session, principal=user, result=int)
    shop.app.delete("/accounts/{account_id}", dependencies=shop.locked("account:{account_id}"))(closes)
    shop.app.put("/accounts/{account_id}", dependencies=[Depends(once, scope="function")])(closes)
    async with shop.client(raises=True, **{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        for method in ("DELETE", "PUT"):
            with pytest.raises(TypeError, match='without scope="function"'):
                await client.request(method, "/accounts/7")


async def test_a_session_that_is_not_shared_is_rejected(shop: Shop) -> None:
    """Without the cache the endpoint gets a separate session, also without another scope."""

    def closes(account_id: int, session: Any = Depends(shop.session, scope="function", use_cache=False)) -> None:
        raise AssertionError

    once = Idempotent(session=shop.session, principal=user, result=int)
    shop.app.delete("/accounts/{account_id}", dependencies=shop.locked("account:{account_id}"))(closes)
    shop.app.put("/accounts/{account_id}", dependencies=[Depends(once, scope="function")])(closes)
    async with shop.client(raises=True, **{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        for method in ("DELETE", "PUT"):
            with pytest.raises(TypeError, match="use_cache=False"):
                await client.request(method, "/accounts/7")


async def test_a_session_for_each_set_of_scopes_is_rejected(shop: Shop) -> None:
    """A session that depends on who is asking is another one below a `Security` with scopes."""
    token = OAuth2PasswordBearer(tokenUrl="token")

    def tenant(token: str = Depends(token), session: Any = Depends(shop.session, scope="function")) -> Any:
        yield session

    def knows(session: Any = Depends(tenant, scope="function")) -> str:
        return "ann"

    def closes(account_id: int, session: Any = Depends(tenant, scope="function"), user: str = pays_as(knows)) -> None:
        raise AssertionError

    once = Idempotent(session=tenant, principal=user, result=int)
    lock = Locked("account:{account_id}", session=tenant)
    shop.app.delete("/accounts/{account_id}", dependencies=[Depends(lock, scope="function")])(closes)
    shop.app.put("/accounts/{account_id}", dependencies=[Depends(once, scope="function")])(closes)
    headers = {"x-user": "ann", "Idempotency-Key": "k1", "Authorization": "Bearer x"}
    async with shop.client(raises=True, **headers) as client:
        for method in ("DELETE", "PUT"):
            with pytest.raises(TypeError, match=r"under Security\(scopes="):
                await client.request(method, "/accounts/7")


async def test_scopes_that_share_the_session_are_accepted(shop: Shop) -> None:
    """A session that does not depend on who is asking is shared by newer versions of FastAPI; the oldest make two of it."""
    seen = []

    def knows(session: Any = Depends(shop.session, scope="function")) -> str:
        seen.append(session)
        return "ann"

    def closes(
        account_id: int, session: Any = Depends(shop.session, scope="function"), user: str = pays_as(knows)
    ) -> None:
        seen.append(session)

    shop.app.delete("/accounts/{account_id}", dependencies=shop.locked("account:{account_id}"))(closes)
    async with shop.client(raises=True) as client:
        if "security_scopes" in Dependant.__dataclass_fields__:
            with pytest.raises(TypeError, match=r"under Security\(scopes="):
                await client.delete("/accounts/7")
        else:
            assert (await client.delete("/accounts/7")).status_code == 200
            assert seen == [seen[0]] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["route", "router", "inclusion", "inclusion of an inclusion", "application"])
async def test_a_lock_may_stand_wherever_dependencies_do(shop: Shop, where: str) -> None:
    """A parameter that a dependency of the router, of its inclusion or of the application declares names the lock."""

    def account(account_id: int) -> int:
        return account_id

    def closes(session: Any = Depends(shop.session, scope="function")) -> None:
        raise AssertionError

    needed = [Depends(account), *shop.locked("account:{account_id}", timeout=0)]
    here = {name: needed if where == name else [] for name in (where, "route", "router", "inclusion")}
    shop.app.router.dependencies.extend(needed if where == "application" else [])
    router = APIRouter(dependencies=here["router"])
    router.delete("/now", dependencies=here["route"])(closes)
    if where == "inclusion of an inclusion":
        outer = APIRouter(prefix="/{account_id}")
        outer.include_router(router)
        shop.app.include_router(outer, prefix="/accounts", dependencies=needed)
    else:
        shop.app.include_router(router, prefix="/accounts/{account_id}", dependencies=here["inclusion"])
    with shop.holding("account:7"):
        async with shop.client(raises=True) as client:
            assert (await client.delete("/accounts/007/now")).status_code == 423


async def test_a_session_in_another_scope_is_rejected_everywhere(shop: Shop) -> None:
    """An inclusion that asks for the session in the request's scope makes a second one."""

    def closes(account_id: int) -> None:
        raise AssertionError

    router = APIRouter()
    router.delete("/accounts/{account_id}", dependencies=shop.locked("account:{account_id}"))(closes)
    shop.app.include_router(router, dependencies=[Depends(shop.session)])
    async with shop.client(raises=True) as client:
        with pytest.raises(TypeError, match='without scope="function"'):
            await client.delete("/accounts/7")


@pytest.mark.parametrize("kind", ["sync", "async", "object", "wrapped"])
@pytest.mark.one_driver
async def test_an_endpoint_that_streams_is_rejected(shop: Shop, kind: str) -> None:
    """FastAPI runs a generator when the session has ended: without its lock, and what it does under a key is never committed."""
    ran = []

    def streams(account_id: int, session: Any = Depends(shop.session, scope="function")) -> Iterator[int]:
        ran.append(account_id)
        yield account_id

    async def streams_async(account_id: int, session: Any = Depends(shop.session, scope="function")) -> Any:
        ran.append(account_id)
        yield account_id

    class Streams:
        def __call__(self, account_id: int) -> Iterator[int]:
            ran.append(account_id)
            yield account_id

    @functools.wraps(streams)
    def wrapped(account_id: int, **given: Any) -> Iterator[int]:
        return streams(account_id, **given)

    endpoint = {"sync": streams, "async": streams_async, "object": Streams(), "wrapped": wrapped}[kind]
    once = Idempotent(session=shop.session, principal=user, result=int)
    options: Any = {"response_model": None}
    shop.app.delete("/accounts/{account_id}", dependencies=shop.locked("account:{account_id}"), **options)(endpoint)
    shop.app.put("/accounts/{account_id}", dependencies=[Depends(once, scope="function")], **options)(endpoint)
    async with shop.client(raises=True, **{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        for method in ("DELETE", "PUT"):
            with pytest.raises(TypeError, match="is a generator"):
                await client.request(method, "/accounts/7")
    assert ran == []


async def test_an_undeclared_field_is_rejected(shop: Shop) -> None:
    """It would be the text of the path, which says one number in many ways."""

    def closes() -> None:
        raise AssertionError

    shop.app.delete("/accounts/{account_id}", dependencies=shop.locked("account:{account_id}"))(closes)
    async with shop.client(raises=True) as client:
        with pytest.raises(TypeError, match="{account_id}"):
            await client.delete("/accounts/7")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "Locked needs at least one name"),
        (("account:{}",), "a field in a name of Locked must be just the name of a path parameter, not ''"),
        (
            ("account:{user.id}",),
            "a field in a name of Locked must be just the name of a path parameter, not 'user.id'",
        ),
    ],
)
def test_names_that_cannot_work_are_rejected_in_the_decorator(names: tuple[str, ...], said: str) -> None:
    """A lock without a name, or with a field that is not a parameter, is a ValueError in the decorator."""
    with pytest.raises(ValueError, match=f"^{said}$"):
        Locked(*names, session=user)


# ---------------------------------------------------------------- keys


@pytest.mark.every_driver
async def test_a_repeated_request_gets_the_first_response(shop: Shop) -> None:
    """C105: one effect; the replay has the same status and body, and says what it is."""
    shop.pays()
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": '"k1"'}) as client:
        first = await client.post("/payments", json={"amount": 5, "note": ""})
        again = await client.post("/payments", json={"note": "", "amount": 5.0}, headers={"Idempotency-Key": "k1"})
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.content == again.content
    assert ("Idempotent-Replayed" in first.headers, again.headers["Idempotent-Replayed"]) == (False, "true")
    assert shop.desk.effects() == 1


async def test_a_replay_in_the_endpoints_response_is_marked_in_its_headers(shop: Shop) -> None:
    """A Response of the endpoint's own takes status and headers from the parameter `response`, set outside of the work."""
    once = Idempotent(session=shop.session, principal=user, result=int)

    async def pays(response: Response, call: IdempotentCall[int] = Depends(once, scope="function")) -> JSONResponse:
        value = await runs(call, 7)
        return JSONResponse(value, 202, headers=dict(response.headers))

    shop.app.post("/payments")(pays)
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        answers = [await client.post("/payments") for _ in range(2)]
    assert [(answer.status_code, answer.json()) for answer in answers] == [(202, 7)] * 2
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true"]


@pytest.mark.every_driver
async def test_requests_at_the_same_time_have_one_effect(shop: Shop) -> None:
    """C095: they wait for the first one's commit, and get its response."""
    shop.pays()
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        answers = await asyncio.gather(*(client.post("/payments", json={"amount": 5}) for _ in range(8)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}
    assert shop.desk.effects() == 1


@pytest.mark.parametrize("world", ["psycopg2"], indirect=True)
async def test_waiters_for_a_key_in_a_sync_endpoint_have_the_default_timeout(shop: Shop) -> None:
    """C095: the answer of the first one needs a thread, which those who wait for its commit give back after `default_timeout=`."""
    engine = shop.desk.plain()
    configure(engine, namespace=shop.desk.scope, default_timeout=0.5)

    def session() -> Iterator[Session]:
        with Session(engine) as session, session.begin():
            yield session

    once = Idempotent(session=session, principal=user, result=int)

    def pays(call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        return call.run(lambda: 7)

    shop.app.post("/payments")(pays)
    anyio.to_thread.current_default_thread_limiter().total_tokens = 1
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        answers = await asyncio.gather(*(client.post("/payments") for _ in range(3)))
        assert (await client.post("/payments")).json() == 7
    engine.dispose()
    told = {answer.status_code: answer for answer in answers}
    assert set(told) == {200, 409}
    assert told[409].headers["Retry-After"] == "1"


@pytest.mark.sync_only
async def test_an_async_endpoint_on_a_sync_session_is_rejected(shop: Shop) -> None:
    """C095: one that waits for a key would stop the event loop, on which the commit of the first one is to come."""
    once = Idempotent(session=shop.session, principal=user, result=int)

    async def pays(call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        return call.run(lambda: 7)

    async def pays_aside(call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        return await runs(call, 7)

    shop.app.post("/payments")(pays)
    shop.app.put("/payments")(pays_aside)
    async with shop.client(raises=True, **{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        with pytest.raises(TypeError, match="an async endpoint"):
            await client.post("/payments")
        answers = await asyncio.gather(*(client.put("/payments") for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4


async def test_another_request_under_the_key_is_422_except_of_another_user(shop: Shop) -> None:
    """C102: another body or query is rejected without the stored response; another principal or path is independent."""
    shop.pays()
    shop.pays("/refunds")
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        first = await client.post("/payments", json={"amount": 5})
        for path, body in (("/payments", {"amount": 6}), ("/payments?a=1", {"amount": 5})):
            other = await client.post(path, json=body)
            assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
            assert first.json()["key"] not in other.text
        for path, name in (("/payments", "bob"), ("/refunds", "ann"), ("/payments", "x" * 300), ("/payments", "a\x00")):
            answer = await client.post(path, json={"amount": 6}, headers={"x-user": name.encode()})
            assert answer.status_code == 201, answer.text
    assert shop.desk.effects() == 5


async def test_what_a_client_says_of_the_host_hides_nothing(shop: Shop) -> None:
    """C108: a URL that is made of the header `Host` may lose its query, or be none at all; keys and errors do without."""
    shop.pays()
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1", "Host": "a#"}) as client:
        assert (await client.post("/payments?a=1", json={"amount": 5})).status_code == 201
        assert (await client.post("/payments?a=2", json={"amount": 5})).status_code == 422
        answer = await client.post("/payments?a=2", json={"amount": 5}, headers={"Host": "[x"})
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
    assert shop.desk.effects() == 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ([], b'{"amount": 5}', "idempotency_key_missing"),
        ([("Idempotency-Key", "a"), ("Idempotency-Key", "a")], b'{"amount": 5}', "idempotency_key_repeated"),
        ([("Idempotency-Key", "")], b'{"amount": 5}', "idempotency_key_invalid"),
        ([("Idempotency-Key", '""')], b'{"amount": 5}', "idempotency_key_invalid"),
        ([("Idempotency-Key", "k" * 256)], b'{"amount": 5}', "idempotency_key_invalid"),
        ([("Idempotency-Key", "a"), ("x-user", "")], b'{"amount": 5}', "principal_missing"),
        ([("Idempotency-Key", "a")], b'{"amount": 5, "more": NaN}', "payload_invalid"),
        (
            [("Idempotency-Key", "a")],
            b'{"amount": 5, "more": ' + b"[" * 5000 + b"]" * 5000 + b"}",
            None,
        ),
    ],
    ids=["none", "two", "empty", "quotes", "long", "nobody", "nan", "deep"],
)
async def test_a_request_without_one_usable_key_and_a_principal_is_400(
    shop: Shop, headers: list[tuple[str, str]], body: bytes, code: str | None
) -> None:
    """C108: for any input, the response says what is wrong, and nothing was done."""
    shop.pays()
    usual = [("x-user", "ann"), ("Content-Type", "application/json")]
    if any(name == "x-user" for name, _ in headers):
        usual = usual[1:]
    async with shop.client() as client:
        answer = await client.post("/payments", content=body, headers=[*usual, *headers])
    assert (answer.status_code, bool(answer.json()["detail"])) == (400, True), answer.text
    if code is not None:  # else it is FastAPI that cannot read the body
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert (answer.json()["code"], answer.json()["title"]) == (code, "Bad Request")
    assert shop.desk.effects() == 0


@pytest.mark.every_driver
async def test_an_error_of_the_endpoint_frees_the_key(shop: Shop) -> None:
    """C101: the transaction rolls back, and the next request does the work."""
    shop.pays()
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        assert (await client.post("/payments", json={"amount": 5, "note": "fails"})).status_code == 503
        assert shop.desk.effects() == 0
        assert (await client.post("/payments", json={"amount": 5})).status_code == 201
    assert shop.desk.effects() == 1


@pytest.mark.every_driver
async def test_a_failed_commit_is_not_a_result(shop: Shop) -> None:
    """The client has its 201 after the commit alone: where that fails it gets the error, and nothing is stored."""
    shop.pays()
    shop.refuse_at_commit()
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        assert (await client.post("/payments", json={"amount": 5})).status_code == 500
        shop.desk.admin.execute(f"DROP TRIGGER refuses ON {shop.desk.table.name}".encode())
        answer = await client.post("/payments", json={"amount": 5})
    assert (answer.status_code, answer.headers.get("Idempotent-Replayed")) == (201, None)
    assert shop.desk.effects() == 1


async def test_without_function_scope_the_response_precedes_the_commit(shop: Shop) -> None:
    """The control: a session that FastAPI ends with the request lets a client believe what is never committed."""
    insert = f"INSERT INTO {shop.desk.table.name} VALUES ('late')"

    async def late(session: Any = Depends(shop.session)) -> None:
        await shop.desk.on(session, lambda session: session.execute(text(insert)))

    shop.app.post("/late", status_code=201)(late)
    shop.refuse_at_commit()
    async with shop.client() as client:
        assert (await client.post("/late")).status_code == 201
    assert shop.desk.effects() == 0


@pytest.mark.parametrize("where", ["background task", "streamed response"])
async def test_work_after_the_endpoint_has_returned_is_rejected(shop: Shop, where: str) -> None:
    """The session has ended by then, so nothing would commit what is done under the key: it raises, and the key stays free."""
    once = Idempotent(session=shop.session, principal=user, result=int)

    async def late(
        tasks: BackgroundTasks, call: IdempotentCall[int] = Depends(once, scope="function")
    ) -> Response | None:
        async def stream() -> AsyncIterator[str]:
            yield str(await runs(call, 7))

        if where == "streamed response":
            return StreamingResponse(stream())
        tasks.add_task(runs, call, 7)
        return None

    shop.app.post("/late", response_model=None)(late)
    async with shop.client(raises=True, **{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        with pytest.raises(TypeError, match="after the endpoint had returned"):
            await client.post("/late")


async def test_a_form_with_a_file_is_compared_by_what_it_says(shop: Shop) -> None:
    """C103: a client writes another boundary each time; the file can still be read by the endpoint."""
    once = Idempotent(session=shop.session, principal=user, result=int)

    async def takes(
        name: Annotated[str, Form()],
        file: UploadFile,
        call: IdempotentCall[int] = Depends(once, scope="function"),
    ) -> int:
        return await runs(call, len(await file.read()))

    shop.app.post("/files")(takes)
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        for content, status, replayed in ((b"abc", 200, None), (b"abc", 200, "true"), (b"xyz", 422, None)):
            answer = await client.post("/files", data={"name": "a"}, files={"file": ("f.txt", content)})
            assert (answer.status_code, answer.headers.get("Idempotent-Replayed")) == (status, replayed), answer.text
            assert status == 422 or answer.json() == 3


async def test_a_file_that_was_read_before_is_compared_as_a_whole(shop: Shop) -> None:
    """C102: a dependency that looks at a file leaves it at its end; another file under the key is another request all the same."""
    once = Idempotent(session=shop.session, principal=user, result=int)

    async def scan(file: UploadFile) -> None:
        await file.read()

    async def takes(file: UploadFile, call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        return await runs(call, len(await file.read()))

    shop.app.post("/files", dependencies=[Depends(scan)])(takes)
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        for content, status in ((b"abc", 200), (b"abc", 200), (b"xyz", 422)):
            answer = await client.post("/files", files={"file": ("f.txt", content)})
            assert answer.status_code == status, answer.text
            assert status == 422 or answer.json() == 3


@pytest.mark.parametrize("world", ["asyncpg"], indirect=True)
async def test_a_large_file_is_never_whole_in_memory(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """C102: it is read in pieces, to its last byte."""
    once = Idempotent(session=shop.session, principal=user, result=int)
    asked = []
    read = StoredFile.read

    async def reads(self: StoredFile, size: int = -1) -> bytes:
        asked.append(size)
        return await read(self, size)

    async def takes(file: UploadFile, call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        return await runs(call, file.size)

    monkeypatch.setattr(StoredFile, "read", reads)
    shop.app.post("/files")(takes)
    start = bytes(3 * 2**20)
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        for end, status in ((b"a", 200), (b"a", 200), (b"b", 422)):
            answer = await client.post("/files", files={"file": ("f.txt", start + end)})
            assert answer.status_code == status, answer.text
    assert set(asked) == {2**20}


class Reads(APIRoute):
    """A route that looks at the bytes of each request before FastAPI does."""

    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def reads(request: Request) -> Response:
            await request.body()
            return await handler(request)

        return reads


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["form", "bytes", "before"])
async def test_a_form_is_compared_by_its_fields_whatever_reads_it(shop: Shop, how: str) -> None:
    """C103: a retry has another boundary, also if the endpoint, or code before it, reads the form or its bytes."""
    once = Idempotent(session=shop.session, principal=user, result=int)

    async def parses(request: Request, call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        async with request.form(max_files=1) as form:
            file: Any = form["file"]
            return await runs(call, len(await file.read()))

    async def looks(request: Request, call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        return await runs(call, (await request.body()).count(b"\x00"))

    async def takes(file: UploadFile, call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        return await runs(call, len(await file.read()))

    shop.app.router.route_class = Reads if how == "before" else APIRoute
    shop.app.post("/files")({"form": parses, "bytes": looks, "before": takes}[how])
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        for content, status, replayed in ((b"\0" * 3, 200, None), (b"\0" * 3, 200, "true"), (b"\1" * 3, 422, None)):
            answer = await client.post("/files", data={"name": "a"}, files={"file": ("f.txt", content)})
            assert (answer.status_code, answer.headers.get("Idempotent-Replayed")) == (status, replayed), answer.text
            assert status == 422 or answer.json() == 3


@pytest.mark.parametrize("world", ["asyncpg"], indirect=True)
async def test_a_form_that_can_be_read_in_no_usual_way_is_compared_as_it_is(shop: Shop) -> None:
    """C103: a broken form, or a field that only the endpoint lets be so large, is the endpoint's; another one is another request."""
    once = Idempotent(session=shop.session, principal=user, result=int)

    async def parses(request: Request, call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        async with request.form(max_part_size=2**22) as form:
            return await runs(call, len(form))

    async def looks(request: Request, call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        return await runs(call, len(await request.body()))

    shop.app.post("/forms")(parses)
    shop.app.post("/bytes")(looks)
    part = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n%b\r\n--b--\r\n'
    for path, first, second in (
        ("/forms", part % (b"a" * 2**21), part % (b"b" * 2**21)),
        ("/bytes", b"no form", b"nor this"),
        ("/bytes", b"--b--\r\n", b"--b--\r\n\r\n"),
    ):
        headers = {
            "x-user": "ann",
            "Idempotency-Key": str(uuid.uuid4()),
            "Content-Type": "multipart/form-data; boundary=b",
        }
        async with shop.client(**headers) as client:
            for body, status in ((first, 200), (first, 200), (second, 422)):
                answer = await client.post(path, content=body)
                assert answer.status_code == status, (first[:9], answer.text)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data; boundary=b"])
async def test_a_consumed_body_is_not_an_empty_form(shop: Shop, kind: str) -> None:
    """C102: its content is not known any more, so it is equal to no other: the program gets an error."""
    once = Idempotent(session=shop.session, principal=user, result=int)

    async def signed(request: Request) -> None:
        async for _ in request.stream():
            pass

    async def takes(call: IdempotentCall[int] = Depends(once, scope="function")) -> int:
        return await runs(call, 1)

    shop.app.post("/hooks", dependencies=[Depends(signed)])(takes)
    headers = {"x-user": "ann", "Idempotency-Key": "k1", "Content-Type": kind}
    async with shop.client(raises=True, **headers) as client:
        for body in (b'{"a": 1}', b'{"a": 2}'):
            with pytest.raises(RuntimeError, match="Stream consumed"):
                await client.post("/hooks", content=body)


@pytest.mark.parametrize("world", ["asyncpg"], indirect=True)
async def test_json_is_compared_by_what_it_says_however_its_type_is_written(shop: Shop) -> None:
    """C103: the name of a type has no case, nor does it need its members in an order."""
    shop.pays()
    async with shop.client(**{"x-user": "ann", "Idempotency-Key": "k1"}) as client:
        for kind, body in (
            ("APPLICATION/JSON", b'{"amount":5,"note":""}'),
            ("application/json", b'{"note":"","amount":5}'),
        ):
            answer = await client.post("/payments", content=body, headers={"Content-Type": kind})
            assert answer.status_code == 201, answer.text
    assert shop.desk.effects() == 1


def test_an_unstorable_result_is_rejected_where_it_is_named() -> None:
    """It is a TypeError in the module of the endpoints, before anything is served."""
    with pytest.raises(TypeError):
        Idempotent(session=user, principal=user, result=Session)


async def test_a_principal_that_is_not_a_text_raises(shop: Shop) -> None:
    """It is not turned into one silently: the repr of an object would be another one each time."""
    shop.pays(principal=lambda: 7)
    async with shop.client(raises=True, **{"Idempotency-Key": "k1"}) as client:
        with pytest.raises(TypeError, match="principal must return a str"):
            await client.post("/payments", json={"amount": 5})


BAD_KEYS = [
    [],
    [b"a", b"b"],
    [b"a, b"],
    [b'"a";p=1'],
    [b'"""a'],
    [b'a\\"b'],
    [b"\xff\xfe"],
    [b'""'],
    [b""],
    [b"k" * 256],
]


def test_the_key_of_a_request_is_one_string() -> None:
    """C108: with its quotes and without it is the same key; none, two, and what only looks like one are 400."""
    app = FastAPI()
    app.post("/")(takes_key)
    client = TestClient(app)
    for good in (b'"k 1"', b' "k 1" '):
        assert client.post("/", headers=[(b"Idempotency-Key", good)]).json() == "k 1"
    assert client.post("/", headers=[(b"idempotency-key", b"k:1")]).json() == "k:1"
    for bad in BAD_KEYS:
        answer = client.post("/", headers=[(b"Idempotency-Key", value) for value in bad])
        assert answer.status_code == 400, bad
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert "Idempotency-Key" in answer.json()["detail"]
    (told,) = app.openapi()["paths"]["/"]["post"]["parameters"]
    assert (told["name"], told["in"], told["required"]) == ("Idempotency-Key", "header", True)


def takes_key(key: Annotated[str, Depends(idempotency_key)]) -> str:
    return key


# ---------------------------------------------------------------- the OpenAPI document


def problems(operation: dict[str, Any]) -> dict[str, set[str]]:
    """Return the documented error codes of an operation, by status."""
    found = {}
    for status, response in operation["responses"].items():
        if (problem := response.get("content", {}).get("application/problem+json")) is not None:
            assert problem["schema"] == {"$ref": "#/components/schemas/PgfenceProblem"}
            assert all(one["value"]["status"] == int(status) for one in problem["examples"].values())
            found[status] = set(problem["examples"])
    return found


def keys(operation: dict[str, Any]) -> list[bool]:
    """Return of each header for a key whether it is required."""
    return [one["required"] for one in operation.get("parameters", ()) if one["name"] == "Idempotency-Key"]


def test_the_openapi_document_has_the_header_and_the_problems() -> None:
    """Of each operation those of its dependencies and of the middleware; the header is required where its absence is 400."""

    def get_session() -> Iterator[Session]:
        raise AssertionError
        yield

    once = Idempotent(session=get_session, principal=user, result=int)
    router = APIRouter(prefix="/in/{shelf}", dependencies=[Depends(Locked("{shelf}", session=get_session))])

    def plain(shelf: str = "") -> None: ...

    def pays(call: IdempotentCall[int] = Depends(once, scope="function")) -> None: ...

    def edits(if_match: Annotated[str | None, Header()] = None) -> None: ...

    app = FastAPI()
    install_error_handlers(app)
    install_error_handlers(app)  # twice does no harm
    app.get("/plain")(plain)
    app.post("/key")(takes_key)
    app.post("/once", responses={409: {"description": "Ours"}})(pays)
    app.put("/edit")(edits)
    router.delete("/{x}")(plain)
    app.include_router(router, prefix="/v1")
    for path in ("/each/{x:path}", "/some", "/key"):
        app.patch(path)(plain)
    engine = create_async_engine("postgresql+psycopg://nowhere/")
    app.add_middleware(IdempotencyMiddleware, engine=engine, methods=["PATCH"], routes=["/each/*"])
    app.add_middleware(IdempotencyMiddleware, engine=engine, methods=["patch"])

    paths = app.openapi()["paths"]
    assert (keys(paths["/plain"]["get"]), problems(paths["/plain"]["get"])) == ([], {})
    assert keys(paths["/key"]["post"]) == keys(paths["/once"]["post"]) == [True]
    assert problems(paths["/key"]["post"])["409"] >= {"idempotency_in_progress", "idempotency_attempt_failed"}
    assert problems(paths["/once"]["post"]).keys() == {"400", "409", "422", "503"}
    assert paths["/once"]["post"]["responses"]["409"]["description"] == "Ours"
    assert "application/json" in paths["/once"]["post"]["responses"]["422"]["content"]  # FastAPI's own
    assert problems(paths["/v1/in/{shelf}/{x}"]["delete"]).keys() == {"409", "422", "423", "503"}
    assert problems(paths["/edit"]["put"]) == {
        "409": {"version_conflict"},
        "412": {"precondition_failed"},
        "428": {"version_required"},
    }
    each, some = paths["/each/{x}"]["patch"], paths["/some"]["patch"]
    assert (sorted(keys(each)), keys(some)) == ([True], [False])
    assert problems(each)["413"] == problems(some)["413"] == {"body_too_large"}
    assert "idempotency_key_missing" in problems(each)["400"] - problems(some)["400"]
    assert app.openapi() is app.openapi()
    app.get("/late", dependencies=[Depends(idempotency_key)])(plain)
    assert keys(app.openapi()["paths"].get("/late", {"get": {}})["get"]) in (
        [True],
        [],
    )  # older versions keep the first


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("error", "status", "code", "wait"),
    [
        (LockTimeoutError("who holds it"), 423, "lock_timeout", "1"),
        (IdempotencyInProgressError("k", scope="s", key="k"), 409, "idempotency_in_progress", "1"),
        (
            IdempotencyInProgressError("k", scope="s", key="k", retry_after=39.2, ended_with="secret"),
            409,
            "idempotency_attempt_failed",
            "40",
        ),
        (IdempotencyKeyReusedError("k", scope="s", key="k"), 422, "idempotency_key_reused", None),
        (AttemptLostError("k", scope="s", key="k", attempt=1, newest=2), 409, "idempotency_attempt_superseded", "1"),
        (AttemptLostError("k", scope="s", key="k", attempt=1, newest=1), 409, "idempotency_outcome_unknown", None),
        (DeadlockError("who was in it"), 409, "deadlock", "1"),
        (VersionConflictError("rows", items=()), 409, "version_conflict", "1"),
        (VersionConflictError("rows", items=(), precondition=True), 412, "precondition_failed", None),
        (VersionRequiredError("rows"), 428, "version_required", None),
        (UnreachableError("host"), 503, "database_unreachable", "1"),
        (UnreachableError("password", retryable=False), 500, "database_login_rejected", None),
        (CapacityError("table", used=1, limit=1), 503, "database_full", "1"),
        (SchemaError("no tables"), 500, "schema", None),
        (Oversold("stock"), 409, "lock_timeout", "1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PgfenceError) else None,
)
def test_each_error_has_its_response_and_its_message_is_only_logged(
    error: PgfenceError, status: int, code: str, wait: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets a code, what to do, and when to send it again if that helps; the log has the rest, and a traceback from 500 on."""
    app = FastAPI()
    install_error_handlers(app)

    def fails() -> None:
        raise error

    app.get("/")(fails)
    with caplog.at_level(logging.INFO, "pgfence.fastapi"):
        answer = TestClient(app).get("/")
    assert (answer.status_code, answer.headers.get("Retry-After")) == (status, wait)
    problem = answer.json()
    assert (problem["code"], problem["title"], problem["status"]) == (code, HTTPStatus(status).phrase, status)
    assert (wait is not None) == ("Retry-After" in problem["detail"])
    assert str(error) not in answer.text or len(str(error)) == 1
    (record,) = caplog.records
    assert str(error) in record.message
    assert (record.levelno, bool(record.exc_info)) == (
        (logging.ERROR, True) if status >= 500 else (logging.INFO, False)
    )


@pytest.mark.parametrize("world", ["asyncpg"], indirect=True)
@pytest.mark.parametrize(
    "error",
    [DeadlockError("who was in it"), AttemptLostError("look", scope="s", key="k", attempt=1, newest=1)],
    ids=["rolled back", "freed by an operator"],
)
async def test_what_may_succeed_later_is_not_recorded_by_the_middleware(shop: Shop, error: PgfenceError) -> None:
    """C101: the next request with the key is handled: a deadlock was rolled back, or an operator has freed the effect's key."""
    done = []

    async def pays() -> str:
        done.append("paid")
        if len(done) == 1:
            raise error
        return "paid"

    shop.app.post("/payments")(pays)
    shop.app.add_middleware(IdempotencyMiddleware, engine=shop.desk.engine, principal=lambda scope: shop.desk.scope)
    async with shop.client(**{"Idempotency-Key": "k1"}) as client:
        answers = [await client.post("/payments") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [409, 200, 200]
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, None, "true"]
    assert len(done) == 2


async def test_a_path_that_is_not_utf8_can_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    """C108: some servers hand on bytes that are not UTF-8 as halves of pairs, or an escape: neither gets into the log."""
    app = FastAPI()
    install_error_handlers(app)
    app.add_api_route("/{name:path}", fails)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/\udcff\x1ba", "query_string": b"", "headers": []}
    with caplog.at_level(logging.INFO, "pgfence.fastapi"):
        await app(scope, anyio.sleep_forever, send)
    assert sent[0]["status"] == 423
    assert "GET /%3F%1Ba: " in caplog.text


async def fails() -> None:
    raise LockTimeoutError("who holds it")


def test_in_a_websocket_the_error_goes_on() -> None:
    """There is no status to respond with: it ends the connection, and the server logs it."""
    app = FastAPI()
    install_error_handlers(app)

    @app.websocket("/")
    async def fails(socket: WebSocket) -> None:
        await socket.accept()
        raise UnreachableError("host")

    with pytest.raises(UnreachableError), TestClient(app).websocket_connect("/") as socket:
        socket.receive_text()
