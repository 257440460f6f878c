"""``odq init`` on files and on S3."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.careless_s3 import careless_s3
from tests.cli.conftest import Odq
from tests.conftest import NewRoot
from tests.support.s3_server import S3Server


def test_a_root_is_made_once_and_can_be_used(tmp_path: Path) -> None:
    odq = Odq(f"file://{tmp_path}/new/root")

    made = odq.json("init")
    again = odq.json("init")

    assert made["created"]
    assert not again["created"]
    assert again["instance_id"] == made["instance_id"]
    assert odq.json("queues", "list") == []
    assert not list((tmp_path / "new/root").glob("probe/*"))


def test_the_root_may_be_given_as_an_argument(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/root"

    assert f"{url} (made)" in Odq("")("init", url)
    assert "no store is given" in Odq("")("init", code=2)


def test_a_bucket_is_made_when_it_is_asked_for(s3_environment: S3Server) -> None:
    odq = Odq("s3://odq-made-by-init/root")

    refused = odq("init", code=1)
    assert "the bucket does not exist; --create-bucket makes it" in refused
    assert odq.json("init", "--create-bucket")["created"]
    assert not odq.json("init", "--create-bucket")["created"]
    assert odq.json("queues", "list") == []


def test_only_s3_has_buckets(tmp_path: Path) -> None:
    assert "is for s3://" in Odq(f"file://{tmp_path}/x")("init", "--create-bucket", code=2)
    assert not (tmp_path / "x").exists()


def test_a_bucket_that_can_not_be_made_is_explained(s3_environment: S3Server) -> None:
    complaint = Odq("s3://no/x")("init", "--create-bucket", code=1)

    assert complaint.startswith("Error: could not make bucket no: ")


def test_a_store_without_conditional_writes_is_refused(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with careless_s3() as (endpoint, objects):
        monkeypatch.setenv("AWS_ENDPOINT", endpoint)
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)

        complaint = Odq("s3://bucket/root")("init", code=1)

    assert "two owners could both win" in complaint
    assert objects == {}


def test_a_root_on_s3_is_made(new_s3_root: NewRoot) -> None:
    assert Odq(new_s3_root()).json("init")["created"]


def test_a_folder_that_can_not_be_written_to_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    complaint = Odq(f"file://{tmp_path}/file/root")("init", code=1)

    assert "a part of the path is a file" in complaint
