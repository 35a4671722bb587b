"""Draw the diagrams of the docs: `python docs/_diagrams/draw.py` writes them to docs/_static.

A decision tree is drawn from a text file beside this script: a title, and paragraphs of a question, its results (`=`) and a
note below a result (`-`). The last paragraph has no question: its results are those of "no" to the last question.
"""

from __future__ import annotations

import textwrap
from functools import partial
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STATIC = HERE.parent / "_static"
WIDTH = 460
STYLE = """\
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.name { font-weight: 600 }
.code { font: 12px ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #0b4f94 }
.note { font-size: 12px; fill: #57606a }
.bad { fill: #b3261e }
.box { fill: #f3f5f8; stroke: #8c959f }
.ours { fill: #e6f0fb; stroke: #1f5fa8 }
.line { fill: none; stroke: #6e7781; stroke-width: 1.5 }
.life { fill: none; stroke: #b9bec6; stroke-width: 1.5 }
.tip { fill: #6e7781 }
.dashed { stroke-dasharray: 5 4 }
.stop { fill: none; stroke: #b3261e; stroke-width: 3; stroke-dasharray: 3 5 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e6e6 }
.code { fill: #8cc4ff }
.note { fill: #b3b9c1 }
.bad { fill: #ff8a80 }
.box { fill: #24282e; stroke: #6e7681 }
.ours { fill: #12263d; stroke: #4f93d8 }
.line { stroke: #9aa4af }
.life { stroke: #444c56 }
.tip { fill: #9aa4af }
.stop { stroke: #ff8a80 }
}"""


def text(
    x: float, y: float, content: str, kind: str = "", anchor: str = "middle"
) -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(content)}</text>'


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    lines: list[tuple[str, str]],
    kind: str = "box",
) -> list[str]:
    """Return a box with lines of text, each with its kind, in the middle."""
    first = y + height / 2 + 5 - 17 * (len(lines) - 1) / 2
    return [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>',
        *(
            text(x + width / 2, first + 17 * number, content, style)
            for number, (content, style) in enumerate(lines)
        ),
    ]


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> list[str]:
    """Return an arrow that is horizontal or vertical."""
    if y1 == y2:
        side = 1 if x2 > x1 else -1
        tip = f"M{x2 - 7 * side} {y2 - 4}l{7 * side} 4l{-7 * side} 4z"
        line = f"M{x1} {y1}H{x2 - 7 * side}"
    else:
        side = 1 if y2 > y1 else -1
        tip = f"M{x2 - 4} {y2 - 7 * side}l4 {7 * side}l4 {-7 * side}z"
        line = f"M{x1} {y1}V{y2 - 7 * side}"
    return [f'<path class="line {kind}" d="{line}"/>', f'<path class="tip" d="{tip}"/>']


def picture(title: str, height: float, parts: list[str]) -> str:
    """Return an SVG that follows the light or dark scheme of the page."""
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}\n</style>",
            *parts,
            "</svg>\n",
        ]
    )


def sequence(
    title: str, names: list[str], steps: list[tuple[str, str, list[tuple[str, str]]]]
) -> str:
    """Return a sequence of messages between three participants, from top to bottom.

    Args:
        title: of the picture.
        names: of the participants.
        steps: `"0>1"` for a message from the first to the second participant, `"0"` for what happens at the first, `"1|"` for
            a time in which it is stopped; the kind of the line; and the lines of text, each with its kind.
    """
    columns = [66, 230, 394]
    parts, y = [], 56.0
    for way, kind, lines in steps:
        if ">" in way:
            start, end = (columns[int(one)] for one in way.split(">"))
            middle = (start + end) / 2
            parts += [
                text(middle, y + 15 * number, content, style)
                for number, (content, style) in enumerate(lines)
            ]
            y += 15 * len(lines) - 6
            parts += arrow(start, y, end, y, kind)
            y += 26
        else:
            column = columns[int(way[0])]
            height = 14 + 17 * len(lines)
            if way.endswith("|"):
                parts.append(f'<path class="stop" d="M{column} {y - 14}v{height}"/>')
                at = column + 10
                parts += [
                    text(at, y + 4 + 17 * number, one, style, "start")
                    for number, (one, style) in enumerate(lines)
                ]
            else:
                parts += box(column - 64, y - 16, 128, height, lines, kind or "box")
            y += height + 8
    bottom = y - 14
    heads = [
        part
        for at, name in zip(columns, names, strict=True)
        for part in box(at - 64, 2, 128, 30, [(name, "name")])
    ]
    lives = [f'<path class="life" d="M{at} 32V{bottom}"/>' for at in columns]
    return picture(title, bottom + 4, [*lives, *heads, *parts])


