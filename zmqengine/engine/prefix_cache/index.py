"""Which blocks are kept, and how much of a prompt they make up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from zmqengine.engine.prefix_cache.block import StoredBlock
from zmqengine.engine.prefix_cache.keys import BLOCK_TOKENS

# Blocks that begin with the same token after the same beginning, looked at for one that shares more. So a look-up costs
# the length of the prompt however many prompts there are.
_SIBLINGS_MAX = 32


class Node:
    """A kept block and its place in the tree. `worth` and `tick` are those of `eviction.EvictionOrder`, `pins` and
    `awaiting` those of `staying.Staying`; one that `is_restored` came from a slower tier and was not used since."""

    __slots__ = ("awaiting", "block", "children", "is_kept", "is_restored", "parent", "pins", "tick", "worth")

    def __init__(self, block: StoredBlock, parent: Node | None) -> None:
        self.block = block
        self.parent = parent
        self.children = 0
        self.pins = self.awaiting = 0
        self.is_kept = True
        self.is_restored = False
        self.worth = 0.0
        self.tick = 0

    @property
    def stays(self) -> bool:
        """Whether it may not go."""
        return self.pins > 0 or self.awaiting > 0

    @property
    def is_leaf(self) -> bool:
        """Whether nothing kept goes on from it."""
        return self.children == 0

    def path(self) -> list[Node]:
        """From the beginning of the prompt to this block."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Match:
    """How a prompt begins: `whole` blocks one after the other, then the first `shared` tokens of `partial`.

    `short` is the longest short block that the prompt goes on with after the whole ones.
    `differs` holds what is kept in place of the prompt's next tokens, if anything is.
    """

    whole: list[Node] = field(default_factory=list)
    partial: Node | None = None
    shared: int = 0
    short: Node | None = None
    differs: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """How many are shared."""
        return (self.whole[-1].block.end if self.whole else 0) + self.shared

    @property
    def nodes(self) -> list[Node]:
        """All of them."""
        return self.whole if self.partial is None else [*self.whole, self.partial]


class BlockIndex:
    """Kept blocks by their keys, as a tree: no block without the one before it."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._children: dict[bytes, dict[int, dict[Node, None]]] = {}
        self.leaves = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, key: bytes) -> Node | None:
        """The block with this key, if it is kept."""
        return self._nodes.get(key)

    def match(self, keys: Sequence[bytes], tokens: np.ndarray, salt: bytes) -> Match:
        """How much of `tokens` is kept; `keys` are those of its whole blocks."""
        whole: list[Node] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            whole.append(node)
        rest = tokens[len(whole) * BLOCK_TOKENS :]
        partial, shared, short = self._closest(keys[len(whole) - 1] if whole else salt, rest)
        if partial is not None:
            following: np.ndarray | None = partial.block.tokens[shared:]
        else:
            following = self._first_child(whole[-1]) if whole else None
        is_told = shared < len(rest) and following is not None and len(following) > 0
        return Match(whole, partial, shared, short, following if is_told else None)

    def add(self, block: StoredBlock) -> Node | None:
        """Keep a block; None if the one before it is not kept, or it is here already."""
        parent = self._nodes.get(block.parent_key)
        if block.key in self._nodes or (parent is None and block.start):
            return None
        node = Node(block, parent)
        self._nodes[block.key] = node
        family = self._children.setdefault(block.parent_key, {})
        family.setdefault(int(block.tokens[0]), {})[node] = None
        self.leaves += 1
        if parent is not None:
            self.leaves -= parent.is_leaf
            parent.children += 1
        return node

    def remove(self, node: Node) -> None:
        """Drop a leaf."""
        assert node.is_leaf, "what goes on from a block goes before it"
        block = node.block
        del self._nodes[block.key]
        family = self._children[block.parent_key]
        siblings = family[int(block.tokens[0])]
        del siblings[node]
        if not siblings:
            del family[int(block.tokens[0])]
            if not family:
                del self._children[block.parent_key]
        node.is_kept = False
        self.leaves -= 1
        if node.parent is not None:
            node.parent.children -= 1
            self.leaves += node.parent.is_leaf

    def covers(self, block: StoredBlock) -> bool:
        """Whether a kept block after the same beginning holds all its tokens."""
        return self._closest(block.parent_key, block.tokens)[1] == len(block.tokens)

    def stand_ins(self, node: Node) -> list[Node]:
        """Shorter blocks after the same beginning whose tokens this one holds as well. They are leaves."""
        block = node.block
        siblings = self._children[block.parent_key][int(block.tokens[0])]
        return [
            other
            for other in siblings
            if len(other.block.tokens) < len(block.tokens)
            and np.array_equal(other.block.tokens, block.tokens[: len(other.block.tokens)])
        ]

    def clear(self) -> None:
        """Drop everything."""
        for node in self._nodes.values():
            node.is_kept = False
        self._nodes.clear()
        self._children.clear()
        self.leaves = 0

    def _closest(self, key: bytes, tokens: np.ndarray) -> tuple[Node | None, int, Node | None]:
        """The block after the one of `key` that begins with most of `tokens`, and how many; and the longest one that
        has no others."""
        best: Node | None = None
        short: Node | None = None
        most = longest = 0
        siblings = self._children.get(key, {}).get(int(tokens[0]), {}) if len(tokens) else {}
        for _, node in zip(range(_SIBLINGS_MAX), reversed(siblings), strict=False):
            shared = shared_tokens(node.block.tokens, tokens)
            if shared > most:
                best, most = node, shared
            if longest < shared == len(node.block.tokens):
                short, longest = node, shared
        return best, most, short

    def _first_child(self, node: Node) -> np.ndarray | None:
        family = self._children.get(node.block.key)
        if not family:
            return None
        return next(iter(next(iter(family.values())))).block.tokens


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens at the beginning are the same."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
