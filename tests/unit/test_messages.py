"""Error messages with real values in them: articles, plurals, and advice that works in each case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from pgfence._admin.doctor.activity import _describe_blockers
from pgfence._alembic.operations import check_version
from pgfence._locks.outages import Patience
from pgfence._sql import encoding, evict
from pgfence._sql.activity import describe_kind
from pgfence._sql.errors import LOCK_OUTCOME_UNKNOWN, ErrorContext, translate_error
from pgfence._sql.storage import VERSION, TableNames
from pgfence._values import errors
from pgfence._values.codec import Codec
from pgfence.config import configure
from pgfence.errors import IdempotencyMisuseError, StandbyError, UnreachableError
from pgfence.keys import LockKey
from pgfence.testing import FaultUnavailableError
from pgfence.testing._faults import _terminate
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Sequence


def wrap(error: psycopg.Error) -> DBAPIError:
    """Return an error of the driver as SQLAlchemy raises it."""
    return DBAPIError("SELECT 1", None, error)


@every_row(
    ("kind", "described"),
    [
        ("advisory", "an advisory lock"),
        ("session lock", "a session lock"),
        ("lease", "a lease"),
        ("idempotency", "an idempotency"),
    ],
)
def test_the_kind_of_a_holder_has_its_article(kind: str, described: str) -> None:
    """An advisory lock is not "a advisory"."""
    assert describe_kind(kind) == described


@every_row(
    ("place", "known", "described"),
    [
        (TableNames(), (), "on the search path"),
        (TableNames(), ("app",), "in database 'app', on the search path"),
        (TableNames(), ("app", "public"), "in database 'app', on the search path 'public'"),
        (TableNames(), ("app", "public", "public"), "in database 'app', schema 'public' (search path 'public')"),
        (TableNames("s"), ("app", "public", "s"), "in database 'app', schema 's'"),
        (TableNames("s"), (), "in schema 's'"),
    ],
)
def test_a_place_is_described_by_what_is_known(place: TableNames, known: Sequence[str], described: str) -> None:
    """Without a schema, it is the search path, whose setting may not be known."""
    assert place.describe(*known) == described


def test_a_recorded_error_of_another_class_is_named_without_an_article() -> None:
    """The class may begin with a vowel."""
    codec = Codec.of(None)
    found = errors.decode(errors.encode(OSError("gone"), codec), (KeyError,), codec, "the key 'k'")
    assert "the key 'k' ended with the exception OSError, which record= does not include" in str(found)


def test_an_unknown_class_in_a_stored_result_is_named_without_an_article() -> None:
    """The class may begin with a vowel."""
    with pytest.raises(IdempotencyMisuseError, match="contains an instance of Invoice, which result="):
        Codec.of(None).decode('{"$c": "Invoice", "v": {}}')


@pytest.mark.parametrize("version", [0, VERSION + 1, "2"])
def test_a_version_that_does_not_exist_is_rejected_with_both_limits(version: Any) -> None:
    """Version 0 is no older version."""
    with pytest.raises(ValueError, match=rf"version must be an int from 1 to {VERSION}.*not {version!r}"):
        check_version(version)


@every_row(
    ("error", "said"),
    [
        (StandbyError("this server is a standby"), "no primary was found"),
        (UnreachableError(f"no response. {LOCK_OUTCOME_UNKNOWN}"), "the server could not be reached"),
    ],
)
def test_an_outage_is_called_what_it_is(error: StandbyError | UnreachableError, said: str) -> None:
    """A standby was reached."""
    patience = Patience(True)
    patience.failures = 1
    ended = patience.build_outage_error(("a",), error, 5)
    assert type(ended) is type(error)
    assert f"Waited 5 s for 'a': {said}. {LOCK_OUTCOME_UNKNOWN}" in str(ended)
    patience.note_held()
    patience.failures = 1
    assert str(ended) != str(patience.build_outage_error(("a",), error, 5))
    assert ("no primary has been found" in str(patience.build_outage_error(("a",), error, 5))) == (
        said == "no primary was found"
    )


@every_row(
    ("pids", "described"),
    [
        ([7], "backend 7"),
        ([7, 8], "backend 7, backend 8"),
        ([0, 7], "backend 7 and a prepared transaction"),
        ([0], "a prepared transaction"),
        ([], "no session at the moment"),
    ],
)
def test_a_prepared_transaction_that_blocks_is_named(pids: list[int], described: str) -> None:
    """PostgreSQL returns 0 for its process."""
    assert _describe_blockers(pids) == described


@every_row(
    ("place", "grant"),
    [
        (TableNames("Apps"), 'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA "Apps" TO <role>'),
        (TableNames(), "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA <schema> TO <role>"),
    ],
)
def test_a_role_that_may_not_call_the_functions_gets_the_grant(place: TableNames, grant: str) -> None:
    """A site may have revoked EXECUTE from PUBLIC; grants on the tables do not help there."""
    denied = psycopg.errors.InsufficientPrivilege("permission denied for function pgfence_enter_gate_v1")
    found = translate_error(wrap(denied), place, ErrorContext())
    assert grant in str(found)
    other = psycopg.errors.InsufficientPrivilege("permission denied for table pgfence_gate")
    assert "EXECUTE" not in str(translate_error(wrap(other), place, ErrorContext()))


def test_a_write_in_a_read_only_transaction_is_not_blamed_on_the_server() -> None:
    """The transaction may be read-only on a primary that accepts writes."""
    denied = psycopg.errors.ReadOnlySqlTransaction("cannot execute INSERT in a read-only transaction")
    found = translate_error(wrap(denied), None, ErrorContext(on_primary="Begin on the primary"))
    assert isinstance(found, StandbyError)
    assert (
        "this server rejected a write (cannot execute INSERT in a read-only transaction): it is a standby, or"
        in str(found)
    )


def test_a_text_that_is_not_known_is_not_quoted() -> None:
    """The server may reject text that no parameter contains."""
    settings = SimpleNamespace(server_encoding="LATIN1", client_encoding="UTF8")
    driver = SimpleNamespace(get_settings=lambda: settings)
    error = encoding.text_error(wrap(psycopg.errors.UntranslatableCharacter("no")), ("plain",), lambda: driver)
    assert str(error).startswith("a text in this statement cannot be represented in the encoding")


@pytest.mark.parametrize("writers", [1, 2])
def test_an_open_writer_is_one_of_several_only_if_there_are_several(
    monkeypatch: pytest.MonkeyPatch, writers: int
) -> None:
    """One writer is not "one of" itself."""
    rows = [(number, f"worker-{number}", None, None) for number in range(1, writers + 1)]
    monkeypatch.setattr(evict, "_run", lambda *_: SimpleNamespace(all=lambda: rows))
    request = evict.EvictionRequest("job", LockKey.of("job"), TableNames(), "hung", "me")
    said = str(evict._occupied_error(None, request))  # type: ignore[arg-type]
    listed = "probably worker-1 (backend 1)" if writers == 1 else "one of worker-1 (backend 1); worker-2 (backend 2)"
    assert f"was still open after 2 s ({listed}). End it" in said


def test_a_role_that_may_not_end_a_session_is_told_what_is_missing() -> None:
    """The role's name is not in the URL if libpq chooses it, and no GRANT helps against a superuser."""

    def connect() -> Any:
        raise wrap(psycopg.errors.InsufficientPrivilege("permission denied to terminate process"))

    engine: Any = SimpleNamespace(connect=connect, url=SimpleNamespace(username=None))
    with pytest.raises(FaultUnavailableError) as caught:
        _terminate(engine, 4711)
    assert str(caught.value) == (
        "this role may not end the session of backend 4711: permission denied to terminate process. Run GRANT"
        " pg_signal_backend TO <role>, or connect as the session's own role (only a superuser can end the session of a superuser)"
    )


def test_the_choices_of_a_setting_are_quoted() -> None:
    """As the value is."""
    engine = create_engine("postgresql+psycopg://")
    with pytest.raises(ValueError, match="pooler must be one of 'auto', .*, not 'none'"):
        configure(engine, pooler="none")  # type: ignore[arg-type]
