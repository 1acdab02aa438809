"""Block files: the blocks that were written, or an error."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path

import pytest
import xxhash

from tests.engine.prefix_cache.host_blocks import chain, plain
from zmqengine.engine.prefix_cache.disk import block_file
from zmqengine.engine.prefix_cache.disk.block_file import (
    DTYPES,
    BadFile,
    HostArray,
    NewerFile,
    encode,
    read_blocks,
    read_header,
    write_file,
)

SALT = b"a model"
CASES = int(os.environ.get("ZMQENGINE_CACHE_FILE_CASES", "10000"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "blocks.safetensors"


def test_blocks_come_back_as_they_were_written(path: Path) -> None:
    """All of them, or some that follow one another; the file is nobody else's."""
    blocks = chain(0, 4)
    write_file(path, encode(SALT, blocks))
    assert sum(map(len, encode(SALT, blocks))) == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert plain(read_blocks(path, SALT, [block.key for block in blocks])) == plain(blocks)
    assert plain(read_blocks(path, SALT, [blocks[2].key])) == plain(blocks[2:3])
    header = read_header(path)
    assert [block.key for block in header.blocks] == [block.key for block in blocks]
    assert [block.form for block in header.blocks] == [block.form for block in blocks]
    assert [block.parent_key for block in header.blocks] == [block.parent_key for block in blocks]
    assert [block.start for block in header.blocks] == [block.start for block in blocks]


def test_the_file_is_safetensors(path: Path) -> None:
    """Other tools can look into it; bfloat16 and every other dtype keep their names and bytes."""
    safetensors = pytest.importorskip("safetensors")
    sizes = {"bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2}
    sizes |= {"uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8, "complex64": 8}
    assert sizes.keys() == DTYPES.keys()
    arrays = [HostArray(dtype, (3, 1), bytes([1]) * 3 * size) for dtype, size in sizes.items()]
    block = chain(0, 1)[0]._replace(arrays=[*arrays, HostArray("float32", (0, 5), b"")])
    write_file(path, encode(SALT, [block]))
    assert plain(read_blocks(path, SALT, [block.key])) == plain([block])
    with safetensors.safe_open(str(path), "np") as opened:
        assert opened.metadata()["format"] == "zmqengine prompt blocks"
        names = {opened.get_slice(f"0.array.{index}").get_dtype() for index in range(len(arrays))}
        assert names == set(DTYPES.values())
        assert opened.get_tensor("0.tokens").tolist() == block.tokens.tolist()


@pytest.mark.parametrize("cases", [300, pytest.param(CASES, marks=pytest.mark.slow)])
def test_damaged_files_give_nothing_wrong(path: Path, tmp_path: Path, cases: int) -> None:
    """Flipped bits, cut ends, inserted and swapped bytes: what is read is what was written, or it is refused."""
    numbers = random.Random(cases)
    blocks = chain(1, 3)
    keys = [block.key for block in blocks]
    write_file(path, encode(SALT, blocks))
    whole = path.read_bytes()
    other_path = tmp_path / "other"
    write_file(other_path, encode(SALT, chain(2, 3)))
    other = other_path.read_bytes()
    refused = 0
    for _ in range(cases):
        path.write_bytes(damaged(numbers, whole, other))
        first = numbers.randrange(3)
        wanted = keys[first : first + numbers.randint(1, 3)]
        try:
            found = read_blocks(path, SALT, wanted)
        except BadFile:
            refused += 1
        else:
            assert plain(found) == plain(blocks[first : first + len(wanted)])
    # What is damaged in blocks that were not asked for goes unnoticed, and that is all.
    assert refused > cases / 2


def damaged(numbers: random.Random, whole: bytes, other: bytes) -> bytes:
    """`whole` with one random fault."""
    data = bytearray(whole)
    at = numbers.randrange(len(data))
    match numbers.randrange(7):
        case 0:
            data[at] ^= 1 << numbers.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = numbers.randbytes(numbers.randint(1, 64))
        case 3:
            del data[at : at + numbers.randint(1, 64)]
        case 4:
            return other
        case 5:
            data[at:] = other[at:]
            if data == whole:
                data[at] ^= 1
        case 6:
            data[:] = numbers.randbytes(numbers.randrange(4096))
    return bytes(data)


def test_headers_that_make_no_sense_are_refused(path: Path) -> None:
    """Also with right checksums, as a writer with a bug would make them."""
    blocks = chain(3, 2)
    write_file(path, encode(SALT, blocks))
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    changes = [
        (b'"shape":[16]', b'"shape":[17]'),
        (b'"shape":[16]', b'"shape":[-1]'),
        (b'"dtype":"BF16"', b'"dtype":"XF16"'),
        (b'"1.tokens"', b'"3.tokens"'),
        (b'"0.tokens"', b'"0.tokenz"'),
        (b'"0.array.0"', b'"0.arrays.0"'),
        (b'"forms":"[', b'"forms":"{'),
        (b'"start":"0"', b'"start":"x"'),
        (b'"salt":"', b'"salt":"x'),
        (blocks[0].key.hex().encode(), blocks[0].key.hex().encode() + b" 00"),
        (b'"data_offsets":[64,', b'"data_offsets":[-9,'),
        (b'"checksums"', b'"checksumz"'),
        (b'"shape":[48]', b'"shape":[32]'),
    ]
    for old, new in changes:
        assert old in whole
        header = whole[8:end].replace(old, new, 1)
        changed = len(header).to_bytes(8, "little") + header
        path.write_bytes(changed + whole[end:-16] + xxhash.xxh3_128_digest(changed))
        with pytest.raises(BadFile, match="is invalid"):
            read_blocks(path, SALT, [blocks[0].key])


def test_a_file_of_no_blocks_is_refused(path: Path) -> None:
    """Code that reads a header may ask for its first block."""
    metadata = dict.fromkeys(("salt", "parent", "keys"), "")
    metadata |= {"format": "zmqengine prompt blocks", "version": "1", "start": "0", "forms": "[]"}
    checksums = {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}
    text = json.dumps({"__metadata__": metadata, "checksums": checksums}).encode()
    header = len(text).to_bytes(8, "little") + text
    path.write_bytes(header + xxhash.xxh3_128_digest(header))
    with pytest.raises(BadFile, match="its length is wrong"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7, 8, 24, 25])
@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1])
def test_a_header_that_cannot_be_as_long_as_it_says_is_not_read(path: Path, length: int, size: int) -> None:
    """A length in the file allocates no memory before it is checked."""
    path.write_bytes((length.to_bytes(8, "little") + bytes(32))[:size])
    with pytest.raises(BadFile, match=r"shorter than its header|cannot be read"):
        read_header(path)


