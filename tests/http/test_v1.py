"""The native API, in JSON and in msgpack."""

from __future__ import annotations

import base64
import json

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from opendata_queue.http.wire import MSGPACK
from tests.http.conftest import Serving

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def ask(client: httpx.AsyncClient, operation: str, **arguments: object) -> httpx.Response:
    return await client.post(f"/v1/{operation}", json=arguments)


async def test_ids_are_texts_and_payloads_base64_in_json(client: httpx.AsyncClient) -> None:
    await ask(client, "create_queue", queue="q", filter="type = 'a'")
    payload = base64.b64encode(b"\xff\x00").decode()
    published = await ask(
        client, "publish", messages=[{"payload": payload, "headers": {"type": "a"}}]
    )

    (message_id,) = published.json()["message_ids"]
    claimed = (await ask(client, "claim", queue="q", wait_ms=30_000)).json()["messages"][0]
    history = (await ask(client, "history", message_id=message_id)).json()["history"]
    read = (await ask(client, "read", message_ids=[message_id, int(message_id)])).json()

    assert isinstance(message_id, str)
    assert claimed["message_id"] == message_id
    assert claimed["payload"] == payload
    assert claimed["headers"] == {"type": "a"}
    assert history["entries"][0]["message_id"] == message_id
    assert [one["payload"] for one in read["messages"]] == [payload, payload]


async def test_both_forms_can_be_mixed(client: httpx.AsyncClient) -> None:
    body = msgspec.msgpack.encode({"messages": [{"payload": b"\xff"}]})

    answer = await client.post(
        "/v1/publish",
        content=body,
        headers={"Content-Type": MSGPACK, "Accept": "application/json"},
    )
    binary = await client.post(
        "/v1/read", json={"message_ids": answer.json()["message_ids"]}, headers={"Accept": MSGPACK}
    )

    assert binary.headers["content-type"] == MSGPACK
    message = msgspec.msgpack.decode(binary.content)["messages"][0]
    assert message["payload"] == b"\xff"
    assert str(message["message_id"]) == answer.json()["message_ids"][0]


async def test_a_name_that_is_not_known_is_refused(client: httpx.AsyncClient) -> None:
    answer = await ask(client, "publish", messages=[{"paylod": ""}])

    assert answer.status_code == 400
    assert answer.json()["error"] == "InvalidInputError"
    assert "paylod" in answer.json()["message"]


@pytest.mark.parametrize("operation", ["create_queue", "update_queue"])
@pytest.mark.parametrize("name", ["self", "name", "filter", "changes", "leese_ms"])
async def test_an_option_that_no_queue_has_is_refused(
    client: httpx.AsyncClient, operation: str, name: str
) -> None:
    await ask(client, "create_queue", queue="q")

    answer = await ask(client, operation, queue="q", options={name: 1})

    assert answer.status_code == 400
    assert f"{name} is no option of a queue" in answer.json()["message"]


async def test_errors_have_their_status_and_name(client: httpx.AsyncClient) -> None:
    await ask(client, "create_queue", queue="there")

    missing = await ask(client, "stats", queue="gone")
    existing = await ask(client, "create_queue", queue="there")
    wrong = await ask(client, "create_queue", queue="new", filter="price >")
    nowhere = await client.post("/v1/nothing", json={})
    method = await client.get("/v1/publish")

    assert (missing.status_code, missing.json()["error"]) == (404, "QueueNotFoundError")
    assert (existing.status_code, existing.json()["error"]) == (409, "QueueExistsError")
    assert (wrong.status_code, wrong.json()["error"]) == (400, "FilterError")
    assert wrong.json()["column"] == 8
    assert (nowhere.status_code, method.status_code) == (404, 405)
    assert "/v1/nothing" in nowhere.json()["message"]


