"""Checks of pgfence's tables and functions, and of the role's privileges on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._admin.doctor.finding import build_finding
from pgfence._sql.storage import VERSION, quote, read_functions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pgfence._admin.doctor.finding import Examined, Finding

_WRITE = ("SELECT", "INSERT", "UPDATE")
_EVERY = (*_WRITE, "DELETE")
FEATURES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "leases": {
        "lease": _WRITE,
        "slot": _WRITE,
        "gate": ("SELECT",),
        "checkpoint": ("SELECT",),
        "schema_version": ("SELECT",),
    },
    "fenced transactions": {"gate": _WRITE, "lease": ("SELECT",)},
    "idempotency keys": {"idempotency_key": _WRITE},
    "semaphores": {"semaphore": _WRITE, "permit_waiter": _EVERY},
    "rate limits": {"rate_limit": _WRITE, "rate_take": _WRITE},
    "partitions": {"partition_set": _WRITE, "partition_member": _EVERY},
}
"""The privileges that each feature needs."""


def check_tables(examined: Examined) -> Iterator[Finding]:
    seen, place = examined.snapshot, examined.place
    if seen.schema is not None:
        if seen.problem is not None:
            outdated = seen.problem.found is None or seen.problem.found < VERSION
            command = seen.problem.command or place.command
            code = "tables-outdated" if outdated else "tables-differ"
            yield build_finding(code, f"{str(seen.problem)[:1].upper()}{str(seen.problem)[1:]}.", f"{command}")
        return
    elsewhere = sorted({table["schema"] for table in seen.tables if table["name"] == "schema_version"})
    if elsewhere:
        yield build_finding(
            "tables-elsewhere",
            f"pgfence's tables are in schema {' and in schema '.join(map(repr, elsewhere))}, but not where pgfence looks:"
            f" {place.describe(seen.database, seen.search_path)}.",
            f"Set the schema: configure(engine, schema={elsewhere[0]!r}), or --schema {elsewhere[0]} on the command line.",
        )
    else:
        yield build_finding(
            "tables-missing",
            f"pgfence's tables are not installed {place.describe(seen.database, seen.search_path)}.",
            place.command,
        )


def check_functions(examined: Examined) -> Iterator[Finding]:
    seen = examined.snapshot
    if seen.schema is None or seen.problem is not None:
        return
    there = {function["name"] for function in seen.functions if function["schema"] == seen.schema}
    if missing := sorted(set(read_functions(examined.place)) - there):
        yield build_finding(
            "tables-differ",
            f"{len(missing)} of pgfence's functions {'is' if len(missing) == 1 else 'are'} missing in schema {seen.schema!r}:"
            f" {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}.",
            examined.place.command,
        )


def check_grants(examined: Examined) -> Iterator[Finding]:
    seen = examined.snapshot
    if seen.schema is None:
        return
    rights = {table["name"]: set(table["rights"] or ()) for table in seen.tables if table["schema"] == seen.schema}
    usable = any(table["usable"] for table in seen.tables if table["schema"] == seen.schema)
    lacking: dict[str, list[str]] = {}
    features = []
    for feature, wanted in FEATURES.items():
        missing = {t: [r for r in need if r not in rights[t]] for t, need in wanted.items() if t in rights}
        # A role that has no right to write to any of these tables does not use the feature.
        uses = any(set(need) & rights[table] - {"SELECT"} for table, need in wanted.items() if table in rights)
        if uses and any(missing.values()):
            features.append(feature)
            for table, some in missing.items():
                lacking[table] = sorted({*lacking.get(table, ()), *some}, key=_EVERY.index)
    denied = [f for f in seen.functions if f["schema"] == seen.schema and not f["allowed"]]
    writes = any(held - {"SELECT"} for held in rights.values())
    grants = _build_grants(examined, {t: some for t, some in lacking.items() if some})
    if writes and denied:
        features.append("all server functions")
        grants.append(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {quote(seen.schema)} TO {quote(seen.role)};")
    if writes and not usable:
        features.append("everything in the schema")
        grants.append(f"GRANT USAGE ON SCHEMA {quote(seen.schema)} TO {quote(seen.role)};")
    if grants:
        yield build_finding(
            "grants-missing",
            f"The role {seen.role!r} has only some of the privileges for {', '.join(features)}.",
            " ".join(grants),
        )


def _build_grants(examined: Examined, lacking: Mapping[str, list[str]]) -> list[str]:
    """Return the missing GRANT statements, one for all tables that lack the same privileges."""
    seen = examined.snapshot
    place = examined.place._replace(schema=seen.schema)
    groups: dict[str, list[str]] = {}
    for table, some in lacking.items():
        groups.setdefault(", ".join(some), []).append(place.name(table))
    return [f"GRANT {some} ON {', '.join(names)} TO {quote(seen.role)};" for some, names in groups.items()]


CHECKS = (check_tables, check_functions, check_grants)
