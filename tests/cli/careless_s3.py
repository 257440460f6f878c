"""An S3 that knows nothing of conditional writes, as old stores are."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    objects: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200)

    def do_GET(self) -> None:
        if "list-type=2" in self.path:
            self._answer(200, b"<ListBucketResult></ListBucketResult>")
            return
        data = self.objects.get(self.path)
        self._answer(404 if data is None else 200, data or b"")

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self._answer(204)

    def do_POST(self) -> None:
        """Deletes in bulk."""
        told = self.rfile.read(int(self.headers["Content-Length"])).decode()
        deleted = "".join(f"<Deleted>{key}</Deleted>" for key in re.findall("<Key>.*?</Key>", told))
        self.objects.clear()
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def careless_s3() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Its endpoint, and the objects that it holds."""
    objects: dict[str, bytes] = {}
    handler = type("Handler", (_Handler,), {"objects": objects})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", objects
        finally:
            server.shutdown()
            thread.join()
