"""The S3 server for tests does what S3 does, and fails as it is told."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import boto3
import obstore
import pytest
import slatedb.uniffi as slatedb
from botocore.exceptions import ClientError
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError
from obstore.store import S3Store

from tests.support.s3_server import ACCESS_KEY_ID, HOST, METHODS, REGION, S3Server

if TYPE_CHECKING:
    from obstore.store import RetryConfig

HANG_S = 120  # only ever waited for when something is broken
RACERS = 16
NO_RETRIES: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=HANG_S)}
SIGNED = f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY_ID}/20260101/{REGION}/s3/aws4_request"
UNSIGNED = ""

_numbers = itertools.count()


class Reply(NamedTuple):
    status: int
    body: bytes


class Bucket:
    """A bucket of its own for a test, through plain HTTP: one request, no retries."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.name = f"bucket-{next(_numbers)}"
        server.create_bucket(self.name)

    def send(self, method: str, key: str = "", body: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection(HOST, self.server.port, timeout=HANG_S)
        signed = {"Authorization": SIGNED, **headers}
        named = {name.replace("_", "-"): value for name, value in signed.items() if value}
        with contextlib.closing(connection):
            connection.request(method, f"/{self.name}/{key}", body, named)
            response = connection.getresponse()
            return Reply(response.status, response.read())

    def holds(self, key: str) -> bool:
        return self.send("HEAD", key).status == 200


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(running: S3Server) -> Iterator[S3Server]:
    running.heal()
    running.reset_requests()
    yield running
    running.heal()


@pytest.fixture
def bucket(server: S3Server) -> Bucket:
    return Bucket(server)


@pytest.fixture
def environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def pool(server: S3Server) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(RACERS) as threads:
        yield threads
        server.heal()  # a failed test may leave a request stalled


def race(pool: ThreadPoolExecutor, act: Callable[[int], bool]) -> list[int]:
    """The racers whose ``act`` won, when all of them start together."""
    barrier = threading.Barrier(RACERS)

    def run(racer: int) -> bool:
        barrier.wait(HANG_S)
        return act(racer)

    return [racer for racer, won in enumerate(pool.map(run, range(RACERS))) if won]


# The process.


def test_a_stopped_server_refuses_connections_and_forgets_its_objects_when_started_again() -> None:
    server = S3Server()
    with server:
        first = Bucket(server)
        assert first.send("PUT", "key", b"value").status == 200
        port = server.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), timeout=HANG_S)
    server.stop()  # once more changes nothing
    with server:
        assert first.send("GET", "key").status == 404


def test_two_servers_share_nothing(bucket: Bucket) -> None:
    with S3Server() as other:
        assert other.endpoint != bucket.server.endpoint
        other.create_bucket(bucket.name)  # the name is free there
        bucket.send("PUT", "key", b"value")
        assert other.requests()["PUT"] == 0


