"""The architecture, held by reading the source: who may import whom, where SQL and waiting live, and how long things get."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pgfence

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(pgfence.__file__).parent
TESTS = Path(__file__).parent

# Rows from the ground up. A module imports from rows below its own, or from its own room; what it needs for annotations counts.
ROWS = (
    ("keys", "_orm"),
    ("types",),
    ("errors",),
    ("_process", "_values", "embedded"),
    ("config",),
    ("_sql",),
    ("_ddl",),
    ("_holds", "compat"),
    ("_connections",),
    ("_locks",),
    ("_leases", "_api"),
    ("_admin", "fence", "idempotency", "retrying", "transaction", "versions"),
    ("_alembic", "_telemetry", "advisory", "lease", "monitoring", "schema"),
    ("claims", "effects", "election", "migrations", "once", "partitions", "rate_limit", "read_write", "semaphore"),
    ("_demo", "_http"),
    ("asgi", "cli", "fastapi", "telemetry", "testing", "wsgi"),
    ("__main__",),
)
LEVEL = {room: level for level, row in enumerate(ROWS) for room in row}

# A library outside of ours, and the only rooms that may import it.
ONLY_IN = {
    "click": ("cli",),
    "rich": ("cli",),
    "fastapi": ("fastapi",),
    "opentelemetry": ("telemetry", "_telemetry"),
    "greenlet": (),
    "alembic": ("migrations", "_alembic"),
    "pytest": (),
    "pickle": (),
    "threading": (
        *("_process", "_holds", "_connections", "_locks", "_leases", "_api"),
        *("election", "partitions", "embedded", "_demo", "_telemetry", "cli", "testing"),
    ),
    "asyncio": (
        "_holds",
        "_connections",
        "_leases",
        "_api",
        "advisory",
        "retrying",
        "effects",
        "election",
        "partitions",
        "asgi",
        "testing",
    ),
    "starlette": ("fastapi",),
    "time": (
        "_process",
        "_holds",
        "_connections",
        "_locks",
        "_leases",
        "_telemetry",
        "embedded",
        "_demo",
        "cli",
        "retrying",
        "migrations",
        "testing",
    ),
}
# Needs greenlet, and importing pgfence must work without it: for types alone, or late, inside a function.
NOT_AT_IMPORT = ("sqlalchemy.ext.asyncio",)

SQL_STARTS = (
    "SELECT ",
    "INSERT ",
    "UPDATE ",
    "DELETE ",
    "SET ",
    "DO $",
    "WITH ",
    "CREATE ",
    "BEGIN",
    "LISTEN ",
    "SHOW ",
)
SQL_ROOMS = ("_sql", "_ddl", "_demo")
# To ask whether somebody is there; it is also what asyncpg reports of a statement that gave one row.
PING = "SELECT 1"

# `asgi` and `wsgi` are imported by users, who say which one they mean by the module. The demo's workers are private.
SHARED_NAMES = ("IdempotencyMiddleware", "Worker")

VERBS = frozenset(
    [
        "abandon",
        "abort",
        "accept",
        "acquire",
        "add",
        "adopt",
        "advise",
        "allow",
        "alter",
        "answer",
        "applies",
        "apply",
        "ask",
        "attach",
        "audit",
        "await",
        "backfill",
        "balance",
        "begin",
        "belong",
        "bind",
        "block",
        "borrow",
        "build",
        "bury",
        "call",
        "campaign",
        "cancel",
        "canonicalize",
        "capture",
        "cast",
        "catch",
        "change",
        "check",
        "checkin",
        "checkout",
        "checkpoint",
        "choose",
        "claim",
        "clean",
        "close",
        "collect",
        "combine",
        "commit",
        "compare",
        "compile",
        "complete",
        "compute",
        "configure",
        "confirm",
        "connect",
        "contend",
        "contradicts",
        "convert",
        "copy",
        "count",
        "create",
        "cut",
        "decode",
        "decorate",
        "delay",
        "default",
        "define",
        "delete",
        "dequeue",
        "describe",
        "detach",
        "detect",
        "discard",
        "dismiss",
        "document",
        "downgrade",
        "drain",
        "drive",
        "drop",
        "elect",
        "emit",
        "encode",
        "end",
        "enqueue",
        "ensure",
        "enter",
        "examine",
        "escape",
        "evict",
        "execute",
        "exit",
        "expand",
        "expect",
        "expire",
        "explain",
        "extend",
        "fail",
        "fence",
        "fetch",
        "fill",
        "filter",
        "find",
        "fingerprint",
        "finish",
        "flatten",
        "flush",
        "follow",
        "forget",
        "fork",
        "format",
        "forward",
        "free",
        "get",
        "give",
        "grant",
        "group",
        "guard",
        "hand",
        "handle",
        "invoke",
        "hash",
        "heal",
        "hear",
        "hold",
        "identify",
        "import",
        "increment",
        "initialize",
        "inject",
        "insert",
        "inspect",
        "install",
        "instrument",
        "interrupt",
        "invalidate",
        "iterate",
        "join",
        "judge",
        "keep",
        "keeps",
        "kill",
        "lacks",
        "lands",
        "lapse",
        "lead",
        "learn",
        "leave",
        "lend",
        "let",
        "limit",
        "list",
        "listen",
        "load",
        "locate",
        "lock",
        "log",
        "look",
        "lose",
        "loses",
        "lower",
        "make",
        "makes",
        "mark",
        "match",
        "matches",
        "measure",
        "merge",
        "migrate",
        "move",
        "moves",
        "name",
        "needs",
        "note",
        "notice",
        "notify",
        "observe",
        "open",
        "own",
        "parse",
        "pause",
        "pay",
        "perform",
        "pick",
        "ping",
        "place",
        "plan",
        "play",
        "poll",
        "pop",
        "post",
        "postpone",
        "prelock",
        "prepare",
        "probe",
        "progress",
        "publish",
        "purge",
        "put",
        "qualify",
        "quote",
        "raise",
        "reaches",
        "read",
        "reap",
        "rebuild",
        "receive",
        "reclaim",
        "recognize",
        "record",
        "refresh",
        "refuse",
        "register",
        "reject",
        "release",
        "remove",
        "rename",
        "render",
        "renew",
        "repair",
        "replace",
        "replay",
        "reply",
        "report",
        "request",
        "require",
        "reset",
        "resign",
        "resize",
        "resolve",
        "respond",
        "restore",
        "retry",
        "return",
        "reverse",
        "revoke",
        "roll",
        "run",
        "rotate",
        "save",
        "say",
        "scan",
        "schedule",
        "select",
        "send",
        "sends",
        "serve",
        "set",
        "settle",
        "shares",
        "show",
        "shut",
        "skew",
        "skip",
        "sleep",
        "slice",
        "sort",
        "split",
        "stand",
        "start",
        "steal",
        "step",
        "stop",
        "store",
        "strip",
        "subscribe",
        "succeed",
        "suspend",
        "take",
        "tell",
        "terminate",
        "test",
        "tick",
        "touch",
        "trace",
        "track",
        "translate",
        "trigger",
        "try",
        "unlist",
        "unlock",
        "unqualify",
        "unsubscribe",
        "unwatch",
        "unwrap",
        "update",
        "use",
        "validate",
        "verify",
        "visit",
        "wait",
        "waits",
        "wake",
        "walk",
        "warn",
        "watch",
        "work",
        "works",
        "wrap",
        "write",
        "writes",
    ]
)
# Words that are no verbs, or no commands, and begin or end a name all the same, each with the reason.
FIRST_WORDS = {
    "is": "a yes-or-no question",
    "has": "a yes-or-no question",
    "may": "a yes-or-no question",
    "must": "a yes-or-no question",
    "should": "a yes-or-no question",
    "will": "a yes-or-no question",
    "as": "a view of the same thing",
    "to": "a conversion, as in to_thread",
    "from": "a conversion, as in from_iterable",
    "with": "a copy that differs",
    "on": "called when something happens",
    "of": "an alternative constructor, as in LockKey.of",
    "for": "an alternative constructor, as in ManagerRegistry.for_carrier",
    "after": "an alternative constructor, as in Deadline.after",
    "main": "the entry point of a program",
    "before": "a listener of the event of that name in SQLAlchemy",
    "returns": "a yes-or-no question",
    "agrees": "a yes-or-no question",
    "deletes": "a yes-or-no question",
    "counts": "a yes-or-no question",
    "changes": "a yes-or-no question",
    "sets": "a yes-or-no question",
    "raises": "a yes-or-no question",
    "skips": "a yes-or-no question",
    "holds": "a yes-or-no question",
}
LAST_WORDS = {
    "of": "what belongs to the argument, as in config_of",
    "error": "the exception to raise",
    "sql": "the text of a statement, or of a part of one",
}
NAMES = {
    "clock": "reads like time.monotonic",
    "seconds": "reads like a unit, in calls by the dozen",
    "left": "a property that needs the present time",
    "seconds_left": "likewise",
    "holders": "the name of the public method",
    "next": "reads like the function of that name",
    "fileno": "as in socket.fileno",
    "result": "what Reporter shows, beside `progress` and `step`",
    "partition_for": "the public name",
    "pair": "a draw of the demo's bank",
    "till": "likewise",
    "pgfence": "what the command line is called",
    "demo": "a command of the command line",
    "doctor": "likewise, and public: monitoring.doctor()",
    "init": "likewise",
    "keys": "likewise",
    "stats": "likewise",
    "ps": "likewise, after the command of Unix",
    "key": "an option of the command line, or a key of the public surface",
    "server": "public: embedded.server()",
    "migration_lock": "public: migrations.migration_lock()",
    "version": "an option of the command line",
    "when_busy": "likewise",
    "current": "public: current()",
    "held": "public: held()",
    "fenced": "public: fenced()",
    "claimed_by": "public: Claimable.claimed_by",
    "claimed_until": "public: Claimable.claimed_until",
    "fence_token": "public: Fenced.fence_token()",
    "remaining": "public: HeldLease.remaining()",
    "idempotent": "public: idempotent()",
    "idempotent_call": "public: idempotent_call()",
    "idempotency_key": "public: fastapi.idempotency_key()",
    "etag": "public: etag()",
    "if_match": "public: if_match()",
    "tables": "public: schema.tables()",
    "stuck_keys": "public: monitoring.stuck_keys()",
    "in_transaction": "public: in_transaction()",
    "raw": "public: LockKey.raw()",
    "family": "public: LockKey.family()",
    "openapi": "what FastAPI calls it",
    "pals_key": "public: compat.pals_key(), and its kin",
    "dlock_key": "likewise",
    "pglock_key": "likewise",
    "sha256_hex15_key": "likewise",
    "hashtext_key": "likewise",
    "memo": "an override of SQLAlchemy's",
    "result_processor": "likewise",
    "communicate_gen": "an override of psycopg's",
    "due": "reads like a question of a timetable",
    "black_hole": "a fault of the proxy, as networks call it",
    "half_close": "likewise",
    "connections": "the count, which the proxy calls so",
    "busy": "public: PgfenceFaults.busy()",
    "checked": "stands for the method of the user's that it wraps",
}
# The rooms in which every function has such a name. The list only grows.
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
MOST_FUNCTIONS = 20


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def modules() -> list[Path]:
    """Return the modules of the package, without its `__init__` and without the templates that `pgfence init` copies."""
    found = (path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
    return sorted(path for path in found if "templates" not in path.parts)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports(path: Path, *, typing: bool = False) -> list[tuple[str, ast.AST]]:
    """Return the dotted names that a module imports; `typing`: also those in its `if TYPE_CHECKING:` blocks."""
    found: list[tuple[str, ast.AST]] = []
    waiting: list[ast.AST] = [parse(path)]
    while waiting:
        node = waiting.pop()
        if not typing and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found.extend((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports are absolute here, so that a search finds them"
            found.extend((f"{node.module}.{alias.name}", node) for alias in node.names)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def rooms_imported(path: Path) -> set[str]:
    """Return the rooms of pgfence that a module imports."""
    ours = [name.split(".") for name, _ in imports(path, typing=True) if name.split(".")[0] == "pgfence"]
    return {parts[1] if parts[1] in LEVEL else "__init__" for parts in ours if len(parts) > 1}


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def docstrings(tree: ast.Module) -> set[int]:
    """Return the identities of the constants that are docstrings or attribute comments, not values."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def offenders(found: Iterable[str]) -> str:
    """Return one line for each offender, for the message of a failed assertion."""
    return "\n".join(sorted(found))


