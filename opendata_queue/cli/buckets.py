"""Making a bucket: the one thing that obstore can't do, so boto3 does it."""

from __future__ import annotations

from typing import Final

from opendata_queue.model.errors import StoreAccessError
from opendata_queue.store import S3Access

_HOME_REGION: Final = "us-east-1"  # S3 refuses it as a location
_OURS: Final = frozenset({"BucketAlreadyOwnedByYou"})


def create_bucket(name: str) -> bool:
    """Make a bucket; false if it is there already, and ours."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise StoreAccessError(
            "making a bucket needs boto3: install opendata-queue[s3], or make it another way"
        ) from error
    access = S3Access.from_environment()
    region = access.region or _HOME_REGION
    style = {"addressing_style": "virtual" if access.virtual_hosted else "path"}
    place = (
        {}
        if region == _HOME_REGION
        else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    )
    try:
        # Profiles and CA bundles it finds by itself, but it does not know all names of endpoints.
        client = boto3.client(
            "s3", region_name=region, endpoint_url=access.endpoint, config=Config(s3=style)
        )
        if _is_there(client, name, ClientError):
            return False  # in us-east-1 S3 would say that it was made
        client.create_bucket(Bucket=name, **place)
    except ClientError as error:
        if error.response["Error"].get("Code") in _OURS:
            return False
        raise StoreAccessError(f"could not make bucket {name}: {error}") from error
    except (BotoCoreError, ValueError) as error:
        raise StoreAccessError(f"could not make bucket {name}: {error}") from error
    return True


def _is_there(client: object, name: str, client_error: type[Exception]) -> bool:
    try:
        client.head_bucket(Bucket=name)  # type: ignore[attr-defined]
    except client_error:
        return False
    return True
