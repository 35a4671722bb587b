"""merge() of an instance that was read elsewhere: its version is compared before anything is overwritten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState

from pgfence.errors import VersionConflict, VersionRequiredError
from pgfence.versions._conflicts import conflict
from pgfence.versions._mapping import ATTRIBUTE, is_versioned, mode_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.orm import Session

    State = InstanceState[object]


def compare(session: Session, instance: object) -> None:
    """Raise unless an instance, and those that merge() takes along, may overwrite what is in the database.

    Raises:
        VersionRequiredError: one has no version that counts, and there is a row of its key.
        VersionConflictError: one was read at another version, or its row is gone.
    """
    state = inspect(instance, raiseerr=False)
    if not isinstance(state, InstanceState):
        return  # merge() raises for what is not mapped
    if overwriting := [
        each for each in _taken_along(state) if is_versioned(each.mapper) and each.session is not session
    ]:
        session._autoflush()  # as merge() does: not inside a flush
        with session.no_autoflush:
            conflicts = [item for each in overwriting for item in _compared(session, each)]
        if conflicts:
            raise conflict(conflicts, precondition=True)


def _taken_along(state: State) -> Iterator[State]:
    yield state
    for _, _, related, _ in state.mapper.cascade_iterator("merge", state):
        yield related


def _compared(session: Session, state: State) -> list[VersionConflict]:
    mapper = state.mapper
    key = state.key or mapper.identity_key_from_instance(state.obj())
    there = None if None in key[1] else session.get(mapper.class_, key[1], identity_token=key[2])
    if there is None and state.key is None:
        return []
    version, pk = state.dict.get(ATTRIBUTE), tuple(key[1])
    if there is not None and (version is None or mode_of(mapper) == "xmin"):
        named = f"{mapper.class_.__name__} {', '.join(map(repr, pk))}"
        why = "has no version" if version is None else "has a version that counts in the session that read it only"
        raise VersionRequiredError(
            f"{named} {why}, and merge() would overwrite whatever others have written: use load_for_version(session,"
            f" {mapper.class_.__name__}, pk, expected) and assign to what it returns"
        )
    found = None if there is None else getattr(there, ATTRIBUTE)
    return [] if found == version else [VersionConflict(mapper.class_, pk, version, found)]
