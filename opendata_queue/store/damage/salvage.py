"""Putting an SST in the place of a damaged one that has all of its blocks that are whole.

The newest manifest names it, and says where its parts are: so they stay where they were. Blocks
that are whole move to right before the filter, and the index names them alone. Only for repairs.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import slatedb.uniffi as slatedb

from opendata_queue.model.errors import CorruptStoreError
from opendata_queue.store.errors import translated
from opendata_queue.store.objects.objects import Objects
from opendata_queue.store.settings import StoreSettings
from opendata_queue.store.slatedb_files.manifests import admin_of, sst_name, ssts_of
from opendata_queue.store.slatedb_files.ssts import _Table, check_bytes

_VERSION: Final = 2
_CHECK_BYTES: Final = 4
_INDEX_OF_ONE_BYTES: Final = 56
"""An index that names one block which is not at the beginning; with its checksum."""
_LONGEST_KEY_BYTES: Final = 65_000
_TRIES: Final = 4

# A table without fields: its place, the list of its fields (none), and where that list is.
_NO_STATISTICS: Final = struct.pack("<IHHi", 8, 4, 4, 4)

Block = tuple[int, bytes, bytes]
"""Where it is, its first key, and its bytes with their checksum."""


async def salvage_ssts(objects: Objects, path: str, names: Iterable[str]) -> list[str]:
    """Replace SSTs of the newest manifest by what is left of them; returns which were replaced.

    The damaged ones are in the folder ``torn`` of the database afterwards.
    """
    wanted = set(names)
    with translated(f"read {path}"):
        manifest = await admin_of(objects, path).read_manifest(None)
    replaced = []
    for sst in ssts_of(manifest) if manifest is not None else []:
        name = sst_name(sst)
        if name not in wanted or sst.info.compression_codec is not None:
            continue
        wanted.discard(name)
        file = f"{path}/compacted/{name}"
        data = await objects.read(file)
        if data is not None:
            await objects.write(f"{path}/torn/{name}", data)
        content = left_of(sst.info, data or b"", await _stand_in(sst.info))
        await objects.write(file, content)
        replaced.append(file)
    return replaced


async def _stand_in(info: slatedb.SsTableInfo) -> bytes:
    """A block for an SST of which none is left, since SlateDB wants one.

    It deletes a key that no row has, behind the first one. If the SST had a single block, there is
    no room in the index to say where another one is: then it has the very size of that one.
    """
    key = (info.first_entry or b"") + b"\x00"
    block = await _block_without(key)
    if int(info.index_len) >= _INDEX_OF_ONE_BYTES:
        return block
    size = int(info.filter_offset)
    for _ in range(_TRIES):
        if len(block) == size or not 0 < len(key) + size - len(block) <= _LONGEST_KEY_BYTES:
            break
        key = key.ljust(len(key) + size - len(block), b"\x00")[: len(key) + size - len(block)]
        block = await _block_without(key)
    return block


async def _block_without(key: bytes) -> bytes:
    """The block of an SST that says of one key that it is deleted."""
    with tempfile.TemporaryDirectory(prefix="odq-repair-") as folder:
        objects = Objects.open(f"file://{folder}", StoreSettings(fsync=False))
        builder = slatedb.DbBuilder("db", objects.slatedb_store)
        with translated("repair"):
            database = await builder.build()
            await database.delete(key)
            options = slatedb.FlushOptions(flush_type=slatedb.FlushType.MEM_TABLE)
            await database.flush_with_options(options)
            await database.shutdown()
        (sst,) = (Path(folder) / "db/compacted").iterdir()
        data = sst.read_bytes()
        described = check_bytes(data)
        assert described is not None
        return data[: described.filter[0]]


def left_of(info: slatedb.SsTableInfo, data: bytes, stand_in: bytes) -> bytes:
    """An SST with the parts where a manifest says they are, and the blocks that are whole."""
    # Where there is no filter, its place is that of what follows the blocks all the same.
    blocks, index = _fitting(info, _whole_blocks(info, data) or [(0, b"", stand_in)])
    parts: dict[int, bytes] = {int(info.index_offset): index}
    for offset, length, empty in (
        # Zeros are a filter block without a filter: any key may be there.
        (int(info.filter_offset), int(info.filter_len), b""),
        (int(info.stats_offset), int(info.stats_len), _NO_STATISTICS),
    ):
        if length:
            parts[offset] = _part(data, offset, length) or _sealed(empty, length)
    body = b"".join(block for _, _, block in blocks)
    content = bytearray(int(info.filter_offset) - len(body)) + body
    for offset in sorted(parts):
        content += bytes(max(0, offset - len(content))) + parts[offset]
    place = len(content)
    described = _description(info)
    content += described + zlib.crc32(described).to_bytes(4, "big")
    return bytes(content) + struct.pack(">QH", place, _VERSION)


def _whole_blocks(info: slatedb.SsTableInfo, data: bytes) -> list[Block]:
    index = _part(data, int(info.index_offset), int(info.index_len))
    if index is None:
        return []
    try:
        named = [(one.u64(0), one.bytes_of(1)) for one in _Table.root(index).tables(0)]
    except (struct.error, IndexError):
        return []
    ends = [*(offset for offset, _ in named[1:]), int(info.filter_offset)]
    blocks = []
    for (offset, key), end in zip(named, ends, strict=True):
        block = _part(data, offset, end - offset)
        if block is not None:
            blocks.append((offset, key, block))
    return blocks


def _part(data: bytes, offset: int, length: int) -> bytes | None:
    """A part with its checksum; none if that is wrong."""
    part = data[offset : offset + length]
    if len(part) != length or length < _CHECK_BYTES:
        return None
    content, check = part[:-_CHECK_BYTES], part[-_CHECK_BYTES:]
    return part if zlib.crc32(content).to_bytes(_CHECK_BYTES, "big") == check else None


def _fitting(info: slatedb.SsTableInfo, blocks: list[Block]) -> tuple[list[Block], bytes]:
    """As many blocks as an index of the given length can name, and that index."""
    room = int(info.index_len) - _CHECK_BYTES
    while True:
        offset = int(info.filter_offset) - sum(len(block) for _, _, block in blocks)
        named = []
        for _, key, block in blocks:
            named.append((offset, key))
            offset += len(block)
        index = _index(named)
        if len(index) <= room:
            return blocks, _sealed(index, int(info.index_len))
        if len(blocks) == 1:
            raise CorruptStoreError("an SST is too small to be replaced: restore it from a backup")
        blocks = blocks[:-1]


def _sealed(content: bytes, length: int) -> bytes:
    """A part of a given length: what follows a table of FlatBuffers is ignored."""
    padded = content.ljust(length - _CHECK_BYTES, b"\x00")
    return padded + zlib.crc32(padded).to_bytes(_CHECK_BYTES, "big")


# --- tables of FlatBuffers ------------------------------------------------------------------------


def _index(blocks: list[tuple[int, bytes]]) -> bytes:
    """``SsTableIndex``: a list of ``BlockMeta``, each with an offset and a first key."""
    fields_at, list_at = 20, 28
    at_start = [offset for offset, _ in blocks] == [0]
    # Where the root is, its fields, the root with the way to the list; the fields of each block. An
    # offset of 0 is left out where it has to be as short as can be.
    table = bytearray(struct.pack("<IHHHxxiI", 12, 6, 8, 4, 8, list_at - 16))
    table += struct.pack("<HHHH", *((8, 8, 0, 4) if at_start else (8, 16, 8, 4)))
    table += struct.pack("<I", len(blocks)) + bytes(4 * len(blocks))
    for number, (offset, key) in enumerate(blocks):
        table += b"" if at_start else bytes(-len(table) % 8)
        at, entry_at = len(table), list_at + 4 + 4 * number
        struct.pack_into("<I", table, entry_at, at - entry_at)
        if at_start:
            table += struct.pack("<iI", at - fields_at, 4)
        else:
            table += struct.pack("<iIQ", at - fields_at, 12, offset)
        table += _bytes(key)
    return bytes(table)


def _description(info: slatedb.SsTableInfo) -> bytes:
    """``SsTableInfo``, as the manifest says it."""
    first, last = _bytes(info.first_entry or b""), _bytes(info.last_entry or b"")
    fields = (4, 8, 16, 24, 32, 60, 61, 56, 40, 48, 62)
    head = struct.pack("<IHH11Hxx", 32, 26, 64, *fields)
    table = struct.pack(
        "<iIQQQQQQIBBBx",
        28,
        64 - 4,
        int(info.index_offset),
        int(info.index_len),
        int(info.filter_offset),
        int(info.filter_len),
        int(info.stats_offset),
        int(info.stats_len),
        64 + len(first) - 56,
        0,
        0,
        int(info.filter_format.value),
    )
    return head + table + first + last


def _bytes(data: bytes) -> bytes:
    """A list of bytes, up to where the next thing may begin."""
    return struct.pack("<I", len(data)) + data + bytes(-len(data) % 4)
