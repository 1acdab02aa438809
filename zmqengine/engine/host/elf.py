"""Renames symbols of a shared library by dropping the beginning of their names.

It is there for one case: MLX on a Linux CPU where nobody may install system packages. The BLAS in MLX's wheel is
fifteen times slower (512x2048 by 2048x2048: 757 ms, OpenBLAS 49), and the only OpenBLAS on PyPI, scipy-openblas32,
calls `cblas_sgemm` by the name `scipy_cblas_sgemm`, which MLX does not look for. Where the system has its own BLAS this
file is not read. NumPy's wheel carries the same library under the same names, and the alternatives (a compiler,
`patchelf`, a wheel of our own) are more to install than this is to read.

A name in an ELF file is an offset into a table of strings, so a name that loses its beginning is a larger offset.
What must be written anew is the hash table by which names are found. Sources: the System V ABI, chapter 5, and
https://flapenguin.me/elf-dt-gnu-hash for the GNU hash table.
"""

from __future__ import annotations

import struct

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 4, 5, 6, 0x6FFFFEF5
_SYMBOL_BYTES = 24


def drop_symbol_prefix(library: bytes, prefix: bytes, dropped: int) -> bytes:
    """A copy of `library` in which every defined dynamic symbol that begins with `prefix` lost `dropped` bytes.

    The library is 64-bit, little-endian, and has a GNU hash table and no other. Raises ValueError otherwise.
    """
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    image = bytearray(library)
    try:
        tables = _find_tables(image)
        symbols = _Symbols(image, tables[_DT_SYMTAB], tables[_DT_STRTAB], tables[_DT_GNU_HASH])
    except (KeyError, struct.error) as error:
        raise ValueError("no GNU hash table") from error
    if _DT_HASH in tables:
        raise ValueError("a second hash table")
    symbols.rename(prefix, dropped)
    symbols.write_hash_table()
    return bytes(image)


def _find_tables(image: bytearray) -> dict[int, int]:
    """File offsets of what the dynamic section points to, by tag."""
    headers_at = struct.unpack_from("<Q", image, 32)[0]
    header_bytes, header_count = struct.unpack_from("<HH", image, 54)
    headers = [
        struct.unpack_from("<IIQQQQ", image, headers_at + place * header_bytes)
        for place in range(header_count)
    ]
    loads = [(address, offset, size) for kind, _, offset, address, _, size in headers if kind == _PT_LOAD]
    dynamic = next(offset for kind, _, offset, *_ in headers if kind == _PT_DYNAMIC)
    tables = {}
    while (entry := struct.unpack_from("<QQ", image, dynamic)) != (0, 0):
        tag, address = entry
        for start, offset, size in loads:
            if start <= address < start + size:
                tables[tag] = address - start + offset
        dynamic += 16
    return tables


class _Symbols:
    """The dynamic symbols of an image that a GNU hash table covers."""

    def __init__(self, image: bytearray, symbols_at: int, strings_at: int, hash_at: int) -> None:
        self._image = image
        self._symbols_at = symbols_at
        self._strings_at = strings_at
        self._hash_at = hash_at
        buckets, self._first, self._bloom_words, self._bloom_shift = struct.unpack_from(
            "<IIII", image, hash_at
        )
        buckets_at = hash_at + 16 + 8 * self._bloom_words
        last = max(struct.unpack_from(f"<{buckets}I", image, buckets_at))
        chain_at = buckets_at + 4 * buckets
        while not struct.unpack_from("<I", image, chain_at + 4 * (last - self._first))[0] & 1:
            last += 1
        self._last = last

    def rename(self, prefix: bytes, dropped: int) -> None:
        for symbol in range(self._first, self._last + 1):
            if self._name(symbol).startswith(prefix):
                at = self._symbols_at + symbol * _SYMBOL_BYTES
                struct.pack_into(
                    "<I", self._image, at, struct.unpack_from("<I", self._image, at)[0] + dropped
                )

    def write_hash_table(self) -> None:
        """Write the table with a single bucket, so the symbols keep their order. It is no longer than before."""
        hashes = [_hash(self._name(symbol)) for symbol in range(self._first, self._last + 1)]
        bloom = [0] * self._bloom_words
        for value in hashes:
            bits = 1 << value % 64 | 1 << (value >> self._bloom_shift) % 64
            bloom[value // 64 % self._bloom_words] |= bits
        chain = [value & ~1 for value in hashes]
        chain[-1] |= 1
        header = (1, self._first, self._bloom_words, self._bloom_shift)
        struct.pack_into(
            f"<IIII{len(bloom)}QI{len(chain)}I",
            self._image,
            self._hash_at,
            *header,
            *bloom,
            self._first,
            *chain,
        )

    def _name(self, symbol: int) -> bytes:
        at = (
            self._strings_at
            + struct.unpack_from("<I", self._image, self._symbols_at + symbol * _SYMBOL_BYTES)[0]
        )
        return bytes(self._image[at : self._image.index(0, at)])


def _hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
