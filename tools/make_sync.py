"""Writes ``opendata_queue/api/sync_operations.py``: ``AsyncSystem`` without ``await``.

Run it after a change of ``AsyncSystem``: ``python -m tools.make_sync``. A test says if it was
forgotten.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_API: Final = Path(__file__).parents[1] / "opendata_queue" / "api"
SOURCE: Final = _API / "system.py"
TARGET: Final = _API / "sync_operations.py"

_WIDTH: Final = 100
_BY_HAND: Final = frozenset({"run_workers", "close"})
"""What is more than a call in the loop: ``sync.py`` has it."""

_WORDS: Final = {"A call that is cancelled": "A call that times out"}
_HEAD: Final = '''"""The operations of ``AsyncSystem`` for code that blocks. See ``sync``.

Made from the declarations by ``tools/make_sync.py``: change those, and run it.
"""

from __future__ import annotations

'''
_CLASS: Final = '''

class SyncOperations:
    """Every call waits for an event loop in another thread, for ``timeout_ms`` at most."""

    _system: AsyncSystem
    _thread: LoopThread
'''
_IMPORTED: Final = {
    "opendata_queue.api.system": ["AsyncSystem"],
    "opendata_queue.runtime.loop_thread": ["LoopThread"],
}


def made() -> str:
    """The text of the module, as the formatter would leave it."""
    text = SOURCE.read_text()
    tree = ast.parse(text)
    interface = next(
        one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "AsyncSystem"
    )
    methods = "".join(_methods(interface, text))
    return _HEAD + "".join(_imports(tree, methods)) + _CLASS + methods


def _methods(interface: ast.ClassDef, text: str) -> Iterator[str]:
    lines = text.splitlines()
    seen_until = interface.lineno
    for one in interface.body:
        between = lines[seen_until : one.lineno - 1]
        seen_until = one.end_lineno or one.lineno
        if not isinstance(one, ast.AsyncFunctionDef) or one.name in _BY_HAND:
            continue
        if not one.name.startswith("_"):
            headings = [line for line in between if line.startswith("    # --- ")]
            yield "".join(f"\n{line}\n" for line in headings)
            yield f"\n{_method(one, text)}"


def _method(method: ast.AsyncFunctionDef, text: str) -> str:
    parameters = _parameters(method.args, text)
    returns = _source(text, method.returns)
    arguments = _arguments(method.args)
    docstring = "\n".join(_docstring(method, text))
    called = _fitting(f"self._system.{method.name}", arguments, 8, "calling = ", "")
    whole = f"self._thread.call(self._system.{method.name}({', '.join(arguments)}), timeout_ms)"
    result = "" if returns == "None" else "return "
    if len(whole) + len(result) + 8 <= _WIDTH:
        body = f"        {result}{whole}\n"
    else:
        body = f"{called}\n        {result}self._thread.call(calling, timeout_ms)\n"
    head = _fitting(f"def {method.name}", ["self", *parameters], 4, "", f" -> {returns}:")
    return f"{head}\n{docstring}\n{body}"


def _fitting(name: str, parts: list[str], indent: int, before: str, behind: str) -> str:
    """A call or a head on one line, or with a line for each part."""
    space = " " * indent
    line = f"{space}{before}{name}({', '.join(parts)}){behind}"
    if len(line) <= _WIDTH:
        return line
    listed = "".join(f"{space}    {part},\n" for part in parts)
    return f"{space}{before}{name}(\n{listed}{space}){behind}"


def _parameters(args: ast.arguments, text: str) -> list[str]:
    first = args.args[1:]
    defaults = [None] * (len(first) - len(args.defaults)) + args.defaults
    parts = [_parameter(one, default, text) for one, default in zip(first, defaults, strict=True)]
    parts.append("*" if args.vararg is None else f"*{_parameter(args.vararg, None, text)}")
    parts += [
        _parameter(one, default, text)
        for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    parts.append("timeout_ms: int | None = None")
    if args.kwarg is not None:
        parts.append(f"**{_parameter(args.kwarg, None, text)}")
    return parts


def _parameter(one: ast.arg, default: ast.expr | None, text: str) -> str:
    declared = f"{one.arg}: {_source(text, one.annotation)}"
    return declared if default is None else f"{declared} = {_source(text, default)}"


def _arguments(args: ast.arguments) -> list[str]:
    passed = [one.arg for one in args.args[1:]]
    passed += [] if args.vararg is None else [f"*{args.vararg.arg}"]
    passed += [f"{one.arg}={one.arg}" for one in args.kwonlyargs]
    return passed + ([] if args.kwarg is None else [f"**{args.kwarg.arg}"])


def _docstring(method: ast.AsyncFunctionDef, text: str) -> Iterator[str]:
    first = method.body[0]
    assert ast.get_docstring(method) is not None, f"{method.name} has no docstring"
    for line in text.splitlines()[first.lineno - 1 : first.end_lineno]:
        for theirs, ours in _WORDS.items():
            line = line.replace(theirs, ours)
        yield line


def _imports(tree: ast.Module, methods: str) -> Iterator[str]:
    """What the methods name, from where ``AsyncSystem`` has it."""
    code = re.sub(r'""".*?"""', "", methods, flags=re.DOTALL)
    named = set(re.findall(r"\w+", code))
    wanted = dict(_IMPORTED)
    for one in tree.body:
        if isinstance(one, ast.ImportFrom) and one.module not in (None, "__future__"):
            names = [alias.name for alias in one.names if alias.name in named]
            if names:
                wanted[str(one.module)] = names
    ours = {module for module in wanted if module.startswith("opendata_queue")}
    for group in (wanted.keys() - ours, ours):
        yield from (_import(module, wanted[module]) for module in sorted(group))
        yield "\n" if group != ours else ""


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _WIDTH:
        return f"{line}\n"
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"


def _source(text: str, node: ast.expr | None) -> str:
    found = None if node is None else ast.get_source_segment(text, node)
    assert found is not None
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    description = (__doc__ or "").partition("\n")[0].replace("``", "")
    argparse.ArgumentParser(prog="python -m tools.make_sync", description=description).parse_args(
        arguments
    )
    TARGET.write_text(made())
    sys.stdout.write(f"wrote {TARGET}\n")


if __name__ == "__main__":
    main()
