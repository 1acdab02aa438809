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

import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash

FORMAT = "zmqengine prompt blocks"
VERSION = 1
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16",
    "bfloat16": "BF16", "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64",
    "complex64": "C64",
}  # fmt: skip
"""MLX's names and those of safetensors."""
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4}
_SIZES |= {"U64": 8, "I64": 8, "C64": 8}
_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}
_TOKENS, _ARRAYS, _STATE, _CHECKSUMS = "tokens", "array", "state", "checksums"
_HEADER_BYTES_MAX = 64 << 20
_CHECKSUM_BYTES = 16

Fault = Literal["torn", "foreign", "newer"]
FAULTS: tuple[Fault, ...] = ("torn", "foreign", "newer")
Bytes = bytes | bytearray | memoryview


class BadFile(Exception):
    """A file of no use: `torn` is damaged, `foreign` is not what its name says, `newer` has a later format."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class HostArray(NamedTuple):
    """An array in memory of the host: its bytes row-major and little-endian, `dtype` as MLX calls it."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class HostBlock(NamedTuple):
    """A `StoredBlock` whose arrays are in memory of the host. `form` is that of its checkpoint, empty without one."""

    key: bytes
    parent_key: bytes
    start: int
    tokens: np.ndarray
    arrays: Sequence[HostArray]
    form: str = ""
    state: Sequence[HostArray] = ()

    @property
    def bytes(self) -> int:
        """What it takes, but for a name."""
        return self.tokens.nbytes + sum(len(array.data) for array in (*self.arrays, *self.state))


class BlockHeader(NamedTuple):
    """What a file says of one block: `tensors` by their names, and the place of all its bytes in the file."""

    key: bytes
    form: str
    tensors: dict[str, _Tensor]
    start: int
    end: int
    checksum: bytes

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.tensors[_TOKENS].shape[0]


class Header(NamedTuple):
    """What a file says of itself: the salt it was written with, and a run of blocks, of which the first follows
    `parent_key` and begins at token `start` of its prompt."""

    salt: bytes
    parent_key: bytes
    start: int
    blocks: tuple[BlockHeader, ...]


class _Metadata(msgspec.Struct, frozen=True):
    format: str
    version: str = ""
    salt: str = ""
    parent: str = ""
    start: str = ""
    keys: str = ""
    forms: str = ""


class _Top(msgspec.Struct):
    metadata: _Metadata | None = msgspec.field(default=None, name="__metadata__")


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def encode(salt: bytes, blocks: Sequence[HostBlock]) -> list[Bytes]:
    """What is in the file of a run, each block the child of the one before: parts to be written one after the other."""
    parts = [[array.data for array in _named(block).values()] for block in blocks]
    header = _encode_header(salt, blocks)
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
    """What the file at `path` holds. Raises `BadFile`, or `OSError` when there is no reading it."""
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
    origin = header.tensors[_TOKENS].data_offsets[0]
    arrays: dict[str, list[HostArray]] = {_TOKENS: [], _ARRAYS: [], _STATE: []}
    for name, tensor in header.tensors.items():
        begin, end = tensor.data_offsets
        array = HostArray(_NAMES[tensor.dtype], tensor.shape, data[begin - origin : end - origin])
        arrays[name.partition(".")[0]].append(array)
    tokens = np.frombuffer(arrays[_TOKENS][0].data, "<u4")
    return HostBlock(header.key, parent_key, start, tokens, arrays[_ARRAYS], header.form, arrays[_STATE])


def _named(block: HostBlock) -> dict[str, HostArray]:
    """Everything in a block, in the order of the file."""
    tokens = np.ascontiguousarray(block.tokens, "<u4").tobytes()
    named = {_TOKENS: HostArray("uint32", (len(block.tokens),), tokens)}
    named |= {f"{_ARRAYS}.{index}": array for index, array in enumerate(block.arrays)}
    return named | {f"{_STATE}.{index}": array for index, array in enumerate(block.state)}


