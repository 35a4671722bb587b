"""The Session that says of a conflict which rows it is about."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from sqlalchemy import event, inspect
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import ObjectDeletedError, StaleDataError

from pgfence.versions import _batch, _conflicts, _merging
from pgfence.versions._mapping import is_versioned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import ORMExecuteState, SessionTransaction
    from sqlalchemy.orm.interfaces import ORMOption

_O = TypeVar("_O")

POLICIES = ("bump", "refuse", "ignore")
CHECKS = ("row", "batch")


class VersionedSession(Session):
    """A Session whose conflicts are a VersionConflictError that names the rows.

    ::

        SessionLocal = sessionmaker(engine, class_=VersionedSession)
        AsyncSessionLocal = async_sessionmaker(async_engine, sync_session_class=VersionedSession)
        db = SQLAlchemy(session_options={"class_": VersionedSession})  # Flask-SQLAlchemy

    Promised: where a flush fails since others have written rows of classes with `Versioned`, the error lists these rows and
    no others, each with the version that was read and the one that is there now. The look at them goes through the session's
    own connection, after the rollback of the transaction, or of the savepoint in which the flush was; what was before the
    savepoint is usable. merge() of an instance that was read elsewhere compares its version as well, and one without a
    version is refused where there is a row that it would overwrite.

    Not promised: that rows which statements of the same transaction wrote, and which no instance in the session stood for,
    are left out of that list. The same in REPEATABLE READ and SERIALIZABLE, where PostgreSQL itself refuses with SQLSTATE
    40001. Anything of the legacy methods `bulk_save_objects` and `bulk_update_mappings`, which compare versions and name no
    rows. And nothing about instances whose rows the transaction has written by plain SQL: refresh() them.

    Args:
        bind: an Engine, or a Connection whose transaction is the caller's.
        bulk: what becomes of statements on versioned classes beside the flush. "bump" raises the version of each row that
            they write, and refuses those that cannot be made to; an UPDATE inside of a SELECT is looked for one level deep.
            "refuse" refuses all that would not have it by themselves, at any depth; "ignore" sends them as they are.
        conflict_check: "row" sends and counts one UPDATE for each row. "batch" locks and compares all rows of the flush
            first, names every conflict at once, and then writes rows that change alike together.
        **session_options: for Session.

    Raises:
        ValueError: `bulk` or `conflict_check` has another value.
    """

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Take the base class along whose `db` argument and routing Flask-SQLAlchemy expects of a session class."""
        made: type[Any] = _for_flask(cls) if "db" in options else cls  # type: ignore[arg-type]
        found: Self = super().__new__(made)
        return found

    def __init__(
        self,
        bind: Engine | Connection | None = None,
        *,
        bulk: Literal["bump", "refuse", "ignore"] = "bump",
        conflict_check: Literal["row", "batch"] = "row",
        **session_options: Any,
    ) -> None:
        for name, value, known in (("bulk", bulk, POLICIES), ("conflict_check", conflict_check, CHECKS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        super().__init__(bind=bind, **session_options)
        self.bulk = bulk
        self.conflict_check = conflict_check
        _conflicts.keep_journal(self)
        if conflict_check == "batch":
            _batch.watch(self)

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """Flush, and name the rows that somebody else has written. autoflush and commit come here as well.

        Raises:
            VersionConflictError: rows are not at the version they were read at. What the transaction or savepoint had is
                rolled back: call rollback().
            PgfenceError: they are, and were not written: a trigger or a policy is in the way.
        """
        try:
            if self.conflict_check == "batch":
                with _batch.flushing(self):
                    super().flush(objects)
            else:
                super().flush(objects)
        except (StaleDataError, ObjectDeletedError) as error:
            if (meant := _conflicts.told(self, error)) is error:
                raise
            raise meant from error

    def merge(self, instance: _O, *, load: bool = True, options: Sequence[ORMOption] | None = None) -> _O:
        """Merge, if what would be overwritten is at the version that the instance was read at.

        Raises:
            VersionRequiredError: it has no version, and there is a row of its key; or its class has the mode "xmin".
            VersionConflictError: the row is at another version, or gone. Not `retryable`: the instance stays as it is.
        """
        if load:
            _merging.compare(self, instance)
        return super().merge(instance, load=load, options=options)

    def merge_all(
        self, instances: Iterable[_O], *, load: bool = True, options: Sequence[ORMOption] | None = None
    ) -> Sequence[_O]:
        """As `merge`, for several; SQLAlchemy has it since 2.1."""
        found = list(instances)
        for instance in found if load else ():
            _merging.compare(self, instance)
        return super().merge_all(found, load=load, options=options)


@cache
def _for_flask(cls: type[VersionedSession]) -> type[VersionedSession]:
    base = import_module("flask_sqlalchemy.session").Session
    return cls if issubclass(cls, base) else type(cls.__name__, (cls, base), {})


@event.listens_for(VersionedSession, "after_transaction_create")
def _begun(session: Session, transaction: SessionTransaction) -> None:
    if transaction.nested and (journal := _conflicts.journal_of(session)) is not None:
        journal.savepoint(transaction)


@event.listens_for(VersionedSession, "do_orm_execute")
def _stated(state: ORMExecuteState) -> None:
    mapper, journal = state.bind_mapper, _conflicts.journal_of(state.session)
    if (state.is_update or state.is_insert) and mapper is not None and journal is not None and is_versioned(mapper):
        known = (inspect(target) for target in state.session.identity_map.values())
        journal.stated(each for each in known if each.mapper.isa(mapper))


@event.listens_for(VersionedSession, "after_soft_rollback")
def _rolled_back(session: Session, transaction: SessionTransaction) -> None:
    if (journal := _conflicts.journal_of(session)) is not None:
        journal.rolled_back(transaction)


@event.listens_for(VersionedSession, "after_transaction_end")
def _ended(session: Session, transaction: SessionTransaction) -> None:
    if (journal := _conflicts.journal_of(session)) is not None:
        journal.ended(transaction)
