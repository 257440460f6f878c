"""The shape of the repository: what may import what, and the trap in a folder's name."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import odq_encodings

ROOT = Path(__file__).parents[1]
PACKAGE_ROOTS = (ROOT, ROOT / "encodings", ROOT / "compactor")

# A module may import its own room and the rooms before it in this list, never those behind it.
ROOMS = (
    "odq_encodings",
    "opendata_queue.model",
    "opendata_queue.runtime",
    "opendata_queue.store",
    "opendata_queue.root",
    "opendata_queue.log",
    "opendata_queue.filters",
    "opendata_queue.queues",
    "opendata_queue.routing",
    "opendata_queue.api",
    "opendata_queue.systems",
    "odq_compactor",
    "opendata_queue.http",
    "opendata_queue.opening",
    "opendata_queue.client",
    "opendata_queue.testing",
    "opendata_queue.spark",
    "opendata_queue.cli",
)
# The same for the rooms within a room. Modules that lie beside them are in no order, but in no
# circle either.
ROOMS_WITHIN = {
    "opendata_queue.store": (
        "files",
        "native",
        "rows",
        "objects",
        "slatedb_files",
        "journal",
        "damage",
        "db",
    ),
    "opendata_queue.queues": ("state", "rows", "store"),
    "opendata_queue.http": ("auth", "requests", "server"),
    "opendata_queue.spark": ("rows", "read", "write"),
    "opendata_queue.cli": ("bench", "serve", "inspect", "doctor"),
}
# The messages database and the queue store know nothing of each other.
APART = {"opendata_queue.queues": "opendata_queue.log"}
# No I/O and no clock: what they need comes in.
PURE = ("opendata_queue.queues.state", "opendata_queue.queues.lanes")
PURE_MAY_IMPORT = ("odq_encodings", "opendata_queue.model", *PURE)
MOST_MODULES_IN_A_ROOM = 16
# All else is in rooms.
DOORS = {"__init__.py", "client.py", "opening.py", "testing.py"}
# Tests of other packages, of several rooms together, and what tests share.
OTHER_TESTS = {"contract", "damage", "format", "retention", "support"}
# The package's front door stands before all that opens a system. It is for users: from inside,
# only the version is asked for.
FRONT_DOOR = "opendata_queue"
VERSION = "opendata_queue.__version__"
SEAMS = {
    "slatedb": {"opendata_queue.store"},
    "obstore": {"opendata_queue.store"},
    "ctypes": {"opendata_queue.store"},
    "lark": {"opendata_queue.filters.parser"},
    "numpy": {"opendata_queue.spark"},
    "pyarrow": {"opendata_queue.filters.arrow", "opendata_queue.spark"},
    "pyspark": {"opendata_queue.spark"},
    "boto3": {"opendata_queue.cli.buckets"},
    "fastapi": {"opendata_queue.http.server"},
    "uvicorn": {"opendata_queue.http.requests.connections", "opendata_queue.http.server"},
    "httptools": {"opendata_queue.http.requests.connections"},
    "starlette": {"opendata_queue.http"},
    "prometheus_client": {"opendata_queue.http"},
    "jwt": {"opendata_queue.http.auth.tokens", "opendata_queue.cli.token"},
    "aiohttp": {"opendata_queue.http.calls"},
    "msgspec": {"opendata_queue.http"},
    "typer": {"opendata_queue.cli"},
    # All else is given a clock. These measure, or wait when there is none any more.
    "time": {
        "opendata_queue.model.clock",
        "opendata_queue.store.last_calls",
        "opendata_queue.cli.bench",
        "opendata_queue.spark.append",
    },
}


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for package in ("opendata_queue", "odq_encodings", "odq_compactor"):
        base = next(base for base in PACKAGE_ROOTS if (base / package).is_dir())
        for path in (base / package).rglob("*.py"):
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file names in an import, at any depth, and for types alone as well."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(named)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def may_import(module: str, imported: str) -> bool:
    own = place_of("opendata_queue.opening" if module == FRONT_DOOR else module)
    assert own is not None, f"{module} is in no room: give it one in ROOMS"
    if imported == VERSION:
        return True
    other = place_of(imported)
    if other is None:
        return not within(imported, FRONT_DOOR)
    return other <= own and in_order_within(module, imported)


def place_of(module: str) -> int | None:
    return next((n for n, room in enumerate(ROOMS) if within(module, room)), None)


def in_order_within(module: str, imported: str) -> bool:
    for room, inner in ROOMS_WITHIN.items():
        places = [
            next((n for n, name in enumerate(inner) if within(one, f"{room}.{name}")), None)
            for one in (module, imported)
        ]
        if places[0] is not None and places[1] is not None:
            return places[1] <= places[0]
    return True


def test_encodings_is_no_package() -> None:
    assert not (ROOT / "encodings" / "__init__.py").exists()


def test_python_starts_with_the_root_on_its_path() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import encodings; print(encodings.__file__)"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert str(ROOT) not in done.stdout.replace(str(ROOT / ".venv"), "")


def test_all_is_in_rooms() -> None:
    package = ROOT / "opendata_queue"
    rooms = {room.split(".")[1] for room in ROOMS if within(room, FRONT_DOOR)}

    assert {path.name for path in package.glob("*.py")} == DOORS
    assert {path.parent.name for path in package.glob("*/*.py")} <= rooms


def test_rooms_within_rooms_are_in_the_list() -> None:
    for path in (ROOT / "opendata_queue").glob("*/*/__init__.py"):
        room = f"opendata_queue.{path.parts[-3]}"
        assert path.parts[-2] in ROOMS_WITHIN.get(room, ()), f"{room}.{path.parts[-2]}"


def test_no_room_is_so_full_that_nothing_is_found_in_it() -> None:
    for path in (ROOT / "opendata_queue").rglob("__init__.py"):
        files = {one.name for one in path.parent.glob("*.py")} - {"__init__.py"}
        assert len(files) <= MOST_MODULES_IN_A_ROOM, path.parent


def test_tests_are_in_the_rooms_of_their_subjects() -> None:
    rooms = {room.split(".")[1] for room in ROOMS if within(room, FRONT_DOOR)}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/*/**/*.py")}

    assert folders - OTHER_TESTS <= rooms


def test_imports_point_one_way() -> None:
    for module, path in modules().items():
        for imported in imports(path):
            assert may_import(module, imported), f"{module} must not import {imported}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    graph = {}
    for module, path in known.items():
        named = imports(path) - {VERSION}
        found = {name if name in known else name.rpartition(".")[0] for name in named}
        graph[module] = (found & known.keys()) - {module}

    graphlib.TopologicalSorter(graph).prepare()  # raises with the modules of a circle


@pytest.mark.parametrize("room", APART)
def test_rooms_that_know_nothing_of_each_other(room: str) -> None:
    for module, path in modules().items():
        if within(module, room):
            assert not [name for name in imports(path) if within(name, APART[room])], module


@pytest.mark.parametrize("pure", PURE)
def test_the_state_of_a_queue_is_pure(pure: str) -> None:
    inside = [path for module, path in modules().items() if within(module, pure)]
    assert inside
    for imported in frozenset().union(*map(imports, inside)):
        ours = within(imported, FRONT_DOOR) or within(imported, "odq_compactor")
        assert not ours or any(within(imported, one) for one in PURE_MAY_IMPORT), imported
        assert imported.partition(".")[0] not in ("asyncio", "time", "datetime", "os"), imported


@pytest.mark.parametrize(
    ("module", "imported", "allowed"),
    [
        ("opendata_queue.systems.engine", "opendata_queue.store.Database", True),
        ("opendata_queue.systems.engine", "asyncio", True),
        ("opendata_queue.store.rows.rows", "opendata_queue.systems.engine", False),
        ("opendata_queue.store.rows.rows", "opendata_queue.System", False),
        ("opendata_queue.store.rows.rows", "opendata_queue", False),
        ("opendata_queue.store.rows.rows", "opendata_queue.__version__", True),
        ("opendata_queue.store.rows.rows", "opendata_queue.store.native.library.load", True),
        ("opendata_queue.store.rows.rows", "opendata_queue.store.db.database.Database", False),
        ("opendata_queue.log.writer", "opendata_queue.queues.state.QueueState", False),
        ("opendata_queue", "opendata_queue.systems.engine.Engine", True),
        ("opendata_queue", "opendata_queue.cli.app", False),
        ("opendata_queue", "odq_compactor", True),
        ("opendata_queue.systems.engine", "odq_compactor", False),
        ("opendata_queue.http.server.serving", "odq_compactor", True),
        ("opendata_queue.cli", "odq_compactor", True),
        ("odq_compactor", "opendata_queue.log.writer", True),
        ("odq_compactor", "opendata_queue.cli", False),
        ("odq_encodings.rows", "opendata_queue.model.errors", False),
    ],
)
def test_the_rule_of_imports(module: str, imported: str, allowed: bool) -> None:
    assert may_import(module, imported) == allowed


def test_an_import_inside_a_function_or_for_types_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "low.py"
    source.write_text(
        "if TYPE_CHECKING:\n    from opendata_queue.cli import app\n"
        "def open():\n    from opendata_queue import System\n    return System\n"
    )

    assert imports(source) == {"opendata_queue.System", "opendata_queue.cli.app"}


def test_nothing_that_the_compactor_uses_imports_it() -> None:
    above = ("odq_compactor", "opendata_queue.opening", "opendata_queue.http.server")
    for module, path in modules().items():
        if any(within(module, one) for one in (*above, "opendata_queue.cli")):
            continue
        assert not [name for name in imports(path) if within(name, "odq_compactor")], module


@pytest.mark.parametrize("library", SEAMS)
def test_a_library_is_touched_only_behind_its_seam(library: str) -> None:
    for module, path in modules().items():
        if any(within(module, seam) for seam in SEAMS[library]):
            continue
        assert not [name for name in imports(path) if within(name, library)], module


def test_the_encodings_need_nothing_but_the_standard_library() -> None:
    for module, path in modules().items():
        if not within(module, "odq_encodings"):
            continue
        for imported in imports(path):
            top = imported.partition(".")[0]
            assert top == "odq_encodings" or top in sys.stdlib_module_names, (module, imported)


def test_what_the_encodings_export_is_there_once() -> None:
    exported = odq_encodings.__all__

    assert [name for name in exported if not hasattr(odq_encodings, name)] == []
    assert len(set(exported)) == len(exported)


def test_names_that_users_were_given_are_where_they_were() -> None:
    """The documents and the help texts name these modules."""
    from opendata_queue.client import ClientOptions
    from opendata_queue.testing import ManualClock

    assert ClientOptions().token is None
    assert ManualClock().now_ms() > 0


# SlateDB and obstore say some things in words alone; here, and only here, they become fields.
TRANSLATES = "opendata_queue.store.errors"

_TEXT_OF_ERRORS = {"args", "message", "msg"}

_TESTS_OF_TEXT = {
    *("startswith", "endswith", "find", "index", "count"),
    *("search", "match", "fullmatch", "findall"),
}


def decisions_by_text(source: str) -> list[int]:
    """The lines where the text of an error is compared or searched."""
    return sorted(_decisions_in(ast.parse(source), frozenset(), frozenset()))


def _decisions_in(scope: ast.AST, errors: frozenset[str], texts: frozenset[str]) -> set[int]:
    """The same for a module or a function; what is caught around it, it knows too."""
    inner: list[ast.AST] = []
    own: list[ast.AST] = []
    waiting = [*ast.iter_child_nodes(scope)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.append(node)
        else:
            own.append(node)
            waiting += ast.iter_child_nodes(node)
    errors |= {name for node in own if (name := _error_named(node)) is not None}
    texts |= {
        target.id
        for node in own
        if isinstance(node, ast.Assign) and _is_text(node.value, errors, texts)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = {one.lineno for node in own for one in _tested(node) if _is_text(one, errors, texts)}
    return found.union(*(_decisions_in(one, errors, texts) for one in inner))


def _error_named(node: ast.AST) -> str | None:
    """The name of what is caught, or is given as an error."""
    if isinstance(node, ast.ExceptHandler):
        return node.name
    if isinstance(node, ast.arg) and node.annotation is not None:
        kinds = re.findall(r"\w+", ast.unparse(node.annotation))
        if any(one.endswith(("Error", "Exception")) for one in kinds):
            return node.arg
    return None


def _tested(node: ast.AST) -> list[ast.expr]:
    """What a node compares, or searches."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    searches = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if searches and node.func.attr in _TESTS_OF_TEXT:  # type: ignore[attr-defined]
        return [node.func.value, *node.args]  # type: ignore[attr-defined]
    return []