def test_every_room_has_a_level_and_every_level_a_room() -> None:
    """A new module is put into the table on purpose, and a name without a file leaves it."""
    assert {room_of(path) for path in modules()} == set(LEVEL)


def allowed_rooms(path: Path) -> set[str]:
    mine = room_of(path)
    lower = {room for room, level in LEVEL.items() if level < LEVEL[mine]}
    allowed = lower | {mine} if path.parent != ROOT else lower
    return allowed | {"__init__"} if mine in {"cli", "_demo", "__main__"} else allowed


def test_imports_point_downward() -> None:
    """A module imports from lower rows or from its own room, never sideways and never the package's front door."""
    assert not offenders(
        f"{name_of(path)} imports {room}" for path in modules() for room in rooms_imported(path) - allowed_rooms(path)
    )


@cache
def followed(start: Path) -> frozenset[Path]:
    """Return the modules of the package that a module imports, for annotations too."""
    files = {".".join(("pgfence", *p.relative_to(ROOT).with_suffix("").parts)): p for p in modules()}
    names = [name for name, _ in imports(start, typing=True)]
    return frozenset(files[n] for name in names for n in (name, name.rpartition(".")[0]) if n in files) - {start}


def leads_to_itself(path: Path) -> bool:
    seen: set[Path] = set()
    waiting = set(followed(path))
    while waiting:
        seen |= waiting
        waiting = {further for one in waiting for further in followed(one)} - seen
    return path in seen


