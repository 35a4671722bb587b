"""The page about edit forms: clients that save at the same time, through Flask and through FastAPI."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psycopg
import pytest

from support import pages
from support.processes import Script
from support.servers import database

if TYPE_CHECKING:
    from collections.abc import Iterator

# Every client has loaded the row before the first of them writes it.
FLASK = """
import json, threading
from concurrent.futures import ThreadPoolExecutor

import edit_form_flask
from edit_form_flask import app, db

loads, barrier = edit_form_flask.load_for_version, threading.Barrier(4, timeout=20)

def together(*args, **options):
    row = loads(*args, **options)
    barrier.wait()
    return row

edit_form_flask.load_for_version = together

def save(title):
    answer = app.test_client().put("/pages/1", data={"title": title}, headers={"If-Match": '"page-1"'})
    return answer.status_code, answer.json, title

with ThreadPoolExecutor(4) as clients:
    print(json.dumps(list(clients.map(save, ["a", "b", "c", "d"]))))
with app.app_context():
    db.engine.dispose()
"""
FASTAPI = """
import asyncio, json
from concurrent.futures import ThreadPoolExecutor

from fastapi.testclient import TestClient
import edit_form_fastapi

loads, barrier = edit_form_fastapi.load_for_version, asyncio.Barrier(4)

async def together(*args, **options):
    row = await loads(*args, **options)
    async with asyncio.timeout(20):
        await barrier.wait()
    return row

edit_form_fastapi.load_for_version = together

with TestClient(edit_form_fastapi.app) as client, ThreadPoolExecutor(4) as clients:
    def save(title):
        answer = client.put("/pages/1", json={"title": title}, headers={"If-Match": '"page-1"'})
        return answer.status_code, answer.json(), title

    print(json.dumps(list(clients.map(save, ["a", "b", "c", "d"]))))
"""


@pytest.fixture
def own(dsn: str) -> Iterator[str]:
    """A database with one page at version 1."""
    with database(dsn, "edit") as made:
        with psycopg.connect(made) as connection:
            connection.execute("CREATE TABLE page (id int PRIMARY KEY, title text NOT NULL, version bigint NOT NULL)")
            connection.execute("INSERT INTO page VALUES (1, 'draft', 1)")
        yield made


@pytest.mark.parametrize("code", [FLASK, FASTAPI], ids=["flask", "fastapi"])
def test_of_concurrent_saves_one_wins_and_the_others_conflict(own: str, code: str) -> None:
    """C072: all have shown the version that is there, so the UPDATE decides: one 200, and 409 for those whose change is not made."""
    script = Script(pages.reader(own, code))
    answers = json.loads(script.read_line())
    script.close()
    assert sorted(status for status, _, _ in answers) == [200, 409, 409, 409]
    (winner,) = (title for status, _, title in answers if status == 200)
    with psycopg.connect(own) as connection:
        assert connection.execute("SELECT title, version FROM page").fetchall() == [(winner, 2)]