def _is_text(node: ast.expr, errors: frozenset[str], texts: frozenset[str]) -> bool:
    """Whether an expression is what an error says, in part or changed."""

    def is_error(one: ast.expr) -> bool:
        return isinstance(one, ast.Name) and one.id in errors

    for one in ast.walk(node):
        match one:
            case ast.Name(id=name) if name in texts:
                return True
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[given]) if is_error(given):
                return True
            case ast.FormattedValue(value=shown) if is_error(shown):
                return True
            case ast.Attribute(value=of, attr=name) if is_error(of) and name in _TEXT_OF_ERRORS:
                return True
    return False


def test_no_decision_goes_by_the_words_of_an_error() -> None:
    found = {
        name: lines
        for name, path in modules().items()
        if name != TRANSLATES and (lines := decisions_by_text(path.read_text()))
    }

    assert not found


@pytest.mark.parametrize(
    "decision",
    [
        "if 'no database' in str(error): pass",
        "if error.args[0] == 'gone': pass",
        "if 'gone' not in f'{error}': pass",
        "if str(error).lower().startswith('no'): pass",
        "text = str(error)\n    found = re.search('gone', text)",
        "if error.message == 'gone': pass",
    ],
)
def test_a_decision_by_the_words_of_an_error_is_found(decision: str) -> None:
    assert decisions_by_text(f"try:\n    go()\nexcept ValueError as error:\n    {decision}\n")
    assert decisions_by_text(f"def f(error: OdqError) -> None:\n    {decision}\n")


MOST_LINES_OF_A_MODULE = 500
MOST_METHODS_OF_A_CLASS = 40


def large_without_a_reason(source: str) -> list[str]:
    """What is too large in a module and does not say why: ``One module because …``."""
    tree = ast.parse(source)
    found = []
    if len(source.splitlines()) > MOST_LINES_OF_A_MODULE:
        found += [] if "One module because " in (ast.get_docstring(tree) or "") else ["module"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            methods = [one for one in node.body if isinstance(one, kinds)]
            reason = "One class because " in (ast.get_docstring(node) or "")
            if len(methods) > MOST_METHODS_OF_A_CLASS and not reason:
                found.append(node.name)
    return found


def test_what_is_large_says_why() -> None:
    found = {
        name: large
        for name, path in modules().items()
        if (large := large_without_a_reason(path.read_text()))
    }

    assert not found


def test_what_is_large_without_a_reason_is_found() -> None:
    lines = "\n" * MOST_LINES_OF_A_MODULE
    methods = "".join(f"    def m{n}(self): ...\n" for n in range(MOST_METHODS_OF_A_CLASS + 1))

    assert large_without_a_reason(f"x = 1{lines}y = 2\n") == ["module"]
    assert not large_without_a_reason(f'"""A list.\n\nOne module because it is."""{lines}')
    assert large_without_a_reason(f"class Large:\n{methods}") == ["Large"]
    assert not large_without_a_reason(f'class Large:\n    """One class because so."""\n{methods}')
