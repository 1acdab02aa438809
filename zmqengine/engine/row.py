"""A row: one request in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zmqengine.engine.image_names import named
from zmqengine.engine.interface import EngineFinish, RowFailure, RowImage, RowRequest, TokenLogprobs
from zmqengine.engine.seeds import seed_key
from zmqengine.engine.texts.text_rows import TextPlace
from zmqengine.errors import ConstraintFailed
from zmqengine.request_rules import check_token_ids
from zmqengine.sampling_params import check_sampling

if TYPE_CHECKING:
    from zmqengine.engine.grammar.matcher import RowMatcher
    from zmqengine.engine.grammar.thinking import ThinkingMatcher


class SampledToken(NamedTuple):
    """A sampled token that has not been reported yet."""

    token: int
    logprobs: TokenLogprobs | None


class Row:
    """One request in the engine: its tokens, the number of them that are cached, and the state of its generation.

    `tokens`: prompt and known output; the KV cache holds the first `computed_tokens` of them, those of a step in flight
    included, except draft tokens. Before the row has a `cache`, `computed_tokens` is the length that the prefix cache
    may provide. `is_finite`: its last logit was. `prefill_tokens`: length of prompt, `emitted` and forced tokens;
    `ids`: their ids, features of images by names of their contents; `features`: each image with the places of its
    features in the prompt. `positions` [3, tokens] of the tokens to prefill, where the model has three and the row has
    images, or where it reads a part of its `prompt`; `shift`: how far the positions behind them are ahead of the
    tokens. `keep`: the share of the prompt to read, until `read_only` is called. `offers`: blocks that become valid in
    the prefix cache once the row's first logit is finite; `keys`: hashes of its blocks; `prefix`: what of it the prefix
    cache had when it was asked last. Prefill stops at `branches`, positions at which it keeps a checkpoint of the
    layers that cannot be cut. `first_forced`: index in `tokens` of the first forced token that was not emitted,
    `prefill_tokens` without any; `unreported`: number of forced tokens still to be reported. `sampled`: number of
    output tokens, the one in flight and forced ones included. A row with a `place` reads that text: it ends after
    prefill. `reuses_prefix`: whether it may start from a cached prefix, `is_cacheable`: whether it may become one.
    `launched`: a step that samples its first token was launched. `gone`: the row has ended, failed or been removed;
    results of a step in flight are dropped.
    """

    __slots__ = (
        "_grammar_matcher",
        "_thinking_matcher",
        "adapter",
        "branches",
        "cache",
        "cached",
        "computed_tokens",
        "features",
        "first_forced",
        "gone",
        "grammar",
        "id",
        "ids",
        "is_cacheable",
        "is_finite",
        "is_pinned",
        "keep",
        "key",
        "keys",
        "launched",
        "logprobs",
        "max_tokens",
        "offers",
        "place",
        "positions",
        "prediction",
        "prefill_tokens",
        "prefix",
        "prompt",
        "prompt_tokens",
        "reuses_prefix",
        "sampled",
        "sampling",
        "scope",
        "shift",
        "speculate",
        "stop",
        "thinking",
        "tokens",
        "unreported",
    )

    def __init__(
        self,
        request: RowRequest,
        vocab_size: int,
        context_tokens: int,
        image_token: int = -1,
        merge: int = 0,
        place: TextPlace | None = None,
    ) -> None:
        self.id = request.row
        forced = request.forced[len(request.emitted) :]
        self.tokens = [*request.prompt, *request.emitted, *forced]
        self.prompt = request.prompt
        self.prompt_tokens = len(request.prompt)
        self.prefill_tokens = len(self.tokens)
        self.place = place
        self.keep = request.prefill_keep
        self.reuses_prefix = self.is_cacheable = self.keep is None
        self.first_forced = self.prefill_tokens - len(forced)
        self.unreported = len(forced)
        self.sampled = self.prefill_tokens - self.prompt_tokens
        open_end = context_tokens - self.prompt_tokens
        self.max_tokens = open_end if request.max_tokens is None else request.max_tokens
        self.stop = frozenset(request.stop_token_ids)
        self.sampling = request.sampling
        self.key = seed_key(request.seed)
        self.logprobs = request.logprobs
        self.computed_tokens = 0
        self.cached = 0
        # A `RowCache` of the runner, whose module imports this one.
        self.cache: Any = None
        self.is_finite = False
        self.scope = request.cache_scope
        self.adapter = request.adapter
        self.is_pinned = request.pin
        self.keys: list[bytes] = []
        self.branches: list[int] = []
        # `Offer`s and a `Prefix` of the prefix cache, which imports this module.
        self.offers: list[Any] = []
        self.prefix: Any = None
        self.launched = False
        self.gone = False
        self.speculate = request.speculate
        self.prediction = request.prediction
        self._check(vocab_size)
        self.ids = named(self.tokens, request.images, image_token)
        self.features: list[tuple[RowImage, np.ndarray]] = []
        for image in request.images:
            span = np.array(self.tokens[image.at : image.at + image.tokens])
            self.features.append((image, image.at + np.flatnonzero(span == image_token)))
        self.positions: np.ndarray | None = None
        self.shift = 0
        if merge and self.features:
            self.positions = three_positions(self.prefill_tokens, self.features, merge)
            self.shift = int(self.positions[0, -1]) + 1 - self.prefill_tokens
        self.grammar = request.grammar
        self.thinking = request.thinking
        output = self.tokens[self.prompt_tokens :]
        matcher = None if request.grammar is None else request.grammar.start(output)
        self._grammar_matcher: RowMatcher | None = matcher
        self._thinking_matcher: ThinkingMatcher | None = None
        if request.thinking is not None:
            self._thinking_matcher = request.thinking.start(output, matcher)

    @property
    def matcher(self) -> RowMatcher | ThinkingMatcher | None:
        """The matcher that may rule out tokens, from the next one to those of the widest verify block."""
        thinking = self._thinking_matcher
        return thinking if thinking is not None and thinking.is_near else self._grammar_matcher

    @property
    def kept(self) -> int:
        """Tokens of a prompt that is read in part; 0 of every other."""
        return 0 if self.is_cacheable else self.prompt_tokens

    def read_only(self, kept: np.ndarray) -> None:
        """Read these tokens of the prompt alone, by index, at their own positions; the output stays behind all."""
        skipped = self.prompt_tokens - len(kept)
        behind = np.arange(self.prompt_tokens, len(self.tokens))
        chosen = np.concatenate([kept, behind]).astype(np.int32)
        self.tokens = [self.tokens[index] for index in chosen]
        self.ids = self.ids[chosen]
        self.positions, self.shift = np.tile(chosen, (3, 1)), skipped
        self.prompt_tokens -= skipped
        self.prefill_tokens -= skipped
        self.first_forced -= skipped
        self.keep = None

    def keep_matcher(self) -> None:
        """Leave the matcher to the row that resumes this one, which would otherwise follow the output again."""
        if self.grammar is not None and self._grammar_matcher is not None:
            self.grammar.keep(self._grammar_matcher)
        self._grammar_matcher = self._thinking_matcher = None

    def leave(self) -> None:
        """End the row and free its constraint. The step in flight holds the row until the next one starts."""
        self.gone = True
        self.grammar = self._grammar_matcher = self._thinking_matcher = None

    @property
    def remaining(self) -> int:
        """Tokens of the prompt, of `emitted` and of forced output that no step has computed yet."""
        return max(0, self.prefill_tokens - self.computed_tokens)

    @property
    def has_forced(self) -> bool:
        """Whether prefill passes forced tokens."""
        return self.first_forced < self.prefill_tokens

    def named(self, end: int) -> np.ndarray:
        """The first `end` tokens as uint32, features of images by names of their contents."""
        if end <= self.prefill_tokens:
            return self.ids[:end]
        return np.concatenate([self.ids, np.array(self.tokens[self.prefill_tokens : end], np.uint32)])

    def take(self, token: int) -> EngineFinish | None:
        """Append a token to the output; returns the finish reason if it ends the row.

        Raises `ConstraintBroken` for a token that the row's grammar cannot have.
        """
        self.tokens.append(token)
        if self._thinking_matcher is not None:
            self._thinking_matcher.follow(token)
        if self._grammar_matcher is not None:
            self._grammar_matcher.consume(token)
            if self._grammar_matcher.is_complete:
                return "stop"
        if token in self.stop:
            return "stop"
        return "length" if len(self.tokens) - self.prompt_tokens >= self.max_tokens else None

    def _check(self, vocab_size: int) -> None:
        # The worker has checked all this. An id out of range would be an unchecked read or write in MLX, so a
        # mistake there must fail one row and not crash the process.
        if not self.prompt_tokens:
            raise ValueError("the prompt is empty")
        ids = {"prompt": self.tokens, "prediction": self.prediction, "stop_token_ids": self.stop}
        check_token_ids(vocab_size, self.sampling, **ids)
        check_sampling(self.sampling)
        if self.max_tokens < self.sampled or self.max_tokens <= self.sampled - self.unreported:
            raise ValueError("max_tokens leaves nothing to generate")


def constraint_failure(row: int, reason: object) -> RowFailure:
    """The failure of a row whose output left its constraint or met a limit of it."""
    return RowFailure(row, f"the constraint failed: {reason}", ConstraintFailed.code)


def three_positions(length: int, features: Sequence[tuple[RowImage, np.ndarray]], merge: int) -> np.ndarray:
    """Frame, row and column of each token, [3, length]; cells of an image have `merge` patches a side.

    A text token is one further than the one before. An image is one frame, at the next position, and the text behind it
    follows its longer side.
    """
    found = np.zeros((3, length), np.int32)
    place, position = 0, 0
    for image, places in features:
        before = int(places[0]) - place
        found[:, place : place + before] = position + np.arange(before)
        position += before
        # Tokens between features stand where the image begins.
        found[:, int(places[0]) : int(places[-1]) + 1] = position
        start = 0
        for grid in image.grids:
            rows, columns = (side // merge for side in grid)
            own = places[start : start + rows * columns]
            found[1, own] += np.repeat(np.arange(rows), columns)
            found[2, own] += np.tile(np.arange(columns), rows)
            start += rows * columns
        place, position = int(places[-1]) + 1, position + max(max(grid) for grid in image.grids) // merge
    found[:, place:] = position + np.arange(length - place)
    return found