def test_the_server_dies_with_a_parent_that_is_killed() -> None:
    program = (
        "from tests.support.s3_server import S3Server; print(S3Server().start().port, flush=True)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{program}; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    with parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        with socket.create_connection((HOST, port), timeout=HANG_S) as connection:
            parent.send_signal(signal.SIGKILL)
            # The end of the stream, and no time-out; or a reset, if it had not been accepted yet.
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_a_connection_serves_many_requests(bucket: Bucket) -> None:
    connection = http.client.HTTPConnection(HOST, bucket.server.port, timeout=HANG_S)
    answers = []
    with contextlib.closing(connection):
        connection.connect()
        used = connection.sock
        for method, body in [
            ("PUT", b"x" * 70_000),
            ("HEAD", None),
            ("GET", None),
            ("DELETE", None),
        ]:
            connection.request(method, f"/{bucket.name}/key", body, {"Authorization": SIGNED})
            response = connection.getresponse()
            answers.append((response.status, response.headers["Content-Length"], response.read()))
            assert connection.sock is used
    lengths = [(status, length, len(body)) for status, length, body in answers]
    assert lengths == [(200, "0", 0), (200, "70000", 0), (200, "70000", 70_000), (204, None, 0)]


def test_a_put_whose_client_leaves_half_way_is_not_executed(bucket: Bucket) -> None:
    with socket.create_connection((HOST, bucket.server.port), timeout=HANG_S) as connection:
        head = f"PUT /{bucket.name}/key HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
        connection.sendall(head.encode() + b"half")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert not bucket.holds("key")


# The clients.


@pytest.mark.usefixtures("environment")
def test_obstore_and_boto3_find_the_server_through_the_environment(bucket: Bucket) -> None:
    store = S3Store(bucket.name)
    client = boto3.client("s3")
    large = bytes(range(256)) * 40_000  # obstore sends it in parts

    obstore.put(store, "from/obstore", large)
    client.put_object(Bucket=bucket.name, Key="from/ütf-8 b%2Foto", Body=b"small")

    assert client.get_object(Bucket=bucket.name, Key="from/obstore")["Body"].read() == large
    assert obstore.get(store, "from/ütf-8 b%2Foto").bytes() == b"small"
    assert obstore.get_range(store, "from/obstore", start=254, length=4) == b"\xfe\xff\x00\x01"
    listed = [entry["path"] for page in obstore.list(store, "from") for entry in page]
    assert listed == ["from/obstore", "from/ütf-8 b%2Foto"]


async def open_writer(bucket: Bucket) -> slatedb.Db:
    builder = slatedb.DbBuilder("root/db", slatedb.ObjectStore.resolve(f"s3://{bucket.name}/"))
    settings = slatedb.Settings.default()
    settings.set("flush_interval", json.dumps(None))
    builder.with_settings(settings)
    return await builder.build()


@pytest.mark.usefixtures("environment")
async def test_slatedb_writes_rows_and_a_second_writer_fences_the_first(bucket: Bucket) -> None:
    first = await open_writer(bucket)
    await first.put(b"key", b"value")
    await first.flush()
    second = await open_writer(bucket)
    assert await second.get(b"key") == b"value"

    await first.put(b"key", b"too late")
    with pytest.raises(slatedb.Error.Closed) as caught:
        await first.flush()
    assert caught.value.reason is slatedb.CloseReason.FENCED

    assert await second.get(b"key") == b"value"
    await second.shutdown()
    with contextlib.suppress(slatedb.Error.Closed):
        await first.shutdown()


@pytest.mark.usefixtures("environment")
async def test_slatedb_knows_its_own_write_again_when_the_answer_was_lost(
    server: S3Server, bucket: Bucket
) -> None:
    writer = await open_writer(bucket)
    await writer.put(b"key", b"value")
    server.drop_after(methods={"PUT"}, path_contains="/wal/", times=1)
    await writer.flush()  # its retry is refused: the object exists
    assert server.faulted() == 1
    assert writer.status().close_reason is None
    await writer.shutdown()

    reopened = await open_writer(bucket)
    assert await reopened.get(b"key") == b"value"
    await reopened.shutdown()


# Conditional puts.


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("attempt", range(5))
def test_of_racing_create_only_puts_exactly_one_wins(
    bucket: Bucket, pool: ThreadPoolExecutor, attempt: int
) -> None:
    store = S3Store(bucket.name, retry_config=NO_RETRIES)

    def create(racer: int) -> bool:
        try:
            obstore.put(store, "key", b"%d" % racer, mode="create")
        except AlreadyExistsError:
            return False
        return True

    (winner,) = race(pool, create)
    assert obstore.get(store, "key").bytes() == b"%d" % winner


@pytest.mark.parametrize("attempt", range(5))
def test_of_racing_updates_of_one_version_exactly_one_wins(
    bucket: Bucket, pool: ThreadPoolExecutor, attempt: int
) -> None:
    bucket.send("PUT", "key", b"before")
    etag = f'"{hashlib.md5(b"before").hexdigest()}"'

    def update(racer: int) -> bool:
        reply = bucket.send("PUT", "key", b"%d" % racer, If_Match=etag)
        assert reply.status in (200, 412)
        return reply.status == 200

    (winner,) = race(pool, update)
    assert bucket.send("GET", "key").body == b"%d" % winner


def test_listing_survives_racing_writes(bucket: Bucket, pool: ThreadPoolExecutor) -> None:
    def write_and_list(racer: int) -> bool:
        for i in range(5):
            assert bucket.send("PUT", f"{racer}/{i}", b"").status == 200
            assert bucket.send("GET", "?list-type=2").status == 200
        return True

    assert len(race(pool, write_and_list)) == RACERS
    assert bucket.send("GET", "?list-type=2").body.count(b"<Key>") == 5 * RACERS


# Refusals.


@pytest.fixture(scope="module")
def strict() -> Iterator[S3Server]:
    with S3Server(check_credentials=True) as server:
        yield server


def store_of(
    server: S3Server,
    bucket: str,
    access_key_id: str,
    *,
    timeout: timedelta = timedelta(seconds=HANG_S),
) -> S3Store:
    return S3Store(
        bucket,
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id=access_key_id,
        secret_access_key="secret",
        client_options={"allow_http": True, "timeout": timeout},
        retry_config=NO_RETRIES,
    )


def test_an_unknown_access_key_is_refused_and_changes_nothing(strict: S3Server) -> None:
    bucket = Bucket(strict)
    ours = store_of(strict, bucket.name, strict.environment()["AWS_ACCESS_KEY_ID"])
    theirs = store_of(strict, bucket.name, "AKIASOMEBODYELSE")

    with pytest.raises(PermissionDeniedError, match="InvalidAccessKeyId"):
        obstore.put(theirs, "key", b"value")
    assert not list(obstore.list(ours))
    obstore.put(ours, "key", b"value")
    with pytest.raises(PermissionDeniedError, match="InvalidAccessKeyId"):
        obstore.get(theirs, "key")
    assert obstore.get(ours, "key").bytes() == b"value"


def test_boto3_reads_the_refusal_as_it_reads_that_of_s3(strict: S3Server) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=strict.endpoint,
        region_name="us-east-1",
        aws_access_key_id="AKIASOMEBODYELSE",
        aws_secret_access_key="secret",
    )
    with pytest.raises(ClientError) as caught:
        client.list_buckets()
    assert caught.value.response["Error"]["Code"] == "InvalidAccessKeyId"
    assert caught.value.response["Error"]["AWSAccessKeyId"] == "AKIASOMEBODYELSE"


