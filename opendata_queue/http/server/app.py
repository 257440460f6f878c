"""The web application around a system."""

from __future__ import annotations

import json
from email.utils import formatdate
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from opendata_queue import __version__
from opendata_queue.http import mqueue, v1
from opendata_queue.http.errors import ErrorBody
from opendata_queue.http.refusals import forbidden
from opendata_queue.http.requests.exchange import Answer, Broker, Endpoint, Inquiry
from opendata_queue.http.wire import JSON, to_json


def make_app(broker: Broker) -> FastAPI:
    """An application that serves ``broker``'s system, and does not close it."""
    app = FastAPI(title="OpenData Queue", version=__version__, redoc_url=None)
    app.routes.extend(v1.routes(broker))
    app.routes.extend(mqueue.routes(broker))
    app.routes.extend(_watching(broker))
    app.openapi = _document  # type: ignore[method-assign]
    app.routes.insert(0, Route("/openapi.json", _openapi))  # the framework's encodes it each time
    app.exception_handler(HTTPException)(_no_such_route)
    return app


class Shortcut:
    """Takes requests straight to their endpoints, past the framework's layers.

    The routes have no parameters in their paths, so that one look-up finds them; all else, the
    documentation and what is not there, is for the framework.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._endpoints = {
            (method, route.path): route.endpoint
            for route in app.routes
            if isinstance(route, Route) and isinstance(route.endpoint, Endpoint)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http":
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
        await (endpoint or self._app)(scope, receive, send)


def _watching(broker: Broker) -> list[Route]:
    """For those who run the broker."""

    async def healthz(request: Request) -> Response:
        # By this clock leases and tokens end: `odq doctor` compares it with its own.
        date = formatdate(broker.clock.now_ms() // 1000, usegmt=True)
        return Response(
            status_code=200, content=b"ok\n", media_type="text/plain", headers={"Date": date}
        )

    async def readyz(request: Request) -> Response:
        ready = broker.failure is None and not broker.draining.is_set()
        text = b"ready\n" if ready else b"not ready\n"
        if ready and broker.system.troubles:
            # Not why: this asks for no token. It stays ready: to send it no work mends nothing.
            text = b"ready, degraded: see the log and /metrics\n"
        return Response(status_code=200 if ready else 503, content=text, media_type="text/plain")

    async def metrics(inquiry: Inquiry) -> Answer:
        if not inquiry.caller.everywhere or "admin" not in inquiry.caller.actions:
            raise forbidden("metrics are for administrators of all namespaces")
        figures = await broker.metrics.exposition(broker.system)
        return Answer(body=figures, media_type=CONTENT_TYPE_LATEST)

    endpoint = Endpoint(
        broker,
        "/metrics",
        metrics,
        while_draining=True,
        open_to_all=broker.settings.open_metrics,
    )
    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", endpoint, methods=["GET"]),
    ]


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ErrorBody(error="InvalidInputError", message=f"{request.url.path}: {error.detail}")
    return Response(
        to_json(body), status_code=error.status_code, media_type=JSON, headers=error.headers
    )


async def _openapi(request: Request) -> Response:
    return Response(_encoded_document(), media_type=JSON)


@cache
def _encoded_document() -> bytes:
    return json.dumps(_document(), separators=(",", ":")).encode()


@cache
def _document() -> dict[str, Any]:
    """The OpenAPI document, made from the same types that requests are decoded with."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenData Queue", "version": __version__},
        "paths": {**v1.paths(), **mqueue.paths()},
        "components": {
            "schemas": {**v1.schemas(), **mqueue.schemas()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }
