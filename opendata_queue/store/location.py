"""Where a root is: ``memory:///name``, ``file:///path`` or ``s3://bucket/prefix``."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from opendata_queue.model.errors import StoreAccessError

JOURNAL_SUFFIX = ".journal"
"""Of files that are no objects: they are in the folder of a database (RFC 0011)."""

_ODD_IN_S3 = re.compile(r"[^A-Za-z0-9 !$&'()+,./:;=@_-]")
_ODD_IN_BUCKET = re.compile(r"[^A-Za-z0-9._-]")
_EXAMPLES = "memory:///, file:///absolute/path or s3://bucket/prefix"


class StoreKind(enum.StrEnum):
    MEMORY = "memory"
    FILE = "file"
    S3 = "s3"


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A parsed root URL. ``path`` has no slash at either end; ``bucket`` is only used on S3."""

    kind: StoreKind
    path: str
    bucket: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse ``url``; ``StoreAccessError`` says what is wrong with it."""
        if isinstance(url, Path):
            raise StoreAccessError(
                f"{url!r} is not a URL; if you mean the folder, that is {url.absolute().as_uri()}"
            )
        if not isinstance(url, str):
            raise StoreAccessError(f"{url!r} is not a URL; use {_EXAMPLES}")
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise StoreAccessError(f"{url!r} is not a URL ({error})") from error
        if url and not parts.scheme:
            folder = Path(url).expanduser().absolute().as_uri()
            raise StoreAccessError(
                f"{url!r} is not a root URL; if you mean the folder, that is {folder}"
            )
        if parts.scheme not in list(StoreKind):
            raise StoreAccessError(f"{url!r} is not a root URL; use {_EXAMPLES}")
        if parts.query or parts.fragment:
            raise StoreAccessError(f"{url!r} has a query or a fragment; a root URL has neither")
        kind = StoreKind(parts.scheme)
        path = unquote(parts.path).strip("/")
        if any(segment in ("", ".", "..") for segment in path.split("/")) and path:
            raise StoreAccessError(f"{url!r} has an empty, '.' or '..' segment in its path")
        if "\0" in path:
            raise StoreAccessError(f"{url!r} has a NUL in its path")
        if kind is StoreKind.S3:
            if not parts.netloc:
                raise StoreAccessError(f"{url!r} names no bucket; use s3://bucket/prefix")
            odd = _ODD_IN_BUCKET.search(parts.netloc)
            if odd:
                raise StoreAccessError(f"{url!r} has {odd.group()!r} in the name of its bucket")
            odd = _ODD_IN_S3.search(path)
            if odd:
                # The clients would each escape it in their own way, and split the root.
                raise StoreAccessError(f"{url!r} has {odd.group()!r} in its prefix; use ASCII")
            return cls(kind=kind, path=path, bucket=parts.netloc)
        if parts.netloc:
            raise StoreAccessError(
                f"{url!r} has a host, {parts.netloc!r}; did you mean {kind}:///{parts.netloc}…?"
            )
        if kind is StoreKind.FILE and not path:
            raise StoreAccessError(f"{url!r} is the whole file system; use file:///absolute/path")
        return cls(kind=kind, path=path)

    def join(self, relative: str) -> str:
        """The path of ``relative`` in the object store. On files that is the root's own folder."""
        if self.kind is StoreKind.FILE or not self.path:
            return relative
        return f"{self.path}/{relative}"

    def url_of(self, relative: str) -> str:
        """The URL of something in this root, for people to read."""
        return f"{str(self).rstrip('/')}/{relative}" if self.path else f"{self}{relative}"

    @property
    def folder(self) -> Path:
        """The root's folder, for ``file:///``."""
        assert self.kind is StoreKind.FILE
        return Path("/", self.path)

    def __str__(self) -> str:
        middle = f"{self.bucket}/" if self.kind is StoreKind.S3 else "/"
        return f"{self.kind}://{middle}{self.path}"
