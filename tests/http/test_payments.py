"""The payments API of the docs: its process dies at every moment of an order, and each order is charged once."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core import NOT_SET

from support import payments
from support.servers import database
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.payments import Answer, Servers

WHOLE = bool(os.environ.get("PGFENCE_TEST_FAULTS"))
ODD_BODIES = [
    b'{"amount": 1e400}',
    b'{"amount": NaN}',
    b'{"amount": -Infinity}',
    b'{"amount": "\\ud800"}',
    b'{"amount": ' + b"1" * 5000 + b"}",
    b"[" * 5000,
    b'{"amount": 5, "\xff": 1}',
    b"\xff\xfe",
]


@pytest.fixture(scope="module")
def own(dsn: str) -> Iterator[str]:
    """A separate database."""
    with database(dsn, "payments") as made:
        yield made


@pytest.fixture(scope="module")
def servers(own: str) -> Iterator[Servers]:
    """Processes to be started, and a provider."""
    with payments.servers(own) as here:
        yield here


def once(url: str, key: str) -> Answer:
    """Order something, and do not ask again."""
    return payments.ask(f"{url}/orders", {"amount": 5}, x_customer="1", idempotency_key=key)


def order(url: str, key: str) -> Answer:
    """Order something, and retry until there is a response other than silence or 409."""
    answers: list[Answer] = []
    eventually(lambda: answers.append(once(url, key)) or answers[-1].status not in (0, 409, 503), deadline=45)
    return answers[-1]


@pytest.mark.timeout(180)
def test_a_server_killed_at_any_moment_leaves_one_charge(servers: Servers, own: str) -> None:
    """C099: SIGKILL before and after each statement, commit and call of an order; the client retries until it gets a response."""
    healthy = servers.api()
    before = len(servers.charges())
    assert order(healthy, "all-is-well").status == 201
    (moments,) = payments.ask(f"{healthy}/moments").body
    assert moments > 10
    keys = [f"dies-at-{moment}" for moment in range(1, moments + 1)]

    def storm(moment: int) -> tuple[Answer, Answer]:
        key = keys[moment - 1]
        assert once(servers.api(moment), key).status == 0
        if WHOLE:  # the attempt that follows dies too
            dying = servers.api(moment)
            eventually(lambda: once(dying, key).status in (0, 201), deadline=45)
        return order(healthy, key), order(healthy, key)

    with ThreadPoolExecutor(18) as clients:
        answers = list(clients.map(storm, range(1, moments + 1)))
    assert {first.status for first, _ in answers} == {201}
    assert [first.body for first, _ in answers] == [again.body for _, again in answers]
    charges = servers.charges()[before:]
    assert len(charges) == len({charge["order"] for charge in charges}) == moments + 1
    assert {first.body["charge"] for first, _ in answers} <= {charge["id"] for charge in charges}
    with psycopg.connect(own) as connection:
        rows = connection.execute(
            "SELECT id, charge FROM customer_order WHERE request LIKE 'dies-at-%' OR request LIKE 'all-is-well%'"
        ).fetchall()
    assert sorted(rows) == sorted((charge["order"], charge["id"]) for charge in charges)


NO_ANSWERS = {
    "silence": b"",
    "another protocol": b"\x00\x01",
    "a part": b"HTTP/1.1 201 Created\r\nContent-Length: 50\r\n\r\n{",
    "a page": b"HTTP/1.1 201 Created\r\nContent-Length: 6\r\n\r\n<html>",
    "no charge": b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}",
    "no name of it": b'HTTP/1.1 201 Created\r\nContent-Length: 11\r\n\r\n{"id":null}',
    "a list": b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n[]",
    "an error": b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n",
}
CHARGED = b'HTTP/1.1 201 Created\r\nContent-Length: 13\r\n\r\n{"id":"ch_x"}'


def test_a_provider_without_a_response_is_called_again_at_once(servers: Servers) -> None:
    """C101: a cut connection, half a response, an invalid one: 503, the key is free, and the next request gets the charge."""
    with payments.provider_that_says([*NO_ANSWERS.values(), CHARGED]) as provider:
        url = servers.api(provider=provider)
        answers = [once(url, "a-bad-line") for _ in (*NO_ANSWERS, CHARGED)]
    assert [answer.status for answer in answers] == [503] * len(NO_ANSWERS) + [201]
    assert {answer.headers["retry-after"] for answer in answers[:-1]} == {"1"}
    assert answers[-1].body["charge"] == "ch_x"


def test_an_order_outlives_its_key(servers: Servers, own: str) -> None:
    """C110: with its key forgotten an order is not charged again, neither the same one nor for another amount."""
    first = order(servers.api(), "kept-for-long")
    url = servers.api(provider="http://127.0.0.1:1")  # it would not know the key any more
    for amount, status in ((9, 422), (5, 201), (9, 422)):
        with psycopg.connect(own) as connection:
            connection.execute("DELETE FROM pgfence_idempotency_key WHERE key = 'kept-for-long'")
        answer = payments.ask(f"{url}/orders", {"amount": amount}, x_customer="1", idempotency_key="kept-for-long")
        assert (answer.status, answer.body == first.body) == (status, status == 201)


@pytest.mark.parametrize("path", ["/orders", "/vouchers"])
def test_invalid_bodies_and_keys_are_client_errors(servers: Servers, path: str) -> None:
    """C108: an answer that repeated what it got would be none; what is not one key is refused wherever a key is needed."""
    url = f"{servers.api()}{path}"
    for body in ODD_BODIES:
        for kind in ("application/json", "text/plain"):
            answer = payments.ask(url, body, x_customer="1", idempotency_key="odd", Content_Type=kind)
            assert answer.status in (400, 422), (body, kind, answer)
    for key in ('"k";p=1', '"""k', 'k\\"x', "\xff\xfe", "a, b", '""'):
        assert payments.ask(url, {"amount": 5}, x_customer="1", idempotency_key=key).status == 400, key
    assert payments.ask(url, {"amount": 5}, x_customer="1").status == 400


@pytest.mark.timeout(3600 if WHOLE else 60)
def test_no_request_makes_a_500(servers: Servers) -> None:
    """C108: requests that fit the schema, and others, with keys that were used before: each status is below 500."""
    url = servers.api()
    operations = [found.ok() for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()]
    kinds = [operation.as_strategy(mode) for operation in operations for mode in schemathesis.GenerationMode]
    seen: Counter[int] = Counter()

    @settings(
        max_examples=10_000 if WHOLE else 60,
        derandomize=not WHOLE,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=st.one_of(kinds),
        key=st.sampled_from(["a", '"b"', None]),
        customer=st.sampled_from(["1", "2", None]),
        odd=st.none() | st.none() | st.none() | st.sampled_from(ODD_BODIES) | st.binary(max_size=20),
        content=st.sampled_from(["application/json", "text/plain", "application/json; charset=utf-16"]),
    )
    def request(case: Any, key: str | None, customer: str | None, odd: bytes | None, content: str) -> None:
        usual = {"idempotency-key": key, "x-customer": customer, "content-type": odd and content}
        case.headers.update({name: value for name, value in usual.items() if value})
        case.body = case.body if odd is None else NOT_SET
        answer = case.call() if odd is None else case.call(data=odd)
        seen[answer.status_code] += 1
        assert answer.status_code < 500, (case.method, case.formatted_path, case.headers, case.body, answer.text)

    request()
    print(dict(seen))
    assert seen[201] > 0
    assert seen[422] > 0
