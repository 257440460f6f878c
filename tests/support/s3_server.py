"""A real S3 server for tests and benchmarks: moto, in a process of its own, that fails on command.

The server keeps everything in memory and executes one request at a time: moto checks the condition
of a conditional put and writes the object in two steps, and its listings break when a write comes
in between. Waiting for a client, and being stalled, happens outside of that lock.

``S3Server`` is the side that a test holds. It talks to the server through ``POST /_odq/<command>``,
which is never counted and never faulted. A bucket cannot have that name.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import io
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication, WSGIEnvironment

ACCESS_KEY_ID = "AKIAODQTESTSERVER"
SECRET_ACCESS_KEY = "odq-test-secret"
REGION = "us-east-1"

METHODS = ("GET", "PUT", "POST", "DELETE", "HEAD", "LIST")
"""What requests are counted and faulted by. A LIST is a GET that lists the keys of a bucket."""

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 5.0
ADMIN_TIMEOUT_S = 120.0
FAULT_TIMEOUT_S = 120.0

_ADMIN_PREFIX = "/_odq/"
_LIST_PARAMETERS = {"list-type", "prefix", "delimiter", "marker", "max-keys", "encoding-type"}
_ERROR_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}
_NEVER_ON_DISK = str(1 << 40)  # moto spools an object to a file from this size on


class Action(enum.StrEnum):
    """What becomes of a faulted request; the ``_AFTER`` ones execute it first."""

    FAIL = "fail"
    FAIL_AFTER = "fail_after"
    STALL = "stall"
    STALL_AFTER = "stall_after"
    DROP = "drop"
    DROP_AFTER = "drop_after"


class S3Server:
    """A server that runs from ``start`` to ``stop``, or inside of ``with``.

    A fault hits the requests that match all of it: ``methods`` are among ``METHODS`` (``None`` is
    any), and ``path_contains`` is looked for in ``/bucket/key``, or in ``/bucket/prefix`` of a
    LIST. It hits ``times`` of them, or all until ``heal`` with ``None``. The oldest fault that
    still matches wins.
    """

    def __init__(self, *, check_credentials: bool = False) -> None:
        self._check_credentials = check_credentials
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def start(self) -> Self:
        assert self._process is None, "the server was started already"
        command = [sys.executable, "-P", __file__]
        if self._check_credentials:
            command.append("--check-credentials")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # the server exits when this pipe ends, so also when we die
            stdout=subprocess.PIPE,
            env={**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": _NEVER_ON_DISK},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise RuntimeError("the S3 server died before it listened; see its stderr")
        self._port = int(line)
        return self

    def stop(self) -> None:
        """Terminate the server, stalled requests included. Does nothing if it does not run."""
        if (process := self._process) is None:
            return
        self._process = None
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._port

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def environment(self) -> dict[str, str]:
        """The variables with which SlateDB, obstore and boto3 find this server.

        The two endpoints mean the same to SlateDB and obstore, where the later one in the process's
        environment wins; boto3 only knows the second.
        """
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,  # what boto3 reads
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def create_bucket(self, name: str) -> None:
        self._ask("bucket", name=name)

    def fail(
        self,
        *,
        methods: Collection[str] | None = None,
        path_contains: str = "",
        status: int = 503,
        times: int | None = None,
    ) -> None:
        """Answer with an error of ``status``, and do not execute the request."""
        self._fault(Action.FAIL, methods, path_contains, times, status)

    def fail_after(
        self,
        *,
        methods: Collection[str] | None = None,
        path_contains: str = "",
        status: int = 503,
        times: int | None = None,
    ) -> None:
        """Execute the request, and answer with an error of ``status`` all the same."""
        self._fault(Action.FAIL_AFTER, methods, path_contains, times, status)

    def stall(
        self,
        *,
        methods: Collection[str] | None = None,
        path_contains: str = "",
        times: int | None = None,
    ) -> None:
        """Hold the request until ``heal``, then answer 503. It is never executed."""
        self._fault(Action.STALL, methods, path_contains, times)

    def stall_after(
        self,
        *,
        methods: Collection[str] | None = None,
        path_contains: str = "",
        times: int | None = None,
    ) -> None:
        """Execute the request, and hold its answer until ``heal``."""
        self._fault(Action.STALL_AFTER, methods, path_contains, times)

    def drop(
        self,
        *,
        methods: Collection[str] | None = None,
        path_contains: str = "",
        times: int | None = None,
    ) -> None:
        """Close the connection without an answer, and do not execute the request."""
        self._fault(Action.DROP, methods, path_contains, times)

    def drop_after(
        self,
        *,
        methods: Collection[str] | None = None,
        path_contains: str = "",
        times: int | None = None,
    ) -> None:
        """Execute the request, and close the connection without an answer."""
        self._fault(Action.DROP_AFTER, methods, path_contains, times)

    def heal(self) -> None:
        """Remove all faults, release what is stalled, and count faulted requests from 0 again.

        Conditions are taken again as S3 takes them.
        """
        self._ask("heal")

    def slow_down(self, latency_ms: float) -> None:
        """Let every request take so much longer from now on, as if the store were far away."""
        self._ask("slow_down", latency_ms=latency_ms)

    def take_if_match(self, *, quoted: bool, bare: bool) -> None:
        """How a PUT with ``If-Match`` is answered from now on; 412 where it is not taken.

        S3 takes an ETag in quotes, as obstore and SlateDB send it. Ceph's gateway (16.2) takes only
        one without, and there are stores that take neither.
        """
        self._ask("if_match", quoted=quoted, bare=bare)

    def faulted(self) -> int:
        """The number of requests that were hit by a fault since the last ``heal``."""
        return int(self._ask("wait", faulted=0, timeout_s=0)["faulted"])

    def wait_until_faulted(self, n: int = 1, *, timeout_s: float = FAULT_TIMEOUT_S) -> None:
        """Return once ``n`` requests were hit since the last ``heal``; else ``TimeoutError``.

        A request that is executed first (``…_after``) is hit once it was executed.
        """
        reached = self._ask("wait", faulted=n, timeout_s=timeout_s)["faulted"]
        if reached < n:
            raise TimeoutError(f"{reached} of {n} requests were faulted within {timeout_s} s")

    def requests(self) -> dict[str, int]:
        """Requests by method (all of ``METHODS``), ``bytes_in`` and ``bytes_out`` of their bodies.

        A request counts once its body has arrived, faulted or not; its answer, when it is sent.
        """
        return dict(self._ask("requests"))

    def reset_requests(self, *, path_contains: str = "") -> None:
        """Count from 0 again, and only requests with that in their path.

        Others may be at work: a database that a test let go of polls until its process ends.
        """
        self._ask("reset", path_contains=path_contains)

    def _fault(
        self,
        action: Action,
        methods: Collection[str] | None,
        path_contains: str,
        times: int | None,
        status: int = 503,
    ) -> None:
        chosen = sorted(METHODS if methods is None else methods)
        if unknown := set(chosen) - set(METHODS):
            raise ValueError(f"{sorted(unknown)} are not among {METHODS}")
        if times is not None and times < 1:
            raise ValueError(f"times is {times}; it must be at least 1, or None")
        self._ask(
            "fault",
            action=action,
            methods=chosen,
            path_contains=path_contains,
            status=status,
            times=times,
        )

    def _ask(self, command: str, **arguments: object) -> dict[str, Any]:
        patience_s = ADMIN_TIMEOUT_S + float(str(arguments.get("timeout_s", 0)))
        connection = http.client.HTTPConnection(HOST, self.port, timeout=patience_s)
        with contextlib.closing(connection):
            connection.request("POST", _ADMIN_PREFIX + command, json.dumps(arguments))
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        if response.status != HTTPStatus.OK:
            raise ValueError(answer["error"])
        return answer


# From here on: what runs in the server's process.


@dataclass(kw_only=True, slots=True)
class _Fault:
    action: Action
    methods: list[str]
    path_contains: str
    status: int
    times: int | None

    def matches(self, method: str, path: str) -> bool:
        return self.times != 0 and method in self.methods and self.path_contains in path


class _Faults:
    """The faults in force. A stalled request waits until the generation that hit it is over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation = 0
        self._faults: list[_Fault] = []
        self._hits = 0

    def add(self, fault: _Fault) -> None:
        with self._changed:
            self._faults.append(fault)

    def take(self, method: str, path: str) -> tuple[_Fault | None, int]:
        """The fault for this request, one of whose ``times`` is used up, and its generation."""
        with self._changed:
            for fault in self._faults:
                if fault.matches(method, path):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault, self._generation
            return None, self._generation

    def hit(self, generation: int) -> None:
        with self._changed:
            if generation == self._generation:
                self._hits += 1
                self._changed.notify_all()

    def wait_for_heal(self, generation: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._generation != generation)

    def wait_for_hits(self, hits: int, timeout_s: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._hits >= hits, timeout_s)
            return self._hits

    def heal(self) -> None:
        with self._changed:
            self._generation += 1
            self._faults.clear()
            self._hits = 0
            self._changed.notify_all()


