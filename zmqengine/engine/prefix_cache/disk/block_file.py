"""File of a run of blocks: safetensors, with checksums of its header and of every block.

    8 bytes    length of the header
    header     JSON: format, version, keys of the blocks; dtype, shape and offsets of every tensor
    block 0    its tensors: tokens, arrays, arrays of its checkpoint
    block 1 ...
    checksums  xxh3-128 of each block, then of all before block 0; a tensor as well

A file is written once, under a name of its own, and never changed. No byte is used before its checksum was found right,
so a damaged file gives what was written or nothing.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

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
_MLX_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}
_SIZES = {name: 1 if name == "BOOL" else int(name.lstrip("BCFIU")) // 8 for name in _MLX_NAMES}
_TOKENS, _ARRAYS, _STATE, _CHECKSUMS = "tokens", "array", "state", "checksums"
_CHECKSUM_BYTES = 16
# A longer header belongs to another file.
_HEADER_BYTES_MAX = 64 << 20

Bytes = bytes | bytearray | memoryview


class BadFile(Exception):
    """A file that is damaged, or not what its name says."""


class NewerFile(BadFile):
    """A file in a format of a later version."""


class HostArray(NamedTuple):
    """An array in host memory: row-major little-endian bytes, and MLX's name of its dtype."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class HostBlock(NamedTuple):
    """A `StoredBlock` in host memory, which any thread may hold. `form`, `state`: its checkpoint, empty without one."""

    key: bytes
    parent_key: bytes
    start: int
    tokens: np.ndarray
    arrays: Sequence[HostArray]
    form: str = ""
    state: Sequence[HostArray] = ()

    @property
    def bytes(self) -> int:
        """Bytes of tokens and arrays."""
        return self.tokens.nbytes + sum(len(array.data) for array in (*self.arrays, *self.state))

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


class BlockHeader(NamedTuple):
    """Description of one block in a file; its bytes lie from `begin` to `end`."""

    key: bytes
    parent_key: bytes
    start: int
    form: str
    tensors: dict[str, Tensor]
    begin: int
    end: int
    checksum: bytes

    @property
    def bytes(self) -> int:
        """Bytes of tokens and arrays."""
        return self.end - self.begin

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.tensors[_TOKENS].shape[0]


class FileHeader(NamedTuple):
    """The salt of a file's chain, and its blocks, each the parent of the next."""

    salt: bytes
    blocks: list[BlockHeader]


class Tensor(msgspec.Struct, frozen=True):
    """Entry of a safetensors header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


class _Metadata(msgspec.Struct, frozen=True):
    format: str
    version: str = ""
    salt: str = ""
    parent: str = ""
    start: str = ""
    keys: str = ""
    forms: str = ""


# --- writing ---


def encode(salt: bytes, blocks: Sequence[HostBlock]) -> list[Bytes]:
    """Contents of the file of a run of blocks, each the parent of the next, in parts."""
    tensors = [_tensors_of(block) for block in blocks]
    parts = [[array.data for array in block.values()] for block in tensors]
    header = _encode_header(salt, blocks, tensors)
    checksums = [*map(_checksum, parts), _checksum([header])]
    return [header, *(data for part in parts for data in part), *checksums]


def write_file(path: Path, parts: Sequence[Bytes]) -> None:
    """Write a new file that only this user can read, and fsync it.

    Raises `OSError`; the caller removes the file at `path`.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[file.write(left) or 0 :]
        os.fsync(descriptor)


def _tensors_of(block: HostBlock) -> dict[str, HostArray]:
    """All arrays of a block by name, in the order of the file."""
    tokens = np.ascontiguousarray(block.tokens, "<u4").tobytes()
    named = {_TOKENS: HostArray("uint32", (block.length,), tokens)}
    named |= {f"{_ARRAYS}.{index}": array for index, array in enumerate(block.arrays)}
    return named | {f"{_STATE}.{index}": array for index, array in enumerate(block.state)}


def _encode_header(
    salt: bytes, blocks: Sequence[HostBlock], tensors: Sequence[dict[str, HostArray]]
) -> bytes:
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
    for number, block in enumerate(tensors):
        for name, array in block.items():
            start, end = end, end + len(array.data)
            entries[f"{number}.{name}"] = Tensor(DTYPES[array.dtype], tuple(array.shape), (start, end))
    checksums_bytes = _CHECKSUM_BYTES * (len(blocks) + 1)
    entries[_CHECKSUMS] = Tensor("U8", (checksums_bytes,), (end, end + checksums_bytes))
    text = msgspec.json.encode(entries)
    # Data that begins at a multiple of 8 can be used without another copy.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# --- reading ---


def read_header(path: Path) -> FileHeader:
    """Read and check the header of a file. Raises `BadFile` or `OSError`."""
    with _opened(path) as descriptor:
        return _read_header(descriptor)


