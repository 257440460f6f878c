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
    {"opendata_queue.errors", "opendata_queue.clock", "opendata_queue.testing"},
    {"opendata_queue.store"},
    {"opendata_queue.committer", "opendata_queue.messages", "opendata_queue.system"},
    # The messages database and the queue store know nothing of each other.
    {
        "opendata_queue.idempotency",
        "opendata_queue.metadata_log",
        "opendata_queue.payloads",
        "opendata_queue.recent",
        "opendata_queue.sequences",
        "opendata_queue.shard",
    },
    {"opendata_queue.filters"},
    {"opendata_queue.queue_options", "opendata_queue.queue_state"},
    {"opendata_queue.engine"},
    {"opendata_queue.cli"},
]
# The package's front door re-exports from every layer, and every layer may ask for its version.
FRONT_DOOR = "opendata_queue"
SEAMS = {
    "slatedb": {"opendata_queue.store"},
    "obstore": {"opendata_queue.store"},
    "lark": {"opendata_queue.filters.parser"},
    "pyarrow": {"opendata_queue.filters.arrow"},
    "pyspark": {"opendata_queue.spark"},
    "boto3": set(),
    "fastapi": {"opendata_queue.server"},
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
        if module == FRONT_DOOR or within(module, "odq_compactor"):
            continue
        own = layer_of(module)
        assert own is not None, f"{module} has no layer: give it one in LAYERS"
        for imported in imports(path):
            other = layer_of(imported)
            assert other is None or other <= own, f"{module} must not import {imported}"


def test_the_engine_never_imports_the_compactor() -> None:
    for module, path in modules().items():
        if within(module, "odq_compactor") or within(module, "opendata_queue.cli"):
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


def test_what_the_encodings_export_is_there_and_sorted() -> None:
    exported = odq_encodings.__all__

    assert [name for name in exported if not hasattr(odq_encodings, name)] == []
    assert len(set(exported)) == len(exported)
