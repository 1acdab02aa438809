"""Index of the prefix cache: a tree of blocks by the hashes that name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS, StoredBlock

# Siblings that start with the same token and are compared with a prompt, the newest first. The bound makes a lookup
# cost the length of the prompt, however many prompts are cached.
_SIBLINGS_MAX = 32


class Node:
    """A block in the tree.

    `holds`: references of pins and waiting requests; a held block is not evicted. `worth`, `tick`: its position in
    `eviction.EvictionOrder`. `is_restored`: restored from a lower tier and not hit since.
    """

    __slots__ = ("block", "children", "holds", "is_kept", "is_restored", "parent", "tick", "worth")

    def __init__(self, block: StoredBlock, parent: Node | None) -> None:
        self.block = block
        self.parent = parent
        self.children = 0
        self.holds = 0
        self.is_kept = True
        self.is_restored = False
        self.worth = 0.0
        self.tick = 0

    @property
    def is_leaf(self) -> bool:
        """Whether no cached block follows it."""
        return self.children == 0

    def path(self) -> list[Node]:
        """The chain from the first block of the prompt to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Match:
    """Cached prefix of a prompt: `whole` blocks, then the first `shared` tokens of `partial`.

    `short`: the longest block after the whole ones that is shorter than the rest of the prompt and equal to it.
    `differs`: cached tokens that differ from the prompt's next ones, if there are any.
    """

    whole: list[Node] = field(default_factory=list)
    partial: Node | None = None
    shared: int = 0
    short: Node | None = None
    differs: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Length of the prefix."""
        return (self.whole[-1].block.end if self.whole else 0) + self.shared

    @property
    def nodes(self) -> list[Node]:
        """Blocks of the prefix."""
        return self.whole if self.partial is None else [*self.whole, self.partial]


class BlockIndex:
    """Blocks by key, as a tree: a block is present only with its parent."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        # Parent's key -> first token -> siblings, the oldest first.
        self._children: dict[bytes, dict[int, dict[Node, None]]] = {}
        self.leaves = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node | None:
        """The block of this key. One operation on a dict: any thread may call it."""
        return self._nodes.get(key)

    def following(self, key: bytes) -> list[Node]:
        """Blocks whose parent is `key`."""
        return [node for siblings in self._children.get(key, {}).values() for node in siblings]

    def match(self, keys: Sequence[bytes], tokens: np.ndarray, salt: bytes) -> Match:
        """The longest cached prefix of `tokens`; `keys` are the keys of its whole blocks."""
        whole: list[Node] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            whole.append(node)
        rest = tokens[len(whole) * BLOCK_TOKENS :]
        partial, shared, short = self._closest(keys[len(whole) - 1] if whole else salt, rest)
        following: np.ndarray | None = None
        if partial is not None:
            following = partial.block.tokens[shared:]
        elif whole and (after := self.following(whole[-1].block.key)):
            following = after[0].block.tokens
        is_told = shared < len(rest) and following is not None and len(following) > 0
        return Match(whole, partial, shared, short, following if is_told else None)

    def add(self, block: StoredBlock) -> Node | None:
        """Add a block; None if it is present or its parent is not."""
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
        """Remove a leaf."""
        assert node.is_leaf, "a block is removed after its children"
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
        """Whether a sibling holds all tokens of the block."""
        return self._closest(block.parent_key, block.tokens)[1] == len(block.tokens)

    def covered_by(self, node: Node) -> list[Node]:
        """Shorter siblings whose tokens are the first ones of this block. They are leaves."""
        block = node.block
        siblings = self._children[block.parent_key][int(block.tokens[0])]
        return [
            other
            for other in siblings
            if len(other.block.tokens) < len(block.tokens)
            and np.array_equal(other.block.tokens, block.tokens[: len(other.block.tokens)])
        ]

    def clear(self) -> None:
        for node in self._nodes.values():
            node.is_kept = False
        self._nodes.clear()
        self._children.clear()
        self.leaves = 0

    def _closest(self, key: bytes, tokens: np.ndarray) -> tuple[Node | None, int, Node | None]:
        """The child of `key` that shares most of `tokens`, how many it shares, and the longest child that has no
        other tokens."""
        best: Node | None = None
        short: Node | None = None
        most = longest = 0
        siblings = self._children.get(key, {}).get(int(tokens[0]), {}) if len(tokens) else {}
        newest = list(islice(reversed(siblings), _SIBLINGS_MAX))
        for node, shared in zip(newest, _shared(newest, tokens), strict=True):
            if shared > most:
                best, most = node, shared
            if longest < shared == len(node.block.tokens):
                short, longest = node, shared
        return best, most, short


def _shared(nodes: Sequence[Node], tokens: np.ndarray) -> list[int]:
    """How many of its tokens each node shares with the first of `tokens`, in one comparison."""
    if not nodes:
        return []
    lengths = [min(len(node.block.tokens), len(tokens)) for node in nodes]
    width = max(lengths)
    differs = np.ones((len(nodes), width + 1), bool)
    known = np.zeros((len(nodes), width), np.uint32)
    for row, node, length in zip(known, nodes, lengths, strict=True):
        row[:length] = node.block.tokens[:length]
    np.not_equal(known, tokens[:width], out=differs[:, :width])
    return [min(each) for each in zip(differs.argmax(axis=1).tolist(), lengths, strict=True)]
