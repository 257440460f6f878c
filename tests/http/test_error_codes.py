"""What kind of error an answer is, it says in fields: its words are for people."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import opendata_queue
from opendata_queue import StoreAccessError
from opendata_queue.http.errors import ErrorBody, body_of, error_of
from opendata_queue.http.wire import MSGPACK
from opendata_queue.model.errors import AccessProblem

Answering = Callable[[int, dict[str, object]], Awaitable[str]]


@pytest.fixture
async def answering() -> AsyncIterator[Answering]:
    """A broker that answers everything with one error, in whatever words."""
    servers = []

    async def start(status: int, body: dict[str, object]) -> str:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(
                status=status, body=msgspec.msgpack.encode(body), headers={"Content-Type": MSGPACK}
            )

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("/"))

    yield start
    for server in servers:
        await server.close()


REFUSED = {"error": "StoreAccessError", "message": "pas question", "refused": True}


@pytest.mark.parametrize("code", [{"code": "forbidden"}, {}], ids=["this release", "release 0.1"])
async def test_a_token_that_may_not_list_queues_may_connect_whatever_words_refuse_it(
    answering: Answering, code: dict[str, object]
) -> None:
    url = await answering(403, REFUSED | code)

    async with await opendata_queue.open_async(url) as system:
        with pytest.raises(StoreAccessError, match="pas question") as refused:
            await system.list_queues()

    assert refused.value.problem is AccessProblem.FORBIDDEN


async def test_a_token_that_is_not_known_may_not_connect(answering: Answering) -> None:
    words = "the token does not allow the action, it is not known"
    url = await answering(401, REFUSED | {"message": words})

    with pytest.raises(StoreAccessError, match="not known"):
        await opendata_queue.open_async(url)


@pytest.mark.parametrize("problem", [None, *AccessProblem])
def test_a_problem_of_access_comes_over_the_wire(problem: AccessProblem | None) -> None:
    sent = msgspec.msgpack.encode(body_of(StoreAccessError("no", problem=problem)))

    error = error_of(msgspec.msgpack.decode(sent, type=ErrorBody))

    assert isinstance(error, StoreAccessError)
    assert error.problem is problem


def test_a_code_of_a_later_release_is_no_problem_that_is_known() -> None:
    error = error_of(ErrorBody(error="StoreAccessError", message="no", code="no_such_planet"))

    assert isinstance(error, StoreAccessError)
    assert (str(error), error.problem) == ("no", None)