def tree(source: str) -> str:
    """Return a decision tree: questions from top to bottom, the results of "yes" beside them."""
    title, *paragraphs = (HERE / source).read_text(encoding="utf-8").split("\n\n")
    parts: list[str] = []
    y = 2.0
    for paragraph in paragraphs:
        lines = paragraph.strip().splitlines()
        asks = textwrap.wrap(
            " ".join(line for line in lines if line[0] not in "=-"), 30
        )
        results = [
            (one, "code name" if line[0] == "=" else "note")
            for line in lines
            if line[0] in "=-"
            for one in textwrap.wrap(line[2:], 28)
        ]
        height = 17 * max(len(asks), len(results)) + 18
        if asks:
            parts += box(2, y, 218, height, [(line, "") for line in asks])
            parts += arrow(220, y + height / 2, 256, y + height / 2)
            parts.append(text(236, y + height / 2 - 5, "yes", "note"))
            parts += box(258, y, 200, height, results, "ours")
            parts += arrow(40, y + height, 40, y + height + 24)
            parts.append(text(48, y + height + 16, "no", "note", "start"))
        else:
            parts += box(2, y, 218, height, results, "ours")
        y += height + 24
    return picture(title, y - 22, parts)


def connections() -> str:
    """Draw where the connections of locks and leases are beside the pool."""
    calls = [("TransactionLock,", "code"), ("idempotent()", "code")]
    parts = [
        *box(2, 2, 456, 148, []),
        text(16, 24, "your process", "name", "start"),
        *box(
            16,
            36,
            176,
            100,
            [("your engine's pool", "name"), ("your sessions,", "note"), *calls],
        ),
        *box(
            206,
            36,
            112,
            100,
            [
                ("session lock", "name"),
                ("one connection", "note"),
                ("for each", "note"),
            ],
            "ours",
        ),
        *box(
            328,
            36,
            118,
            100,
            [
                ("heartbeat", "name"),
                ("one connection", "note"),
                ("for all leases", "note"),
            ],
            "ours",
        ),
        *arrow(104, 136, 104, 236),
        *arrow(262, 136, 262, 236),
        *arrow(387, 136, 387, 236),
        text(112, 176, "transactions", "note", "start"),
        text(112, 191, "of your work", "note", "start"),
        text(270, 176, "open while the", "note", "start"),
        text(270, 191, "lock is held", "note", "start"),
        text(395, 212, "renewals", "note", "start"),
        *box(2, 238, 456, 128, []),
        text(16, 354, "PostgreSQL", "name", "start"),
        *box(
            16,
            250,
            176,
            84,
            [("your tables,", ""), ("gates, keys,", ""), ("transaction locks", "")],
        ),
        *box(
            206,
            250,
            112,
            84,
            [("advisory lock", ""), ("of the server", "note"), ("session", "note")],
            "ours",
        ),
        *box(
            328,
            250,
            118,
            84,
            [("lease rows", ""), ("token and", "note"), ("expiry", "note")],
            "ours",
        ),
    ]
    return picture("Locks and leases use connections beside the pool", 368, parts)


def lease() -> str:
    """Draw the time of a lease whose holder is stopped."""
    return sequence(
        "A lease whose holder is stopped",
        ["worker A", "PostgreSQL", "worker B"],
        [
            ("0>1", "", [("acquire", "code")]),
            ("1>0", "dashed", [("token 1, for one TTL", "note")]),
            ("0>1", "", [("renew, and again", "note")]),
            ("0>1", "", [("lease.begin()", "code"), ("enter gate with 1", "note")]),
            ("1", "ours", [("gate: 1", "name")]),
            ("0>1", "", [("write, COMMIT", "note")]),
            (
                "0|",
                "",
                [
                    ("A is stopped", "bad"),
                    ("for longer", "note"),
                    ("than the TTL", "note"),
                ],
            ),
            ("1", "ours", [("lease expires", "name")]),
            ("2>1", "", [("acquire", "code")]),
            ("1>2", "dashed", [("token 2", "note")]),
            ("2>1", "", [("lease.begin()", "code"), ("enter gate with 2", "note")]),
            ("1", "ours", [("gate: 2", "name")]),
            ("2>1", "", [("write, COMMIT", "note")]),
            (
                "0",
                "",
                [
                    ("A continues:", ""),
                    ("check() raises", "code"),
                    ("LockLostError", "code"),
                ],
            ),
            ("0>1", "", [("a write with token 1", "note")]),
            (
                "1>0",
                "dashed",
                [("rejected: PF001", "bad"), ("StaleFencingTokenError", "code")],
            ),
        ],
    )


