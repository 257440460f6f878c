"""Where a client may go when it is sent to another address, and where it may take its token.

A file in a bucket, or a broker, says where a root is served. An attacker who writes such a file, or
answers in the place of a broker, must not get a client's token, nor have it sent without TLS.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from opendata_queue.model.errors import InvalidInputError, StoreAccessError

# Nothing that two parsers could read in two ways: no user, no query, no other characters.
_ADDRESS: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<port>[0-9]{1,5}))?(?:/[A-Za-z0-9._~/-]*)?"
)
_PATTERN: Final = re.compile(
    r"(?:(?P<scheme>https)://)?"
    r"(?P<host>\*|(?:\*\.)?[A-Za-z0-9._-]+(?:/[0-9]{1,2})?|\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f:.]+(?:/[0-9]{1,3})?)"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
_THIS_MACHINE: Final = frozenset(("localhost", "0.0.0.0", "::"))


class TokenHosts:
    """The hosts that a client may take its token to: those that were named, or the usual ones.

    If none were named, that is the host of the broker's own URL, on any port. For a broker that was
    found through a root it is this machine alone: the file that names the broker may come from
    all who can write to the bucket.
    """

    def __init__(self, hosts: Iterable[str] | None, *, broker: str | None, token: bool) -> None:
        """``broker`` is the URL that the user gave, if that is a broker's and not a root's."""
        if isinstance(hosts, str):
            raise InvalidInputError(f"hosts is {hosts!r}, not a list of hosts: use [{hosts!r}]")
        self._hosts = None if hosts is None else [_Pattern(one) for one in hosts]
        parts = None if broker is None else urlsplit(broker)
        self._host = None if parts is None else _plain(parts.hostname or "")
        self._secure = parts is not None and parts.scheme == "https"
        self._token = token

    def check(self, address: str, *, said_by: str, now_at: str = "") -> None:
        """Refuse an address that was not typed by the user; ``now_at`` is where we are now."""
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise StoreAccessError(
                f"{said_by} says that it is served at {address!r}, which is no plain URL of a "
                "broker, such as http://host:8080"
            )
        scheme, host, port = found["scheme"], _plain(found["host"]), found["port"]
        if scheme != "https" and (self._secure or now_at.startswith("https://")):
            raise StoreAccessError(
                f"{said_by} says that it is served at {address}, without TLS: a client that came "
                "by https does not go on by http; let brokers --advertise their https URL"
            )
        if self._token and not self._allowed(scheme, host, int(port or 0) or _default(scheme)):
            raise StoreAccessError(
                f"{said_by} says that it is served at {address}, and the token is not for that "
                f'host: if you trust it, name it with hosts=["{host}"], --hosts {host} or '
                f"ODQ_HOSTS={host}"
            )

    def _allowed(self, scheme: str, host: str, port: int) -> bool:
        if self._host is not None and host == self._host:
            return True
        if self._hosts is not None:
            return any(one.matches(scheme, host, port) for one in self._hosts)
        return self._host is None and _is_this_machine(host)


class _Pattern:
    """``host``, ``*.domain``, an address, a network (``10.0.0.0/8``) or ``*``.

    With ``https://`` before it, only by TLS; with ``:port`` behind it, only that port.
    """

    def __init__(self, text: str) -> None:
        found = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise InvalidInputError(
                f"{text!r} is no host to trust, such as broker.example.com, *.example.com, "
                "10.0.0.7, 10.0.0.0/8 or https://broker.example.com:8443"
            )
        self._scheme = found["scheme"]
        self._port = None if found["port"] is None else int(found["port"])
        self._name = _plain(found["host"])
        self._network = _network(self._name)
        if self._network is None and "/" in self._name:
            raise InvalidInputError(f"{text!r} is no network, such as 10.0.0.0/8")

    def matches(self, scheme: str, host: str, port: int) -> bool:
        if self._scheme not in (None, scheme) or self._port not in (None, port):
            return False
        if self._name == "*":
            return True
        if self._network is not None:
            address = _address(host)
            return address is not None and address in self._network
        if self._name.startswith("*."):
            return host.endswith(self._name[1:]) and _address(host) is None
        return host == self._name


def _plain(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _is_this_machine(host: str) -> bool:
    address = _address(host)
    return host in _THIS_MACHINE or (address is not None and address.is_loopback)


def _default(scheme: str) -> int:
    return 443 if scheme == "https" else 80
