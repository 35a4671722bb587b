"""Models of a ledger: fenced entries, and notes whose version the server counts."""

from __future__ import annotations

from datetime import date

from sqlalchemy import MetaData
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import Fenced, Versioned


class Base(DeclarativeBase):
    metadata = MetaData()


class Entry(Fenced, Base):
    __tablename__ = "entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    book: Mapped[str]
    day: Mapped[date]

    @staticmethod
    def __fence_resource__(row: Entry) -> str:
        return f"close:{row.book}"


class Note(Versioned, Base):
    __tablename__ = "note"
    __version_mode__ = "server"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]
