"""Root URLs: what is understood, and what is refused in words that help."""

from __future__ import annotations

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


def test_paths_are_joined_under_the_root() -> None:
    assert Location.parse("s3://bucket/a").join("messages/00000") == "a/messages/00000"
    assert Location.parse("s3://bucket").join("messages/00000") == "messages/00000"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "is not a root URL; use memory:///, file:///"),
        ("./data", "is not a root URL"),
        ("/var/lib/odq", "is not a root URL"),
        ("gs://bucket/x", "is not a root URL"),
        ("http://[broken", "is not a URL"),
        ("s3:///prefix", "names no bucket"),
        ("file://data/x", r"has a host, 'data'; did you mean file:///data"),
        ("file:///", "is the whole file system"),
        ("file:///a/../b", "'..' segment"),
        ("s3://bucket/a//b", "empty, '.' or '..' segment"),
        ("s3://bucket/a?x=1", "has a query"),
        ("s3://bucket/a#x", "has a query or a fragment"),
    ],
)
def test_other_urls_are_refused_and_the_reason_is_named(url: str, complaint: str) -> None:
    with pytest.raises(StoreAccessError, match=complaint):
        Location.parse(url)