def failover() -> str:
    """Draw a lease whose primary dies and whose heartbeat reaches the new primary in time."""
    return sequence(
        "A lease with a TTL of 30 s during a failover",
        ["holder", "db1, primary", "db2, standby"],
        [
            ("0>1", "", [("0 s: renew", "code")]),
            ("1>0", "dashed", [("token 7, for 30 s", "note")]),
            ("1", "", [("9 s: db1 dies", "bad")]),
            ("0>1", "dashed", [("10 s: renew", "code")]),
            (
                "0",
                "",
                [("no response:", ""), ("unknown", "code"), ("still held", "note")],
            ),
            (
                "2",
                "ours",
                [
                    ("25 s: promoted", "name"),
                    ("has the row", "note"),
                    ("of token 7", "note"),
                ],
            ),
            ("0>2", "", [("renew", "code")]),
            ("2>0", "dashed", [("token 7, for 30 s", "note")]),
            ("0", "ours", [("stays held", "name")]),
            (
                "0",
                "",
                [("otherwise", "note"), ("27 s: lost", "bad"), ("30 s: free", "note")],
            ),
        ],
    )


def idempotency_key() -> str:
    """Draw a request that is repeated with its key."""
    return sequence(
        "A request that is sent again with its Idempotency-Key",
        ["client", "application", "PostgreSQL"],
        [
            ("0>1", "", [("POST /payments", "code"), ("Idempotency-Key: k1", "code")]),
            ("1>2", "", [("claim k1, COMMIT", "note")]),
            ("1", "ours", [("the endpoint", "name"), ("runs once", "note")]),
            ("1>2", "", [("store the response,", "note"), ("COMMIT", "note")]),
            ("1>0", "dashed", [("201, lost on its way", "bad")]),
            (
                "0>1",
                "",
                [("the same request,", "note"), ("Idempotency-Key: k1", "code")],
            ),
            ("1>2", "", [("claim k1", "note")]),
            ("2>1", "dashed", [("the stored response", "note")]),
            (
                "1>0",
                "dashed",
                [("201, the same body", "note"), ("Idempotent-Replayed", "code")],
            ),
        ],
    )


def attempt() -> str:
    """Draw the states of an attempt at an effect."""
    parts = [
        *box(140, 2, 170, 36, [("free", "name")]),
        *arrow(225, 38, 225, 92),
        text(233, 62, "claim, COMMIT:", "note", "start"),
        text(233, 78, "attempt 1, 2, ...", "note", "start"),
        *box(
            140,
            92,
            170,
            50,
            [("in progress", "name"), ("renewed while it runs", "note")],
            "ours",
        ),
        # An error of `free`, back to free on the left.
        '<path class="line" d="M140 117H72V20H132"/>',
        '<path class="tip" d="M132 16l7 4l-7 4z"/>',
        text(64, 62, "error", "note", "end"),
        text(64, 78, "of free=", "code", "end"),
        *arrow(160, 142, 160, 216),
        *arrow(225, 142, 225, 216),
        *arrow(290, 142, 290, 216),
        *box(2, 218, 172, 52, [("done", "name"), ("result is replayed", "note")]),
        *box(184, 218, 84, 52, [("failed", "name"), ("replayed", "note")]),
        *box(
            278, 218, 170, 52, [("unknown", "name"), ("what it did: not known", "note")]
        ),
        text(152, 184, "result", "note", "end"),
        text(217, 174, "error of", "note", "end"),
        text(217, 189, "record=", "code", "end"),
        text(298, 170, "another error,", "note", "start"),
        text(298, 185, "a cancellation,", "note", "start"),
        text(298, 200, "a process that died", "note", "start"),
        # After the claim has expired, the next attempt.
        '<path class="line" d="M420 218V117H318"/>',
        '<path class="tip" d="M318 113l-7 4l7 4z"/>',
        text(416, 94, "claim expired:", "note", "end"),
        text(416, 109, "next attempt", "note", "end"),
        *arrow(363, 270, 363, 322),
        text(355, 302, "takeover=False", "code", "end"),
        *box(238, 324, 210, 36, [("AttemptLostError", "code")]),
    ]
    return picture("The states of an attempt", 362, parts)


DIAGRAMS = {
    "how-connections.svg": connections,
    "how-lease.svg": lease,
    "failover.svg": failover,
    "how-idempotency-key.svg": idempotency_key,
    "how-attempt.svg": attempt,
    "race.svg": partial(tree, "race.txt"),
    "which-one.svg": partial(tree, "which-one.txt"),
}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (STATIC / name).write_text(draw(), encoding="utf-8")
