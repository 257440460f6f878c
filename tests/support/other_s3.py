"""Any S3 in the place of the test server: ``make test-s3 ENDPOINT=…``.

Credentials come from the environment, as for other AWS tools. What only the test server can do,
such as failing on command and counting requests, skips the test that asks for it.
"""

from __future__ import annotations

import os
import uuid
from typing import Any, Final, Self

import pytest

from tests.support.s3_server import S3Server

ENDPOINT: Final = os.environ.get("ODQ_TEST_S3_ENDPOINT", "")
"""Where it is; nothing for the test server."""
PREFIX: Final = f"run-{uuid.uuid4().hex[:12]}"
"""What all roots of this process are under, and what is removed at its end."""

_BUCKET: Final = os.environ.get("ODQ_TEST_S3_BUCKET", "odq-tests")
_ON_S3: Final = frozenset({"s3_environment", "new_s3_root"})


def bucket() -> str:
    """The bucket of the tests; in a store that outlives them, and a folder of their own in it."""
    return f"{_BUCKET}/{PREFIX}" if ENDPOINT else "odq-tests"


def is_on_s3(item: pytest.Item) -> bool:
    """Whether a test has anything to do with S3."""
    callspec = getattr(item, "callspec", None)
    values = () if callspec is None else callspec.params.values()
    kinds = [one for one in values if isinstance(one, str)]
    if any(kind.endswith(("memory", "file")) for kind in kinds):
        return False
    names = set(getattr(item, "fixturenames", ()))
    return bool(names & _ON_S3) or any(kind == "s3" or kind.endswith("-s3") for kind in kinds)


class OtherS3(S3Server):
    """A server that was there before the tests, and knows nothing of them."""

    def start(self) -> Self:
        return self

    def stop(self) -> None:
        """Remove what the tests of this process have written; the bucket stays."""
        self._client().Bucket(_BUCKET).objects.filter(Prefix=f"{PREFIX}/").delete()

    @property
    def endpoint(self) -> str:
        return ENDPOINT

    def environment(self) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        region = given.get("AWS_REGION", "us-east-1")
        return given | {
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
            "AWS_ENDPOINT": ENDPOINT,
            "AWS_ENDPOINT_URL": ENDPOINT,
            "AWS_ALLOW_HTTP": "true",
        }

    def create_bucket(self, name: str) -> None:
        self._client().create_bucket(Bucket=name.partition("/")[0])

    def heal(self) -> None:
        """There is nothing to heal: no test has broken anything."""

    def _ask(self, command: str, **arguments: object) -> dict[str, Any]:
        pytest.skip(f"only the test server can do this: {command}")

    def _client(self) -> Any:
        import boto3

        return boto3.resource("s3", endpoint_url=ENDPOINT)
