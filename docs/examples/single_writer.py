"""Apply commands to accounts in order, with one worker at a time for each account.

pip install "pgfence[cli,psycopg]"
pgfence install
python single_writer.py 10.0.0.7:8000
"""

import signal
import sys

from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgfence import HeldLease, Partitions

engine = create_engine("postgresql+psycopg://")
SessionLocal = sessionmaker(engine)
accounts = Partitions(engine, "accounts", 64, ttl=15)


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    name: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int]


class Command(Base):
    __tablename__ = "command"
    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str]
    amount: Mapped[int]
    done: Mapped[bool] = mapped_column(default=False)


def apply_commands(session: Session, partition: int) -> int:
    query = (
        select(Command)
        .where(
            ~Command.done,
            func.pgfence_partition_for_v1(Command.account, 64) == partition,
        )
        .order_by(Command.id)
        .limit(100)
    )
    commands = session.scalars(query).all()
    for command in commands:
        session.get_one(Account, command.account).balance += command.amount
        command.done = True
    return len(commands)


def serve(partition: int, lease: HeldLease) -> None:
    while not lease.lost:
        with lease.begin(SessionLocal) as session:
            applied = apply_commands(session, partition)
        if not applied:
            lease.wait_lost(0.5)


def main(address: str) -> None:
    signals = [signal.SIGINT, signal.SIGTERM]
    # Block the signals in all threads, so that only sigwait receives them.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with accounts.join(serve, address=address) as worker:
        print("owns", len(worker.owned), flush=True)
        signal.sigwait(signals)


if __name__ == "__main__":
    main(sys.argv[1])
