"""The shape of the repository: what may import what, and the trap in a folder's name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import odq_encodings

ROOT = Path(__file__).parents[1]
PACKAGE_ROOTS = (ROOT, ROOT / "encodings", ROOT / "compactor")

# A module may import its own layer's package and the layers above it in this list, never below:
# cli, server, client, spark → engine → tailer, payloads, … → store → odq_encodings.
LAYERS: list[set[str]] = [
    {"odq_encodings"},
    {
        "opendata_queue.errors",
        "opendata_queue.checks",
        "opendata_queue.clock",
        "opendata_queue.pauses",
        "opendata_queue.control_files",
        "opendata_queue.process_identity",
        "opendata_queue.root_clock",
        "opendata_queue.tasks",
        "opendata_queue.token_hosts",
        "opendata_queue.testing",
    },
    {"opendata_queue.daemon_threads", "opendata_queue.loop_thread"},
    {"opendata_queue.store"},
    {
        "opendata_queue.allowance",
        "opendata_queue.beside",
        "opendata_queue.committer",
        "opendata_queue.features",
        "opendata_queue.messages",
        "opendata_queue.system",
        "opendata_queue.turns",
    },
    {
        "opendata_queue.commit_files",
        "opendata_queue.owner_files",
        "opendata_queue.ownership",
        "opendata_queue.roles",
        "opendata_queue.root_time",
        "opendata_queue.shard_files",
    },
    # The messages database and the queue store know nothing of each other.
    {
        "opendata_queue.followed_log",
        "opendata_queue.idempotency",
        "opendata_queue.message_rows",
        "opendata_queue.metadata_log",
        "opendata_queue.owners_shard",
        "opendata_queue.payloads",
        "opendata_queue.read_ahead",
        "opendata_queue.recent",
        "opendata_queue.sequences",
        "opendata_queue.shard",
        "opendata_queue.shard_readers",
        "opendata_queue.stored_messages",
    },
    {"opendata_queue.bulk"},
    {"opendata_queue.filters"},
    {
        "opendata_queue.attempts",
        "opendata_queue.lanes",
        "opendata_queue.queue_options",
        "opendata_queue.queue_state",
        "opendata_queue.receipts",
    },
    # A system offers consumers and workers, which use a system.
    {
        "opendata_queue.acks",
        "opendata_queue.consumers",
        "opendata_queue.interface",
        "opendata_queue.leases",
        "opendata_queue.workers",
    },
    {
        "opendata_queue.bulk_registry",
        "opendata_queue.queue_removal",
        "opendata_queue.queue_store",
        "opendata_queue.stored_queue",
        "opendata_queue.sweeper",
    },
    {
        "opendata_queue.browsing",
        "opendata_queue.queue_looks",
        "opendata_queue.views",
        "opendata_queue.dead_letters",
        "opendata_queue.log_replay",
        "opendata_queue.routing",
        "opendata_queue.tailer",
    },
    {
        "opendata_queue.all_messages",
        "opendata_queue.bulk_routing",
        "opendata_queue.following",
        "opendata_queue.live_follower",
        "opendata_queue.look_pace",
    },
    {"opendata_queue.engine", "opendata_queue.ingest", "opendata_queue.read_only"},
    {"opendata_queue.sync"},
    {"opendata_queue.wire"},
    {"opendata_queue.client"},
    {"odq_compactor"},
    {"opendata_queue.opening"},
    {"opendata_queue.server"},
    {"opendata_queue.spark"},
    {"opendata_queue.cli"},
]
# The package's front door stands before all that opens a system. It is for users: from inside,
# only the version is asked for.
FRONT_DOOR = "opendata_queue"
VERSION = "opendata_queue.__version__"
SEAMS = {
    "slatedb": {"opendata_queue.store"},
    "obstore": {"opendata_queue.store"},
    "lark": {"opendata_queue.filters.parser"},
    "numpy": {"opendata_queue.spark"},
    "pyarrow": {"opendata_queue.filters.arrow", "opendata_queue.spark"},
    "pyspark": {"opendata_queue.spark"},
    "boto3": {"opendata_queue.cli.buckets"},
    "fastapi": {"opendata_queue.server"},
    "uvicorn": {"opendata_queue.server"},
    "aiohttp": {"opendata_queue.client"},
    "msgspec": {"opendata_queue.client", "opendata_queue.server", "opendata_queue.wire"},
    "typer": {"opendata_queue.cli"},
}


def modules() -> dict[str, Path]:
    found = {}
    for package in ("opendata_queue", "odq_encodings", "odq_compactor"):
        base = next(base for base in PACKAGE_ROOTS if (base / package).is_dir())
        for path in (base / package).rglob("*.py"):
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, at any depth."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    return named


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def may_import(module: str, imported: str) -> bool:
    own = layer_of("opendata_queue.opening" if module == FRONT_DOOR else module)
    assert own is not None, f"{module} has no layer: give it one in LAYERS"
    if imported == VERSION:
        return True
    other = layer_of(imported)
    if other is None:
        return not within(imported, FRONT_DOOR)
    return other <= own


def layer_of(module: str) -> int | None:
    for index, members in enumerate(LAYERS):
        if any(within(module, member) for member in members):
            return index
    return None


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


def test_imports_point_one_way() -> None:
    for module, path in modules().items():
        for imported in imports(path):
            assert may_import(module, imported), f"{module} must not import {imported}"


@pytest.mark.parametrize(
    ("module", "imported", "allowed"),
    [
        ("opendata_queue.engine", "opendata_queue.store.Database", True),
        ("opendata_queue.engine", "asyncio", True),
        ("opendata_queue.store.rows", "opendata_queue.engine", False),
        ("opendata_queue.store.rows", "opendata_queue.System", False),
        ("opendata_queue.store.rows", "opendata_queue", False),
        ("opendata_queue.store.rows", "opendata_queue.__version__", True),
        ("opendata_queue", "opendata_queue.engine.System", True),
        ("opendata_queue", "opendata_queue.cli.app", False),
        ("opendata_queue", "odq_compactor", True),
        ("opendata_queue.engine", "odq_compactor", False),
        ("opendata_queue.cli", "odq_compactor", True),
        ("odq_compactor", "opendata_queue.shard", True),
        ("odq_compactor", "opendata_queue.cli", False),
        ("odq_encodings.rows", "opendata_queue.errors", False),
    ],
)
def test_the_rule_of_imports(module: str, imported: str, allowed: bool) -> None:
    assert may_import(module, imported) == allowed


def test_an_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "low.py"
    source.write_text("def open():\n    from opendata_queue import System\n    return System\n")

    assert imports(source) == {"opendata_queue.System"}


def test_nothing_that_the_compactor_uses_imports_it() -> None:
    above = {"odq_compactor", "opendata_queue.opening", "opendata_queue.server"}
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