def _encode_header(salt: bytes, blocks: Sequence[HostBlock]) -> bytes:
    entries: dict[str, object] = {
        "__metadata__": _Metadata(
            format=FORMAT,
            version=str(VERSION),
            salt=salt.hex(),
            parent=blocks[0].parent_key.hex(),
            start=str(blocks[0].start),
            keys=" ".join(block.key.hex() for block in blocks),
            forms=msgspec.json.encode([block.form for block in blocks]).decode(),
        )
    }
    end = 0
    for number, block in enumerate(blocks):
        for name, array in _named(block).items():
            start, end = end, end + len(array.data)
            entries[f"{number}.{name}"] = _Tensor(DTYPES[array.dtype], tuple(array.shape), (start, end))
    checksums_bytes = _CHECKSUM_BYTES * (len(blocks) + 1)
    entries[_CHECKSUMS] = _Tensor("U8", (checksums_bytes,), (end, end + checksums_bytes))
    text = msgspec.json.encode(entries)
    # Data that begins at a multiple of 8 can be used where it lies.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(descriptor: int) -> Header:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(_HEADER_BYTES_MAX, size - 8 - _CHECKSUM_BYTES):
        raise BadFile("torn", "it is shorter than its header")
    text = bytes(_read(descriptor, 0, 8 + length))
    _check_format(text[8:])
    if _checksum([text]) != _read(descriptor, size - _CHECKSUM_BYTES, _CHECKSUM_BYTES):
        raise BadFile("torn", "its header is damaged, or its end is missing")
    try:
        metadata, tensors = _decode_header(text[8:], size - len(text))
        keys = list(map(bytes.fromhex, metadata.keys.split()))
        forms = msgspec.json.decode(metadata.forms, type=list[str])
        starts = [len(text) + next(iter(block.values())).data_offsets[0] for block in tensors]
        found = bytes(_read(descriptor, starts[-1], size - starts[-1]))
        checksums = [found[at : at + _CHECKSUM_BYTES] for at in range(0, len(found), _CHECKSUM_BYTES)]
        parts = zip(keys, forms, tensors[:-1], starts[:-1], starts[1:], checksums[:-1], strict=True)
        blocks = tuple(BlockHeader(*part) for part in parts)
        return Header(
            bytes.fromhex(metadata.salt), bytes.fromhex(metadata.parent), int(metadata.start), blocks
        )
    except (msgspec.MsgspecError, LookupError, ValueError) as error:
        raise BadFile("foreign", f"its header makes no sense: {error}") from None


def _decode_header(text: bytes, data_bytes: int) -> tuple[_Metadata, list[dict[str, _Tensor]]]:
    """The tensors of each block, and last the checksums. They must lie in order, without gaps, up to the end."""
    entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(entries.pop("__metadata__"), type=_Metadata)
    tensors: list[dict[str, _Tensor]] = []
    end = 0
    for name, raw in entries.items():
        number, _, rest = name.partition(".")
        if rest in (_TOKENS, ""):
            tensors.append({})
        tensor = msgspec.json.decode(raw, type=_Tensor)
        start, end = end, end + math.prod(tensor.shape) * _SIZES[tensor.dtype]
        is_known = rest.partition(".")[0] in (_TOKENS, _ARRAYS, _STATE) and int(number) == len(tensors) - 1
        if tensor.data_offsets != (start, end) or not (is_known or name == _CHECKSUMS):
            raise ValueError(f"{name} is in the wrong place")
        tensors[-1][rest] = tensor
    if end != data_bytes or tensors[-1][""].shape != (_CHECKSUM_BYTES * len(tensors),) or len(tensors) < 2:
        raise ValueError("its length is another one")
    return metadata, tensors


def _check_format(text: bytes) -> None:
    """Say what else a file is before its checksum is looked at: that is only where it is in this format."""
    try:
        metadata = msgspec.json.decode(text, type=_Top).metadata
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BadFile("torn", "its header cannot be read") from None
    if metadata is None or metadata.format != FORMAT:
        raise BadFile("foreign", "it was not written by zmqengine")
    if metadata.version != str(VERSION):
        raise BadFile("newer", f"its format is {metadata.version!r}, this version knows {VERSION}")


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
