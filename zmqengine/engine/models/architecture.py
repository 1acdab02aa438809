"""Architecture of a family: layers between which a stream of hidden states flows."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

from zmqengine.engine.models.layers import HeadShape, Linear, Norm
from zmqengine.engine.models.ops import Ops
from zmqengine.engine.models.slot_recurrence import RecurrentMixer

Mixer: TypeAlias = HeadShape | RecurrentMixer


class Stream(NamedTuple):
    """Hidden states [tokens, dim] between two layers: `hidden` and `added`, which the next norm adds up.

    `added_norm`: of `added` alone, before. `scale` [1]: a factor of the sum, after.
    """

    hidden: Any
    added: Any = None
    added_norm: Norm | None = None
    scale: Any = None

    def summed(self, ops: Ops, norm: Norm) -> tuple[Any, Any]:
        """The sum, and it after an RMS norm."""
        if self.added is None:
            return self.hidden, ops.norm(self.hidden, norm)
        return ops.add_and_norm(self.hidden, self.added, norm, self.added_norm, self.scale)

    def total(self, ops: Ops) -> Any:
        """The sum."""
        if self.added is None:
            return self.hidden
        if self.added_norm is not None:
            # What is made beside the sum is not used: still one kernel in place of two.
            return self.summed(ops, self.added_norm)[0]
        total = self.hidden + self.added
        return total if self.scale is None else total * self.scale


class Before(NamedTuple):
    """Results of a layer before its tokens are mixed: hidden states, arguments of the mixing (queries, keys and
    values), and what it keeps for `after`."""

    hidden: Any
    mixing: tuple[Any, ...]
    kept: tuple[Any, ...] = ()


class DecoderLayer(Protocol):
    """A layer of a family, cut in two where tokens are mixed: attention is the only part that knows rows."""

    @property
    def mixer(self) -> Mixer:
        """How tokens are mixed."""
        ...

    def before(self, ops: Ops, stream: Stream, positions: Any) -> Before:
        """From hidden states to queries, keys and values."""
        ...

    def after(self, ops: Ops, before: Before, mixed: Any, beside: tuple[Any, ...]) -> Stream:
        """From what the mixing gave, [tokens, numbers], to the hidden states after the layer.

        `beside`: inputs of the layer's own, from `DecoderWeights.layer_inputs`.
        """
        ...


class LayerInputs(Protocol):
    """Inputs that each layer has of its own, by token: a named tuple of weights."""

    def compute(self, ops: Ops, tokens: Any, hidden: Any) -> list[Any]:
        """An array [tokens, ...] for each layer, from tokens and their embeddings."""
        ...


class DecoderWeights(NamedTuple):
    """All weights of a model. A tied `head` has the arrays of the `embedding`.

    `sources`: for each layer the one whose keys and values it reads; empty where each reads its own. `embedding_scale`
    multiplies embeddings; logits are bounded by a `logits_cap`, as in `HeadShape`.
    """

    embedding: Linear
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear
    embedding_scale: float = 1.0
    logits_cap: float | None = None
    sources: tuple[int, ...] = ()
    layer_inputs: LayerInputs | None = None