def read_blocks(path: Path, salt: bytes, keys: Sequence[bytes]) -> list[HostBlock]:
    """Read and check the blocks of `keys`, consecutive in the file. Raises `BadFile` or `OSError`."""
    with _opened(path) as descriptor:
        header = _read_header(descriptor)
        held = [block.key for block in header.blocks]
        first = held.index(keys[0]) if keys[0] in held else 0
        wanted = header.blocks[first : first + len(keys)]
        if header.salt != salt or [block.key for block in wanted] != list(keys):
            raise BadFile("it holds other blocks than its name says")
        data = memoryview(_read(descriptor, wanted[0].begin, wanted[-1].end - wanted[0].begin))
    return [
        _block(block, data[block.begin - wanted[0].begin : block.end - wanted[0].begin]) for block in wanted
    ]


def check_format(text: bytes) -> None:
    """Check format and version of a header. Its checksum comes later: a later version may have it elsewhere."""
    try:
        metadata, _ = _split(text)
    except (msgspec.MsgspecError, LookupError, ValueError, RecursionError):
        raise BadFile("its header cannot be read") from None
    if metadata.format != FORMAT:
        raise BadFile("it was not written by zmqengine")
    if metadata.version != str(VERSION):
        raise NewerFile(f"its format is {metadata.version!r}, this version knows {VERSION}")


def _block(header: BlockHeader, data: memoryview) -> HostBlock:
    if _checksum([data]) != header.checksum:
        raise BadFile("a block is damaged")
    origin = header.tensors[_TOKENS].data_offsets[0]
    arrays: dict[str, list[HostArray]] = {_TOKENS: [], _ARRAYS: [], _STATE: []}
    for name, tensor in header.tensors.items():
        begin, end = tensor.data_offsets
        array = HostArray(_MLX_NAMES[tensor.dtype], tensor.shape, data[begin - origin : end - origin])
        arrays[name.partition(".")[0]].append(array)
    return HostBlock(
        header.key,
        header.parent_key,
        header.start,
        np.frombuffer(arrays[_TOKENS][0].data, "<u4"),
        arrays[_ARRAYS],
        header.form,
        arrays[_STATE],
    )


def _read_header(descriptor: int) -> FileHeader:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(_HEADER_BYTES_MAX, size - 8 - _CHECKSUM_BYTES):
        raise BadFile("it is shorter than its header")
    text = bytes(_read(descriptor, 0, 8 + length))
    check_format(text[8:])
    if _checksum([text]) != _read(descriptor, size - _CHECKSUM_BYTES, _CHECKSUM_BYTES):
        raise BadFile("its header is damaged, or its end is missing")
    try:
        metadata, entries = _split(text[8:])
        tensors = _blocks_of(entries, size - len(text))
        begins = [len(text) + next(iter(block.values())).data_offsets[0] for block in tensors]
        tail = bytes(_read(descriptor, begins[-1], size - begins[-1]))
        checksums = [tail[at : at + _CHECKSUM_BYTES] for at in range(0, len(tail), _CHECKSUM_BYTES)]
        keys = list(map(bytes.fromhex, metadata.keys.split()))
        parents = [bytes.fromhex(metadata.parent), *keys[:-1]]
        starts = [int(metadata.start)]
        for block in tensors[:-1]:
            starts.append(starts[-1] + block[_TOKENS].shape[0])
        forms = msgspec.json.decode(metadata.forms, type=list[str])
        parts = zip(
            keys,
            parents,
            starts[:-1],
            forms,
            tensors[:-1],
            begins[:-1],
            begins[1:],
            checksums[:-1],
            strict=True,
        )
        return FileHeader(bytes.fromhex(metadata.salt), [BlockHeader(*part) for part in parts])
    except (msgspec.MsgspecError, LookupError, ValueError) as error:
        raise BadFile(f"its header is invalid: {error}") from None


def _split(text: bytes) -> tuple[_Metadata, dict[str, msgspec.Raw]]:
    entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return msgspec.json.decode(entries.pop("__metadata__"), type=_Metadata), entries


def _blocks_of(entries: dict[str, msgspec.Raw], data_bytes: int) -> list[dict[str, Tensor]]:
    """Tensors of each block, and last the checksums. They must lie in order, without gaps, up to the end."""
    tensors: list[dict[str, Tensor]] = []
    end = 0
    for name, raw in entries.items():
        number, _, rest = name.partition(".")
        if rest in (_TOKENS, ""):
            tensors.append({})
        tensor = msgspec.json.decode(raw, type=Tensor)
        start, end = end, end + math.prod(tensor.shape) * _SIZES[tensor.dtype]
        is_known = rest.partition(".")[0] in (_TOKENS, _ARRAYS, _STATE) and int(number) == len(tensors) - 1
        if tensor.data_offsets != (start, end) or not (is_known or name == _CHECKSUMS):
            raise ValueError(f"{name} is in the wrong place")
        tensors[-1][rest] = tensor
    if end != data_bytes or tensors[-1][""].shape != (_CHECKSUM_BYTES * len(tensors),) or len(tensors) < 2:
        raise ValueError("its length is wrong")
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # Refuse a link, a pipe, and a file of another user, which could contain anything.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise BadFile("it is not a regular file of this user")
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, size: int) -> bytearray:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        count = os.preadv(descriptor, [left], start + size - len(left))
        if not count:
            raise BadFile("it ends too early")
        left = left[count:]
    return data


def _checksum(parts: Sequence[Bytes]) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()
