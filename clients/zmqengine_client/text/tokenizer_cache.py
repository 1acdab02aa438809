"""Tokenizers by hash: built once in a process, and kept on disk, so that a front-end fetches one once in its life."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

import msgspec

from zmqengine.paths import cache_directory
from zmqengine.protocol.messages import TokenizerBundle
from zmqengine_client.text.tokenizer import Tokenizer

TOKENIZERS_MAX = 4
FILES_MAX = 8
CACHE_BYTES_MAX = 256 * 1024 * 1024
_DIGEST_BYTES = 32

_lock = threading.Lock()
_tokenizers: OrderedDict[str, Tokenizer] = OrderedDict()


def find(bundle_hash: str) -> Tokenizer | None:
    """The tokenizer of this hash from this process, or from disk. May take a while: not for an event loop."""
    with _lock:
        tokenizer = _tokenizers.get(bundle_hash)
    if tokenizer is None:
        bundle = TokenizerDirectory().load(bundle_hash)
        tokenizer = None if bundle is None else _keep(bundle)
    return tokenizer


def add(bundle: TokenizerBundle) -> Tokenizer:
    """Keep what a worker sent, here and on disk."""
    tokenizer = _keep(bundle)
    TokenizerDirectory().store(bundle)
    return tokenizer


def clear() -> None:
    """Forget the tokenizers of this process; those on disk stay."""
    with _lock:
        _tokenizers.clear()


class TokenizerDirectory:
    """Bundles on disk. A file that cannot be read or written is as if it were not there."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = (directory or cache_directory()) / "tokenizers"

    def load(self, bundle_hash: str) -> TokenizerBundle | None:
        """The bundle of this hash, if it is here and whole."""
        try:
            content = self._path(bundle_hash).read_bytes()
            digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if hashlib.sha256(body).digest() != digest:
                return None
            bundle = msgspec.msgpack.decode(body, type=TokenizerBundle)
        except (OSError, msgspec.MsgspecError):
            return None
        return bundle if bundle.hash == bundle_hash else None

    def store(self, bundle: TokenizerBundle) -> None:
        """Keep a bundle; the least recently stored ones go when there are too many or they are too large."""
        body = msgspec.msgpack.encode(bundle)
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Written beside and renamed: another process sees the whole file or none.
            handle, name = tempfile.mkstemp(dir=self._directory, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(body).digest() + body)
                os.replace(name, self._path(bundle.hash))
            except OSError:
                os.unlink(name)
                raise
            self._trim()

    def _trim(self) -> None:
        files = [
            (path.stat().st_mtime, path.stat().st_size, path) for path in self._directory.glob("*.bundle")
        ]
        total = 0
        for place, (_, size, path) in enumerate(sorted(files, key=lambda file: file[0], reverse=True)):
            total += size
            if place and (place >= FILES_MAX or total > CACHE_BYTES_MAX):
                path.unlink()

    def _path(self, bundle_hash: str) -> Path:
        # The hash comes from the worker: as part of a path it must be ours.
        return self._directory / (hashlib.sha256(bundle_hash.encode()).hexdigest()[:32] + ".bundle")


def _keep(bundle: TokenizerBundle) -> Tokenizer:
    tokenizer = Tokenizer(bundle)
    with _lock:
        _tokenizers[bundle.hash] = tokenizer
        while len(_tokenizers) > TOKENIZERS_MAX:
            _tokenizers.popitem(last=False)
    return tokenizer
