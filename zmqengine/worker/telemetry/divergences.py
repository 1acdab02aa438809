"""Logs the position at which a long prompt differs from a cached one: from there on it is prefilled.

The log reveals a head that changes from turn to turn (a date, a counter of tokens, tools in another order).
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from zmqengine.engine.interface import RowDivergence
from zmqengine.worker.requests.live_request import LiveRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger("zmqengine.worker")


class Divergences:
    """Log of divergences. Contains text only with a tokenizer, since prompts are private."""

    def __init__(self, tokenizer_json: bytes | None) -> None:
        self._tokenizer_json = tokenizer_json

    def note(self, divergence: RowDivergence, request: LiveRequest | None) -> None:
        facts = {} if self._tokenizer_json is None else self._texts(divergence)
        log.info(
            f"prompt shares {divergence.shared:,} of {divergence.total:,} tokens with a kept one, then differs",
            extra={"request": "" if request is None else request.id, **facts},
        )

    def _texts(self, divergence: RowDivergence) -> dict[str, str]:
        decode = self._tokenizer.decode
        return {
            "kept": repr(decode(divergence.kept, skip_special_tokens=False)),
            "came": repr(decode(divergence.came, skip_special_tokens=False)),
        }

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        # Imported here: without --log-prompts no worker needs it.
        from tokenizers import Tokenizer

        assert self._tokenizer_json is not None
        tokenizer: Tokenizer = Tokenizer.from_str(self._tokenizer_json.decode())
        return tokenizer
