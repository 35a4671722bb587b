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

from support import payments
from support.servers import database
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.payments import Answer, Servers

WHOLE = bool(os.environ.get("PGFENCE_TEST_FAULTS"))


@pytest.fixture(scope="module")
def own(dsn: str) -> Iterator[str]:
    """A database of their own."""
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
    """Order something, and ask until there is an answer: neither silence nor 409."""
    answers: list[Answer] = []
    eventually(lambda: answers.append(once(url, key)) or answers[-1].status not in (0, 409, 503), deadline=45)
    return answers[-1]


@pytest.mark.timeout(180)
def test_a_server_that_dies_at_any_moment_leaves_one_charge_and_one_answer(servers: Servers, own: str) -> None:
    """C099: SIGKILL before and after each statement, commit and call of an order; the client asks until it has its answer."""
    healthy = servers.api()
    before = len(servers.charges())
    assert order(healthy, "all is well").status == 201
    (moments,) = payments.ask(f"{healthy}/moments").body
    assert moments > 10
    keys = [f"dies at {moment}" for moment in range(1, moments + 1)]

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
        rows = connection.execute("SELECT id, charge FROM customer_order WHERE customer = 1").fetchall()
    assert sorted(rows) == sorted((charge["order"], charge["id"]) for charge in charges)


@pytest.mark.timeout(3600 if WHOLE else 60)
def test_no_request_makes_a_500(servers: Servers) -> None:
    """C108: requests that fit the schema, and such as do not, with keys that are used before: each has an answer below 500."""
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
    @given(case=st.one_of(kinds), key=st.sampled_from(["a", '"b"', None]), customer=st.sampled_from(["1", "2", None]))
    def request(case: Any, key: str | None, customer: str | None) -> None:
        usual = {"idempotency-key": key, "x-customer": customer}
        case.headers.update({name: value for name, value in usual.items() if value})
        answer = case.call()
        seen[answer.status_code] += 1
        assert answer.status_code < 500, (case.method, case.formatted_path, case.headers, case.body, answer.text)

    request()
    print(dict(seen))
    assert seen[201] > 0
    assert seen[422] > 0
