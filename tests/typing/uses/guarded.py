"""Models with the mixin."""

from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from app import Base
from pgfence import Fenced


class Entry(Fenced, Base):
    __tablename__ = "entry"
    id: Mapped[int] = mapped_column(primary_key=True)
    book: Mapped[str]

    @staticmethod
    def __fence_resource__(row: Entry) -> str:
        return f"close:{row.book}"


class Rate(Fenced, Base):
    __tablename__ = "rate"
    __fence__ = "row"
    __fence_resource__ = "rates"
    id: Mapped[int] = mapped_column(primary_key=True)
