"""Many advisory keys in one statement, as one array: the bigints first, then the pairs, each as `LockKey.value`.

A try goes key by key: the row of a key is made only after the key before it was granted, so no key behind a refused one is
asked for. A filter with a LIMIT would promise neither. The n-th element of an array is found at once; a join with the list of
keys would read the whole list for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._sql.params import ParamStyle
    from pgfence.keys import LockKey

KEYS = "SELECT v, i > {0}::bigint AS p, i FROM pg_catalog.unnest({1}::bigint[]) WITH ORDINALITY AS u(v, i)"
"""A row for each key: its value, whether it is a pair, its place. Takes `encode_keys`."""


def call_on_row(function: str, value: str = "v", is_pair: str = "p") -> str:
    """Return a call of a lock function on one row of keys: on a bigint, or on the two halves of a pair."""
    return (
        f"CASE WHEN {is_pair} THEN pg_catalog.{function}(({value} >> 32)::integer, (({value} << 32) >> 32)::integer)"
        f" ELSE pg_catalog.{function}({value}) END"
    )


def call_on_nth(function: str, n: str) -> str:
    """Return a call of a lock function on the n-th key of a row `b` with the columns `bigints` and `keys`."""
    return call_on_row(function, f"((SELECT b.keys FROM b))[{n}]", f"{n} > (SELECT b.bigints FROM b)")


def build_try(function: str, may_start: str) -> str:
    """Return the recursive query `t(i, got)`: a row 0 that says whether to start, then one for each key up to a refusal."""
    return (
        f"t(i, got) AS (SELECT 0, {may_start} FROM b UNION ALL SELECT t.i + 1, {call_on_nth(function, 't.i + 1')}"
        " FROM t WHERE t.got AND t.i < (SELECT pg_catalog.cardinality(b.keys) FROM b))"
    )


def encode_keys(keys: Sequence[LockKey], style: ParamStyle) -> tuple[int, object]:
    """Return how many of the sorted keys are bigints, and the array as the driver wants it."""
    values = [key.value for key in keys]
    bigints = sum([key.space == "bigint" for key in keys]) if keys[-1].space == "pair" else len(keys)
    if style == "numeric":
        return bigints, values
    # As a text: psycopg would write a list anew for each statement, while a lock object can keep the text.
    return bigints, f"{{{','.join(map(str, values))}}}"
