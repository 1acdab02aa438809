"""Kernels for texts that follow each other without padding, behind one interface, and what they are given."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import mlx.core as mx


class Tables(NamedTuple):
    """Arrays [entries, width] that a model looks up, and the norm of their sum: `positions` from the row `first` on."""

    words: mx.array
    positions: mx.array | None
    first: int
    types: mx.array | None
    weight: mx.array
    bias: mx.array | None
    eps: float


class EmbeddedTokens(NamedTuple):
    """Tokens as `states`, normalised [tokens, width], and copies of tables in a buffer of the device.

    `spans` for `attend`; `positions` [tokens]; `texts` for `pool`; `arrivals` for `layers`, once.
    """

    states: mx.array
    spans: mx.array
    positions: mx.array
    texts: mx.array
    arrivals: mx.array


class LayerStack(NamedTuple):
    """Arrays of all layers of an encoder of BERT's kind, [layers, ...] each, weights [layers, outputs, inputs].

    Attention has `heads`. Norms follow the sums with attention (`middle`) and with the network (`norm`), whose
    activation is GELU; the two products before them have no bias.
    """

    heads: int
    eps: float
    qkv_weight: mx.array
    qkv_bias: mx.array
    out_weight: mx.array
    middle_weight: mx.array
    middle_bias: mx.array
    up_weight: mx.array
    up_bias: mx.array
    down_weight: mx.array
    norm_weight: mx.array
    norm_bias: mx.array


class NormOfSums(NamedTuple):
    """A norm of sums that `TextKernels.sum_up` made: the `stats` of them, and the norm's own arrays and number."""

    stats: mx.array
    weight: mx.array
    bias: mx.array
    eps: float


class TextKernels(Protocol):
    """Operations on texts in float32, one kernel each; `cuda/text_kernels.py` is one, and documents them."""

    def supports(self, dim: int) -> bool: ...

    def embed(self, tokens: mx.array, texts: mx.array, tables: Tables) -> EmbeddedTokens: ...

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        spans: mx.array,
        *,
        scale: float,
        window: int | None,
        slopes: mx.array | None,
    ) -> mx.array: ...

    def stacks(self, stack: LayerStack) -> bool: ...

    def layers(
        self, states: mx.array, spans: mx.array, arrivals: mx.array, stack: LayerStack
    ) -> mx.array: ...

    def pool(self, states: mx.array, texts: mx.array, *, largest: bool) -> mx.array: ...

    def deliver(self, vectors: mx.array, memory: mx.array) -> mx.array: ...

    def multiplies(self, inputs: int) -> bool: ...

    def multiply(
        self,
        rows: mx.array,
        weights: mx.array,
        bias: mx.array | None,
        *,
        added: mx.array | None = None,
        gelu: bool = False,
        norm: NormOfSums | None = None,
    ) -> mx.array: ...

    def sums_up(self, outputs: int) -> bool: ...

    def sum_up(
        self,
        rows: mx.array,
        weights: mx.array,
        bias: mx.array | None,
        added: mx.array,
        norm: NormOfSums | None,
    ) -> tuple[mx.array, mx.array]: ...
