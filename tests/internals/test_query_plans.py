"""How the server functions find their rows: by key, whatever the size of the tables when a session planned them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest

from pgfence._sql.storage import TableNames, read_functions
from pgfence._sql.tables import build_creation, build_removal

if TYPE_CHECKING:
    from collections.abc import Iterator

# The statements of a function are planned for all values, and for good, after five executions.
OFTEN = 8

FILL = (
    (
        "INSERT INTO {}lease (name, token, acquired_at, renewed_at, expires_at, free_at)"
        " VALUES ('r', 1, now(), now(), now(), now())"
    ),
    "INSERT INTO {}gate (resource, token, updated_at) VALUES ('r', 1, now())",
    "INSERT INTO {}checkpoint (name, token, updated_at) VALUES ('r', 1, now())",
    "INSERT INTO {}slot (name) VALUES ('r')",
    "INSERT INTO {}idempotency_key (scope, key, status, created_at, expires_at) VALUES ('s', 'r', 'free', now(), now())",
    "INSERT INTO {}semaphore (name, permits, highest) VALUES ('r', 1, 1)",
    "INSERT INTO {}permit_waiter (name, waiter, weight, arrived_at, seen_at) VALUES ('r', gen_random_uuid(), 1, now(), now())",
    "INSERT INTO {}rate_limit (name, max_takes, per, taken, newest) VALUES ('r', 1, 1, 1, now())",
    "INSERT INTO {}rate_take (name, slot, taken_at) VALUES ('r', 0, now())",
    *(f"VACUUM ANALYZE {{}}{table}" for table in ("lease", "gate", "checkpoint", "slot", "idempotency_key")),
    "INSERT INTO {}resign_request (name, token, asked_at) VALUES ('r', 1, now())",
    "INSERT INTO {}partition_set (name, partitions, hash) VALUES ('r', 1, 'sha256')",
    "INSERT INTO {}partition_member (name, member, ttl, seen_at) VALUES ('r', gen_random_uuid(), 1, now())",
    *(
        f"VACUUM ANALYZE {{}}{table}"
        for table in ("resign_request", "semaphore", "permit_waiter", "rate_limit", "rate_take")
    ),
    *(f"VACUUM ANALYZE {{}}{table}" for table in ("partition_set", "partition_member")),
    "INSERT INTO {}lock_name (key, name, seen_at) VALUES (1, 'r', now())",
    "VACUUM ANALYZE {}lock_name",
)
CALLS = (
    "acquire_lease_v1(%(name)s, %(id)s, 60, 0, 0, NULL, 'me', 'here', 1, '', NULL)",
    "acquire_lease_v2(%(name)s || 'v', %(id)s, 60, 0, 0, NULL, 'me', 'here', 1, '', NULL, 'lease')",
    "enter_gate_v1(%(name)s, 1)",
    "check_gate_v1(%(name)s, 'accounts')",
    "save_checkpoint_v1(%(name)s, 1, '1')",
    "renew_leases_v1(ARRAY[%(name)s], ARRAY[%(id)s], ARRAY[1]::bigint[], ARRAY[60]::float8[])",
    "adopt_lease_v1(%(name)s, %(id)s, 1, %(new)s, NULL, 'there', 2)",
    "adopt_lease_v2(%(name)s || 'v', %(id)s, 1, %(new)s, NULL, 'there', 2)",
    "release_lease_v1(%(name)s, %(new)s, 1)",
    "evict_lease_v1(%(name)s, 'me', '', NULL)",
    "evict_lease_v2(%(name)s || 'v', 'me', '', NULL)",
    "forget_lease_v1(%(name)s, %(new)s)",
    "lock_with_token_v1(pg_backend_pid(), 1, %(name)s, 0)",
    "lock_with_token_v2(pg_backend_pid(), 1, %(name)s || 'v', 0, 'here', 1)",
    "acquire_slot_v1(%(name)s || 's', now(), now() + interval '1 h', %(id)s, 60, NULL, 'me', 'here', 1, '', NULL)",
    "acquire_slot_v2(%(name)s || 't', now(), now() + interval '1 h', %(id)s, 60, NULL, 'me', 'here', 1, '', NULL, 'UTC', 0, NULL)",
    "finish_slot_v1(%(name)s || 's', %(id)s, 1, now(), true)",
    "claim_key_v1('s', %(name)s, NULL, 60, 0)",
    "finish_key_v1('s', %(name)s, 'done', '1')",
    "claim_effect_v1('s', %(name)s || 'e', NULL, %(id)s, 30, 60, true, 'me', 'here', 1)",
    "renew_keys_v1(ARRAY['s' || chr(31) || %(name)s || 'e'], ARRAY[%(id)s], ARRAY[1]::bigint[], ARRAY[30]::float8[])",
    "save_step_v1('s' || chr(31) || %(name)s || 'e', %(id)s, 1, 'step', '1')",
    "finish_effect_v1('s' || chr(31) || %(name)s || 'e', %(id)s, 1, 60, 'done', '1', NULL, NULL, NULL, true)",
    "claim_effect_v1('s', %(name)s || 'f', NULL, %(id)s, 30, 60, true, 'me', 'here', 1)",
    "free_effect_v1('s' || chr(31) || %(name)s || 'f', %(id)s, 1)",
    "forget_effect_v1('s' || chr(31) || %(name)s || 'f', %(id)s)",
    "acquire_permits_v1(%(name)s || 'p', 3, 2, false, %(id)s, 60, NULL, 'me', 'here', 1, '', NULL, 0)",
    "acquire_permits_v1(%(name)s || 'p', 3, 2, false, %(id)s, 60, NULL, 'me', 'here', 1, '', %(new)s, 1)",
    "leave_permits_v1(%(name)s || 'p', %(new)s)",
    "resize_semaphore_v1(%(name)s || 'p', 2)",
    "acquire_permits_v1(%(name)s || 'p', 2, 1, false, %(id)s, 60, NULL, 'me', 'here', 1, '', NULL, 0)",
    "release_permits_v1(ARRAY[%(name)s || 'p#1'], %(id)s, ARRAY[2]::bigint[])",
    "forget_permits_v1(%(name)s || 'p', %(id)s)",
    "acquire_lease_v2(%(name)s || 'w', %(id)s, 60, 0, 0, NULL, 'me', 'here', 1, '', NULL, 'term')",
    "ask_to_resign_v1(%(name)s || 'w', 'me', '', NULL)",
    "renew_leases_v1(ARRAY[%(name)s || 'w'], ARRAY[%(id)s], ARRAY[1]::bigint[], ARRAY[60]::float8[])",
    "join_partitions_v1(%(name)s, 3, 'sha256', %(id)s, 60)",
    "join_partitions_v1(%(name)s, 3, 'sha256', %(id)s, 60)",
    "acquire_partition_v1(%(name)s, 0, 3, 'sha256', %(id)s, 60, 0, 0, NULL, 'me', 'here', 1, '', NULL, 'partition')",
    "release_lease_v1(%(name)s || '/0', %(id)s, 1)",
    "leave_partitions_v1(%(name)s, %(id)s)",
    "resize_partitions_v1(%(name)s, 2, 'sha256')",
    "take_v1(%(name)s, 3, 60, 2)",
    "take_v1(%(name)s, 3, 60, 2)",
    "change_rate_v1(%(name)s, 2, 60)",
    "note_names_v1(ARRAY[hashtext(%(name)s)]::bigint[], ARRAY[%(name)s])",
    "note_names_v1(ARRAY[hashtext(%(name)s)]::bigint[], ARRAY[%(name)s])",
)
SCANS = (
    "SELECT relname, seq_tup_read FROM pg_stat_xact_user_tables WHERE starts_with(relname, %s) AND seq_tup_read > 0"
    " ORDER BY relname"
)


@pytest.fixture
def place(admin: psycopg.Connection[Any], name: str) -> Iterator[TableNames]:
    """Tables that no other test uses, with a fenced one."""
    here = TableNames(prefix=f"plan_{name[-12:]}_")
    for statement in (*build_creation(here), f"CREATE TABLE {here.prefix}fenced (id int)"):
        admin.execute(statement.encode())
    admin.execute(
        f"CREATE TRIGGER fence BEFORE INSERT ON {here.prefix}fenced EXECUTE FUNCTION {here.prefix}fence_table_v1('r')".encode()
    )
    yield here
    for statement in (f"DROP TABLE {here.prefix}fenced", *build_removal(here)):
        admin.execute(statement.encode())


def scanned(session: psycopg.Connection[Any], place: TableNames, name: str) -> list[Any]:
    """Call every function in one transaction; return which tables were read from end to end, and how many rows of them."""
    values = {"name": name, "id": str(uuid4()), "new": str(uuid4())}
    with session.transaction():
        for call in CALLS:
            session.execute(f"SELECT * FROM {place.prefix}{call}".encode(), values)
        session.execute(f"SELECT {place.prefix}enter_gate_v1('r', 1)".encode())
        session.execute(f"INSERT INTO {place.prefix}fenced VALUES (1)".encode())
        session.execute("SELECT pg_advisory_unlock(1), pg_advisory_unlock(1)")
        session.execute("SET CONSTRAINTS ALL IMMEDIATE")
        return session.execute(SCANS, [place.prefix]).fetchall()


def test_no_function_reads_a_table_from_end_to_end_though_it_is_tiny(
    admin: psycopg.Connection[Any], dsn: str, place: TableNames
) -> None:
    """A scan of the one page is cheaper, but a session keeps that plan while the table grows, and each row costs each call."""
    for statement in FILL:
        admin.execute(statement.format(place.prefix).encode())
    with psycopg.connect(dsn, autocommit=True) as session:
        for number in range(OFTEN):
            assert scanned(session, place, f"name {number}") == []


def test_every_function_is_called() -> None:
    """But those that only refuse, or only call others."""
    gates = {
        "enter_gates",
        "refuse",
        "refuse_wait",
        "fence_row",
        "fence_table",
        "fence_truncate",
        "lock_gate",
        "check_key",
    }
    leases = {"timeline", "next_token", "add_lease", "rebase_lease", "session_holds", "zone_offset", "add_permits"}
    others = {f"{name}_v1" for name in gates | leases | {"partition_for"}}
    assert set(read_functions(TableNames())) == others | {call.partition("(")[0] for call in CALLS}