def test_a_request_without_credentials_is_refused(strict: S3Server) -> None:
    reply = Bucket(strict).send("GET", "key", Authorization=UNSIGNED)
    assert reply.status == 403
    assert b"<Code>AccessDenied</Code>" in reply.body


def test_a_presigned_request_has_its_credentials_in_the_query(strict: S3Server) -> None:
    bucket = Bucket(strict)
    ours = store_of(strict, bucket.name, strict.environment()["AWS_ACCESS_KEY_ID"])
    obstore.put(ours, "key", b"value")
    url = obstore.sign(ours, "GET", "key", timedelta(minutes=1))
    query = url.partition("?")[2]
    assert bucket.send("GET", f"key?{query}", Authorization=UNSIGNED) == (200, b"value")


@pytest.mark.parametrize("check", [False, True])
def test_a_missing_bucket_is_named_as_such(server: S3Server, strict: S3Server, check: bool) -> None:
    asked = strict if check else server
    store = store_of(asked, "no-such-bucket", asked.environment()["AWS_ACCESS_KEY_ID"])
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        obstore.put(store, "key", b"value")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        obstore.get(store, "key")


def test_a_bucket_is_created_once(server: S3Server, bucket: Bucket) -> None:
    with pytest.raises(ValueError, match="BucketAlreadyExists"):
        server.create_bucket(bucket.name)


# Faults.


def test_a_failed_put_is_not_executed(server: S3Server, bucket: Bucket) -> None:
    server.fail(methods={"PUT"}, times=1)
    reply = bucket.send("PUT", "key", b"value")
    assert reply.status == 503
    assert b"<Code>SlowDown</Code>" in reply.body
    assert not bucket.holds("key")


def test_a_fault_ends_after_its_times(server: S3Server, bucket: Bucket) -> None:
    server.fail(methods={"PUT"}, path_contains="wal/", status=500, times=3)
    statuses = [bucket.send("PUT", "wal/1", b"").status for _ in range(5)]
    assert statuses == [500, 500, 500, 200, 200]
    assert server.faulted() == 3


