"""One declaration for each operation, and what comes from it."""

from __future__ import annotations

import inspect

import pytest

from opendata_queue import AsyncSystem, Engine, OtherRoleError
from opendata_queue.api.operation import ACTIONS, Operation, operation, operations_of
from opendata_queue.api.system import OPERATIONS
from opendata_queue.http import wire
from opendata_queue.systems.ingest import Ingest
from tests.conftest import NewRoot
from tools import make_sync

# What is made of operations, or of a system without asking it for anything.
NOT_OPERATIONS = {
    *("publish", "read", "pause_queue", "resume_queue"),
    *("consumer", "worker", "run_workers", "close"),
}


def test_every_public_method_is_an_operation_or_made_of_operations() -> None:
    public = {
        name
        for name, _ in inspect.getmembers(AsyncSystem, inspect.isfunction)
        if not name.startswith("_")
    }

    assert public - NOT_OPERATIONS == {one.method.__name__ for one in OPERATIONS.values()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_owner_of_a_root_has_every_operation(name: str) -> None:
    assert OPERATIONS[name].method.__name__ in vars(Engine)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_declaration_says_what_callers_need_to_know(name: str) -> None:
    declared = OPERATIONS[name]

    assert declared.action in ACTIONS
    assert declared.summary
    assert not declared.summary.endswith(".")
    assert inspect.getdoc(getattr(AsyncSystem, declared.method.__name__))
    # What only shows does no harm the second time.
    assert declared.repeatable or declared.action != "view"


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_request_has_the_arguments_of_its_method(name: str) -> None:
    sent = set(wire.OPERATIONS[name].request.__struct_fields__)
    taken = {"queue" if one.name == "name" else one.name for one in OPERATIONS[name].parameters}

    assert taken <= sent
    # What a client says beside them when it asks a second time.
    assert sent - taken <= {"key", "retried"}


def test_the_methods_without_await_are_made_from_the_declarations() -> None:
    assert make_sync.TARGET.read_text() == make_sync.made(), "run: python -m tools.make_sync"


def test_help_of_the_generator_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = make_sync.TARGET.stat().st_mtime_ns

    with pytest.raises(SystemExit) as ended:
        make_sync.main(["--help"])

    assert ended.value.code == 0
    assert "python -m tools.make_sync" in capsys.readouterr().out
    assert make_sync.TARGET.stat().st_mtime_ns == before


async def test_a_process_that_publishes_refuses_what_is_about_queues(
    new_memory_root: NewRoot,
) -> None:
    async with await Ingest.open(new_memory_root()) as ingest:
        for declared in OPERATIONS.values():
            if declared.name in ("publish", "read"):
                continue
            needed = [
                one
                for one in declared.parameters
                if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
            ]
            with pytest.raises(OtherRoleError, match="no process serves them"):
                await getattr(ingest, declared.name)(*("x" for _ in needed))


class Echo:
    """A system that gives back what it is asked to do."""

    async def _perform(
        self, operation: Operation, arguments: dict[str, object]
    ) -> tuple[str, dict[str, object]]:
        return operation.name, arguments

    @operation(action="view", answer="found")
    async def look_up(self, name: str, *ids: int, deep: bool = False, **rest: int) -> object:
        """Look something up. And so on.

        More.
        """
        raise NotImplementedError


async def test_an_operation_without_a_method_is_performed_with_its_arguments() -> None:
    assert await Echo().look_up("q", 1, 2, x=3) == (
        "look_up",
        {"name": "q", "ids": (1, 2), "deep": False, "rest": {"x": 3}},
    )
    with pytest.raises(TypeError, match="name"):
        await Echo().look_up()  # type: ignore[call-arg]


async def test_arguments_by_name_become_a_call() -> None:
    declared = operations_of(Echo)["look_up"]
    arguments = {"name": "q", "ids": [1, 2], "deep": True, "rest": {"x": 3}}

    _, given = await declared.call(Echo(), arguments)

    assert given == {"name": "q", "ids": (1, 2), "deep": True, "rest": {"x": 3}}
    assert (declared.summary, declared.doing) == ("Look something up. And so on", "look up")
    assert declared.is_of_a_queue