def test_no_import_leads_back_to_its_module() -> None:
    """Following imports from a module never leads back to it."""
    assert not offenders(name_of(path) for path in modules() if leads_to_itself(path))


def test_no_room_holds_more_than_an_eighth() -> None:
    """A room that grows past 13 % of the lines holds more than one concept."""
    lines: Counter[str] = Counter()
    for path in modules():
        lines[room_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    assert max(lines.values()) <= 0.13 * lines.total(), lines.most_common(3)


def test_a_library_stays_in_its_room() -> None:
    """Threads and tasks stay in the rooms that wait, Click and Rich in cli, and optional libraries out of the core."""
    found = [(path, name, node) for path in modules() for name, node in imports(path)]
    assert not offenders(
        f"{name_of(path)}:{getattr(node, 'lineno', '?')} imports {name}"
        for path, name, node in found
        if room_of(path) not in ONLY_IN.get(name.split(".")[0], LEVEL)
    )
    assert not offenders(
        f"{name_of(path)}:{getattr(node, 'lineno', '?')} imports {name} when it is imported itself"
        for path, name, node in found
        if name.startswith(NOT_AT_IMPORT) and not any(node in ast.walk(function) for function in functions(parse(path)))
    )


def test_sql_stays_in_its_room() -> None:
    """What we tell the server is written in _sql alone; the demo speaks for an application."""
    found = []
    for path in modules():
        if room_of(path) in SQL_ROOMS:
            continue
        tree = parse(path)
        documented = docstrings(tree)
        found += [
            f"{name_of(path)}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documented
            and node.value.lstrip().startswith(SQL_STARTS)
            and node.value != PING
        ]
    assert not offenders(found)


def test_nothing_swallows_a_cancel_or_an_interrupt() -> None:
    """Code that catches BaseException raises it again; none suppresses it."""
    found = []
    for path in modules():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or "BaseException" in ast.unparse(node.type)):
                swallows = not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"suppress", "contextlib.suppress"}:
                swallows = "BaseException" in ast.unparse(node)
            else:
                continue
            found += [f"{name_of(path)}:{node.lineno}"] * swallows
    assert not offenders(found)


