"""A network that loses answers on purpose: a proxy between client and broker."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class UnreliableNetwork:
    """Forwards requests to a broker, and swallows the next ``lose`` answers to ``path``."""

    def __init__(self, url: str) -> None:
        self.redirect(url)
        self._path = b""
        self._left = 0
        self.lost = 0

    def lose(self, path: str, answers: int = 1) -> None:
        self._path = path.encode()
        self._left = answers

    def redirect(self, url: str) -> None:
        """Forward what comes over new connections to another broker."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._upstream = (host, int(port))

    @property
    def url(self) -> str:
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        try:
            while request := await _message(reader):
                upstream_writer.write(request)
                answer = await _message(upstream_reader)
                if self._left and request.startswith(b"POST " + self._path + b" "):
                    self._left -= 1
                    self.lost += 1
                    return
                writer.write(answer)
                await writer.drain()
        finally:
            upstream_writer.close()
            writer.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """A request or an answer, head and body; nothing at the end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.partition(b":")[2]))
    return head
