"""What ``examples/deploy`` and the documents tell people to run is there to be run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from opendata_queue import InvalidInputError
from opendata_queue.cli import app
from opendata_queue.http.auth.tokens import Gate
from opendata_queue.http.settings import ServerSettings
from opendata_queue.testing import ManualClock

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples" / "deploy"
IMAGE = "opendata-queue"
COMMAND = typer.main.get_command(app)


def containers() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """What runs our image: its name, its arguments, and its environment."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        if service["image"] == IMAGE:
            yield f"compose {name}", service["command"], service["environment"]
    parts = [part for part in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if part]
    told: dict[str, str] = {}
    for part in parts:
        told |= part.get("data", {}) | part.get("stringData", {})
    for part in parts:
        for container in _find(part, "containers"):
            yield f"kubernetes {container['name']}", container["args"], told


def _find(tree: Any, name: str) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == name:
                yield from value
            else:
                yield from _find(value, name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _find(value, name)


def parse(arguments: list[str]) -> None:
    """Let the command line take arguments, without doing what they say."""
    context = COMMAND.make_context("odq", list(arguments), resilient_parsing=False)
    while isinstance(context.command, typer.core.TyperGroup):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)


def known_variables(command: Any = COMMAND) -> set[str]:
    found = {one.envvar for one in command.params if isinstance(one.envvar, str)}
    for child in getattr(command, "commands", {}).values():
        found |= known_variables(child)
    return found


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [pytest.param(*rest, id=name) for name, *rest in containers()],
)
def test_every_container_is_given_what_odq_takes(
    arguments: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    parse(arguments)

    ours = {name for name in environment if name.startswith("ODQ_")}
    assert ours <= known_variables()
    assert environment["ODQ_STORE"].startswith("s3://")


def test_a_container_with_a_slip_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse(["serve", "--store", "memory:///", "--stand-by"])


def test_what_the_pieces_of_the_manifest_refer_to_is_there() -> None:
    parts = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    named = {(part["kind"], part["metadata"]["name"]) for part in parts}

    for part in parts:
        assert part["metadata"].get("namespace", "odq") == "odq"
        for source in _find(part, "envFrom"):
            ((kind, reference),) = source.items()
            wanted = {"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind]
            assert (wanted, reference["name"]) in named
        if part["kind"] == "Deployment":
            labels = part["spec"]["template"]["metadata"]["labels"]
            assert part["spec"]["selector"]["matchLabels"].items() <= labels.items()
    pods = [part["spec"]["template"] for part in parts if part["kind"] == "Deployment"]
    for service in (part for part in parts if part["kind"] == "Service"):
        selected = service["spec"]["selector"].items()
        assert any(selected <= pod["metadata"]["labels"].items() for pod in pods)


def test_the_image_installs_extras_that_there_are() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()

    (extras,) = re.findall(r"/source\[(.*?)\]", text)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    assert 'ENTRYPOINT ["odq"]' in text


def commands() -> list[str]:
    """Command lines of ``odq`` in the documents about running it."""
    documents = (ROOT / "docs" / "operations.md", DEPLOY / "README.md")
    text = "".join(document.read_text() for document in documents)
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if re.match(r"\$ (\w+=\S+ )*odq ", line)]


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_document_is_taken(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODQ_STORE", "memory:///")
    words = shlex.split(line, comments=True)

    parse(words[words.index("odq") + 1 :])


def test_no_pod_is_told_of_services_in_variables_that_odq_reads() -> None:
    parts = [part for part in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if part]
    links = {
        f"{part['metadata']['name'].upper()}_PORT" for part in parts if part["kind"] == "Service"
    }
    pods = [pod for part in parts for pod in _pods(part)]

    assert links & known_variables()  # or there is no need for this
    assert pods
    assert all(pod["enableServiceLinks"] is False for pod in pods)


def _pods(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        if "containers" in tree:
            yield tree
        for value in tree.values():
            yield from _pods(value)


def test_no_secret_in_the_files_is_accepted() -> None:
    """Nor may one be left as it is: an example is deployed with what stands in it."""
    found = [environment["ODQ_JWT_SECRET"] for _, _, environment in containers()]

    assert found
    for secret in found:
        if secret.startswith("${ODQ_JWT_SECRET:?"):
            continue  # compose refuses to start without one
        with pytest.raises(InvalidInputError, match="placeholder of an example"):
            Gate(ServerSettings(jwt_key=secret), ManualClock())


def test_no_broker_of_the_files_shows_its_metrics_to_everybody() -> None:
    for _, arguments, environment in containers():
        assert "ODQ_OPEN_METRICS" not in environment
        assert "--open-metrics" not in arguments


def test_what_is_no_source_stays_out_of_the_image() -> None:
    """The image is built from all of the folder: history, environments and roots are there, too."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    wanted = {"encodings", "compactor", "opendata_queue", "pyspark_opendata_queue"}

    assert {".git", ".venv", "**/__pycache__", "**/.env", "**/*.pem"} <= set(ignored)
    assert wanted.isdisjoint(name.strip("/") for name in ignored)
