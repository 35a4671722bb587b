"""The middlewares under real servers, with real clients: uvicorn with FastAPI, gunicorn with Flask."""

from __future__ import annotations

import secrets
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import psycopg
import pytest

from pgfence import schema
from support.servers import database
from support.shops import GATE, Shop
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS = 12


@pytest.fixture(scope="module", params=["uvicorn", "gunicorn"])
def shop(request: pytest.FixtureRequest, dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A shop under a server."""
    with database(dsn, request.param) as own, psycopg.connect(own, autocommit=True) as admin:
        admin.execute(schema.sql().encode())
        admin.execute("CREATE TABLE payment (note text, pid integer)")
        served = Shop(request.param, own, tmp_path_factory.mktemp(request.param))
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{served.port}", timeout=30) as http:
                yield Client(served, admin, http)
        finally:
            served.close()


class Client:
    """A client that pays."""

    def __init__(self, shop: Shop, admin: psycopg.Connection[Any], http: httpx2.Client) -> None:
        self.shop, self.admin, self.http = shop, admin, http

    def pay(self, key: str, note: Any, **more: str) -> httpx2.Response:
        return self.http.post("/pay", content=note, headers={"idempotency-key": f'"{key}"', **more})

    def until_paid(self, key: str, note: str) -> httpx2.Response:
        """Pay, and retry while another request is in progress."""
        answers: list[httpx2.Response] = []
        blocking(lambda: answers.append(self.pay(key, note)) or answers[-1].status_code != 409, 20)
        return answers[-1]

    def pids(self, note: str) -> list[int]:
        """Return the processes in which a payment was made."""
        return [pid for (pid,) in self.admin.execute("SELECT pid FROM payment WHERE note = %s", [note])]

    @contextmanager
    def slow(self) -> Iterator[str]:
        """Let payments with this note wait, once they are made, until the end of the block."""
        with self.admin.transaction():
            self.admin.execute("SELECT pg_advisory_xact_lock(%s)", [GATE])
            yield f"slow {secrets.token_hex(6)}"

    def reached(self, note: str) -> int:
        """Return which process handles a payment."""
        pids: list[int] = blocking(lambda: self.pids(note), 20)
        return pids[-1]


@pytest.fixture
def key() -> str:
    """A key that no other test has."""
    return secrets.token_hex(8)


def test_of_many_clients_one_pays_and_all_get_its_response(shop: Client, key: str) -> None:
    """C095: twelve concurrent clients on separate connections, several processes, a pool of one in each."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        with shop.slow() as note:
            first = [pool.submit(shop.pay, key, note) for _ in range(CLIENTS)]
            shop.reached(note)
            blocking(lambda: sum(one.done() for one in first) == CLIENTS - 1, 20)
        statuses = Counter(one.result().status_code for one in first)
        answers = list(pool.map(lambda _: shop.until_paid(key, note), range(CLIENTS)))
    assert statuses == {409: CLIENTS - 1, 201: 1}
    assert len(shop.pids(note)) == 1
    assert len({(answer.status_code, answer.content) for answer in answers}) == 1
    assert {answer.headers["idempotent-replayed"] for answer in answers} == {"true"}
    assert all("date" in answer.headers and len(answer.headers.get_list("date")) == 1 for answer in answers)


def test_a_client_that_reconnects_gets_its_response(shop: Client, key: str) -> None:
    """The client disconnects during the payment; the payment completes, and a retry does not repeat it."""
    request = "POST /pay HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: {key}\r\nContent-Length: {length}\r\n\r\n{note}"
    with shop.slow() as note:
        with shop.shop.connected() as connection:
            connection.sendall(request.format(key=key, length=len(note), note=note).encode())
            pid = shop.reached(note)
        assert shop.pay(key, note).status_code == 409
    answer = shop.until_paid(key, note)
    assert (answer.status_code, answer.json()) == (201, {"note": note, "pid": pid})
    assert answer.headers["idempotent-replayed"] == "true"
    assert shop.pids(note) == [pid]


def test_a_process_that_is_killed_gives_its_key_to_the_next(shop: Client, key: str) -> None:
    """C099: SIGKILL in the middle of a payment; the key is free when the claim is over, and not before."""
    with ThreadPoolExecutor(1) as pool, shop.slow() as note:
        lost = pool.submit(shop.pay, key, note)
        first = shop.reached(note)
        shop.shop.kill(first)
        with pytest.raises(httpx2.TransportError):
            lost.result(20)
    answer = shop.until_paid(key, note)
    assert (answer.status_code, "idempotent-replayed" in answer.headers) == (201, False)
    assert shop.pids(note) == [first, answer.json()["pid"]]
    assert answer.json()["pid"] != first
    row = shop.admin.execute("SELECT attempt, status FROM pgfence_idempotency_key WHERE key = %s", [key]).fetchone()
    assert row == (2, "done")


def test_bad_requests_leave_the_connection_usable(shop: Client, key: str) -> None:
    """No key, two keys, one that is too long, and such a body: each gets its response, and a good request follows."""
    for headers, body, status in (
        ([], b"a", 400),
        ([("idempotency-key", "a"), ("idempotency-key", "b")], b"a", 400),
        ([("idempotency-key", "k" * 300)], b"a", 400),
        ([("idempotency-key", key)], b"a" * 1001, 413),
    ):
        answer = shop.http.post("/pay", content=body, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
        assert answer.json()["status"] == status
    assert shop.pay(key, "good").status_code == 201
    assert shop.http.head("/pay", headers={"idempotency-key": key}).status_code == 405


def test_a_chunked_body_is_the_same_request(shop: Client, key: str) -> None:
    """A client that does not know the length sends the body in pieces; what counts is what it says."""
    first = shop.pay(key, iter([b"in ", b"pieces"]))
    again = shop.pay(key, "in pieces")
    other = shop.pay(key, iter([b"in ", b"pieces", b"!"]))
    assert (first.status_code, again.content, other.status_code) == (201, first.content, 422)
    assert shop.pay(key, iter([b"x" * 600] * 2)).status_code == 413


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(shop: Client, key: str) -> None:
    """`Expect: 100-continue`: the body is read before the claim, so the client sends it."""
    lines = ["POST /pay HTTP/1.1", "Host: shop", f"Idempotency-Key: {key}", "Content-Length: 6", "Expect: 100-continue"]
    with shop.shop.connected() as connection, connection.makefile("rb") as answer:
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
        assert answer.readline().startswith(b"HTTP/1.1 100 ")
        assert answer.readline() == b"\r\n"
        connection.sendall(b"waited")
        assert answer.readline().startswith(b"HTTP/1.1 201 ")
        assert b'"waited"' in answer.read()
