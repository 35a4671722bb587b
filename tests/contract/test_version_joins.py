"""`__version_relationships__` counts a change of a row for its owner, whatever the relationship joins on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, func, inspect, select
from sqlalchemy.orm import attributes

from pgfence import schema
from pgfence.errors import VersionConflictError
from support.version_joins import PAIRS, Pair, base_and_subclass
from support.versioned_rows import made, on_session, statements

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

    from support.worlds import World

pytestmark = pytest.mark.one_driver


def edit(session: Session, pair: Pair) -> None:
    session.get_one(pair.line, 11).amount += 1


def edit_with_the_owner_loaded(session: Session, pair: Pair) -> None:
    session.info["kept"] = session.scalars(select(pair.owner)).all()
    session.get_one(pair.line, 11).amount += 1


def edit_without_loading(session: Session, pair: Pair) -> None:
    session.info["kept"] = line = session.get_one(pair.line, 11)
    session.expire(line)
    line.amount = 77


def add_by_key(session: Session, pair: Pair) -> None:
    session.add(pair.line(id=13, **pair.refer(1)))


def add_to_the_collection(session: Session, pair: Pair) -> None:
    owner = session.scalars(select(pair.owner).where(pair.owner.id == 1)).one()
    lines = getattr(owner, pair.lines)
    (lines.append if hasattr(lines, "append") else lines.add)(pair.line(id=14))


def delete(session: Session, pair: Pair) -> None:
    session.delete(session.get_one(pair.line, 13))


def remove_from_the_collection(session: Session, pair: Pair) -> None:
    owner = session.scalars(select(pair.owner).where(pair.owner.id == 1)).one()
    getattr(owner, pair.lines).remove(session.get_one(pair.line, 14))


def edit_one_of_nobody(session: Session, pair: Pair) -> None:
    session.get_one(pair.line, 31).amount += 1


def move_by_key(session: Session, pair: Pair) -> None:
    for name, value in pair.refer(2).items():
        setattr(session.get_one(pair.line, 12), name, value)


def move_without_loading(session: Session, pair: Pair) -> None:
    session.info["kept"] = line = session.get_one(pair.line, 12)
    session.expire(line)
    for name, value in pair.refer(1).items():
        setattr(line, name, value)


def move_by_the_collection(session: Session, pair: Pair) -> None:
    owner = session.scalars(select(pair.owner).where(pair.owner.id == 2)).one()
    lines = getattr(owner, pair.lines)
    (lines.append if hasattr(lines, "append") else lines.add)(session.get_one(pair.line, 12))


CHANGES: dict[Callable[..., None], tuple[int, int]] = {
    edit: (1, 0),
    edit_with_the_owner_loaded: (1, 0),
    edit_without_loading: (1, 0),
    add_by_key: (1, 0),
    add_to_the_collection: (1, 0),
    delete: (1, 0),
    remove_from_the_collection: (1, 0),
    edit_one_of_nobody: (0, 0),
    move_by_key: (1, 1),
    move_without_loading: (1, 1),
    move_by_the_collection: (1, 1),
}


def versions(session: Session, pair: Pair) -> list[int]:
    version = pair.owner.__mapper__.column_attrs["version"].columns[0]
    ids = version.table.c.id
    return list(session.scalars(select(version).where(ids.in_([1, 2])).order_by(ids)))


async def pair_of(world: World, engine: Any, name: str, mode: str = "client") -> Pair:
    """Create the tables of a pair, owners 1 to 3, lines 11 and 12 of owner 1, and line 31 of owner 3, which has no other use."""
    pair = PAIRS[name](mode)
    await made(world, engine, pair.owner)
    if mode == "server":
        await world.call(schema.add_version_trigger, engine, inspect(pair.owner).base_mapper.class_)

    def fill(session: Session) -> None:
        session.add_all([pair.owner(id=number) for number in (1, 2, 3)])
        session.add_all([pair.line(id=id_, **pair.refer(id_ // 10)) for id_ in (11, 12, 31)])
        session.commit()

    await on_session(world, engine, fill)
    return pair


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mode", "check"), [(mode, check) for mode in ("client", "server") for check in ("auto", "row", "batch")]
)
@pytest.mark.parametrize("name", PAIRS)
async def test_every_change_of_a_line_counts_once_for_its_owners(
    world: World, name: str, mode: str, check: str
) -> None:
    """C065: the line's owner before and after the change get the next version, and no other owner."""
    engine = world.engine()
    pair = await pair_of(world, engine, name, mode)
    found: dict[str, tuple[int, ...]] = {}
    for change in CHANGES:

        def work(session: Session, change: Callable[..., None] = change) -> None:
            before = versions(session, pair)
            with session.no_autoflush:
                change(session, pair)
            session.commit()
            after = versions(session, pair)
            found[change.__name__] = tuple(new - old for old, new in zip(before, after, strict=True))

        await on_session(world, engine, work, conflict_check=check)
    assert found == {change.__name__: raised for change, raised in CHANGES.items()}


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("name", PAIRS)
async def test_changes_of_two_lines_of_one_owner_conflict(world: World, name: str) -> None:
    """C065: two sessions have read the owner and its lines; the second commit raises a conflict that lists the owner."""
    engine = world.engine()
    pair = await pair_of(world, engine, name)
    kept: list[Any] = []

    def read(session: Session) -> None:
        owners, line = session.scalars(select(pair.owner)).all(), session.get_one(pair.line, 12)
        kept.extend([*owners, line])

    def save_what_was_read(session: Session) -> None:
        session.add_all(kept)
        kept[-1].amount = 5
        session.commit()

    await on_session(world, engine, read)
    await on_session(world, engine, lambda session: [edit(session, pair), session.commit()])
    with pytest.raises(VersionConflictError) as refused:
        await on_session(world, engine, save_what_was_read)
    assert [(item.pk[-1], item.expected, item.found) for item in refused.value.items] == [(1, 1, 2)]


