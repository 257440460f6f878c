"""What proves that a bulk shard is as its writer left it (RFC 0009).

Its database is written once and never changes. A manifest with a flipped bit may name fewer files
and still be readable, so its size and checksum are kept in a file of their own.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.store.damage.whole_files import cut_file
from opendata_queue.store.location import StoreKind
from opendata_queue.store.objects.control_files import parsed, sealed_model
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.problems import REPAIR, Problem
from opendata_queue.store.slatedb_files.manifests import manifest_name

_NAME: Final = "complete.json"
_ALL_OF_IT: Final = "messages of the shard"


class BulkProof(BaseModel):
    """What ``complete.json`` of a bulk shard's database says. Unknown properties are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    manifest: Annotated[int, Field(ge=1, lt=1 << 64)]
    """The number of the one that counts."""
    size: Annotated[int, Field(ge=1, lt=1 << 63)]
    crc32: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


async def leave_proof(objects: Objects, path: str) -> None:
    """Note the size and checksum of the newest manifest of a database that is complete."""
    if objects.location.kind is StoreKind.MEMORY:
        return  # where SlateDB has a store of its own, and no file is ever damaged
    newest = max(await objects.names(f"{path}/manifest"))
    content = await objects.read(f"{path}/manifest/{newest}")
    if content is None:
        raise CorruptStoreError(f"{objects.location.url_of(path)}/manifest/{newest} is gone")
    check = f"{zlib.crc32(content):08x}"
    proof = BulkProof(manifest=int(newest.partition(".")[0]), size=len(content), crc32=check)
    await objects.create(f"{path}/{_NAME}", sealed_model(proof))


async def withdraw_proof(objects: Objects, path: str) -> None:
    """Before a shard is removed: from then on it is no damage that files of it are missing."""
    await objects.delete(f"{path}/{_NAME}")


async def check_proof(objects: Objects, path: str) -> None:
    """Refuse a bulk shard whose manifest is not the one that its writer has left."""
    problem = await unproven(objects, path) or await _cut(objects, path)
    if problem is not None:
        raise CorruptStoreError(f"{objects.location}/{problem}")


async def _cut(objects: Objects, path: str) -> Problem | None:
    """An SST that is shorter than it was: SlateDB would ask for ever for what it lacks.

    On S3 that would be two requests more for each shard: it is found there when a read fails.
    """
    if objects.location.kind is not StoreKind.FILE:
        return None
    problem = await cut_file(objects, path)
    if problem is None:
        return None
    name = f"{path}/compacted/{PurePosixPath(problem.file).name}"
    return replace(problem, file=name, lost=_ALL_OF_IT)


async def unproven(objects: Objects, path: str) -> Problem | None:
    """What is wrong with the manifest of a bulk shard, if something is.

    Release 0.1 has left no proof: its shards are taken as they are.
    """
    proof_path = f"{path}/{_NAME}"
    content = await objects.read(proof_path)
    if content is None:
        return None
    try:
        proof = parsed(BulkProof, content, proof_path, "proves nothing")
    except CorruptStoreError as error:
        wrong = str(error).removeprefix(f"{proof_path} ")
        return Problem(
            file=proof_path,
            wrong=wrong,
            lost="nothing, if the manifest is whole",
            advice=REPAIR,
        )
    damage = await _wrong_with_manifest(objects, path, proof)
    if damage is None or await objects.read(proof_path) is None:  # the shard is being removed
        return None
    file = f"{path}/manifest/{manifest_name(proof.manifest)}"
    return Problem(file=file, wrong=damage, lost=_ALL_OF_IT, advice=REPAIR)


async def _wrong_with_manifest(objects: Objects, path: str, proof: BulkProof) -> str | None:
    file = f"{path}/manifest/{manifest_name(proof.manifest)}"
    manifest = await objects.read(file)
    if manifest is None:
        return "is missing"
    if len(manifest) != proof.size or zlib.crc32(manifest) != int(proof.crc32, 16):
        return "is damaged: it is not what its writer has left"
    return None
