"""Writes the first inputs of the corpus, and the words of the protocol for the fuzzer to put in.

The inputs are every example of SPEC.md and every hostile body we know by name.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import get_args

import msgpack

from tests.protocol import specification
from tests.protocol.test_bounds import HOSTILE
from zmqengine.sampling_params import Sampling

CORPUS = Path(__file__).parent / "corpus"
WORDS = Path(__file__).parent / "words.dict"


def seeds() -> list[bytes]:
    """Inputs in the form that `target.check` takes."""
    found = [
        bytes([place]) + kind.encode() + msgpack.packb(body)
        for kind, body in specification.examples()
        for place, union in enumerate(specification.UNIONS.values())
        if kind.encode() in {cls.KIND for cls in get_args(union)}
    ]
    # The deep ones are for the tests: in a corpus they would only make every run slow.
    return found + [b"\0I" + body for body in HOSTILE.values() if len(body) < 1000]


def write(directory: Path) -> None:
    """One file a seed, named by its contents."""
    directory.mkdir(parents=True, exist_ok=True)
    for seed in seeds():
        (directory / hashlib.sha1(seed).hexdigest()).write_bytes(seed)


def words() -> str:
    """The field names as msgpack has them, in libFuzzer's dictionary format."""
    names = {name for cls in specification.message_classes() for name in cls.__struct_fields__}
    names |= set(Sampling.__struct_fields__)
    packed = ("".join(f"\\x{byte:02x}" for byte in msgpack.packb(name)) for name in sorted(names))
    return "".join(f'"{word}"\n' for word in packed)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else CORPUS)
    WORDS.write_text(words(), encoding="ascii")