@pytest.mark.parametrize(
    ("old", "new", "fault", "reason"),
    [
        (b'"version":"1"', b'"version":"2"', NewerFile, "its format is '2'"),
        (b'"format":"zmqengine', b'"format":"sometthing', BadFile, "not written by zmqengine"),
        (b'"__metadata__"', b'"__netadata__"', BadFile, "cannot be read"),
        (b'"shape":[16]', b'"shape":[17]', BadFile, "its header is damaged"),
    ],
)
def test_a_file_says_why_it_is_of_no_use(
    path: Path, old: bytes, new: bytes, fault: type[BadFile], reason: str
) -> None:
    """A later format is told apart from damage: its file is not removed."""
    block = chain(0, 1)[0]
    write_file(path, encode(SALT, [block]))
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    with pytest.raises(BadFile, match=reason) as caught:
        read_header(path)
    assert type(caught.value) is fault


def test_only_files_of_this_user_are_opened(path: Path, tmp_path: Path) -> None:
    """Files of another user or model are refused, links are not followed, and a pipe does not block the reader."""
    write_file(path, encode(SALT, chain(0, 1)))
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        read_header(link)
    keys = [block.key for block in read_header(path).blocks]
    with pytest.raises(BadFile, match="other blocks"):
        read_blocks(path, b"another model", keys)
    if os.geteuid() == 0:
        os.chown(path, 65_534, 65_534)
        with pytest.raises(BadFile, match="not a regular file"):
            read_header(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadFile, match="not a regular file"):
        read_header(pipe)


def test_a_file_that_is_cut_while_it_is_read_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short read ends the read: nobody waits for missing bytes."""
    write_file(path, encode(SALT, chain(0, 1)))
    monkeypatch.setattr(block_file, "check_format", lambda text: os.truncate(path, 100))
    with pytest.raises(BadFile, match="too early"):
        read_header(path)