def test_files_and_functions_stay_short() -> None:
    """A file stops at 400 lines, a function at 60 without its docstring, and nine functions of ten fit twenty lines."""
    assert not offenders(
        name_of(path) for path in modules() if len(path.read_text(encoding="utf-8").splitlines()) > LINES_OF_A_FILE
    )
    lengths = {
        f"{name_of(path)}:{function.lineno} {function.name}": length(function)
        for path in modules()
        for function in functions(parse(path))
    }
    assert not offenders(f"{name}: {lines} lines" for name, lines in lengths.items() if lines > LINES_OF_A_FUNCTION)
    assert sorted(lengths.values())[len(lengths) * 9 // 10] <= MOST_FUNCTIONS


def test_a_class_name_is_defined_once() -> None:
    """The name of a class says which class it is, wherever it is read."""
    places: dict[str, list[str]] = {}
    for path in modules():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and node.name not in SHARED_NAMES:
                places.setdefault(node.name, []).append(name_of(path))
    assert not offenders(f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1)


def has_other_kind_of_name(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Say whether a function is a property, an overload, or called by Python itself."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    dunder = function.name.startswith("__") and function.name.endswith("__")
    return dunder or any(word in decorator for decorator in decorators for word in ("property", "overload", ".setter"))


def begins_with_a_verb(name: str) -> bool:
    words = name.strip("_").split("_")
    return words[0] in VERBS or words[0] in FIRST_WORDS or words[-1] in LAST_WORDS or name.strip("_") in NAMES


def test_every_function_name_begins_with_a_verb() -> None:
    """A function is called by what it does; a property, by what it is."""
    assert not offenders(
        f"{name_of(path)}:{function.lineno} {function.name}"
        for path in modules()
        for function in functions(parse(path))
        if not has_other_kind_of_name(function) and not begins_with_a_verb(function.name)
    )


def test_annotations_are_never_evaluated_at_import() -> None:
    """Types of optional libraries may be used in signatures, because nothing evaluates them."""
    found = []
    for path in modules():
        code = [n for n in parse(path).body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        found += [name_of(path)] * bool(code and ast.unparse(code[0]) != "from __future__ import annotations")
    assert not offenders(found)


def test_every_test_says_what_it_holds() -> None:
    """A test has a sentence for a docstring."""
    assert not offenders(
        f"{path.relative_to(TESTS).as_posix()}:{test.lineno} {test.name}"
        for path in TESTS.rglob("test_*.py")
        for test in functions(parse(path))
        if test.name.startswith("test_") and not (ast.get_docstring(test) or "").split("\n\n")[0].endswith(".")
    )


def test_contract_tests_use_the_public_surface() -> None:
    """What needs a private module is in tests/internals, or behind a helper of tests/support; programs in a text count too."""
    private = re.compile(r"\bpgfence(\.\w+)*\._|\bfrom pgfence\S* import (\(\s*)?_")
    assert not offenders(
        f"{path.relative_to(TESTS).as_posix()}:{number} {line.strip()}"
        for path in (TESTS / "contract").glob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    )
