"""Requests of web pages that a browser on the same machine happens to show.

A broker without tokens trusts all that reaches it, and any page can make a browser send a ``GET``
there. Browsers say where such a request comes from, and other clients say nothing of the kind.
A page may also let its own name point to this machine (DNS rebinding): then the request is the
page's own to the browser, and only its ``Host`` shows that it was not meant for the broker.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from opendata_queue.http.refusals import forbidden
from opendata_queue.http.settings import ServerSettings

_HOSTS_KEPT: Final = 256
_ASKED_FOR: Final = frozenset({"same-origin", "none"})
"""What ``Sec-Fetch-Site`` says of the broker's own pages, and of what a user has typed."""


class PageCheck:
    """Refuses what pages of others send to a broker that asks for no tokens."""

    def __init__(self, settings: ServerSettings) -> None:
        self._needed = not settings.uses_tokens
        self._only_here = self._needed and not settings.insecure and is_loopback(settings.host)
        self._advertised = None if settings.advertise is None else _name(settings.advertise)

    def check(self, headers: Mapping[bytes, str]) -> None:
        """Refuse a request by its headers, if it comes from such a page."""
        if not self._needed:
            return
        host = headers.get(b"host", "")
        origin = headers.get(b"origin")
        if (origin is not None and origin.partition("://")[2].lower() != host.lower()) or (
            headers.get(b"sec-fetch-site", "none") not in _ASKED_FOR
        ):
            raise forbidden(
                f"this comes from a web page of {origin or 'another site'}, and a broker without "
                "tokens takes nothing from pages"
            )
        if self._only_here and host:
            name = _name(f"//{host}")
            if name != self._advertised and not is_loopback(name):
                raise forbidden(
                    f"this was sent to {host}, and a broker without tokens is for this machine "
                    "only: connect to 127.0.0.1 or localhost, or start the broker with --advertise "
                    "and that name, with tokens, or with --insecure"
                )


@lru_cache(maxsize=_HOSTS_KEPT)
def _name(url: str) -> str:
    """The host of a URL, without its port; nothing if it makes no sense."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


@lru_cache(maxsize=_HOSTS_KEPT)
def is_loopback(host: str) -> bool:
    """Whether a name or address is always this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
