"""The command line on databases of another encoding than UTF8."""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgfence.cli import main
from support.servers import with_database

if TYPE_CHECKING:
    from collections.abc import Iterator

NIGHT = "Ночь"


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def encoding(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An encoding, and in DATABASE_URL a database that has it."""
    name = f"pgfence_test_{secrets.token_hex(4)}_encoding"
    monkeypatch.setenv("DATABASE_URL", with_database(dsn, name))
    monkeypatch.delenv("PGCLIENTENCODING", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{request.param}' LOCALE 'C'".encode())
        yield request.param
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_a_name_that_the_database_cannot_represent_is_misuse(encoding: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 64 and one line that names text, encoding and what helps. SQL_ASCII keeps any bytes, so it works there."""
    assert main(["install", "--quiet"]) == 0
    kept = encoding == "SQL_ASCII"
    for words, code in (
        (["run", "--once-per", "day", NIGHT, "--", "true"], 0),
        (["run", "--lease", f"{NIGHT}, leased", "--", "true"], 0),
        (["evict", f"{NIGHT}, leased", "--reason", "why", "--yes"], 0),
        (["evict", "plain", "--reason", NIGHT, "--yes"], 67),
        (["keys", "--scope", NIGHT], 0),
        (["keys", "free", "scope", NIGHT, "--reason", "why", "--yes"], 67),
    ):
        expected = code if kept or words[1] == "plain" else 64
        assert (main(words), words) == (expected, words)
        err = capfd.readouterr().err
        assert len(err.splitlines()) <= 1
        if expected == 64:
            assert all(word in err for word in (NIGHT, encoding, "UTF8"))
