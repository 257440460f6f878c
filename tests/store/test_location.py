"""Root URLs: what is understood, and what is refused in words that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendata_queue import StoreAccessError
from opendata_queue.store import Location, StoreKind


@pytest.mark.parametrize(
    ("url", "kind", "bucket", "path", "printed"),
    [
        ("memory:///", StoreKind.MEMORY, "", "", "memory:///"),
        ("memory:///jobs", StoreKind.MEMORY, "", "jobs", "memory:///jobs"),
        ("file:///var/lib/odq/", StoreKind.FILE, "", "var/lib/odq", "file:///var/lib/odq"),
        ("file:///with%20space", StoreKind.FILE, "", "with space", "file:///with space"),
        ("s3://bucket", StoreKind.S3, "bucket", "", "s3://bucket/"),
        ("s3://bucket/", StoreKind.S3, "bucket", "", "s3://bucket/"),
        ("s3://bucket/a/b", StoreKind.S3, "bucket", "a/b", "s3://bucket/a/b"),
    ],
)
def test_root_urls(url: str, kind: StoreKind, bucket: str, path: str, printed: str) -> None:
    location = Location.parse(url)

    assert (location.kind, location.bucket, location.path) == (kind, bucket, path)
    assert str(location) == printed


@pytest.mark.parametrize(
    ("url", "key", "shown"),
    [
        ("s3://bucket/a", "a/x/y", "s3://bucket/a/x/y"),
        ("s3://bucket", "x/y", "s3://bucket/x/y"),
        ("file:///a", "x/y", "file:///a/x/y"),
        ("memory:///a", "a/x/y", "memory:///a/x/y"),
        ("memory:///", "x/y", "memory:///x/y"),
    ],
)
def test_paths_are_joined_under_the_root(url: str, key: str, shown: str) -> None:
    location = Location.parse(url)

    assert location.join("x/y") == key
    assert location.url_of("x/y") == shown


def test_something_that_is_no_text_is_refused() -> None:
    with pytest.raises(StoreAccessError, match="5 is not a URL"):
        Location.parse(5)  # type: ignore[arg-type]


def test_a_path_is_refused_and_its_url_is_named() -> None:
    with pytest.raises(StoreAccessError, match="if you mean the folder, that is file:///tmp/a%20b"):
        Location.parse(Path("/tmp/a b"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "is not a root URL; use memory:///, file:///"),
        ("./data", "is not a root URL"),
        ("/var/lib/odq", "is not a root URL; if you mean the folder, that is file:///var/lib/odq"),
        ("gs://bucket/x", "is not a root URL"),
        ("http://[broken", "is not a URL"),
        ("s3:///prefix", "names no bucket"),
        ("file://data/x", r"has a host, 'data'; did you mean file:///data"),
        ("file:///", "is the whole file system"),
        ("file:///a/../b", "'..' segment"),
        ("s3://a b/x", "has ' ' in the name of its bucket"),
        ("s3://bucket@host:99/x", "has '@' in the name of its bucket"),
        ("s3://bucket/a//b", "empty, '.' or '..' segment"),
        ("s3://bucket/a?x=1", "has a query"),
        ("s3://bucket/a#x", "has a query or a fragment"),
        ("s3://bucket/é", "has 'é' in its prefix"),
        ("s3://bucket/a%25b", "has '%' in its prefix"),
        ("file:///a%00b", "has a NUL"),
    ],
)
def test_other_urls_are_refused_and_the_reason_is_named(url: str, complaint: str) -> None:
    with pytest.raises(StoreAccessError, match=complaint):
        Location.parse(url)
