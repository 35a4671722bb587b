"""The header `Idempotency-Key`: a string of a structured field (RFC 9651), and the bare form in which many clients send it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pgfence.idempotency._keys import LONGEST, expect_key

if TYPE_CHECKING:
    from collections.abc import Sequence

_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
# Visible ASCII without what makes a list, a parameter or a quotation of it: servers join repeated headers by a comma.
_BARE = re.compile(r"[!#-+\--:<-\[\]-~]+")


def key_of(values: Sequence[str]) -> str:
    """Return the key that the headers of a request give: `"k1"` with its quotes and `k1` without are the same.

    Args:
        values: of each header of that name.

    Raises:
        ValueError: there is none or more than one, or it is not a key; the message is for the client.
    """
    if len(values) != 1:
        raise ValueError(f"This request needs {'an' if not values else 'one'} Idempotency-Key.")
    value = values[0].strip(" \t")
    if len(value) > 2 * LONGEST + 2:
        raise ValueError(f"The Idempotency-Key must not be longer than {LONGEST} characters.")
    if quoted := _QUOTED.fullmatch(value):
        value = re.sub(r'\\(["\\])', r"\1", quoted[1])
    elif not _BARE.fullmatch(value):
        raise ValueError("The Idempotency-Key is malformed: it is one string, in double quotes.")
    try:
        return expect_key(value, "The Idempotency-Key")
    except ValueError as error:
        raise ValueError(f"{error}.") from None
