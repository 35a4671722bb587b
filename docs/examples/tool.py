"""A command-line tool whose commands run one at a time, built with Typer."""

import threading

import typer
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from pgfence import AdvisoryLock

cli = typer.Typer()
engine = create_engine(
    "postgresql+psycopg://", connect_args={"application_name": "tool"}
)


@cli.command()
def rebuild() -> None:
    lock = AdvisoryLock(engine, "rebuild")
    held = lock.try_acquire()
    if held is None:
        print("busy:", *lock.holders())
        raise typer.Exit(75)
    stop = threading.Event()
    held.on_lost(stop.set)
    with held:
        for _step in range(3):  # your work, step by step
            held.check()  # raises LockLostError if the lock is lost
            if stop.is_set():
                break


@cli.command()
def compact() -> None:
    with AdvisoryLock(engine, "rebuild").connect() as connection:
        connection.execute(text("SELECT 1"))  # your work
        connection.commit()  # the lock is kept
        with Session(connection) as session:
            session.execute(text("SELECT 1"))
            session.commit()
    print("compacted")


if __name__ == "__main__":
    cli()
