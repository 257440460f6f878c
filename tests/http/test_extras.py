"""Those who only embed a queue need none of what the broker and its client need."""

from __future__ import annotations

from tests.support.scripts import run

WITHOUT_EXTRAS = """
    import sys

    for name in ("aiohttp", "msgspec", "fastapi", "uvicorn", "prometheus_client", "jwt"):
        sys.modules[name] = None  # importing it fails

    import opendata_queue
    import opendata_queue.cli
    from typer.testing import CliRunner

    with opendata_queue.open("memory:///") as system:
        print(system.publish(b"x"))
    try:
        opendata_queue.open("http://127.0.0.1:1")
    except opendata_queue.StoreAccessError as error:
        print(error)
    done = CliRunner().invoke(opendata_queue.cli.app, ["serve", "--store", "memory:///"])
    print(done.exit_code, done.output.strip())
"""


def test_the_package_works_without_the_extras_and_says_which_is_missing() -> None:
    _, client, server = run(WITHOUT_EXTRAS)

    assert "opendata-queue[client]" in client
    assert server.startswith("1 ")
    assert "opendata-queue[server]" in server
