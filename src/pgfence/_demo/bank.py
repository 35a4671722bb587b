"""The bank: pgbench's accounts, and its history as the journal against which every balance is checked.

A transfer reads two balances, computes in Python, writes both, and books two lines of the journal in the same transaction.
Rows of the journal are never updated. If a balance differs from the sum of its lines, an update was lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from sqlalchemy import Column, Integer, MetaData, Table, insert, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

SCHEMA = "pgfence_demo"
NAMESPACE = "pgfence demo"
ACCOUNT = LockKey.family("account", namespace=NAMESPACE)
TILL = LockKey.family("till", namespace=NAMESPACE)

TILLS = 4
ACCOUNTS_OF_A_TILL = 25
HIGHEST_AMOUNT = 100_00


class Base(DeclarativeBase):
    """The application's models."""

    metadata = MetaData(schema=SCHEMA)


class Account(Base):
    """An account; the balance is in cents."""

    __tablename__ = "pgbench_accounts"

    aid: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    abalance: Mapped[int]


JOURNAL = Table("pgbench_history", Base.metadata, Column("aid", Integer), Column("delta", Integer))

_AUDIT = text(f"""
    SELECT coalesce(sum(j.lines), 0) / 2,
           count(*) FILTER (WHERE a.abalance <> coalesce(j.booked, 0)),
           coalesce(sum(abs(a.abalance - coalesce(j.booked, 0))), 0)
    FROM {SCHEMA}.pgbench_accounts AS a
    LEFT JOIN (SELECT aid, sum(delta) AS booked, count(*) AS lines FROM {SCHEMA}.pgbench_history GROUP BY aid) AS j USING (aid)
    WHERE a.aid BETWEEN :first AND :last
""")


@dataclass(frozen=True, slots=True)
class Ledger:
    """A comparison of balances and journal. It is exact even during transfers, because one statement reads one snapshot.

    Attributes:
        transfers: transfers in the journal.
        accounts_off: balances that differ from their journal.
        cents_off: the sum of the differences, without their signs.
    """

    transfers: int
    accounts_off: int
    cents_off: int


@dataclass(frozen=True, slots=True)
class Accounts:
    """The few accounts of one act. They are divided among tills, and some tills are far busier than others (Zipf)."""

    first: int

    @property
    def last(self) -> int:
        """The highest account number."""
        return self.first + TILLS * ACCOUNTS_OF_A_TILL - 1

    def pair(self, chance: Random) -> tuple[int, int]:
        """Choose two accounts at random, from any tills."""
        return _pick_pair(chance, range(self.first, self.last + 1))

    def till(self, chance: Random) -> range:
        """Choose a till at random, and return the range of its accounts."""
        number = chance.choices(range(TILLS), cum_weights=_build_zipf_weights(TILLS))[0]
        first = self.first + number * ACCOUNTS_OF_A_TILL
        return range(first, first + ACCOUNTS_OF_A_TILL)

    def pair_of(self, till: range, chance: Random) -> tuple[int, int]:
        """Choose two accounts of one till at random."""
        return _pick_pair(chance, till)

    def audit(self, engine: Engine) -> Ledger:
        """Compare every balance with its journal."""
        with engine.connect() as connection:
            row = connection.execute(_AUDIT, {"first": self.first, "last": self.last}).one()
        return Ledger(*map(int, row))


def move(session: Session, source: int, target: int, cents: int) -> None:
    """Move money as applications do: read both balances, compute, write both, and book two lines in the journal."""
    giver, taker = session.get_one(Account, source), session.get_one(Account, target)
    giver.abalance -= cents
    taker.abalance += cents
    lines = [{"aid": source, "delta": -cents}, {"aid": target, "delta": cents}]
    session.execute(insert(JOURNAL), lines)


def _pick_pair(chance: Random, accounts: Sequence[int]) -> tuple[int, int]:
    weights = _build_zipf_weights(len(accounts))
    one = other = chance.choices(accounts, cum_weights=weights)[0]
    while other == one:
        other = chance.choices(accounts, cum_weights=weights)[0]
    return one, other


def _build_zipf_weights(count: int) -> list[float]:
    return list(accumulate(1 / rank for rank in range(1, count + 1)))
