"""The tables that the clients write, and reading them after a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import Versioned, schema

if TYPE_CHECKING:
    from sqlalchemy import URL

_TIMELINE = "left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)"
_CREATE = f"""
    CREATE TABLE cluster_head (name text PRIMARY KEY, number bigint NOT NULL);
    CREATE TABLE cluster_write (
        id uuid PRIMARY KEY, name text NOT NULL, number bigint NOT NULL, token bigint NOT NULL, who text NOT NULL,
        at timestamptz NOT NULL DEFAULT clock_timestamp(), timeline text NOT NULL DEFAULT {_TIMELINE});
    CREATE TABLE cluster_transaction (id uuid PRIMARY KEY, who text NOT NULL, timeline text NOT NULL DEFAULT {_TIMELINE});
    CREATE TABLE cluster_counter (name text PRIMARY KEY, number bigint NOT NULL);
    CREATE TABLE cluster_key (key text NOT NULL, id uuid NOT NULL, value bigint NOT NULL);
    CREATE TABLE cluster_slot (slot timestamptz NOT NULL, id uuid NOT NULL);
    CREATE TABLE cluster_page (name text PRIMARY KEY, body text NOT NULL, version bigint NOT NULL);
    CREATE TABLE cluster_version (id uuid PRIMARY KEY, name text NOT NULL, version bigint NOT NULL);
    CREATE TABLE cluster_probe (name text PRIMARY KEY, number bigint NOT NULL);
    CREATE TABLE cluster_job (id bigint PRIMARY KEY, state text NOT NULL);
    CREATE INDEX ON cluster_job (id) WHERE state = 'new';
    CREATE TABLE cluster_done (id uuid NOT NULL, job bigint NOT NULL);
    INSERT INTO cluster_job SELECT n, 'new' FROM generate_series(1, 50000) n;
    INSERT INTO cluster_page SELECT 'page-' || n, '', 1 FROM generate_series(0, 3) n;
"""
NUMBER = text(
    "INSERT INTO cluster_head VALUES (:name, 1) ON CONFLICT (name) DO UPDATE SET number = cluster_head.number + 1 RETURNING number"
)
"""The lock on the row of the head is held until the commit, so the numbers are in the order of the commits."""
WRITE = text("INSERT INTO cluster_write (id, name, number, token, who) VALUES (:id, :name, :number, :token, :who)")
COUNT = text(
    "INSERT INTO cluster_counter VALUES (:who, 1) ON CONFLICT (name) DO UPDATE SET number = cluster_counter.number + 1"
)
TRANSACTION = text("INSERT INTO cluster_transaction (id, who) VALUES (:id, :who)")
KEY = text("INSERT INTO cluster_key VALUES (:key, :id, :value)")
SLOT = text("INSERT INTO cluster_slot VALUES (:slot, :id)")
VERSION = text("INSERT INTO cluster_version VALUES (:id, :name, :version)")
DONE = text("INSERT INTO cluster_done SELECT :id, unnest(CAST(:jobs AS bigint[]))")
PROBE = text(
    "INSERT INTO cluster_probe VALUES (:name, 1) ON CONFLICT (name) DO UPDATE SET number = cluster_probe.number + 1"
)


class Base(DeclarativeBase):
    """The mapped classes of the clients."""


class Page(Versioned, Base):
    """A row that several clients change."""

    __tablename__ = "cluster_page"
    name: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[str]


class Job(Base):
    """A row that one client claims."""

    __tablename__ = "cluster_job"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


@dataclass(frozen=True, slots=True)
class FencedRow:
    """A row of the table with the fence."""

    id: str
    name: str
    number: int
    token: int
    who: str
    timeline: str


@dataclass(frozen=True, slots=True)
class KeyRow:
    """The row that the work of an idempotency key has inserted."""

    key: str
    id: str
    value: int


@dataclass(frozen=True, slots=True)
class VersionRow:
    """The row that belongs to one version of a page."""

    id: str
    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Rows:
    """What the database contains after a run.

    Attributes:
        done: for each job that was claimed the ids of the transactions that did it.
        counters: for each client the counter, and how many of its transactions are there.
        pages: the version of each page.
    """

    fenced: list[FencedRow]
    transactions: set[str]
    keys: list[KeyRow]
    versions: list[VersionRow]
    counters: dict[str, tuple[int, int]]
    pages: dict[str, int]
    done: dict[int, list[str]]

    def list_ids(self, table: str) -> set[str]:
        """Return the ids in a table of `Write`."""
        if table == "fenced":
            return {row.id for row in self.fenced}
        if table == "key":
            return {row.id for row in self.keys}
        if table == "claim":
            return {row for rows in self.done.values() for row in rows}
        return {row.id for row in self.versions} if table == "version" else self.transactions


def install(url: str | URL) -> None:
    """Create pgfence's tables and those of the clients."""
    engine = create_engine(url)
    schema.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(_CREATE)
    schema.add_fence(engine, "cluster_head", resource="{name}")
    schema.add_fence(engine, "cluster_write", resource="{name}")
    engine.dispose()


def read_rows(url: str | URL) -> Rows:
    """Return what the database contains."""
    engine = create_engine(url)
    with engine.begin() as connection:

        def query(statement: str) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in connection.exec_driver_sql(statement)]

        rows = Rows(
            fenced=[
                FencedRow(*row)
                for row in query("SELECT id::text, name, number, token, who, timeline FROM cluster_write")
            ],
            transactions={str(row[0]) for row in query("SELECT id FROM cluster_transaction")},
            keys=[KeyRow(*row) for row in query("SELECT key, id::text, value FROM cluster_key")],
            versions=[VersionRow(*row) for row in query("SELECT id::text, name, version FROM cluster_version")],
            counters={
                name: (number, count)
                for name, number, count in query(
                    "SELECT name, number, (SELECT count(*) FROM cluster_transaction t WHERE t.who = c.name) FROM cluster_counter c"
                )
            },
            done=dict(query("SELECT job, array_agg(id::text) FROM cluster_done GROUP BY job")),
            pages=dict(query("SELECT name, version FROM cluster_page")),
        )
    engine.dispose()
    return rows
