"""Requests that Schemathesis makes up from the OpenAPI document, on a broker in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from opendata_queue import Engine
from opendata_queue.http import mqueue, v1
from opendata_queue.http.requests.exchange import Broker
from opendata_queue.http.server.app import make_app
from opendata_queue.http.settings import ServerSettings
from opendata_queue.http.wire import JSON
from opendata_queue.runtime.loop_thread import LoopThread
from opendata_queue.testing import ManualClock
from tests.http.conftest import BROKER_URL

EXAMPLES = 15

# Claims that wait would hold everything up.
LIMITS = ServerSettings(max_wait_ms=1)


class FuzzedBroker:
    """A broker and its client in an event loop of their own."""

    def __init__(self) -> None:
        self.thread = LoopThread("fuzzed broker")
        self.thread.call(self._open())

    async def _open(self) -> None:
        self._engine = await Engine.open("memory:///")
        app = make_app(Broker(self._engine, LIMITS, ManualClock()))
        self.document: dict[str, Any] = app.openapi()
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BROKER_URL)

    def send(self, case: schemathesis.Case[Any]) -> httpx.Response:
        made = requests.Request(**case.as_transport_kwargs(base_url=BROKER_URL)).prepare()
        assert made.method is not None
        assert made.url is not None
        body = made.body.encode() if isinstance(made.body, str) else made.body
        assert body is None or isinstance(body, bytes)
        request = self._client.build_request(
            made.method,
            made.url,
            headers=[(name.encode(), _raw(value)) for name, value in made.headers.items()],
            content=body,
        )
        return self.thread.call(self._client.send(request))

    def close(self) -> None:
        self.thread.call(self._close())
        self.thread.stop()

    async def _close(self) -> None:
        await self._client.aclose()
        await self._engine.close()


def _raw(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")


@pytest.fixture(scope="module")
def broker() -> Iterator[FuzzedBroker]:
    broker = FuzzedBroker()
    yield broker
    broker.close()


def _operations() -> list[str]:
    return [
        f"{method.upper()} {path}"
        for path, methods in {**v1.paths(), **mqueue.paths()}.items()
        for method in methods
    ]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=str)
@pytest.mark.parametrize("label", _operations())
def test_no_request_is_answered_with_more_than_a_refusal(
    broker: FuzzedBroker, label: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(broker.document)
    method, _, path = label.partition(" ")
    operation = schema[path][method]

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(case: schemathesis.Case[Any]) -> None:
        answer = broker.send(case)

        assert answer.status_code < 500, (case.body, answer.text)
        if answer.status_code == 200:
            operation.validate_response(schemathesis.Response.from_any(answer))
        else:
            assert answer.headers["content-type"] == JSON
            assert answer.json()["error"]

    send()
