"""The page about single writers: two processes of its program share the accounts and apply all commands in order."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psycopg
from sqlalchemy import create_engine

from pgfence import schema
from support import pages
from support.processes import Script
from support.servers import database
from support.waiting import blocking

if TYPE_CHECKING:
    from typing import Any

WORK = """
import single_writer

single_writer.main(sys.argv[1])
"""
FILL = "INSERT INTO command (account, amount, done) SELECT a.name, 1, false FROM account AS a, generate_series(1, 20)"


def count(connection: psycopg.Connection[Any], query: str) -> int:
    found = connection.execute(query.encode()).fetchone()
    assert found is not None
    return int(found[0])


def test_two_workers_share_the_accounts_and_apply_each_command_once(dsn: str) -> None:
    """Each owns half of the partitions; nothing is lost or applied twice, and both leave on SIGTERM."""
    with database(dsn, "single_writer") as own:
        engine = create_engine(f"postgresql+psycopg://{own.split('://', 1)[1]}")
        schema.create_all(engine)
        engine.dispose()
        with psycopg.connect(own, autocommit=True) as connection:
            connection.execute("CREATE TABLE account (name text PRIMARY KEY, balance int NOT NULL)")
            connection.execute("CREATE TABLE command (id serial PRIMARY KEY, account text, amount int, done bool)")
            connection.execute("INSERT INTO account SELECT 'account:' || i, 0 FROM generate_series(1, 30) AS i")
            first = Script(pages.reader(own, WORK), "10.0.0.7:1")
            first.wait_for("owns 64")
            connection.execute(FILL.encode())
            second = Script(pages.reader(own, WORK), "10.0.0.7:2")
            owners = (
                "SELECT count(*) FROM pgfence_lease WHERE kind = 'partition' AND released_at IS NULL"
                " AND expires_at > clock_timestamp() GROUP BY metadata ->> 'address'"
            )
            blocking(lambda: connection.execute(owners.encode()).fetchall() == [(32,), (32,)])
            connection.execute(FILL.encode())
            blocking(lambda: count(connection, "SELECT count(*) FROM command WHERE NOT done") == 0)
            for script in (first, second):
                script.kill(signal.SIGTERM)
                assert script.go_on() == 0
                script.close()
            assert count(connection, "SELECT sum(balance) FROM account WHERE balance = 40") == 30 * 40
            assert count(connection, "SELECT count(*) FROM pgfence_lease WHERE released_at IS NULL") == 0
