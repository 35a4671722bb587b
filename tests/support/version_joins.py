"""Owners whose lines count, one pair of classes for each way in which the lines can refer to their owner."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import ForeignKey, ForeignKeyConstraint, and_, func
from sqlalchemy.orm import (
    DeclarativeBase,
    DynamicMapped,
    Mapped,
    declared_attr,
    foreign,
    mapped_column,
    relationship,
    remote,
)

from pgfence.versions import Versioned

if TYPE_CHECKING:
    from collections.abc import Callable


class Pair(NamedTuple):
    """Classes of one way to join.

    Attributes:
        owner: has lines that count.
        line: refers to it.
        refer: from the number of an owner to the attributes of its lines.
        lines: the name of the relationship.
    """

    owner: Any
    line: Any
    refer: Callable[[int], dict[str, Any]]
    lines: str = "lines"


def _base(mode: str, *names: str) -> tuple[Any, Any, str]:
    class Base(DeclarativeBase):
        pass

    class Counted(Versioned):
        __version_mode__ = mode  # type: ignore[assignment]
        __version_relationships__ = names
        note: Mapped[str] = mapped_column(default="")

    return Base, Counted, f"owner_{secrets.token_hex(6)}"


def joined_subclass(mode: str) -> Pair:
    """The lines refer to the table of the subclass, three levels down, whose key has another name."""
    base, counted, name = _base(mode)

    class Document(counted, base):
        __tablename__ = f"{name}_document"
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "document"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]

    class Middle(Document):
        __tablename__ = f"{name}_middle"
        __mapper_args__ = {"polymorphic_identity": "middle"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(ForeignKey(f"{name}_document.id"), primary_key=True)

    class Owner(Middle):
        __tablename__ = name
        __version_relationships__ = ("lines",)
        __mapper_args__ = {"polymorphic_identity": "owner"}  # noqa: RUF012
        middle_id: Mapped[int] = mapped_column(ForeignKey(f"{name}_middle.id"), primary_key=True)
        lines: Mapped[list[Any]] = relationship("Line", back_populates="owner", cascade="all, delete-orphan")

    class Line(base):
        __tablename__ = f"{name}_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int] = mapped_column(ForeignKey(f"{name}.middle_id"))
        amount: Mapped[int] = mapped_column(default=0)
        owner: Mapped[Any] = relationship("Owner", back_populates="lines")

    return Pair(Owner, Line, lambda number: {"owner_id": number})


def names_of_the_base(mode: str) -> Pair:
    """The relationship is that of an unversioned list in the base, and the subclass in one table counts it."""
    base, counted, name = _base(mode)

    class Document(counted, base):
        __tablename__ = name
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "document"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        lines: Mapped[list[Any]] = relationship("Line", back_populates="owner", cascade="all, delete-orphan")

    class Owner(Document):
        __version_relationships__ = ("lines",)
        __mapper_args__ = {"polymorphic_identity": "owner"}  # noqa: RUF012

    class Line(base):
        __tablename__ = f"{name}_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int] = mapped_column(ForeignKey(f"{name}.id"))
        amount: Mapped[int] = mapped_column(default=0)
        owner: Mapped[Any] = relationship("Document", back_populates="lines")

    return Pair(Owner, Line, lambda number: {"owner_id": number})


def alternate_key(mode: str) -> Pair:
    """The foreign key refers to another unique column, and nothing leads back from the line."""
    base, counted, name = _base(mode, "lines")

    class Owner(counted, base):
        __tablename__ = name
        id: Mapped[int] = mapped_column(primary_key=True)
        number: Mapped[str] = mapped_column(unique=True, default=lambda context: f"n{context.current_parameters['id']}")
        lines: Mapped[list[Any]] = relationship("Line")

    class Line(base):
        __tablename__ = f"{name}_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_number: Mapped[str | None] = mapped_column(ForeignKey(f"{name}.number"))
        amount: Mapped[int] = mapped_column(default=0)

    return Pair(Owner, Line, lambda number: {"owner_number": f"n{number}"})


def composite_key(mode: str) -> Pair:
    """The foreign key has two columns, which are in another order than in the primary key."""
    base, counted, name = _base(mode, "lines")

    class Owner(counted, base):
        __tablename__ = name
        tenant: Mapped[str] = mapped_column(primary_key=True, default="t")
        id: Mapped[int] = mapped_column(primary_key=True)
        lines: Mapped[list[Any]] = relationship("Line", back_populates="owner", cascade="all, delete-orphan")

    class Line(base):
        __tablename__ = f"{name}_line"
        __table_args__ = (ForeignKeyConstraint(["owner_id", "tenant"], [f"{name}.id", f"{name}.tenant"]),)
        id: Mapped[int] = mapped_column(primary_key=True)
        tenant: Mapped[str] = mapped_column(default="t")
        owner_id: Mapped[int]
        amount: Mapped[int] = mapped_column(default=0)
        owner: Mapped[Any] = relationship("Owner", back_populates="lines")

    return Pair(Owner, Line, lambda number: {"owner_id": number})


def part_of_the_key(mode: str) -> Pair:
    """The owner has one more column in its key than the lines refer to."""
    base, counted, name = _base(mode, "lines")

    class Owner(counted, base):
        __tablename__ = name
        tenant: Mapped[str] = mapped_column(primary_key=True, default="t")
        id: Mapped[int] = mapped_column(primary_key=True, unique=True)
        lines: DynamicMapped[Any] = relationship("Line", back_populates="owner", cascade="all, delete-orphan")

    class Line(base):
        __tablename__ = f"{name}_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int] = mapped_column(ForeignKey(f"{name}.id"))
        amount: Mapped[int] = mapped_column(default=0)
        owner: Mapped[Any] = relationship("Owner", back_populates="lines")

    return Pair(Owner, Line, lambda number: {"owner_id": number})


def constants_and_functions(mode: str) -> Pair:
    """A primaryjoin that also compares other columns of both with constants, by functions."""
    base, counted, name = _base(mode, "lines")

    class Owner(counted, base):
        __tablename__ = name
        id: Mapped[int] = mapped_column(primary_key=True)
        region: Mapped[str] = mapped_column(default="eu")

    class Line(base):
        __tablename__ = f"{name}_line"
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int | None] = mapped_column(ForeignKey(f"{name}.id"))
        kind: Mapped[str] = mapped_column(server_default="Open")
        gone: Mapped[bool | None]
        amount: Mapped[int] = mapped_column(default=0)

    of_one = and_(
        Owner.id == foreign(remote(Line.owner_id)),
        func.lower(remote(Line.kind)) == "open",
        remote(Line.gone).is_(None),
        Owner.region == "eu",
    )
    Owner.lines = relationship(Line, primaryjoin=of_one, lazy="write_only", passive_deletes=True)
    return Pair(Owner, Line, lambda number: {"owner_id": number})


def same_table(mode: str) -> Pair:
    """A tree: the lines are rows of their owner's class, and have versions themselves."""
    base, counted, name = _base(mode, "lines")

    class Node(counted, base):
        __tablename__ = name
        id: Mapped[int] = mapped_column(primary_key=True)
        owner_id: Mapped[int | None] = mapped_column(ForeignKey(f"{name}.id"))
        amount: Mapped[int] = mapped_column(default=0)
        lines: Mapped[list[Any]] = relationship("Node", back_populates="owner")
        owner: Mapped[Any] = relationship("Node", back_populates="lines", remote_side="Node.id")

    return Pair(Node, Node, lambda number: {"owner_id": number})