class _Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self, path_contains: str = "") -> None:
        with self._lock:
            self._path_contains = path_contains
            self._counts = dict.fromkeys((*METHODS, "bytes_in", "bytes_out"), 0)

    def add(self, path: str, name: str, count: int = 1) -> None:
        with self._lock:
            if self._path_contains in path:
                self._counts[name] = self._counts.get(name, 0) + count

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    status: str
    headers: list[tuple[str, str]]
    body: bytes


class _Service:
    """Answers requests: counts them, faults them, checks who sent them, and has moto do them."""

    def __init__(self, app: WSGIApplication, *, check_credentials: bool) -> None:
        self._app = app
        self._check_credentials = check_credentials
        self._one_at_a_time = threading.Lock()
        self._faults = _Faults()
        self._counters = _Counters()
        self._latency_ms = 0.0
        self._takes_quoted, self._takes_bare = True, True

    def answer(self, environ: WSGIEnvironment, body: bytes) -> _Answer | None:
        """The answer to a request, or None to close the connection without one."""
        path = _text(environ["PATH_INFO"])
        if path.startswith(_ADMIN_PREFIX):
            return self._administer(path.removeprefix(_ADMIN_PREFIX), body)
        method, path = _classify(environ, path)
        self._counters.add(path, method)
        self._counters.add(path, "bytes_in", len(body))
        if self._latency_ms:
            time.sleep(self._latency_ms / 1000)
        answer = self._answer_unless_faulted(method, path, environ)
        if answer is not None:
            self._counters.add(path, "bytes_out", len(answer.body))
        return answer

    def _answer_unless_faulted(
        self, method: str, path: str, environ: WSGIEnvironment
    ) -> _Answer | None:
        fault, generation = self._faults.take(method, path)
        if fault is None:
            return self._execute(environ)
        executed: _Answer | None = None
        if fault.action in (Action.FAIL_AFTER, Action.STALL_AFTER, Action.DROP_AFTER):
            executed = self._execute(environ)
        self._faults.hit(generation)
        match fault.action:
            case Action.FAIL | Action.FAIL_AFTER:
                return _error(environ, fault.status)
            case Action.STALL:
                self._faults.wait_for_heal(generation)
                return _error(environ, HTTPStatus.SERVICE_UNAVAILABLE)
            case Action.STALL_AFTER:
                self._faults.wait_for_heal(generation)
                return executed
            case Action.DROP | Action.DROP_AFTER:
                return None

    def _execute(self, environ: WSGIEnvironment) -> _Answer:
        from werkzeug.test import run_wsgi_app

        if self._check_credentials and (refused := _refusal(environ)) is not None:
            return refused
        if not self._takes_if_match(environ):
            return _error(environ, HTTPStatus.PRECONDITION_FAILED)
        try:
            with self._one_at_a_time:
                chunks, status, headers = run_wsgi_app(self._app, environ, buffered=True)
                return _Answer(status=status, headers=list(headers), body=b"".join(chunks))
        except Exception:
            traceback.print_exc()
            return _error(environ, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _takes_if_match(self, environ: WSGIEnvironment) -> bool:
        """Whether the condition of an overwrite is one that this store can read."""
        tag = environ.get("HTTP_IF_MATCH")
        if tag is None or environ["REQUEST_METHOD"] != "PUT":
            return True
        if tag.startswith('"'):
            return self._takes_quoted
        environ["HTTP_IF_MATCH"] = f'"{tag}"'
        return self._takes_bare

    def _administer(self, command: str, body: bytes) -> _Answer:
        try:
            told = self._obey(command, json.loads(body))
        except Exception as error:
            return _json("400 Bad Request", {"error": f"{command}: {error!r}"})
        return _json("200 OK", told)

    def _obey(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        match command:
            case "bucket":
                self._create_bucket(**arguments)
            case "fault":
                action = Action(arguments.pop("action"))
                self._faults.add(_Fault(action=action, **arguments))
            case "heal":
                self._faults.heal()
                self._takes_quoted, self._takes_bare = True, True
            case "slow_down":
                self._latency_ms = float(arguments["latency_ms"])
            case "if_match":
                self._takes_quoted, self._takes_bare = arguments["quoted"], arguments["bare"]
            case "wait":
                hits = self._faults.wait_for_hits(arguments["faulted"], arguments["timeout_s"])
                return {"faulted": hits}
            case "requests":
                return self._counters.read()
            case "reset":
                self._counters.reset(**arguments)
            case _:
                raise LookupError("no such command")
        return {}

    def _create_bucket(self, name: str) -> None:
        from moto.core.models import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        with self._one_at_a_time:
            s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(name, REGION)


def _text(wsgi_string: str) -> str:
    """WSGI hands UTF-8 over as if it were latin-1."""
    return wsgi_string.encode("latin-1").decode("utf-8", "replace")


def _classify(environ: WSGIEnvironment, path: str) -> tuple[str, str]:
    """One of ``METHODS`` (or what else the client sent), and the path of what it is about."""
    method: str = environ["REQUEST_METHOD"]
    bucket, _, key = path.strip("/").partition("/")
    if method != "GET" or key or not bucket:
        return method, path
    query = parse_qs(_text(environ["QUERY_STRING"]), keep_blank_values=True)
    if query.keys().isdisjoint(_LIST_PARAMETERS):
        return method, path
    return "LIST", f"/{bucket}/{query.get('prefix', [''])[0]}"


def _refusal(environ: WSGIEnvironment) -> _Answer | None:
    """S3's answer to a key id that is not ours, or to none."""
    credential = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2]
    if not credential:
        query = parse_qs(environ["QUERY_STRING"])
        credential = query.get("X-Amz-Credential", [""])[0]
    key_id = credential.partition("/")[0]
    if key_id == ACCESS_KEY_ID:
        return None
    if not key_id:
        return _error(environ, HTTPStatus.FORBIDDEN)
    return _error(
        environ,
        HTTPStatus.FORBIDDEN,
        code="InvalidAccessKeyId",
        message="The AWS Access Key Id you provided does not exist in our records.",
        detail=f"<AWSAccessKeyId>{escape(key_id)}</AWSAccessKeyId>",
    )


def _error(
    environ: WSGIEnvironment,
    status: int,
    *,
    code: str | None = None,
    message: str = "Injected by the test server.",
    detail: str = "",
) -> _Answer:
    phrase = HTTPStatus(status).phrase
    code = code or _ERROR_CODES.get(status, phrase.replace(" ", ""))
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message>{detail}</Error>"
    )
    return _Answer(
        status=f"{int(status)} {phrase}",
        headers=[("Content-Type", "application/xml")],
        body=b"" if environ["REQUEST_METHOD"] == "HEAD" else body.encode(),
    )