def test_a_fault_without_times_lasts_until_it_is_healed(server: S3Server, bucket: Bucket) -> None:
    server.fail()
    assert {bucket.send("GET", "key").status for _ in range(10)} == {503}
    server.heal()
    assert bucket.send("GET", "key").status == 404


def test_a_put_that_fails_after_execution_is_there(server: S3Server, bucket: Bucket) -> None:
    server.fail_after(methods={"PUT"}, status=500)
    assert bucket.send("PUT", "key", b"value").status == 500
    assert bucket.send("GET", "key") == (200, b"value")


def test_a_stalled_put_waits_for_the_healing_and_is_never_executed(
    server: S3Server, bucket: Bucket, pool: ThreadPoolExecutor
) -> None:
    server.stall(methods={"PUT"}, times=1)
    stalled = pool.submit(bucket.send, "PUT", "key", b"value")
    server.wait_until_faulted()
    assert bucket.send("PUT", "other", b"").status == 200  # the server goes on
    assert not stalled.done()
    server.heal()
    assert stalled.result(HANG_S).status == 503
    assert not bucket.holds("key")


def test_a_put_that_stalls_after_execution_is_there_before_its_answer(
    server: S3Server, bucket: Bucket, pool: ThreadPoolExecutor
) -> None:
    server.stall_after(methods={"PUT"}, times=1)
    stalled = pool.submit(bucket.send, "PUT", "key", b"value")
    server.wait_until_faulted()
    assert bucket.send("GET", "key") == (200, b"value")
    assert bucket.send("PUT", "key", b"", If_None_Match="*").status == 412
    assert not stalled.done()
    server.heal()
    assert stalled.result(HANG_S).status == 200


def test_a_client_that_gives_up_on_a_stalled_put_has_still_written_it(
    server: S3Server, bucket: Bucket
) -> None:
    impatient = store_of(server, bucket.name, "any", timeout=timedelta(milliseconds=500))
    server.stall_after(methods={"PUT"}, times=1)
    with pytest.raises(GenericError, match="error sending request"):
        obstore.put(impatient, "key", b"value", mode="create")
    server.wait_until_faulted()
    with pytest.raises(AlreadyExistsError):
        obstore.put(store_of(server, bucket.name, "any"), "key", b"value", mode="create")


def test_a_dropped_put_is_not_executed(server: S3Server, bucket: Bucket) -> None:
    server.drop(methods={"PUT"}, times=1)
    with pytest.raises(http.client.RemoteDisconnected):
        bucket.send("PUT", "key", b"value")
    assert not bucket.holds("key")
    assert bucket.send("PUT", "key", b"value").status == 200


def test_a_put_that_is_dropped_after_execution_is_there(server: S3Server, bucket: Bucket) -> None:
    server.drop_after(methods={"PUT"}, times=1)
    with pytest.raises(http.client.RemoteDisconnected):
        bucket.send("PUT", "key", b"value")
    assert bucket.send("GET", "key") == (200, b"value")


def test_obstore_sees_an_error_where_a_create_was_dropped_and_does_not_know_that_it_is_there(
    server: S3Server, bucket: Bucket
) -> None:
    store = store_of(server, bucket.name, "any")
    server.drop_after(methods={"PUT"}, times=1)
    with pytest.raises(GenericError):
        obstore.put(store, "key", b"value", mode="create")
    assert obstore.get(store, "key").bytes() == b"value"


def test_a_fault_hits_only_what_matches_all_of_it(server: S3Server, bucket: Bucket) -> None:
    server.fail(methods={"PUT", "LIST"}, path_contains="wal/")
    assert bucket.send("PUT", "wal/1", b"").status == 503
    assert bucket.send("PUT", "manifest/1", b"").status == 200
    assert bucket.send("GET", "wal/1").status == 404
    assert bucket.send("GET", "?list-type=2&prefix=wal%2F").status == 503
    assert bucket.send("GET", "?list-type=2&prefix=manifest%2F").status == 200
    assert server.faulted() == 2


