"""The Session that says of a conflict which rows it is about."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from sqlalchemy import event, inspect
from sqlalchemy.orm import InstanceState, Session
from sqlalchemy.orm.exc import ObjectDeletedError, StaleDataError

from pgfence.errors import VersionConflict, VersionRequiredError
from pgfence.versions._batch import NOW, Flush
from pgfence.versions._conflicts import conflict_error, explain_failure
from pgfence.versions._mapping import ATTRIBUTE, is_versioned, mode_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm.interfaces import ORMOption
    from sqlalchemy.orm.unitofwork import UOWTransaction

    from pgfence._orm import State

_O = TypeVar("_O")

POLICIES = ("bump", "refuse", "ignore")
CHECKS = ("auto", "row", "batch")


class VersionedSession(Session):
    """A Session whose conflicts are a VersionConflictError that names the rows.

    ::

        SessionLocal = sessionmaker(engine, class_=VersionedSession)
        AsyncSessionLocal = async_sessionmaker(async_engine, sync_session_class=VersionedSession)
        db = SQLAlchemy(session_options={"class_": VersionedSession})  # Flask-SQLAlchemy

    Guarantees:
        If a flush fails because other processes have written rows of classes with `Versioned`, the error lists these rows
        and no others, each with the version that was read and the one that is there now, whichever way the flush was to write
        them: as a change or a deletion of their own, by a cascade, by `post_update`, or as a new row under the key of one that
        it deletes. Unless `conflict_check` is "batch", these are the rows that the flush knew of when it came to the first
        conflict. The look at them
        goes through the session's own connection, before the transaction, or the savepoint in which the flush was, is rolled
        back; what was before the savepoint is usable. merge() of an instance that was read elsewhere compares its version as
        well, and one without a version is rejected where there is a row that it would overwrite.

    Limitations:
        In REPEATABLE READ and SERIALIZABLE PostgreSQL itself rejects such a write with SQLSTATE 40001. The legacy methods
        `bulk_save_objects` and `bulk_update_mappings` compare versions and list no rows. The session cannot follow SQL text,
        statements on session.connection() and triggers that write rows of its instances: refresh() these before changing them,
        or the flush raises a PgfenceError. Two sessions on one Connection are told apart by versions only, so that such a
        row is a conflict there.

    Args:
        bind: an Engine, or a Connection whose transaction is the caller's.
        bulk: what becomes of statements on versioned classes beside the flush. "bump" raises the version of each row that
            they write, and refuses those that cannot be made to; an UPDATE inside of a SELECT is looked for one level deep.
            "refuse" refuses all that would not have it by themselves, at any depth; "ignore" sends them as they are.
        conflict_check: "auto" writes several rows of a table together and a single row by itself, whichever costs fewer round
            trips. With psycopg and psycopg2, one statement has the versions of all rows that change alike, and the driver counts
            the rows that it matches. asyncpg cannot count them: four rows or more are locked and compared first. Rows of a
            class with the mode "xmin", of a Session on a Connection, and in AUTOCOMMIT are written one by one.
            "row" sends and counts one UPDATE for each row. "batch" locks and compares all rows of the flush first, names every
            conflict at once, and then writes rows that change alike together; in AUTOCOMMIT, where a row lock does not last, it
            raises TransactionStateError.
        **session_options: for Session.

    Raises:
        ValueError: `bulk` or `conflict_check` has another value.
    """

    def __new__(cls, *_: object, **options: object) -> Self:
        """Take the base class along whose `db` argument and routing Flask-SQLAlchemy expects of a session class."""
        made: type[Any] = _add_flask_base(cls) if "db" in options else cls  # type: ignore[arg-type]
        found: Self = super().__new__(made)
        return found

    def __init__(
        self,
        bind: Engine | Connection | None = None,
        *,
        bulk: Literal["bump", "refuse", "ignore"] = "bump",
        conflict_check: Literal["auto", "row", "batch"] = "auto",
        **session_options: Any,
    ) -> None:
        for name, value, known in (("bulk", bulk, POLICIES), ("conflict_check", conflict_check, CHECKS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        super().__init__(bind=bind, **session_options)
        self.bulk = bulk
        self.conflict_check: Literal["auto", "row", "batch"] = conflict_check

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """Flush, and name the rows that somebody else has written. autoflush and commit come here as well.

        Raises:
            VersionConflictError: rows are not at the version they were read at. What the transaction or savepoint had is
                rolled back: call rollback().
            PgfenceError: no other process has written them, but they were not written: a trigger or a policy is in the way, or
                this session has changed the rows by a statement which it cannot follow.
        """
        flush = Flush(self, self.conflict_check)
        before = NOW.set(flush)
        try:
            super().flush(objects)
        except (StaleDataError, ObjectDeletedError) as error:
            if not flush.started:
                flush.record_failed_rows()
            if (found := explain_failure(flush, error)) is error:
                raise
            raise found from error
        finally:
            NOW.reset(before)

    def merge(self, instance: _O, *, load: bool = True, options: Sequence[ORMOption] | None = None) -> _O:
        """Merge, if what would be overwritten is at the version that the instance was read at.

        Raises:
            VersionRequiredError: it has no version, and there is a row of its key; or its class has the mode "xmin".
            VersionConflictError: the row is at another version, or gone. Not `retryable`: the instance stays as it is.
        """
        if load:
            _check_merge(self, instance)
        return super().merge(instance, load=load, options=options)

    def merge_all(
        self, instances: Iterable[_O], *, load: bool = True, options: Sequence[ORMOption] | None = None
    ) -> Sequence[_O]:
        """As `merge`, for several; SQLAlchemy has it since 2.1."""
        found = list(instances)
        for instance in found if load else ():
            _check_merge(self, instance)
        return super().merge_all(found, load=load, options=options)


def _check_merge(session: Session, instance: object) -> None:
    """Raise unless an instance, and those that merge() takes along, may overwrite what is in the database.

    Raises:
        VersionRequiredError: one has no version that counts, and there is a row of its key.
        VersionConflictError: one was read at another version, or its row is gone.
    """
    state = inspect(instance, raiseerr=False)
    if not isinstance(state, InstanceState):
        return  # merge() raises for what is not mapped
    if overwriting := [
        each for each in _iterate_cascade(state) if is_versioned(each.mapper) and each.session is not session
    ]:
        session._autoflush()  # as merge() does: not inside a flush
        with session.no_autoflush:
            conflicts = [item for each in overwriting for item in _find_conflicts(session, each)]
        if conflicts:
            raise conflict_error(conflicts, precondition=True)


def _iterate_cascade(state: State) -> Iterator[State]:
    yield state
    for _, _, related, _ in state.mapper.cascade_iterator("merge", state):
        yield related


def _find_conflicts(session: Session, state: State) -> list[VersionConflict]:
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


@cache
def _add_flask_base(cls: type[VersionedSession]) -> type[VersionedSession]:
    base = import_module("flask_sqlalchemy.session").Session
    return cls if issubclass(cls, base) else type(cls.__name__, (cls, base), {})


@event.listens_for(VersionedSession, "before_flush")
def _before_flush(session: Session, context: UOWTransaction, _instances: object) -> None:
    if (flush := NOW.get()) is not None and flush.session is session:
        flush.context = context
        context.execute = flush.run  # type: ignore[method-assign]
