"""The architecture, held by reading the source: who may import whom, where SQL and waiting live, and how long things get."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import pgfence

ROOT = Path(pgfence.__file__).parent
TESTS = Path(__file__).parent

# Rows from the ground up. A module imports from rows below its own, or from its own package.
ROWS = (
    ("errors",),
    ("blocks", "grants", "keys", "timing"),
    ("config",),
    ("_sql",),
    ("_runtime",),
    ("handles", "misuse", "wrapping", "altering", "flushes"),
    ("schema", "fence", "evicting", "purging", "versions", "retrying", "idempotency"),
    ("fenced_handles",),
    ("verbs",),
    ("advisory", "transaction", "compat", "lease"),
    ("once", "effects", "stuck"),
    ("_http",),
    ("asgi", "wsgi", "fastapi", "embedded", "monitoring", "migrations", "alembic_plugin"),
    ("demo",),
    ("cli", "__main__"),
)
LEVEL = {room: level for level, row in enumerate(ROWS) for room in row}

# A library outside of ours, and the only rooms that may import it.
ONLY_IN = {
    "typer": ("cli",),
    "click": ("cli",),
    "rich": ("cli",),
    "fastapi": ("fastapi",),
    "greenlet": (),
    "alembic": ("migrations", "alembic_plugin"),
    "opentelemetry": (),
    "pytest": (),
    "pickle": (),
    "threading": ("_runtime", "handles", "embedded", "demo", "cli"),
    "asyncio": ("_runtime", "handles", "verbs", "advisory", "retrying", "effects", "asgi"),
    "starlette": ("fastapi",),
    "time": ("timing", "_runtime", "embedded", "demo", "cli", "retrying", "migrations"),
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
SQL_ROOMS = ("_sql", "demo")
# To ask whether somebody is there; it is also what asyncpg reports of a statement that gave one row.
PING = "SELECT 1"

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
MOST_FUNCTIONS = 20


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def modules() -> list[Path]:
    """Return our modules: without the front door, and without the files that become somebody else's environment."""
    found = (path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
    return sorted(path for path in found if "templates" not in path.parts)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def run_time_imports(path: Path) -> list[tuple[str, ast.AST]]:
    """Return the dotted names that a module really imports; `if TYPE_CHECKING:` blocks import nothing."""
    found: list[tuple[str, ast.AST]] = []
    waiting: list[ast.AST] = [parse(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
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
    ours = [name.split(".") for name, _ in run_time_imports(path) if name.split(".")[0] == "pgfence"]
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


each_module = pytest.mark.parametrize("path", modules(), ids=name_of)


def test_every_room_has_a_level_and_every_level_a_room() -> None:
    """A new module is put into the table on purpose, and a name without a file leaves it."""
    assert {room_of(path) for path in modules()} == set(LEVEL)


@each_module
def test_imports_point_downward(path: Path) -> None:
    """A module imports from lower rows or from its own package, never sideways and never the package's front door."""
    mine = room_of(path)
    lower = {room for room, level in LEVEL.items() if level < LEVEL[mine]}
    allowed = lower | {mine} if path.parent != ROOT else lower
    if mine in {"cli", "demo", "__main__"}:
        allowed |= {"__init__"}
    if mine == "__main__":
        allowed |= {"cli"}
    assert rooms_imported(path) <= allowed


@cache
def followed(start: Path) -> set[Path]:
    """Return the modules of ours that a module imports."""
    files = {".".join(("pgfence", *p.relative_to(ROOT).with_suffix("").parts)): p for p in modules()}
    names = [name for name, _ in run_time_imports(start)]
    return {files[n] for name in names for n in (name, name.rpartition(".")[0]) if n in files} - {start}


@each_module
def test_a_package_has_no_import_cycle(path: Path) -> None:
    """Following imports from a module never leads back to it."""
    seen: set[Path] = set()
    waiting = followed(path)
    while waiting:
        seen |= waiting
        waiting = {further for one in waiting for further in followed(one)} - seen
    assert path not in seen


@each_module
def test_a_library_stays_in_its_room(path: Path) -> None:
    """Threads and tasks stay in _runtime, typer and rich in cli, and optional libraries out of the core."""
    for name, node in run_time_imports(path):
        rooms = ONLY_IN.get(name.split(".")[0])
        where = f"{name_of(path)}:{getattr(node, 'lineno', '?')} imports {name}"
        assert rooms is None or room_of(path) in rooms, where
        late = any(node in ast.walk(function) for function in functions(parse(path)))
        assert late or not name.startswith(NOT_AT_IMPORT), where


@each_module
def test_sql_stays_in_its_room(path: Path) -> None:
    """What we tell the server is written in _sql alone; the demo speaks for an application."""
    if room_of(path) in SQL_ROOMS:
        return
    tree = parse(path)
    told = docstrings(tree)
    texts = [
        n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in told
    ]
    sql = [n for n in texts if n.value.lstrip().startswith(SQL_STARTS) and n.value != PING]
    assert [f"{n.lineno}: {n.value}" for n in sql] == []


@each_module
def test_nothing_swallows_a_cancel_or_an_interrupt(path: Path) -> None:
    """Whoever catches BaseException raises again; nobody suppresses it."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or "BaseException" in ast.unparse(node.type)):
            assert any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), f"{name_of(path)}:{node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"suppress", "contextlib.suppress"}:
            assert "BaseException" not in ast.unparse(node), f"{name_of(path)}:{node.lineno}"


@each_module
def test_files_and_functions_stay_short(path: Path) -> None:
    """A file stops at 400 lines, a function at 60 without its docstring."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_OF_A_FILE
    lengths = {f"{function.name}:{function.lineno}": length(function) for function in functions(parse(path))}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_OF_A_FUNCTION} == {}


def test_most_functions_fit_twenty_lines() -> None:
    """Nine functions of ten are read at one glance."""
    lengths = sorted(length(function) for path in modules() for function in functions(parse(path)))
    assert lengths[len(lengths) * 9 // 10] <= MOST_FUNCTIONS


@each_module
def test_annotations_are_never_evaluated_at_import(path: Path) -> None:
    """Types of optional libraries may stand in signatures because nothing evaluates them."""
    tree = parse(path)
    code = [n for n in tree.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    assert not code or ast.unparse(code[0]) == "from __future__ import annotations"


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_every_test_says_what_it_holds(path: Path) -> None:
    """A test has a sentence for a docstring."""
    tests = [function for function in functions(parse(path)) if function.name.startswith("test_")]
    assert [
        f"{test.name}:{test.lineno}"
        for test in tests
        if not (ast.get_docstring(test) or "").split("\n\n")[0].endswith(".")
    ] == []