async def test_a_line_that_the_condition_leaves_out_does_not_count(world: World) -> None:
    """A line of another kind changes without its owner; a change of the kind counts, because the line leaves the collection."""
    engine = world.engine()
    pair = await pair_of(world, engine, "constants_and_functions")

    def work(session: Session) -> list[list[int]]:
        found = []
        for name, value in (("kind", "closed"), ("amount", 3), ("kind", "OPEN"), ("gone", True)):
            setattr(session.get_one(pair.line, 11), name, value)
            session.commit()
            found.append(versions(session, pair))
        return found

    assert await on_session(world, engine, work) == [[2, 1], [2, 1], [3, 1], [4, 1]]


@pytest.mark.parametrize("name", ["joined_subclass", "alternate_key", "composite_key"])
async def test_many_lines_cost_as_many_queries_as_one(world: World, name: str) -> None:
    """The owners of all changed lines are read together."""
    engine = world.engine()
    pair = await pair_of(world, engine, name)

    def queries(session: Session, count: int) -> int:
        for line in session.scalars(select(pair.line).where(pair.line.id.in_([11, 12, 31]))).all()[:count]:
            line.amount = 9
        sent = statements(session)
        session.flush()
        return sum(text.startswith("SELECT") for text, _many in sent)

    one = await on_session(world, engine, lambda session: queries(session, 1))
    assert await on_session(world, engine, lambda session: queries(session, 3)) == one == 1


async def test_a_line_that_a_listener_changes_counts(world: World) -> None:
    """Listeners of before_flush that are registered later, on the session, have been called when changes are counted."""
    engine = world.engine()
    pair = await pair_of(world, engine, "alternate_key")

    def work(session: Session) -> list[int]:
        line, other = session.get_one(pair.line, 11), session.get_one(pair.line, 31)
        event.listen(session, "before_flush", lambda *_: setattr(line, "amount", 8))
        other.amount = 7
        session.commit()
        return versions(session, pair)

    assert await on_session(world, engine, work) == [2, 1]


async def test_what_sends_no_update_of_the_line_does_not_count(world: World) -> None:
    """A line that is modified, and has the values of its row, leaves the owner as it is."""
    engine = world.engine()
    pair = await pair_of(world, engine, "same_table")

    def work(session: Session) -> list[int]:
        line = session.get_one(pair.line, 11)
        attributes.set_attribute(line, "amount", line.amount)
        line.lines.append(pair.line(id=15))
        session.commit()
        return [*versions(session, pair), session.scalar(select(func.max(pair.owner.version)))]

    assert await on_session(world, engine, work) == [1, 1, 2]


@pytest.mark.parametrize("names", [None, (), ("files",), ("files", "lines")])
async def test_the_list_of_a_subclass_replaces_that_of_its_base(world: World, names: tuple[str, ...] | None) -> None:
    """This applies to changes of a line, of the collection and of the foreign key. Rows of the base class keep its list."""
    engine = world.engine()
    document, owner, part = base_and_subclass("client", names)
    await made(world, engine, document)
    counted = ("lines",) if names is None else names

    def work(session: Session) -> dict[str, int]:
        first = owner(id=1)
        session.add_all([first, document(id=2), part(id=1, line_of=1), part(id=2, file_of=1), part(id=3, line_of=2)])
        session.commit()
        changes: dict[str, Callable[[], Any]] = {
            "lines: row": lambda: setattr(session.get_one(part, 1), "amount", 5),
            "files: row": lambda: setattr(session.get_one(part, 2), "amount", 5),
            "lines: collection": lambda: first.lines.append(part(id=4)),
            "files: collection": lambda: first.files.append(part(id=5)),
            "lines: key": lambda: session.add(part(id=6, line_of=1)),
            "files: key": lambda: session.add(part(id=7, file_of=1)),
        }
        found: dict[str, int] = {}
        for name, change in changes.items():
            before = first.version
            change()
            session.commit()
            found[name] = first.version - before
        session.get_one(part, 3).amount = 5
        session.commit()
        assert session.get_one(document, 2).version == 2
        return found

    found = await on_session(world, engine, work)
    assert found == {name: int(name.partition(":")[0] in counted) for name in found}


async def test_a_row_whose_owner_only_the_database_knows_is_rejected(world: World) -> None:
    """A foreign key that is an SQL expression raises an error, and nothing is saved."""
    engine = world.engine()
    pair = await pair_of(world, engine, "alternate_key")

    def work(session: Session) -> None:
        session.get_one(pair.line, 11).owner_number = func.concat("n", "2")
        with pytest.raises(TypeError, match="counts as a change of its .*owner_number, which determines the owner"):
            session.commit()
        session.rollback()
        assert versions(session, pair) == [1, 1]

    await on_session(world, engine, work)
