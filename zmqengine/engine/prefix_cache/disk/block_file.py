"""The file of a run of blocks: safetensors, with checksums of its header and of every block.

    8 bytes    length of the header
    header     JSON: what the file is, the keys of its blocks, and dtype, shape and place of every tensor
    block 0    its tensors one after the other: tokens, arrays, and those of its checkpoint
    block 1 ...
    checksums  xxh3-128 of each block, then of all before block 0; a tensor as well

A file is written once, under a name of its own, and never changed. Nothing in it is used before its checksum was found
right, so whatever has happened to a file, it is read as it was written or not at all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from zmqengine.engine.prefix_cache.disk.block_header import (
    ARRAYS,
    CHECKSUM_BYTES,
    NAMES,
    STATE,
    TOKENS,
    BadFile,
    BlockHeader,
    Header,
    check_format,
    encode_header,
    parse_header,
    tensors_of,
)
from zmqengine.engine.prefix_cache.disk.host_block import Bytes, HostArray, HostBlock

_HEADER_BYTES_MAX = 64 << 20


def encode(salt: bytes, blocks: Sequence[HostBlock]) -> list[Bytes]:
    """What is in the file of a run, each block the child of the one before: parts to be written one after the other."""
    parts = [[array.data for array in tensors_of(block).values()] for block in blocks]
    header = encode_header(salt, blocks)
    checksums = [*map(_checksum, parts), _checksum([header])]
    return [header, *(data for part in parts for data in part), *checksums]


def write_file(path: Path, parts: Sequence[Bytes]) -> None:
    """Write a new file of the user's alone, which is on the disk when this returns.

    Raises `OSError`: what is left at `path` is the caller's to remove.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[file.write(left) or 0 :]
        os.fsync(descriptor)


def read_header(path: Path) -> Header:
    """Blocks of the file at `path`. Raises `BadFile`, or `OSError` when it cannot be read."""
    with _opened(path) as descriptor:
        return _read_header(descriptor)


def read_blocks(path: Path, salt: bytes, keys: Sequence[bytes]) -> list[HostBlock]:
    """The blocks of `keys`, which follow one another in the file at `path`. Raises `BadFile` or `OSError`."""
    with _opened(path) as descriptor:
        header = _read_header(descriptor)
        held = [block.key for block in header.blocks]
        first = held.index(keys[0]) if keys[0] in held else 0
        if header.salt != salt or held[first : first + len(keys)] != list(keys):
            raise BadFile("foreign", "it holds other blocks than its name says")
        wanted = header.blocks[first : first + len(keys)]
        data = memoryview(_read(descriptor, wanted[0].start, wanted[-1].end - wanted[0].start))
    start = header.start + sum(block.tokens for block in header.blocks[:first])
    parent_key = header.blocks[first - 1].key if first else header.parent_key
    blocks = []
    for block in wanted:
        mine, data = data[: block.end - block.start], data[block.end - block.start :]
        if _checksum([mine]) != block.checksum:
            raise BadFile("torn", "a block is damaged")
        blocks.append(_block(block, parent_key, start, mine))
        start, parent_key = blocks[-1].start + len(blocks[-1].tokens), block.key
    return blocks


def _block(header: BlockHeader, parent_key: bytes, start: int, data: memoryview) -> HostBlock:
    origin = header.tensors[TOKENS].data_offsets[0]
    arrays: dict[str, list[HostArray]] = {TOKENS: [], ARRAYS: [], STATE: []}
    for name, tensor in header.tensors.items():
        begin, end = tensor.data_offsets
        array = HostArray(NAMES[tensor.dtype], tensor.shape, data[begin - origin : end - origin])
        arrays[name.partition(".")[0]].append(array)
    tokens = np.frombuffer(arrays[TOKENS][0].data, "<u4")
    return HostBlock(header.key, parent_key, start, tokens, arrays[ARRAYS], header.form, arrays[STATE])


def _read_header(descriptor: int) -> Header:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(_HEADER_BYTES_MAX, size - 8 - CHECKSUM_BYTES):
        raise BadFile("torn", "it is shorter than its header")
    text = bytes(_read(descriptor, 0, 8 + length))
    check_format(text[8:])
    if _checksum([text]) != _read(descriptor, size - CHECKSUM_BYTES, CHECKSUM_BYTES):
        raise BadFile("torn", "its header is damaged, or its end is missing")
    return parse_header(text, size, lambda start: bytes(_read(descriptor, start, size - start)))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # Neither a link nor a pipe that somebody has put here, nor another user's file, which could hold anything.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise BadFile("foreign", "it is no file of this user")
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, size: int) -> bytearray:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        count = os.preadv(descriptor, [left], start + size - len(left))
        if not count:
            raise BadFile("torn", "it ends too early")
        left = left[count:]
    return data


def _checksum(parts: Sequence[Bytes]) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()
