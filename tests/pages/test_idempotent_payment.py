"""The page about a payment: the endpoint under a real server that is killed, and under clients that all ask at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest

from support import pages
from support.payments import ask
from support.processes import Script
from support.servers import database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.payments import Answer

# The payment is written and not committed when the process dies.
SERVER = """
import socket

import uvicorn
from sqlalchemy.ext.asyncio import AsyncSession

from idempotent_payment import app

flush = AsyncSession.flush

async def flush_and_die(self, *args):
    await flush(self, *args)
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "dies":
    AsyncSession.flush = flush_and_die
listening = socket.create_server(("127.0.0.1", 0))
say(listening.getsockname()[1])
uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listening])
"""


@pytest.fixture
def own(dsn: str) -> Iterator[str]:
    """A database with the tables of the program."""
    with database(dsn, "pay") as made:
        pages.install(made)
        with psycopg.connect(made) as connection:
            connection.execute(
                "CREATE TABLE payment (id serial PRIMARY KEY, user_id int NOT NULL, amount numeric NOT NULL)"
            )
        yield made


def pay(port: str, key: str) -> Answer:
    return ask(f"http://127.0.0.1:{port}/payments", {"amount": "1.10"}, x_user="1", idempotency_key=key)


def test_a_payment_is_made_once_by_a_server_that_is_killed(own: str) -> None:
    """C095: what the dead process wrote is gone and its key is free at once; of ten requests one pays, and all are told the same."""
    with (
        closing(Script(pages.reader(own, SERVER), "dies")) as dying,
        closing(Script(pages.reader(own, SERVER), "")) as server,
    ):
        assert pay(dying.read_line(), "k1").status == 0
        port = server.read_line()
        assert pay(port, "k1").status == 201
        with ThreadPoolExecutor(10) as clients:
            answers = list(clients.map(lambda _: pay(port, "k2"), range(10)))
    assert {answer.status for answer in answers} == {201}
    assert len({str(answer.body) for answer in answers}) == 1
    with psycopg.connect(own) as connection:
        assert connection.execute("SELECT count(*) FROM payment").fetchone() == (2,)
