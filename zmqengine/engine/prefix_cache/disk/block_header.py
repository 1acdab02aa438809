"""Header of a block file: that of safetensors, with names and offsets of every tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from zmqengine.engine.prefix_cache.disk.host_block import HostArray, HostBlock

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
NAMES = {theirs: ours for ours, theirs in DTYPES.items()}
TOKENS, ARRAYS, STATE, _CHECKSUMS = "tokens", "array", "state", "checksums"
CHECKSUM_BYTES = 16

Fault = Literal["torn", "foreign", "newer"]
FAULTS: tuple[Fault, ...] = ("torn", "foreign", "newer")


class BadFile(Exception):
    """A file of no use: `torn` is damaged, `foreign` is not what its name says, `newer` has a later format."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class BlockHeader(NamedTuple):
    """What a file says of one block: `tensors` by their names, and the place of all its bytes in the file."""

    key: bytes
    form: str
    tensors: dict[str, Tensor]
    start: int
    end: int
    checksum: bytes

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.tensors[TOKENS].shape[0]


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


class Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def tensors_of(block: HostBlock) -> dict[str, HostArray]:
    """Everything in a block by its name, in the order of the file."""
    tokens = np.ascontiguousarray(block.tokens, "<u4").tobytes()
    named = {TOKENS: HostArray("uint32", (len(block.tokens),), tokens)}
    named |= {f"{ARRAYS}.{index}": array for index, array in enumerate(block.arrays)}
    return named | {f"{STATE}.{index}": array for index, array in enumerate(block.state)}


def encode_header(salt: bytes, blocks: Sequence[HostBlock]) -> bytes:
    """The bytes with which the file of a run begins."""
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
        for name, array in tensors_of(block).items():
            start, end = end, end + len(array.data)
            entries[f"{number}.{name}"] = Tensor(DTYPES[array.dtype], tuple(array.shape), (start, end))
    checksums_bytes = CHECKSUM_BYTES * (len(blocks) + 1)
    entries[_CHECKSUMS] = Tensor("U8", (checksums_bytes,), (end, end + checksums_bytes))
    text = msgspec.json.encode(entries)
    # Data that begins at a multiple of 8 can be used where it lies.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_header(text: bytes, size: int, read_from: Callable[[int], bytes]) -> Header:
    """The header of a file of `size` bytes that begins with `text`; `read_from` gives what lies between a place and its
    end. Raises `BadFile`."""
    try:
        metadata, tensors = _decode_header(text[8:], size - len(text))
        keys = list(map(bytes.fromhex, metadata.keys.split()))
        forms = msgspec.json.decode(metadata.forms, type=list[str])
        starts = [len(text) + next(iter(block.values())).data_offsets[0] for block in tensors]
        found = read_from(starts[-1])
        checksums = [found[at : at + CHECKSUM_BYTES] for at in range(0, len(found), CHECKSUM_BYTES)]
        parts = zip(keys, forms, tensors[:-1], starts[:-1], starts[1:], checksums[:-1], strict=True)
        blocks = tuple(BlockHeader(*part) for part in parts)
        return Header(
            bytes.fromhex(metadata.salt), bytes.fromhex(metadata.parent), int(metadata.start), blocks
        )
    except (msgspec.MsgspecError, LookupError, ValueError) as error:
        raise BadFile("foreign", f"its header makes no sense: {error}") from None


def _decode_header(text: bytes, data_bytes: int) -> tuple[_Metadata, list[dict[str, Tensor]]]:
    """The tensors of each block, and last the checksums. They must lie in order, without gaps, up to the end."""
    entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(entries.pop("__metadata__"), type=_Metadata)
    tensors: list[dict[str, Tensor]] = []
    end = 0
    for name, raw in entries.items():
        number, _, rest = name.partition(".")
        if rest in (TOKENS, ""):
            tensors.append({})
        tensor = msgspec.json.decode(raw, type=Tensor)
        start, end = end, end + math.prod(tensor.shape) * _SIZES[tensor.dtype]
        is_known = rest.partition(".")[0] in (TOKENS, ARRAYS, STATE) and int(number) == len(tensors) - 1
        if tensor.data_offsets != (start, end) or not (is_known or name == _CHECKSUMS):
            raise ValueError(f"{name} is in the wrong place")
        tensors[-1][rest] = tensor
    if end != data_bytes or tensors[-1][""].shape != (CHECKSUM_BYTES * len(tensors),) or len(tensors) < 2:
        raise ValueError("its length is another one")
    return metadata, tensors


def check_format(text: bytes) -> None:
    """Say what else a file is before its checksum is looked at: that is only where it is in this format."""
    try:
        metadata = msgspec.json.decode(text, type=_Top).metadata
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise BadFile("torn", "its header cannot be read") from None
    if metadata is None or metadata.format != FORMAT:
        raise BadFile("foreign", "it was not written by zmqengine")
    if metadata.version != str(VERSION):
        raise BadFile("newer", f"its format is {metadata.version!r}, this version knows {VERSION}")
