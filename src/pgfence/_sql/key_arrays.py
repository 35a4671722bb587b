"""Pass many advisory keys to one statement as one array of `LockKey.value`: bigint keys first, then pairs.

Keys are tried one by one: the row of a key is produced only after the key before it was granted, so that no key after a
rejected one is tried. A filter with a LIMIT does not guarantee this. Access to the n-th element of an array is cheap; a join
with the list of keys would read the whole list for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._sql.params import ParamStyle
    from pgfence.keys import LockKey

KEYS = "SELECT v, i > {0}::bigint AS p, i FROM pg_catalog.unnest({1}::bigint[]) WITH ORDINALITY AS u(v, i)"
"""One row for each key, with its value, whether it is a pair, and its position. The parameters are what `encode_keys` returns."""


def call_on_row(function: str, value: str = "v", is_pair: str = "p") -> str:
    """Return the call of a lock function for one row of `KEYS`, with a bigint or with the two halves of a pair."""
    return (
        f"CASE WHEN {is_pair} THEN pg_catalog.{function}(({value} >> 32)::integer, (({value} << 32) >> 32)::integer)"
        f" ELSE pg_catalog.{function}({value}) END"
    )


def call_on_nth(function: str, n: str) -> str:
    """Return the call of a lock function for the n-th key of a row `b` with the columns `bigints` and `keys`."""
    return call_on_row(function, f"((SELECT b.keys FROM b))[{n}]", f"{n} > (SELECT b.bigints FROM b)")


def build_try(function: str, may_start: str) -> str:
    """Return the recursive query `t(i, got)`. Row 0 states whether to start.

    After row 0, there is one row for each key, up to the first rejection.
    """
    return (
        f"t(i, got) AS (SELECT 0, {may_start} FROM b UNION ALL SELECT t.i + 1, {call_on_nth(function, 't.i + 1')}"
        " FROM t WHERE t.got AND t.i < (SELECT pg_catalog.cardinality(b.keys) FROM b))"
    )


def encode_keys(keys: Sequence[LockKey], style: ParamStyle) -> tuple[int, object]:
    """Return the number of bigints among the sorted keys, and the array of the keys in the driver's format."""
    values = [key._value for key in keys]
    bigints = sum([key.space == "bigint" for key in keys]) if keys[-1].space == "pair" else len(keys)
    if style == "numeric":
        return bigints, values
    # The array is passed as text, because psycopg would format a list again for each statement, while a lock object can keep the
    # text.
    return bigints, f"{{{','.join(map(str, values))}}}"
