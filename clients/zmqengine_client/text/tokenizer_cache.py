"""Tokenizers by hash: built once in a process and cached on disk, so that a front-end fetches each only once."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from pathlib import Path

import msgspec

from zmqengine.paths import cache_directory, replace_file
from zmqengine.protocol.messages import TokenizerBundle
from zmqengine_client.text.tokenizer import Tokenizer

TOKENIZERS_MAX = 4
FILES_MAX = 8
CACHE_BYTES_MAX = 256 * 1024 * 1024
_DIGEST_BYTES = 32

_lock = threading.Lock()
_tokenizers: OrderedDict[str, Tokenizer] = OrderedDict()


def find(bundle_hash: str) -> Tokenizer | None:
    """The tokenizer of this hash from memory or from disk. Blocking: not for an event loop."""
    with _lock:
        tokenizer = _tokenizers.get(bundle_hash)
    if tokenizer is None:
        bundle = TokenizerDirectory().load(bundle_hash)
        tokenizer = None if bundle is None else _keep(bundle)
    return tokenizer


def add(bundle: TokenizerBundle) -> Tokenizer:
    """Cache a tokenizer that a worker sent, in memory and on disk."""
    tokenizer = _keep(bundle)
    TokenizerDirectory().store(bundle)
    return tokenizer


def clear() -> None:
    """Drop the tokenizers in memory; files on disk stay."""
    with _lock:
        _tokenizers.clear()


class TokenizerDirectory:
    """Tokenizer bundles on disk. A file that cannot be read or written counts as absent."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = (directory or cache_directory()) / "tokenizers"

    def load(self, bundle_hash: str) -> TokenizerBundle | None:
        """The bundle of this hash, if the file exists and is intact."""
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
        """Store a bundle; the oldest are deleted past a number of files or a total size."""
        body = msgspec.msgpack.encode(bundle)
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path(bundle.hash), hashlib.sha256(body).digest() + body)
            self._trim()

    def _trim(self) -> None:
        files = [
            (path.stat().st_mtime, path.stat().st_size, path) for path in self._directory.glob("*.bundle")
        ]
        total = 0
        for index, (_, size, path) in enumerate(sorted(files, key=lambda file: file[0], reverse=True)):
            total += size
            if index and (index >= FILES_MAX or total > CACHE_BYTES_MAX):
                path.unlink()

    def _path(self, bundle_hash: str) -> Path:
        # The hash comes from the worker and must not reach a path: hash it again.
        return self._directory / (hashlib.sha256(bundle_hash.encode()).hexdigest()[:32] + ".bundle")


def _keep(bundle: TokenizerBundle) -> Tokenizer:
    tokenizer = Tokenizer(bundle)
    with _lock:
        _tokenizers[bundle.hash] = tokenizer
        while len(_tokenizers) > TOKENIZERS_MAX:
            _tokenizers.popitem(last=False)
    return tokenizer
