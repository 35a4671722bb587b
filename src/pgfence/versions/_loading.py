"""`load_for_version`: load a row only if it is still at the version that the caller has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload
from uuid import UUID

from sqlalchemy import Uuid, inspect, literal, select, update
from sqlalchemy.orm import Mapper, Session
from sqlalchemy.orm.attributes import instance_state

from pgfence._api.inputs import is_async_session, is_session, unwrap_session
from pgfence._orm import Key, identity_of
from pgfence.errors import TransactionStateError, VersionConflict, VersionConflictError
from pgfence.versions import _mapping
from pgfence.versions._conflicts import emit_conflicts, missing_version_error
from pgfence.versions.etags import ANY, IfMatch, etag

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import TypeAlias

    from pgfence._api.inputs import AnyAsyncSession, SyncSession

    Expected: TypeAlias = int | UUID | IfMatch

__all__ = ["load_for_version"]

ASYNCIO = "sqlalchemy.ext.asyncio"
_SHOWN = 60
T = TypeVar("T")


@overload
def load_for_version(
    session: AnyAsyncSession, model: type[T], pk: Any, expected: Expected, *, lock: bool = False
) -> Coroutine[Any, Any, T]: ...
@overload
def load_for_version(session: SyncSession, model: type[T], pk: Any, expected: Expected, *, lock: bool = False) -> T: ...
def load_for_version(session: Any, model: type, pk: object, expected: object, *, lock: bool = False) -> object:
    """Load a row to change it, if it is still at the version that a client has seen.

    ::

        page = load_for_version(session, Page, 1, expected=if_match(request.headers))
        page.title = request.form["title"]
        session.commit()

    Guarantees: the row is read again even if the session already has it, and its version is compared before anything else is
    sent. The flush compares the version that was read here, so if another process writes the row in between, the flush fails
    and no change is lost.

    Limitations: the flush is not guaranteed to succeed unless `lock=True`. If it fails, a plain Session raises SQLAlchemy's
    StaleDataError, and a `VersionedSession` raises VersionConflictError. In REPEATABLE READ and SERIALIZABLE, the row is as old
    as the transaction's snapshot, and the UPDATE of a row that has changed since then fails with SQLSTATE 40001. A row that was
    deleted and created again starts at version 1 again. `VersionedUUID` distinguishes it from the deleted row.

    Args:
        session: a Session or scoped_session, or the async counterpart of either, in which case the result must be awaited.
        model: a class with `Versioned` or `VersionedUUID`.
        pk: the primary key, as a value, a tuple, or a dict with attribute names as keys; see `Session.get`.
        expected: the version that the client sent, as a number from a form, a UUID, or the result of `if_match`.
        lock: whether to lock the row (FOR UPDATE), so that no other transaction writes it before this one ends. Locking waits for
            a transaction that has locked the row, up to the session's `lock_timeout`, and costs one more round trip. The lock is
            held until the transaction ends, even after a conflict.

    Raises:
        VersionConflictError: the row is at another version, or was deleted. In the error's item for the row, `found` is the
            current version, or None if the row was deleted. Respond with 412. The error is not `retryable`, because the client
            must read the row first. The session remains usable.
        TransactionStateError: the session has unflushed changes, which could be lost when the row is read again.
        SchemaError: the version of the row is NULL. `command` contains the statements that fix it.
        InvalidRequestError: SQLAlchemy's own error, if `pk` does not fit the primary key.
        TypeError: `expected` is not a version of that class (such as None or "1"); the class is not versioned; or `session` is
            not a session. With `__version_mode__ = "xmin"`, the only IfMatch that is allowed is `*`; see `etag`.
    """
    if is_async_session(session):
        return unwrap_session(session).run_sync(_load, _check_model(model, expected), pk, expected, lock)
    if not is_session(session):
        raise TypeError(f"load_for_version() takes a Session or an AsyncSession, not {type(session).__name__}")
    return _load(unwrap_session(session), _check_model(model, expected), pk, expected, lock)


def _check_model(model: type, expected: object) -> Mapper[object]:
    """Return the mapper of a versioned class to which the expected version may belong."""
    mapper: object = inspect(model, raiseerr=False)
    if not isinstance(mapper, Mapper) or not _mapping.is_versioned(mapper):
        raise TypeError(f"load_for_version() takes a class with the mixin Versioned or VersionedUUID, not {model!r}")
    if isinstance(expected, IfMatch):
        return mapper
    kind = UUID if isinstance(_mapping.get_version_column(mapper).type, Uuid) else int
    if not isinstance(expected, kind) or isinstance(expected, bool):
        raise TypeError(
            f"the version of {mapper.class_.__name__} is of type {kind.__name__}, and the expected version is {expected!r}:"
            f" convert the value that the client sent with {kind.__name__}(...), or pass if_match(headers)"
        )
    return mapper


def _load(session: Session, mapper: Mapper[object], pk: object, expected: object, lock: bool) -> object:
    _reject_unflushed(session, mapper)
    version = _mapping.get_version_column(mapper)
    # A Session that reads from replicas must read this row from the server to which the flush will write it.
    primary = {"bind": session.get_bind(mapper, clause=update(version.table))}
    key = _key_of(mapper, pk)
    with session.no_autoflush:
        # session.get() raises an error for a key that does not fit.
        if lock and len(key) == len(mapper.primary_key):
            # This is separate from the read, because tables that the read joins without locking would be as old as the statement that
            # waited, and PostgreSQL rejects FOR UPDATE of an outer join.
            keys = zip(mapper.base_mapper.primary_key, key, strict=True)
            # The parameters have the types of the columns, as those of session.get().
            one = select(version).where(*(column == literal(value, column.type) for column, value in keys))
            one = one.with_for_update()
            session.execute(one, bind_arguments=primary)
        found = session.get(mapper.class_, pk, populate_existing=True, bind_arguments=primary)
    if found is None:
        raise _conflict_error(session, mapper, key, expected, None)
    loaded = getattr(found, _mapping.ATTRIBUTE)
    if loaded is None:
        raise missing_version_error(mapper, identity_of(instance_state(found)))
    if not _agrees(found, loaded, expected):
        raise _conflict_error(session, mapper, identity_of(instance_state(found)), expected, loaded)
    return found


def _agrees(row: object, version: object, expected: object) -> bool:
    if isinstance(expected, IfMatch):
        return expected == ANY or expected.matches(etag(row))
    return bool(version == expected)


def _reject_unflushed(session: Session, mapper: Mapper[object]) -> None:
    """Raise an error if there are unflushed changes, which reading could lose, also in other rows that the SELECT loads."""
    changed = [one for one in session.dirty if session.is_modified(one)] + list(session.deleted)
    if changed:
        kinds_of = ", ".join(sorted({type(one).__name__ for one in changed}))
        raise TransactionStateError(
            f"the Session has unflushed changes ({kinds_of}), and reading {mapper.class_.__name__} again could lose them: call"
            " load_for_version() before you change anything, or call flush() first"
        )


def _conflict_error(
    session: Session, mapper: Mapper[object], key: Key, expected: object, version: object
) -> VersionConflictError:
    wanted = str(expected) if isinstance(expected, IfMatch) else expected
    if version is None:
        now = "it does not exist, or is hidden from this role. Tell the client that there is no such row"
    else:
        now = f"it is at version {version}. Show the current row to the client"
    item = VersionConflict(mapper.class_, key, wanted, version)
    emit_conflicts(session, [item])
    return VersionConflictError(
        f"{_mapping.name_row(mapper.class_, key)} is not at the expected version ({str(wanted)[:_SHOWN]}): {now}",
        items=[item],
        precondition=True,
    )


def _key_of(mapper: Mapper[object], pk: object) -> Key:
    """Return the values of a primary key in the order of its columns; a dict may lack some of them."""
    if isinstance(pk, dict):
        given = {synonym.name: pk[synonym.key] for synonym in mapper.synonyms if synonym.key in pk} | pk
        names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
        return tuple(given[name] for name in names if name in given)
    return tuple(pk) if isinstance(pk, (tuple, list)) else (pk,)
