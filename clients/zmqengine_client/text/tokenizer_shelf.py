"""Tokenizers of this process, by hash: built once, shared by all clients."""

from __future__ import annotations

import threading
from collections import OrderedDict

from zmqengine.protocol.messages import TokenizerBundle
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_client.text.tokenizer_cache import TokenizerCache

TOKENIZERS_MAX = 4

_lock = threading.Lock()
_tokenizers: OrderedDict[str, Tokenizer] = OrderedDict()


def find(bundle_hash: str) -> Tokenizer | None:
    """The tokenizer of this hash from this process, or from disk. May take a while: not for an event loop."""
    with _lock:
        tokenizer = _tokenizers.get(bundle_hash)
    if tokenizer is None:
        bundle = TokenizerCache().load(bundle_hash)
        tokenizer = None if bundle is None else _keep(bundle)
    return tokenizer


def add(bundle: TokenizerBundle) -> Tokenizer:
    """Keep what a worker sent, here and on disk."""
    tokenizer = _keep(bundle)
    TokenizerCache().store(bundle)
    return tokenizer


def clear() -> None:
    """Forget the tokenizers of this process; those on disk stay."""
    with _lock:
        _tokenizers.clear()


def _keep(bundle: TokenizerBundle) -> Tokenizer:
    tokenizer = Tokenizer(bundle)
    with _lock:
        _tokenizers[bundle.hash] = tokenizer
        while len(_tokenizers) > TOKENIZERS_MAX:
            _tokenizers.popitem(last=False)
    return tokenizer
