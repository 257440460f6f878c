"""The MQueue API."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from opendata_queue import AsyncSystem, Engine
from opendata_queue.systems.ingest import Ingest
from opendata_queue.testing import ManualClock
from tests.http.conftest import SECRET, Serving, served

REFUND = {"namespace": "payments", "topic": "process-refund"}


def item(payload: bytes, **more: Any) -> dict[str, Any]:
    return {**REFUND, "payload": base64.b64encode(payload).decode(), **more}


async def enqueue(client: httpx.AsyncClient, *items: dict[str, Any]) -> list[int]:
    answer = await client.post("/enqueue", json=items)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()
    return ids


async def dequeue(client: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get("/dequeue", params={**REFUND, **query})
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()
    return items


def payloads(items: list[dict[str, Any]]) -> list[bytes]:
    return [base64.b64decode(one["payload"]) for one in items]


async def test_items_come_back_by_priority_with_numeric_ids(client: httpx.AsyncClient) -> None:
    ids = await enqueue(client, item(b"low", priority=9), item(b"high", priority=1), item(b"none"))

    items = await dequeue(client)

    assert all(isinstance(one, int) for one in ids)
    assert payloads(items) == [b"high", b"low", b"none"]
    assert [one["id"] for one in items] == [ids[1], ids[0], ids[2]]
    assert all(set(one) == {"id", "payload", "lease_expires_at"} for one in items)
    assert items[0]["lease_expires_at"] == "2023-11-14T22:13:50.000Z"


async def test_a_limit_bounds_an_answer(client: httpx.AsyncClient) -> None:
    await enqueue(client, *(item(b"x") for _ in range(15)))

    assert len(await dequeue(client)) == 10
    assert len(await dequeue(client, limit=2)) == 2


async def test_an_answer_holds_only_so_many_bytes_and_leaves_the_rest_to_others(
    serving: Serving,
) -> None:
    async with serving(max_answer_bytes=1_000) as client:
        await enqueue(client, *(item(bytes(400)) for _ in range(3)))

        assert len(await dequeue(client)) == 2
        assert len(await dequeue(client)) == 1


async def test_what_one_process_enqueues_another_one_that_serves_queues_hands_out(
    tmp_path: Path,
) -> None:
    root = f"file://{tmp_path}/root"
    async with (
        await Ingest.open(root) as publisher,
        await Engine.open(root, publishes=False) as queues,
        served(publisher, role="ingest") as ingest,
        served(queues, role="queues") as tailer,
    ):
        ids = await enqueue(ingest, item(b"before anybody asked"))
        items: list[dict[str, Any]] = []
        while not items:
            items = await dequeue(tailer)
        refused = await ingest.get("/dequeue", params=REFUND)

    assert [one["id"] for one in items] == ids
    assert refused.status_code == 421


async def test_what_an_ingest_process_enqueues_a_broker_of_all_roles_beside_it_hands_out(
    tmp_path: Path,
) -> None:
    root = f"file://{tmp_path}/root"
    async with (
        await Engine.open(root) as engine,
        await Ingest.open(root) as publisher,
        served(engine) as broker,
        served(publisher, role="ingest") as ingest,
    ):
        await engine.publish(b"before", headers=REFUND)  # by nobody who enqueues
        ids = await enqueue(ingest, item(b"before anybody asked"))
        items: list[dict[str, Any]] = []
        while not items:
            items = await dequeue(broker)

    assert [one["id"] for one in items] == ids


async def test_an_item_for_later_is_delivered_then(
    client: httpx.AsyncClient, clock: ManualClock
) -> None:
    await enqueue(client, item(b"x", deliver_after="2023-11-14T23:13:20+00:00"))
    assert await dequeue(client) == []

    clock.advance_ms(3_600_000)

    assert payloads(await dequeue(client)) == [b"x"]


async def test_topics_and_namespaces_are_apart(client: httpx.AsyncClient) -> None:
    await enqueue(client, item(b"1"), item(b"2", topic="other"), item(b"3", namespace="other"))

    assert payloads(await dequeue(client)) == [b"1"]
    assert payloads(await dequeue(client, topic="other")) == [b"2"]
    assert payloads(await dequeue(client, namespace="other")) == [b"3"]


async def test_an_acked_item_is_done(client: httpx.AsyncClient, system: AsyncSystem) -> None:
    (message_id,) = await enqueue(client, item(b"x"))
    await dequeue(client)

    answer = await client.post("/ack", json={"id": message_id, **REFUND})
    again = await client.post("/ack", json={"id": message_id, **REFUND})

    assert answer.status_code == 200
    assert again.status_code == 409
    assert (await system.stats("payments/process-refund")).done == 1


async def test_a_nacked_item_comes_back_and_remembers_why(
    client: httpx.AsyncClient, clock: ManualClock, system: AsyncSystem
) -> None:
    (message_id,) = await enqueue(client, item(b"x"))
    for _ in range(5):
        await dequeue(client)
        body = {"id": message_id, **REFUND, "error": "Payment gateway timeout"}
        assert (await client.post("/nack", json=body)).status_code == 200
        clock.advance_ms(3_600_000)

    (failed,) = await system.failed("payments/process-refund")

    assert failed.error == "Payment gateway timeout"


async def test_an_item_that_nobody_has_leased_can_not_be_acked(
    client: httpx.AsyncClient,
) -> None:
    (message_id,) = await enqueue(client, item(b"x"))

    waiting = await client.post("/ack", json={"id": message_id, **REFUND})
    unknown = await client.post("/ack", json={"id": 1 << 40, **REFUND})

    assert waiting.status_code == 409
    assert "available" in waiting.json()["message"]
    assert unknown.status_code == 404


async def test_a_lease_outlives_the_broker_that_gave_it(
    client: httpx.AsyncClient, serving: Serving, system: AsyncSystem
) -> None:
    first, second = await enqueue(client, item(b"1"), item(b"2"))
    await dequeue(client)

    async with serving() as another:
        assert (await another.post("/ack", json={"id": first, **REFUND})).status_code == 200
        assert (await another.post("/nack", json={"id": second, **REFUND})).status_code == 200

    assert (await system.stats("payments/process-refund")).done == 1
    assert (await client.post("/ack", json={"id": first, **REFUND})).status_code == 409


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[{}]",
        b'[{"namespace": "a", "topic": "b", "payload": "!"}]',
        b'[{"namespace": "a", "topic": "b", "payload": "", "priority": 256}]',
        b'[{"namespace": "a", "topic": "b", "payload": "", "deliver_after": "soon"}]',
        b'[{"namespace": "a/c", "topic": "b", "payload": ""}]',
        b'[{"namespace": "a", "topic": "", "payload": ""}]',
        b'[{"namespace": "a", "topic": "b c", "payload": ""}]',
    ],
)
async def test_items_that_make_no_sense_are_refused(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post(
        "/enqueue", content=body, headers={"Content-Type": "application/json"}
    )

    assert answer.status_code == 400
    assert answer.json()["error"] == "InvalidInputError"


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1_001}, {"limit": "x"}, {"topic": ""}])
async def test_a_query_that_makes_no_sense_is_refused(
    client: httpx.AsyncClient, query: dict[str, Any]
) -> None:
    assert (await client.get("/dequeue", params={**REFUND, **query})).status_code == 400


async def test_whoever_asks_for_the_head_of_an_answer_claims_nothing(
    client: httpx.AsyncClient,
) -> None:
    await enqueue(client, item(b"x"))

    answer = await client.head("/dequeue", params=REFUND)

    assert answer.status_code == 405
    assert payloads(await dequeue(client)) == [b"x"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://example.org"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "example.org"},
        {"Host": "example.org:8080", "Origin": "http://example.org:8080"},
        {"Host": "127.0.0.1.example.org"},
        {"Host": "[nonsense"},
    ],
)
async def test_a_web_page_of_others_can_not_claim_from_a_broker_without_tokens(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    await enqueue(client, item(b"x"))

    answer = await client.get("/dequeue", params=REFUND, headers=headers)

    assert answer.status_code == 403
    assert "without tokens" in answer.json()["message"]
    assert payloads(await dequeue(client)) == [b"x"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {"Host": "localhost:8080", "Origin": "http://localhost:8080"},
        {"Host": "[::1]:8080"},
        {"Host": "Queues.example.org:8080"},
    ],
)
async def test_a_broker_without_tokens_answers_its_own_page_and_by_its_own_names(
    serving: Serving, headers: dict[str, str]
) -> None:
    async with serving(advertise="http://queues.example.org") as client:
        answer = await client.get("/dequeue", params=REFUND, headers=headers)

    assert answer.status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_broker_for_a_network_that_is_trusted_may_have_any_name(
    serving: Serving, host: str
) -> None:
    async with serving(host=host, insecure=True) as client:
        named = await client.get("/dequeue", params=REFUND, headers={"Host": "queues:8080"})
        foreign = await client.get("/dequeue", params=REFUND, headers={"Origin": "http://x"})

    assert (named.status_code, foreign.status_code) == (200, 403)


async def test_with_tokens_it_does_not_matter_which_page_asks(
    guarded: httpx.AsyncClient, token: Callable[..., dict[str, str]]
) -> None:
    headers = {**token("payments"), "Host": "queues", "Origin": "https://example.org"}

    assert (await guarded.get("/dequeue", params=REFUND, headers=headers)).status_code == 200


async def test_so_many_queues_are_made_and_no_more(serving: Serving) -> None:
    async with serving(max_topic_queues=1) as client:
        await enqueue(client, item(b"x"))

        answer = await client.get("/dequeue", params={**REFUND, "topic": "second"})

    assert answer.status_code == 409


async def test_a_namespace_that_has_all_its_queues_leaves_others_theirs(
    serving: Serving, token: Callable[..., dict[str, str]]
) -> None:
    async with serving(max_topic_queues=1, jwt_key=SECRET) as client:

        async def status(namespace: str, topic: str) -> int:
            query = {"namespace": namespace, "topic": topic}
            answer = await client.get("/dequeue", params=query, headers=token(namespace))
            return answer.status_code

        assert await status("a", "first") == 200
        assert await status("a", "second") == 409
        assert await status("b", "first") == 200
        gone = {"queue": "a/first"}
        await client.post("/v1/delete_queue", json=gone, headers=token("a"))
        assert await status("a", "second") == 200


async def test_a_namespace_over_its_rate_makes_no_queue(
    serving: Serving, system: AsyncSystem
) -> None:
    async with serving(rate_per_second=1, rate_burst=1) as client:
        topics = [{**REFUND, "topic": topic} for topic in ("first", "second")]
        answers = [await client.get("/dequeue", params=one) for one in topics]

    assert [one.status_code for one in answers] == [200, 429]
    assert await system.list_queues() == ["payments/first"]


@pytest.mark.parametrize("path", ["/ack", "/nack"])
async def test_an_item_of_a_topic_that_is_not_there_is_not_found_and_makes_no_queue(
    client: httpx.AsyncClient, system: AsyncSystem, path: str
) -> None:
    answer = await client.post(path, json={"id": 1, **REFUND})

    assert answer.status_code == 404
    assert await system.list_queues() == []


async def test_a_token_keeps_to_its_namespace(
    guarded: httpx.AsyncClient, token: Callable[..., dict[str, str]]
) -> None:
    mine, theirs = token("payments"), token("others")

    assert (await guarded.post("/enqueue", json=[item(b"x")], headers=mine)).status_code == 200
    assert (await guarded.post("/enqueue", json=[item(b"x")], headers=theirs)).status_code == 403
    assert (await guarded.get("/dequeue", params=REFUND, headers=theirs)).status_code == 403
    assert len((await guarded.get("/dequeue", params=REFUND, headers=mine)).json()) == 1
    assert (await guarded.get("/dequeue", params=REFUND)).status_code == 401


async def test_nobody_finishes_by_a_guessed_id_what_another_subject_claimed(
    guarded: httpx.AsyncClient, token: Callable[..., dict[str, str]], system: AsyncSystem
) -> None:
    alice, bob = token("payments", sub="alice"), token("payments", sub="bob")
    answer = await guarded.post("/enqueue", json=[item(b"1"), item(b"2")], headers=alice)
    first, second = answer.json()
    asked = {**REFUND, "receipts": "true"}
    leased = (await guarded.get("/dequeue", params=asked, headers=alice)).json()

    for path in ("/ack", "/nack"):
        guessed = await guarded.post(path, json={"id": first, **REFUND}, headers=bob)
        assert guessed.status_code == 409
        assert "leased by another consumer" in guessed.json()["message"]
    swapped = {"id": second, "receipt": leased[0]["receipt"], **REFUND}
    assert (await guarded.post("/ack", json=swapped, headers=bob)).status_code == 400
    made_up = {"id": first, "receipt": "00" * 40, **REFUND}
    assert (await guarded.post("/ack", json=made_up, headers=bob)).status_code == 400

    mine = await guarded.post("/ack", json={"id": first, **REFUND}, headers=alice)
    shown = {"id": second, "receipt": leased[1]["receipt"], **REFUND}
    assert mine.status_code == 200
    assert (await guarded.post("/ack", json=shown, headers=bob)).status_code == 200
    assert (await system.stats("payments/process-refund")).done == 2


async def test_what_was_claimed_through_another_api_is_not_finished_by_its_id(
    client: httpx.AsyncClient, system: AsyncSystem
) -> None:
    (message_id,) = await enqueue(client, item(b"1"))
    (claimed,) = await system.claim("payments/process-refund", consumer="worker", wait_ms=10_000)

    answer = await client.post("/ack", json={"id": message_id, **REFUND})

    assert answer.status_code == 409
    assert await system.ack("payments/process-refund", claimed) == ["ok"]
