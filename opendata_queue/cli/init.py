"""``odq init``: make a root."""

from __future__ import annotations

from typing import Annotated

import typer

from opendata_queue.cli.common import (
    AsJson,
    RootStore,
    StoreArgument,
    objects_at,
    print_fields,
    print_json,
    root_location,
    run,
    url_of,
)
from opendata_queue.cli.doctor.store import describe
from opendata_queue.model.clock import SystemClock
from opendata_queue.model.errors import AccessProblem, InvalidInputError, StoreAccessError
from opendata_queue.root.descriptor import DESCRIPTOR_PATH, SystemDescriptor, open_root
from opendata_queue.store import Abilities, StoreKind


def init(
    url: StoreArgument = None,
    create_bucket: Annotated[
        bool, typer.Option("--create-bucket", help="On S3: make the bucket, if it is not there.")
    ] = False,
    store: RootStore = None,
    as_json: AsJson = False,
) -> None:
    """Make a root: the place where queues and messages are kept.

    It first tries what the store can do, by really doing it, says what was found, and refuses one
    that can't create an object only once: with it, two processes could both own the root. A root
    that is there already is left as it is.

    S3 is configured as for other AWS tools: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and
    AWS_REGION, or AWS_PROFILE; for MinIO and the like AWS_ENDPOINT_URL, and AWS_CA_BUNDLE for a
    certificate of your own.

    Examples:
      odq init file:///var/lib/queues
      odq init s3://my-bucket/queues --create-bucket
    """
    root = url_of(store, url)
    location = root_location(root)
    if create_bucket and location.kind is not StoreKind.S3:
        raise InvalidInputError(f"--create-bucket is for s3://, and {root} is not there")
    if create_bucket:
        from opendata_queue.cli import buckets

        buckets.create_bucket(location.bucket)
    try:
        descriptor, made, abilities = run(_make(root))
    except StoreAccessError as error:
        if error.problem is AccessProblem.NO_BUCKET:
            error.add_note("--create-bucket makes it")
        raise
    result = {
        "store": root,
        "instance_id": descriptor.instance_id,
        "format_version": descriptor.format_version,
        "created": made,
        "abilities": abilities.as_json(),
    }
    if as_json:
        print_json(result)
        return
    print_fields(
        [
            ("root", f"{root} ({'made' if made else 'was there already'})"),
            ("instance", descriptor.instance_id),
            ("format", descriptor.format_version),
            *((one.check, one.found) for one in describe(abilities, location.kind)),
        ]
    )


async def _make(root: str) -> tuple[SystemDescriptor, bool, Abilities]:
    """The descriptor of the root, whether it was not there before, and what its store can do."""
    objects = objects_at(root)
    there = await objects.read(DESCRIPTOR_PATH) is not None
    abilities = await objects.probe()
    abilities.check(root)
    return await open_root(objects, SystemClock()), not there, abilities
