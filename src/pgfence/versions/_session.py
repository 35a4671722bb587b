"""The Session whose conflict errors list the rows that another transaction has written."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from sqlalchemy import event, inspect
from sqlalchemy.orm import InstanceState, Session
from sqlalchemy.orm.exc import ObjectDeletedError, StaleDataError

from pgfence._api.inputs import check_choice
from pgfence._api.transactions import ATTEMPT
from pgfence.errors import VersionConflict, VersionRequiredError
from pgfence.versions._batch import NOW, Flush
from pgfence.versions._conflicts import conflict_error, explain_failure
from pgfence.versions._mapping import ATTRIBUTE, is_versioned, mode_of, name_row

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
    """A Session that raises VersionConflictError, with the conflicting rows, instead of StaleDataError.

    ::

        SessionLocal = sessionmaker(engine, class_=VersionedSession)
        AsyncSessionLocal = async_sessionmaker(engine, sync_session_class=VersionedSession)
        db = SQLAlchemy(session_options={"class_": VersionedSession})  # Flask-SQLAlchemy

    Guarantees:
        If a flush fails because other processes have written rows of classes with `Versioned`, the error lists these rows and no
        others, each with the version that was read and the current version. The error lists a row no matter how the flush was
        going to write it: as a change or a deletion, through a cascade or `post_update`, or as a new row under the key of a row
        that it deletes. Unless `conflict_check` is "batch", only rows that the flush already knew of when it met the first
        conflict are listed. They are read through the session's own connection, before the transaction, or the savepoint that
        contains the flush, is rolled back. Work before the savepoint is kept. A merge() of an instance that another session has
        read also compares its version, and rejects an instance without a version if there is a row that it would overwrite.

    Limitations:
        In REPEATABLE READ and SERIALIZABLE, PostgreSQL itself rejects the write of a row that has changed since the snapshot,
        with SQLSTATE 40001. The legacy methods `bulk_save_objects` and `bulk_update_mappings` compare versions but do not list
        the rows. The session cannot track SQL text, statements on session.connection() or triggers that write rows of its
        instances. Refresh the instances of such rows before you change them, or the flush raises a PgfenceError. In a Session on
        a Connection, such a row counts as a conflict, because another session may have written it on that Connection.

    Args:
        bind: an Engine, or a Connection whose transaction you control.
        bulk: how statements on versioned classes outside a flush are handled. "bump" increments the version of each row that they
            write, and rejects statements for which that is impossible. An UPDATE inside a SELECT is detected only one level deep.
            "refuse" rejects all statements that do not increment versions themselves, at any depth. "ignore" sends them
            unchanged.
        conflict_check: "auto" writes the rows of a table together or one by one, whichever costs fewer round trips. With psycopg
            and psycopg2, one statement contains the versions of all rows that change alike, and the driver counts the rows that
            it matches. With asyncpg, which cannot count them, four rows or more are locked and compared first. Rows of a class
            with the mode "xmin", of a Session on a Connection, and in AUTOCOMMIT are written one by one. "row" sends and counts
            one UPDATE for each row. "batch" first locks and compares all versioned rows that the flush changes or deletes, except
            rows of a class with the mode "xmin", lists every conflict immediately, and then writes rows that change alike
            together; in AUTOCOMMIT, where a row lock does not last, it raises TransactionStateError.
        **session_options: passed to Session.

    Raises:
        ValueError: `bulk` or `conflict_check` has an invalid value.
    """

    def __new__(cls, *_: object, **options: object) -> Self:
        """Add the base class that Flask-SQLAlchemy expects of a session class, for its `db` argument and routing."""
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
            check_choice(name, value, known)
        super().__init__(bind=bind, **session_options)
        self.bulk = bulk
        self.conflict_check: Literal["auto", "row", "batch"] = conflict_check

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """Flush pending changes. If another transaction has written some of the rows, the error lists them.

        Autoflush and `commit()` call this method too.

        Raises:
            VersionConflictError: rows are not at the version at which they were read. The transaction or savepoint was rolled
                back, so call rollback().
            VersionRequiredError, SchemaError: a row has no version, or was read without it; see `Versioned`.
            TransactionStateError: the session has `conflict_check="batch"`, and the connection is in AUTOCOMMIT.
            PgfenceError: the rows were not written although no other process has written them, because a trigger or a policy
                prevents it, or because this session has changed the rows by a statement that it cannot track.
            StaleDataError: SQLAlchemy's own error, for rows of classes without a version.
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
            attempt = vars(self).get(ATTEMPT)
            if attempt is not None:  # The function of run_transaction may swallow the error.
                attempt.flush_error = found
            raise found from error
        finally:
            NOW.reset(before)

    def merge(self, instance: _O, *, load: bool = True, options: Sequence[ORMOption] | None = None) -> _O:
        """Merge an instance if the row that it would overwrite is at the version at which the instance was read.

        Raises:
            VersionRequiredError: a row with the key of the instance exists, and the instance has no version or its class has the
                mode "xmin".
            VersionConflictError: the row is at another version or was deleted. The error is not `retryable`, because the instance
                keeps its version.
        """
        if load:
            _check_merge(self, instance)
        return super().merge(instance, load=load, options=options)

    def merge_all(
        self, instances: Iterable[_O], *, load: bool = True, options: Sequence[ORMOption] | None = None
    ) -> Sequence[_O]:
        """Merge several instances, each as `merge` does. SQLAlchemy 2.1 added this method."""
        found = list(instances)
        for instance in found if load else ():
            _check_merge(self, instance)
        return super().merge_all(found, load=load, options=options)


def _check_merge(session: Session, instance: object) -> None:
    """Raise an error unless an instance, and those that merge() cascades to, may overwrite what is in the database."""
    state = inspect(instance, raiseerr=False)
    if not isinstance(state, InstanceState):
        return  # merge() raises an error for objects that are not mapped.
    if overwriting := [
        each for each in _iterate_cascade(state) if is_versioned(each.mapper) and each.session is not session
    ]:
        session._autoflush()  # merge() does the same, except inside a flush.
        with session.no_autoflush:
            conflicts = [item for each in overwriting for item in _find_conflicts(session, each)]
        if conflicts:
            raise conflict_error(session, conflicts, precondition=True)


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
        why = "has no version" if version is None else "has a version that is valid only in the session that read it"
        raise VersionRequiredError(
            f"{name_row(mapper.class_, pk)} {why}, and merge() would overwrite changes of other transactions: use"
            f" load_for_version(session, {mapper.class_.__name__}, pk, expected) and assign to what it returns"
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