def _json(status: str, told: dict[str, Any]) -> _Answer:
    headers = [("Content-Type", "application/json")]
    return _Answer(status=status, headers=headers, body=json.dumps(told).encode())


def _encode(answer: _Answer, *, head: bool, close: bool) -> bytes:
    """The answer as one piece, with the length that keeps the connection usable."""
    code = int(answer.status.split()[0])
    headers = answer.headers
    body = answer.body
    if code in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
        body = b""
        headers = [pair for pair in headers if pair[0].lower() != "content-length"]
    elif not head:  # the length in the answer to a HEAD is that of the object
        headers = [pair for pair in headers if pair[0].lower() != "content-length"]
        headers.append(("Content-Length", str(len(body))))
    headers = [*headers, ("Connection", "close" if close else "keep-alive")]
    lines = [f"HTTP/1.1 {answer.status}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if head else body)


def _read_body(environ: WSGIEnvironment) -> bytes | None:
    """The whole body, which ``environ`` has as a buffer afterwards; None if the client left."""
    stream = environ["wsgi.input"]
    if environ.pop("wsgi.input_terminated", False):
        environ.pop("HTTP_TRANSFER_ENCODING", None)
        try:
            body = bytes(stream.read())
        except OSError:
            return None
    else:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = bytes(stream.read(length))
        if len(body) < length:
            return None
    environ["CONTENT_LENGTH"] = str(len(body))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _serve(*, check_credentials: bool) -> None:
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    app = create_backend_app("s3")
    _copy_no_objects()
    service = _Service(app, check_credentials=check_credentials)

    class Handler(MotoRequestHandler):
        """Werkzeug's own ``run_wsgi`` closes every connection, and can only answer."""

        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def run_wsgi(self) -> None:
            self.environ = environ = self.make_environ()
            body = _read_body(environ)
            answer = None if body is None else service.answer(environ, body)
            if answer is None:
                self.close_connection = True
                return
            head = self.command == "HEAD"
            self.wfile.write(_encode(answer, head=head, close=self.close_connection))

        def log(self, type: str, message: str, *args: object) -> None:
            pass

    server = make_server(HOST, 0, app, threaded=True, request_handler=Handler)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    print(server.port, flush=True)
    sys.stdout = sys.stderr  # nobody reads the pipe from here on
    server.serve_forever()


def _copy_no_objects() -> None:
    """Hand out an object's bytes as they are kept.

    moto copies all of them for each request, also for one that wants a few bytes of a large object:
    25 ms for 60 MB, where S3 takes as long as for a small one.
    """
    from moto.s3.models import FakeKey

    def value(key: FakeKey) -> bytes:
        with key.lock:
            kept: bytes = key._value_buffer._file.getvalue()  # type: ignore[attr-defined]
            return kept

    FakeKey.value = property(value, FakeKey.value.fset)  # type: ignore[assignment,attr-defined]


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    _serve(check_credentials="--check-credentials" in sys.argv[1:])
