"""The documented rights of each feature are sufficient, and each of them is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence import schema
from pgfence.config import configure
from pgfence.errors import SchemaError
from support import installations as tables
from support.installations import PURGE, TableNames, translate_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ID = "'00000000-0000-0000-0000-000000000001'"
LEASES = {
    "lease": ("SELECT", "INSERT", "UPDATE"),
    "gate": ("SELECT",),
    "checkpoint": ("SELECT",),
    "schema_version": ("SELECT",),
}
WRITERS = {"gate": ("SELECT", "INSERT", "UPDATE"), "lease": ("SELECT",)}

LEASE_CALLS = (
    f"SELECT * FROM {{acquire_lease_v2}}('new', {ID}, 10, 0, 0, NULL, 'o', 'h', 1, 'p', NULL, 'lease')",
    f"SELECT {{renew_leases_v1}}(ARRAY['new'], ARRAY[{ID}], ARRAY[1], ARRAY[10.0])",
    f"SELECT * FROM {{adopt_lease_v2}}('new', {ID}, 1, {ID}, 'o', 'h', 1)",
    f"SELECT {{forget_lease_v1}}('new', {ID})",
    f"SELECT {{release_lease_v1}}('new', {ID}, 1)",
)

PERMITS = f"SELECT * FROM {{acquire_permits_v1}}('s', 1, 1, false, {ID}, 10, NULL, 'o', 'h', 1, 'p', {ID}, 0)"

FEATURES: dict[str, tuple[dict[str, tuple[str, ...]], tuple[str, ...]]] = {
    "leases": (LEASES, LEASE_CALLS),
    "tokens": (
        {"lease": ("SELECT", "INSERT", "UPDATE"), "gate": ("SELECT",)},
        ("SELECT {lock_with_token_v2}(pg_backend_pid(), 1, 'new', 0, 'h', 1)", "SELECT pg_advisory_unlock_all()"),
    ),
    "once": (
        LEASES | {"slot": ("SELECT", "INSERT", "UPDATE")},
        (
            f"SELECT * FROM {{acquire_slot_v2}}('new', 'epoch', NULL, {ID}, 10, NULL, 'o', 'h', 1, 'p', NULL, 'UTC', 0, NULL)",
            f"SELECT {{finish_slot_v1}}('new', {ID}, 1, 'epoch', true)",
        ),
    ),
    "writers": (
        WRITERS,
        ("SELECT {enter_gates_v1}(ARRAY['a', 'new'], ARRAY[1, 1])", "SELECT {check_gate_v1}('a', 't')"),
    ),
    "checkpoints": (
        WRITERS | {"checkpoint": ("SELECT", "INSERT", "UPDATE")},
        ("SELECT {save_checkpoint_v1}('a', 1, '{{}}')",),
    ),
    "idempotency keys": (
        {"idempotency_key": ("SELECT", "INSERT", "UPDATE")},
        (
            "SELECT {claim_key_v1}('s', 'k', NULL, 60, 0)",
            "SELECT {finish_key_v1}('s', 'k', 'done', '1')",
        ),
    ),
    "purge": (
        {"idempotency_key": ("SELECT", "UPDATE", "DELETE")},
        (PURGE.format("'-Infinity'", "10", table="{idempotency_key}"),),
    ),
    "semaphores": (
        LEASES
        | {"semaphore": ("SELECT", "INSERT", "UPDATE"), "permit_waiter": ("SELECT", "INSERT", "UPDATE", "DELETE")},
        (
            PERMITS,
            PERMITS,
            f"SELECT {{release_permits_v1}}(ARRAY['s#1'], {ID}, ARRAY[1])",
            f"SELECT {{leave_permits_v1}}('s', {ID})",
        ),
    ),
    "partitions": (
        LEASES
        | {
            "partition_set": ("SELECT", "INSERT", "UPDATE"),
            "partition_member": ("SELECT", "INSERT", "UPDATE", "DELETE"),
        },
        (
            f"SELECT * FROM {{join_partitions_v1}}('p', 2, 'sha256', {ID}, 10)",
            f"SELECT * FROM {{join_partitions_v1}}('p', 2, 'sha256', {ID}, 10)",
            f"SELECT * FROM {{acquire_partition_v1}}('p', 0, 2, 'sha256', {ID}, 10, 0, 0, NULL, 'o', 'h', 1, 'p', NULL, 'partition')",
            f"SELECT {{leave_partitions_v1}}('p', {ID})",
        ),
    ),
    "resizing": (
        {
            "partition_set": ("SELECT", "INSERT", "UPDATE"),
            "lease": ("SELECT", "UPDATE"),
            "gate": ("SELECT", "INSERT", "UPDATE"),
        },
        (
            "SELECT * FROM {resize_partitions_v1}('q', 2, 'sha256')",
            "SELECT * FROM {resize_partitions_v1}('q', 3, 'sha256')",
        ),
    ),
    "rate limits": (
        {"rate_limit": ("SELECT", "INSERT", "UPDATE"), "rate_take": ("SELECT", "INSERT", "UPDATE")},
        ("SELECT * FROM {take_v1}('r', 2, 60, 1)", "SELECT * FROM {take_v1}('r', 2, 60, 2)"),
    ),
    "terms": (
        {"lease": ("SELECT", "UPDATE"), "resign_request": ("SELECT",)},
        (f"SELECT {{renew_leases_v1}}(ARRAY['e'], ARRAY[{ID}], ARRAY[1], ARRAY[10.0])",),
    ),
    "asking": (
        {"lease": ("SELECT", "UPDATE"), "resign_request": ("SELECT", "INSERT", "UPDATE"), "audit": ("INSERT",)},
        ("SELECT * FROM {ask_to_resign_v1}('e', 'me', 'because', NULL)",),
    ),
    "evict": (
        {"lease": ("SELECT", "UPDATE"), "gate": ("SELECT", "INSERT", "UPDATE"), "audit": ("INSERT",)},
        ("SELECT * FROM {evict_lease_v2}('a', 'me', 'because', NULL)",),
    ),
}


@pytest.fixture
def place(dsn: str, admin: psycopg.Connection[Any], name: str) -> Iterator[TableNames]:
    """Tables in a separate schema, with a lease on "a" and a term of "e" that the owner holds, and a free lease "q/0"."""
    here = TableNames(f"rights_{name[-12:]}", "r_")
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    configure(engine, schema=here.schema, prefix=here.prefix)
    schema.create_all(engine)
    engine.dispose()
    admin.execute(filled(LEASE_CALLS[0].replace("'new'", "'a'"), here))
    admin.execute(filled(LEASE_CALLS[0].replace("'new'", "'e'").replace("'lease'", "'term'"), here))
    admin.execute(filled(LEASE_CALLS[0].replace("'new'", "'q/0'"), here))
    admin.execute(f"UPDATE {here.name('lease')} SET free_at = 'epoch' WHERE name = 'q/0'".encode())
    yield here
    admin.execute(f"DROP SCHEMA {here.schema} CASCADE".encode())


def filled(call: str, place: TableNames) -> bytes:
    """Return a call with the names of our functions, or of the table, in it."""
    names = {name.split('"')[-2].removeprefix(place.prefix): name for name in tables.list_functions(place)}
    names["idempotency_key"] = place.name("idempotency_key")
    return call.format(**names).encode()


def rights(feature: str) -> list[tuple[str, str]]:
    return [(table, right) for table, given in FEATURES[feature][0].items() for right in given]


def use(dsn: str, place: TableNames, feature: str) -> None:
    """Use the feature in one transaction that is rolled back."""
    with psycopg.connect(dsn) as user:
        # Otherwise a condition that is known while planning may hide a table that is read only then.
        user.execute("SET plan_cache_mode = force_generic_plan")
        for call in FEATURES[feature][1]:
            user.execute(filled(call, place))
        if feature in {"leases", "once", "semaphores", "partitions"}:
            user.execute(tables.build_check(place).encode())
        user.rollback()


@pytest.mark.parametrize("feature", FEATURES)
def test_the_listed_rights_are_enough_and_each_is_needed(
    feature: str, place: TableNames, role: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """A role with only the listed rights can use the feature, and without any one of them SchemaError is raised."""
    least = role()
    who = least.split("//")[1].split(":")[0]
    grants = [f"{right} ON {place.name(table)}" for table, right in rights(feature)]
    grants.append(f"USAGE ON SCHEMA {place.schema}")
    for grant in grants:
        admin.execute(f"GRANT {grant} TO {who}".encode())
    use(least, place, feature)
    for grant in grants:
        admin.execute(f"REVOKE {grant} FROM {who}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
            use(least, place, feature)
        assert isinstance(translate_error(caught.value, place), SchemaError), grant
        admin.execute(f"GRANT {grant} TO {who}".encode())


def test_a_fenced_table_can_be_written_with_the_rights_of_a_writer(
    place: TableNames, role: Callable[..., str], dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """The trigger runs with the writer's rights: those of the gate, and of the table itself."""
    least = role()
    who = least.split("//")[1].split(":")[0]
    admin.execute(f"CREATE TABLE {place.schema}.books (book int)".encode())
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    configure(engine, schema=place.schema, prefix=place.prefix)
    schema.add_fence(engine, f"{place.schema}.books", resource="a")
    engine.dispose()
    grants = [f"{right} ON {place.name(table)}" for table, right in rights("writers")]
    for grant in (*grants, f"USAGE ON SCHEMA {place.schema}", f"INSERT ON {place.schema}.books"):
        admin.execute(f"GRANT {grant} TO {who}".encode())
    with psycopg.connect(least) as user:
        user.execute(filled("SELECT {enter_gates_v1}(ARRAY['a'], ARRAY[1])", place))
        user.execute(f"INSERT INTO {place.schema}.books VALUES (1)".encode())
    assert admin.execute(f"SELECT book FROM {place.schema}.books".encode()).fetchall() == [(1,)]