async def test_a_form_that_a_web_page_could_send_unasked_is_refused(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post(
        "/v1/list_queues", content=b"{}", headers={"Content-Type": "text/plain"}
    )

    assert answer.status_code == 415


async def test_the_trace_of_a_publish_reaches_the_consumer(client: httpx.AsyncClient) -> None:
    await ask(client, "create_queue", queue="q")
    await client.post(
        "/v1/publish",
        json={"messages": [{"payload": ""}, {"payload": "", "headers": {"traceparent": "own"}}]},
        headers={"traceparent": TRACE},
    )

    claimed = (await ask(client, "claim", queue="q", count=2)).json()["messages"]

    assert [one["headers"]["traceparent"] for one in claimed] == [TRACE, "own"]


@pytest.mark.parametrize("trace", ["", "nonsense", TRACE.replace("4", "x"), "ff" + TRACE[2:]])
async def test_a_trace_that_makes_no_sense_is_dropped(
    client: httpx.AsyncClient, trace: str
) -> None:
    await ask(client, "create_queue", queue="q")
    headers = {"traceparent": trace, "tracestate": "a=1"}
    await client.post("/v1/publish", json={"messages": [{"payload": ""}]}, headers=headers)

    (claimed,) = (await ask(client, "claim", queue="q")).json()["messages"]

    assert claimed["headers"] == {}


async def test_the_state_of_a_trace_goes_along_with_it(client: httpx.AsyncClient) -> None:
    await ask(client, "create_queue", queue="q")
    headers = {"traceparent": TRACE, "tracestate": "vendor=1"}
    many = {str(number): "x" for number in range(254)}
    body = {"messages": [{"payload": ""}, {"payload": "", "headers": many}]}
    answer = await client.post("/v1/publish", json=body, headers=headers)
    assert answer.status_code == 200

    first, full = (await ask(client, "claim", queue="q", count=2)).json()["messages"]

    assert first["headers"] == headers
    assert full["headers"] == many


async def test_headers_that_are_too_large_together_are_refused(client: httpx.AsyncClient) -> None:
    headers = {str(number): "x" * 60_000 for number in range(10, 28)}

    refused = await ask(client, "publish", messages=[{"payload": "", "headers": headers}])

    assert refused.status_code == 400
    assert "headers have 1080036 bytes in all, over the limit of 1048576" in refused.text


async def test_headers_of_the_limit_are_published_without_a_trace(
    client: httpx.AsyncClient,
) -> None:
    full = {f"{number:04}": "x" * 65_532 for number in range(16)}
    body = {"messages": [{"payload": "", "headers": full}]}

    answer = await client.post("/v1/publish", json=body, headers={"traceparent": TRACE})

    assert answer.status_code == 200
    (read,) = (await ask(client, "read", message_ids=answer.json()["message_ids"])).json()[
        "messages"
    ]
    assert read["headers"] == full


async def test_an_answer_has_a_size(serving: Serving) -> None:
    async with serving(max_answer_bytes=1_000) as client:
        await ask(client, "create_queue", queue="q")
        payload = base64.b64encode(b"x" * 400).decode()
        await ask(client, "publish", messages=[{"payload": payload}] * 5)

        first = (await ask(client, "claim", queue="q", count=5)).json()["messages"]
        stats = (await ask(client, "stats", queue="q")).json()
        ids = [first[0]["message_id"]] * 3
        refused = await ask(client, "read", message_ids=ids)
        read = await ask(client, "read", message_ids=ids[:2])

    assert len(first) == 2
    assert (refused.status_code, read.status_code) == (400, 200)
    assert (stats["in_flight"], stats["available"]) == (2, 3)


async def test_health_and_metrics_are_shown(client: httpx.AsyncClient) -> None:
    await ask(client, "create_queue", queue="q")
    await ask(client, "publish", messages=[{"payload": ""}] * 3)
    await ask(client, "claim", queue="q")

    assert (await client.get("/healthz")).status_code == 200
    assert (await client.get("/readyz")).status_code == 200
    text = (await client.get("/metrics")).text

    assert 'odq_messages_total{event="published"} 3.0' in text
    assert 'odq_messages_total{event="claimed"} 1.0' in text
    assert 'odq_queue_messages{queue="q",state="available"} 2.0' in text
    assert 'odq_queue_messages{queue="q",state="in_flight"} 1.0' in text
    assert 'odq_requests_total{route="/v1/publish",status="200"} 1.0' in text
    assert 'odq_queue_oldest_age_seconds{queue="q"}' in text


async def test_metrics_show_commits_and_requests_to_the_store(client: httpx.AsyncClient) -> None:
    await ask(client, "create_queue", queue="q")
    await ask(client, "publish", messages=[{"payload": ""}] * 3)
    text = (await client.get("/metrics")).text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]

    def values(name: str, **labels: str) -> list[float]:
        return [
            one.value
            for one in samples
            if one.name == name and labels.items() <= one.labels.items()
        ]

    for database in ("messages/00000", "queues/00000"):
        assert values("odq_commit_seconds_count", database=database)[0] >= 1
        assert values("odq_commit_bytes_sum", database=database)[0] > 0
        puts = values("slatedb_object_store_request_count_total", database=database, api="put")
        assert sum(puts) > 0
        assert values("slatedb_db_write_ops_total", database=database)[0] > 0
    assert values("odq_commit_rows_total", database="messages/00000")[0] >= 6
    assert values("odq_object_requests_total")[0] > 0
    assert len(values("odq_commit_seconds_bucket", le="+Inf")) == 2


async def test_metrics_show_so_many_queues_and_count_the_rest(serving: Serving) -> None:
    async with serving(max_metric_queues=2) as client:
        for name in "abc":
            await ask(client, "create_queue", queue=name)
        text = (await client.get("/metrics")).text

    assert 'queue="b"' in text
    assert 'queue="c"' not in text
    assert "odq_queues_left_out 1.0" in text


async def test_the_api_is_documented(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()

    assert (await client.get("/docs")).status_code == 200
    assert {"/v1/publish", "/v1/claim", "/enqueue", "/nack"} <= set(document["paths"])
    claimed = document["components"]["schemas"]["ClaimedMessage"]["properties"]
    assert claimed["message_id"]["type"] == "string"


async def test_each_request_is_logged_with_its_messages(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "opendata_queue.access")
    async with serving(access_log=True) as client:
        answer = await client.post(
            "/v1/publish",
            json={"messages": [{"payload": ""}] * 12},
            headers={"traceparent": TRACE},
        )

    (line,) = [json.loads(one.message) for one in caplog.records]
    assert line["message_ids"] == answer.json()["message_ids"][:10]
    assert (line["route"], line["status"], line["messages"]) == ("/v1/publish", 200, 12)
    assert line["traceparent"] == TRACE