def lines_of_a_subclass(mode: str) -> Pair:
    """The lines are rows of a joined subclass of the class that the relationship leads to."""
    base, counted, name = _base(mode, "lines")

    class Owner(counted, base):
        __tablename__ = name
        id: Mapped[int] = mapped_column(primary_key=True)
        lines: Mapped[list[Any]] = relationship("Row", cascade="all, delete-orphan")

    class Row(base):
        __tablename__ = f"{name}_row"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        owner_id: Mapped[int] = mapped_column(ForeignKey(f"{name}.id"))

        @declared_attr.directive
        def __mapper_args__(cls) -> dict[str, Any]:  # noqa: N805
            return {"polymorphic_identity": cls.__name__, "polymorphic_on": "kind"}

    class Line(Row):
        __tablename__ = f"{name}_line"
        id: Mapped[int] = mapped_column(ForeignKey(f"{name}_row.id"), primary_key=True)
        amount: Mapped[int] = mapped_column(default=0)

    return Pair(Owner, Line, lambda number: {"owner_id": number})


def base_and_subclass(mode: str, names: tuple[str, ...] | None) -> tuple[Any, Any, Any]:
    """Return a base that counts its lines, a subclass that also has files, with its own list unless None, and a row of both."""
    base, counted, name = _base(mode, "lines")

    class Document(counted, base):
        __tablename__ = name
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "document"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        lines: Mapped[list[Any]] = relationship("Part", foreign_keys="Part.line_of")

    class Owner(Document):
        __tablename__ = f"{name}_owner"
        __mapper_args__ = {"polymorphic_identity": "owner"}  # noqa: RUF012
        if names is not None:
            __version_relationships__ = names
        id: Mapped[int] = mapped_column(ForeignKey(f"{name}.id"), primary_key=True)
        files: Mapped[list[Any]] = relationship("Part", foreign_keys="Part.file_of")

    class Part(base):
        __tablename__ = f"{name}_part"
        id: Mapped[int] = mapped_column(primary_key=True)
        line_of: Mapped[int | None] = mapped_column(ForeignKey(f"{name}.id"))
        file_of: Mapped[int | None] = mapped_column(ForeignKey(f"{name}_owner.id"))
        amount: Mapped[int] = mapped_column(default=0)

    return Document, Owner, Part


PAIRS = {
    each.__name__: each
    for each in (
        joined_subclass,
        names_of_the_base,
        alternate_key,
        composite_key,
        part_of_the_key,
        constants_and_functions,
        same_table,
        lines_of_a_subclass,
    )
}