def test_the_oldest_fault_that_matches_wins(server: S3Server, bucket: Bucket) -> None:
    server.fail(status=500, times=1)
    server.fail(status=503, times=1)
    assert [bucket.send("GET", "key").status for _ in range(3)] == [500, 503, 404]


def test_waiting_ends_when_enough_requests_were_faulted(
    server: S3Server, bucket: Bucket, pool: ThreadPoolExecutor
) -> None:
    server.stall(times=3)
    waiting = pool.submit(server.wait_until_faulted, 3)
    stalled = [pool.submit(bucket.send, "GET", "key") for _ in range(3)]
    waiting.result(HANG_S)
    server.heal()
    assert [answer.result(HANG_S).status for answer in stalled] == [503] * 3
    assert server.faulted() == 0


def test_waiting_for_a_fault_that_does_not_come_times_out(server: S3Server) -> None:
    with pytest.raises(TimeoutError, match="0 of 1"):
        server.wait_until_faulted(1, timeout_s=0)


@pytest.mark.parametrize(("methods", "times"), [({"put"}, 1), ({"PUT"}, 0)])
def test_a_fault_that_could_never_hit_is_refused(
    server: S3Server, methods: set[str], times: int
) -> None:
    with pytest.raises(ValueError, match=r"must be at least 1|not among"):
        server.fail(methods=methods, times=times)


# Counting.


def test_requests_are_counted_by_method_with_the_bytes_of_their_bodies(
    server: S3Server, bucket: Bucket
) -> None:
    bucket.send("PUT", "key", b"x" * 1000)
    bucket.send("PUT", "key", b"x" * 1000)
    bucket.send("GET", "key")
    bucket.send("HEAD", "key")
    bucket.send("DELETE", "key")
    listing = bucket.send("GET", "?list-type=2&prefix=a")
    assert server.requests() == {
        "GET": 1,
        "PUT": 2,
        "POST": 0,
        "DELETE": 1,
        "HEAD": 1,
        "LIST": 1,
        "bytes_in": 2000,
        "bytes_out": 1000 + len(listing.body),
    }
    server.reset_requests()
    assert server.requests() == dict.fromkeys((*METHODS, "bytes_in", "bytes_out"), 0)


def test_a_faulted_request_counts_and_what_the_test_asks_the_server_does_not(
    server: S3Server, bucket: Bucket
) -> None:
    server.drop(methods={"PUT"})
    with pytest.raises(http.client.RemoteDisconnected):
        bucket.send("PUT", "key", b"value")
    server.wait_until_faulted()
    server.heal()
    counts = server.requests()
    assert (counts["PUT"], counts["POST"], counts["bytes_in"], counts["bytes_out"]) == (1, 0, 5, 0)


def test_only_requests_with_a_certain_path_are_counted_if_that_is_asked_for(
    server: S3Server, bucket: Bucket
) -> None:
    server.reset_requests(path_contains="mine/")
    bucket.send("PUT", "mine/key", b"x")
    bucket.send("PUT", "other/key", b"x")
    bucket.send("GET", "?list-type=2&prefix=mine/")
    bucket.send("GET", "?list-type=2&prefix=other/")
    counts = server.requests()
    assert (counts["PUT"], counts["LIST"], counts["bytes_in"]) == (1, 1, 1)


# What other stores do with conditions.


@pytest.mark.parametrize(
    ("quoted", "bare", "statuses"), [(True, True, [200, 200]), (False, True, [412, 200])]
)
def test_an_overwrite_by_etag_is_taken_as_it_is_set(
    bucket: Bucket, quoted: bool, bare: bool, statuses: list[int]
) -> None:
    tag = hashlib.md5(b"value").hexdigest()
    bucket.server.take_if_match(quoted=quoted, bare=bare)
    found = []
    for condition in (f'"{tag}"', tag):
        assert bucket.send("PUT", "key", b"value").status == 200
        found.append(bucket.send("PUT", "key", b"other", If_Match=condition).status)

    assert found == statuses
    assert bucket.send("PUT", "key", b"third", If_Match=tag).status == 412
    bucket.server.heal()
    assert bucket.send("PUT", "key", b"value").status == 200
    assert bucket.send("PUT", "key", b"other", If_Match=f'"{tag}"').status == 200
