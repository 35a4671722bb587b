"""The resource of a fence by row: text, and columns in braces."""

from __future__ import annotations

import pytest

from pgfence._ddl.fences import parts_of


@pytest.mark.parametrize(
    ("resource", "parts"),
    [
        ("close", ("close",)),
        ("close:{book}", ("close:", "book", "")),
        ("{book}{branch}", ("", "book", "", "branch", "")),
        ("{{{book}}}", ("{", "book", "}")),
        ("it's 100 % \\ fine", ("it's 100 % \\ fine",)),
    ],
)
def test_a_resource_is_text_and_columns_in_turn(resource: str, parts: tuple[str, ...]) -> None:
    """Texts are at even positions, columns at odd ones."""
    assert parts_of(resource, "") == parts


@pytest.mark.parametrize(
    "wrong", ["", "a" * 256, "{", "a{}", "{0}", "{a.b}", "{a!r}", "{a:>5}", "{a b}", "a\x00", "a\x1f"]
)
def test_a_resource_that_cannot_be_used_is_rejected(wrong: str) -> None:
    """Empty, too long, half a brace, or more than the name of a column in braces."""
    with pytest.raises(ValueError, match=r"resource"):
        parts_of(wrong, "")
