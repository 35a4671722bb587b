"""The checker of histories: what it accepts, and what it reports."""

from __future__ import annotations

from pgfence.testing._history import Entry, judge_history
from support.rows import every_row

ALONE = "a+ a- b+ b-"
Row = tuple[str, list[str], set[str]]


def read(text: str) -> list[Entry]:
    """Return the steps of a text: holder, + or -, a token, and the resource after a colon."""
    steps = []
    for word in text.split():
        step, _, resource = word.partition(":")
        steps.append(
            Entry(resource, step[0], "enter" if step[1] == "+" else "leave", int(step[2:]) if step[2:] else None)
        )
    return steps


ROWS: list[Row] = [
    (ALONE, [], set()),
    ("a+1 a- b+2 b- b+2 b-", [], set()),
    ("a+:x b+:y a-:x b-:y", [], set()),
    ("a+ b+ b- c+", [], {"a"}),
    ("a+ b+ a- b-", ["step 3: 'a' left, but 'b' was inside", "step 4: 'b' left, but no holder"], {"a"}),
    ("a+2 a- b+1 b-", ["step 3: 'b' entered with token 1 after 'a' had 2"], set()),
    ("a+2 a- b+2 b-", ["step 3: 'b' and 'a' have the same token 2"], set()),
    (
        "a+3:x a-:x b+2:y b-:y b+2:x b-:x c+2:x c-:x",
        [f"step {step} of 'x': '{who}' entered with token 2 after 'a' had 3" for step, who in ((5, "b"), (7, "c"))],
        set(),
    ),
]


@every_row("row", ROWS)
def test_a_history_is_judged(row: Row) -> None:
    """An overlap, a token that goes back and a token of two holders are reported; who never left is returned."""
    text, wanted, unfinished = row
    wrong, left = judge_history(read(text))
    assert left == unfinished
    assert len(wrong) == len(wanted)
    assert all(found.startswith(start) for found, start in zip(wrong, wanted, strict=True))
