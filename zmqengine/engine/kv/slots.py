"""Slots: where rows of our own decoder keep their keys and values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from zmqengine.checkpoint.cache_shape import SLOT_SIZES_MAX, SLOT_TOKENS_MIN, slot_tokens
from zmqengine.engine.kv.eight_bits import PER_WORD, PackedColumns, by_part

CAPACITY_MIN = SLOT_TOKENS_MIN
POOLS_MAX = SLOT_SIZES_MAX
COPIED_TOKENS = 1024
"""Maximum tokens of a row copied at once."""


class KVShape(NamedTuple):
    """Keys and values of one layer: `heads` of `dim` numbers a token, in 8 bits where they have a `group_size`.

    Without values of their own these are a part of keys.
    """

    heads: int
    dim: int
    dtype: mx.Dtype
    group_size: int | None = None
    has_values: bool = True

    @property
    def parts(self) -> list[tuple[str, KVShape]]:
        """The arrays that hold them, by what their names end in."""
        if self.group_size is None:
            return [("", self)]
        of_groups = KVShape(self.heads, self.dim // self.group_size, self.dtype)
        numbers = KVShape(self.heads, self.dim // PER_WORD, mx.uint32)
        return [(" numbers", numbers), (" scales", of_groups), (" biases", of_groups)]

    @property
    def wide_bytes(self) -> int:
        """Bytes of the keys and values of one token with all bits."""
        return (2 if self.has_values else 1) * self.heads * self.dim * self.dtype.size

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return sum(part.wide_bytes for _, part in self.parts)

    @property
    def array_bytes(self) -> int:
        """Bytes of the keys of one token."""
        return self.token_bytes // (2 if self.has_values else 1)


ArrayNames = Sequence[tuple[int, str]]
"""Arrays of a pool: the layer of each, and "keys" or "values", of columns in 8 bits with the part behind it."""


def grouped(shapes: Sequence[KVShape]) -> dict[KVShape, list[tuple[int, str]]]:
    """Arrays of the same shape, which are read and written together."""
    groups: dict[KVShape, list[tuple[int, str]]] = {}
    for layer, shape in enumerate(shapes):
        for end, part in shape.parts:
            groups.setdefault(part, []).append((layer, "keys" + end))
            if shape.has_values:
                groups[part].append((layer, "values" + end))
    return groups


class SlotStorage(Protocol):
    """Arrays of slots on one device."""

    on_mlx: bool
    """Whether the arrays are MLX's, which counts their bytes."""
    writes_in_place: bool
    """Whether `write` changes an array that a step in flight may read, unknown to MLX."""
    slots_least: int
    """Slots of a new pool."""

    def zeros(self, shape: Sequence[int], dtype: mx.Dtype) -> Any:
        """A new array of zeros."""
        ...

    def joined(self, first: Any, second: Any) -> Any:
        """A new array of the slots of both."""
        ...

    def chosen(self, array: Any, slots: Sequence[int]) -> Any:
        """A new array of some slots."""
        ...

    def read(self, arrays: Sequence[Any], index: int, start: int, end: int) -> mx.array:
        """A copy of columns of slot `index` of arrays of one shape, [arrays, 1, heads, tokens, dim]."""
        ...

    def write(self, arrays: Sequence[Any], index: int, start: int, columns: mx.array) -> None:
        """Write columns of slot `index` of arrays of one shape, from column `start` on; they are as those of `read`."""
        ...

    def clear(self, arrays: Sequence[Any], index: int) -> None:
        """Fill slot `index` of arrays of one shape with zeros."""
        ...


class MlxStorage:
    """`SlotStorage` by documented MLX operations: in place where nothing else refers to the array."""

    on_mlx = True
    writes_in_place = False
    slots_least = 1

    def zeros(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """See `SlotStorage`."""
        return mx.zeros(list(shape), dtype)

    def joined(self, first: mx.array, second: mx.array) -> mx.array:
        """See `SlotStorage`. Computed at once: both exist until then."""
        joined = mx.concatenate([first, second])
        mx.eval(joined)
        return joined

    def chosen(self, array: mx.array, slots: Sequence[int]) -> mx.array:
        """See `SlotStorage`. Computed at once: both exist until then."""
        chosen = mx.concatenate([array[slot : slot + 1] for slot in slots])
        mx.eval(chosen)
        return chosen

    def read(self, arrays: Sequence[mx.array], index: int, start: int, end: int) -> mx.array:
        """See `SlotStorage`."""
        return mx.stack([array[index : index + 1, :, start:end] for array in arrays])

    def write(self, arrays: Sequence[mx.array], index: int, start: int, columns: mx.array) -> None:
        """See `SlotStorage`."""
        stop = start + columns.shape[-2]
        for array, array_columns in zip(arrays, columns, strict=True):
            array[index : index + 1, :, start:stop] = array_columns

    def clear(self, arrays: Sequence[mx.array], index: int) -> None:
        """See `SlotStorage`."""
        for array in arrays:
            array[index] = 0


class Carry(NamedTuple):
    """The hidden state of a row's last computed token, for the head of a model that has one.

    `states` [tokens, dim], of which the row's begin at `first`. Of a verify block the last `accepted` one counts; where
    none is, the row stays `before` it.
    """

    states: mx.array
    first: int
    accepted: Callable[[], int] | None = None
    before: tuple[mx.array, int] | None = None

    def place(self) -> tuple[mx.array, int] | None:
        """The array that has the state, and its index; None for a row that had none before an abandoned block."""
        accepted = 1 if self.accepted is None else self.accepted()
        return (self.states, self.first + accepted - 1) if accepted else self.before


class Slot:
    """A row's place in a pool. Its tokens are in columns 0 on, in order; it never moves while a step may read it."""

    __slots__ = ("carry", "index", "pool", "state", "states")

    def __init__(self, pool: SlotPool, index: int) -> None:
        self.pool = pool
        self.index = index
        self.carry: Carry | None = None
        self.states: StatePool | None = None
        self.state = 0
        """Index of the row's recurrent states in `states`, where the model has such."""

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.pool.capacity

    @property
    def bytes(self) -> int:
        """Bytes of the slot."""
        return self.pool.slot_bytes + (0 if self.states is None else self.states.slot_bytes)

    def park(self) -> None:
        """Nothing: the row stays where it is."""

    def close(self, *, is_finite: bool) -> None:
        """Give the slot back. Unless its numbers are known to be finite, they are cleared before its next use."""
        self.pool.give_back(self, is_finite=is_finite)
        if self.states is not None:
            self.states.give_back(self.state)


class ArrayShape(NamedTuple):
    """One row's part of an array [slots, ...]."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def byte_count(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.size


class HeldBlock(Protocol):
    """A verify block that states do not contain yet: how many of its tokens count is known once it has landed."""

    def apply(self) -> None:
        """Bring the states of all its rows up to their accepted tokens."""
        ...

    def state_of(self, index: int) -> list[mx.array] | None:
        """The states of one row after its accepted tokens, in order; None if the row is not in the block."""
        ...

    def drop(self, index: int) -> None:
        """Forget a row."""
        ...


class StatePool:
    """Recurrent states of all rows: arrays [slots, ...] of each recurrent layer, whatever the lengths of the rows.

    A step replaces the arrays, or a kernel writes into them. Those of a row before its first token are never read.
    """

    def __init__(self, layers: Sequence[Sequence[ArrayShape]]) -> None:
        self.layers = layers
        self.arrays: list[list[Any]] = []
        self.block: HeldBlock | None = None
        self.views: Any = None
        """What a back-end derives from the arrays; None once they are replaced."""
        self.slot_bytes = sum(each.byte_count for layer in layers for each in layer)
        self._taken: list[bool] = []

    @property
    def rows(self) -> int:
        """Slots of the arrays."""
        return 0 if not self.arrays else int(self.arrays[0][0].shape[0])

    @property
    def used(self) -> int:
        """Slots with a row."""
        return sum(self._taken)

    def take(self) -> int:
        """The free index that is least."""
        free = next((index for index, taken in enumerate(self._taken) if not taken), len(self._taken))
        if free == len(self._taken):
            self._taken.append(False)
        self._taken[free] = True
        if free >= self.rows:
            self._grow()
        return free

    def give_back(self, index: int) -> None:
        """Free an index. Without rows the arrays are freed."""
        self._taken[index] = False
        if self.block is not None:
            self.block.drop(index)
        if not any(self._taken):
            self._taken, self.arrays, self.block, self.views = [], [], None, None

    def settle(self) -> None:
        """Bring all states up to the accepted tokens of the last verify block."""
        if self.block is not None:
            self.block.apply()
            self.block = None

    def copy(self, index: int) -> list[mx.array]:
        """Copies of the states of a row, [1, ...], after its accepted tokens."""
        held = None if self.block is None else self.block.state_of(index)
        if held is not None:
            return held
        # A look-up, since MLX makes a slice of most of an array without a copy, and kernels may write into that.
        return [array[mx.array([index])] for layer in self.arrays for array in layer]

    def restore(self, index: int, arrays: Sequence[Any]) -> None:
        """Set the states of a row."""
        self.views = None
        states = iter(arrays)
        for layer in self.arrays:
            for array in layer:
                array[index : index + 1] = next(states)

    def trim(self, slots: Sequence[Slot], count: int) -> None:
        """Leave room for `count` rows, those of `slots` among them, in new arrays."""
        self.settle()
        taken = [slot.state for slot in slots]
        order = [*taken, *(index for index in range(self.rows) if index not in taken)][:count]
        for layer in self.arrays:
            for number, array in enumerate(layer):
                layer[number] = MlxStorage().chosen(array, order)
        self._taken = [True] * len(slots)
        for index, slot in enumerate(slots):
            slot.state = index

    def _grow(self) -> None:
        """Add half as many slots again."""
        self.settle()
        self.views = None
        more = max(1, self.rows // 2)
        fresh = [[mx.zeros((more, *each.shape), each.dtype) for each in layer] for layer in self.layers]
        if self.arrays:
            fresh = [
                [mx.concatenate(list(pair)) for pair in zip(*both, strict=True)]
                for both in zip(self.arrays, fresh, strict=True)
            ]
        self.arrays = fresh


class SlotPool:
    """All slots of one capacity: `keys` and `values` of each layer, [slots, heads, capacity, dim] or in 8 bits."""

    def __init__(self, shapes: Sequence[KVShape], capacity: int, storage: SlotStorage) -> None:
        self.capacity = capacity
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.slots: list[Slot | None] = []
        self.slot_bytes = capacity * sum(each.token_bytes for each in shapes)
        self.views: Any = None
        """What a back-end derives from the arrays; None once they are replaced."""
        self._shapes = shapes
        self._storage = storage
        # Slots whose last row may have left numbers that are not finite.
        self._unclean: set[int] = set()
        self._touched = 0

    @property
    def rows(self) -> int:
        """Slots of the arrays."""
        if not self.keys:
            return 0
        first = self.keys[0]
        return int((first.numbers if isinstance(first, PackedColumns) else first).shape[0])

    @property
    def used(self) -> int:
        """Slots with a row."""
        return sum(slot is not None for slot in self.slots)

    @property
    def bytes(self) -> int:
        """Bytes of the arrays, without those of the host that were never written."""
        return self.slot_bytes * (self.rows if self._storage.on_mlx else self._touched)

    def arrays(self, names: ArrayNames) -> list[Any]:
        """The arrays of these names."""
        return [self._array(layer, *name.split()) for layer, name in names]

    def _array(self, layer: int, name: str, part: str = "") -> Any:
        array = (self.keys if name == "keys" else self.values)[layer]
        return getattr(array, part) if part else array

    def take(self, ahead_bytes: int) -> Slot:
        """The free slot with the least index; attention covers all up to the last one in use.

        A pool without one grows, by at most `ahead_bytes` more than that.
        """
        free = next((index for index, slot in enumerate(self.slots) if slot is None), len(self.slots))
        if free == len(self.slots):
            self.slots.append(None)
        if free >= self.rows:
            self._grow(ahead_bytes)
        self._touched = max(self._touched, free + 1)
        slot = self.slots[free] = Slot(self, free)
        if free in self._unclean:
            self._unclean.remove(free)
            for names in grouped(self._shapes).values():
                self._storage.clear(self.arrays(names), free)
        return slot

    def give_back(self, slot: Slot, *, is_finite: bool) -> None:
        """Free a slot. A pool without rows frees its arrays."""
        assert self.slots[slot.index] is slot, "a slot is given back once"
        self.slots[slot.index] = None
        if not is_finite:
            self._unclean.add(slot.index)
        while self.slots and self.slots[-1] is None:
            self.slots.pop()
        if not self.slots:
            self.keys, self.values = [], []
            self._touched = 0
            self._unclean.clear()
            self.replaced()

    def trim(self, count: int) -> None:
        """Leave `count` slots, at least one for each row, in new arrays. Rows move from the others to free ones."""
        assert count >= max(1, self.used), "every row has a slot"
        order = sorted(
            range(self.rows), key=lambda index: index >= len(self.slots) or self.slots[index] is None
        )
        order = order[:count]
        for arrays in (self.keys, self.values):
            for layer, array in enumerate(arrays):
                arrays[layer] = by_part(lambda part: self._storage.chosen(part, order), array)
        self._unclean = {number for number, index in enumerate(order) if index in self._unclean}
        self.slots = [self.slots[index] for index in order[: self.used]]
        for number, slot in enumerate(self.slots):
            assert slot is not None, "rows come first"
            slot.index = number
        self._touched = min(self._touched, count)
        self.replaced()

    def replaced(self) -> None:
        """Note that arrays were replaced."""
        self.views = None

    def _grow(self, ahead_bytes: int) -> None:
        """Add half as many slots again, if memory allows: at most a third is unused, and each is copied twice on
        average."""
        more = max(self._storage.slots_least, self.rows // 2)
        if self._storage.on_mlx:
            more = min(more, 1 + max(0, ahead_bytes) // self.slot_bytes)

        def fresh(shape: KVShape, name: str) -> Any:
            # An array of no width, where values are a part of keys.
            is_kept = name == "keys" or shape.has_values
            parts = [
                self._storage.zeros((more, part.heads, self.capacity, part.dim if is_kept else 0), part.dtype)
                for _, part in shape.parts
            ]
            return parts[0] if shape.group_size is None else PackedColumns(*parts)

        for name, arrays in (("keys", self.keys), ("values", self.values)):
            if not arrays:
                arrays += [fresh(shape, name) for shape in self._shapes]
            else:
                for layer, shape in enumerate(self._shapes):
                    arrays[layer] = by_part(self._storage.joined, arrays[layer], fresh(shape, name))
        self.replaced()


class Slots:
    """The slots of all rows, in pools of few capacities: powers of two, and that of a full context.

    A row that outgrows its slot moves to a larger one, alone.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        context_tokens: int,
        storage: SlotStorage | None = None,
        states: Sequence[Sequence[ArrayShape]] = (),
        carry: ArrayShape | None = None,
    ) -> None:
        self.shapes = list(shapes)
        self.carry = carry
        """The hidden state that a row carries from step to step, where the model has a head."""
        self.states = StatePool(states) if states else None
        self.storage: SlotStorage = storage or MlxStorage()
        self.pools: dict[int, SlotPool] = {}
        self._context_tokens = context_tokens
        self._token_bytes = sum(each.token_bytes for each in shapes)
        self.ahead_bytes = 1 << 60
        """Bytes that pools may allocate for rows to come."""

    def capacity(self, tokens: int) -> int:
        """The capacity of the slot for a row of `tokens`."""
        return slot_tokens(tokens, self._context_tokens)

    def project_bytes(self, tokens: int) -> int:
        """Bytes of the slot of a row of `tokens`."""
        return self.capacity(tokens) * self._token_bytes + (
            0 if self.states is None else self.states.slot_bytes
        )

    def take(self, tokens: int) -> Slot:
        """A free slot for a row of `tokens`."""
        slot = self._take(tokens)
        if self.states is not None:
            slot.states, slot.state = self.states, self.states.take()
        return slot

    def _take(self, tokens: int) -> Slot:
        capacity = self.capacity(tokens)
        if capacity not in self.pools:
            self.pools[capacity] = SlotPool(self.shapes, capacity, self.storage)
        rows = self.pools[capacity].rows
        slot = self.pools[capacity].take(self.ahead_bytes)
        self.ahead_bytes -= max(0, self.pools[capacity].rows - rows - 1) * slot.pool.slot_bytes
        return slot

    def move(self, slot: Slot, tokens: int, computed: int) -> Slot:
        """Copy the first `computed` tokens of a slot into one for `tokens`, and give it back."""
        larger = self._take(tokens)
        for names in grouped(self.shapes).values():
            # In pieces, since each exists twice.
            for start in range(0, computed, COPIED_TOKENS):
                columns = self.copy(slot, names, start, min(start + COPIED_TOKENS, computed))
                self.restore(larger, names, columns, start)
                if self.storage.on_mlx and not self.storage.writes_in_place:
                    # Before the next write to the smaller slot's pool, which MLX would copy while this reads it.
                    mx.eval(larger.pool.arrays(names))
        slot.pool.give_back(slot, is_finite=False)
        larger.states, larger.state, larger.carry = slot.states, slot.state, slot.carry
        return larger

    @property
    def byte_count(self) -> int:
        """Bytes of slots in use."""
        states = 0 if self.states is None else self.states.slot_bytes * self.states.used
        return states + sum(pool.slot_bytes * pool.used for pool in self.pools.values())

    @property
    def empty_bytes(self) -> int:
        """Bytes of allocated slots without a row."""
        states = 0 if self.states is None else self.states.slot_bytes * self.states.rows
        return states + sum(pool.bytes for pool in self.pools.values()) - self.byte_count

    @property
    def largest_array_bytes(self) -> int:
        """Bytes of the largest array: pools grow and shrink array by array."""
        token_bytes = max(each.array_bytes for each in self.shapes)
        return max((pool.bytes for pool in self.pools.values()), default=0) * token_bytes // self._token_bytes

    @property
    def widened_bytes(self) -> int:
        """Bytes of the columns of a layer in 8 bits, with all bits for a piece of a prompt."""
        token_bytes = max((each.wide_bytes for each in self.shapes if each.group_size), default=0)
        return token_bytes * max(self.pools, default=0)

    def unneeded_bytes(self, waiting: Sequence[int]) -> int:
        """Bytes of allocated slots that neither a row has nor one that waits, of as many tokens, will take."""
        coming = Counter(self.capacity(tokens) for tokens in waiting)
        states = self.states
        unneeded_bytes = sum(
            max(0, pool.bytes - (pool.used + coming[pool.capacity]) * pool.slot_bytes)
            for pool in self.pools.values()
        )
        if states is not None:
            unneeded_bytes += max(0, states.rows - states.used - len(waiting)) * states.slot_bytes
        return unneeded_bytes

    def trim(self, waiting: Sequence[int]) -> None:
        """Free these slots."""
        coming = Counter(self.capacity(tokens) for tokens in waiting)
        for pool in self.pools.values():
            count = max(1, pool.used + coming[pool.capacity])
            if pool.rows > count:
                pool.trim(count)
        if self.states is not None:
            slots = [slot for pool in self.pools.values() for slot in pool.slots if slot is not None]
            count = max(1, len(slots) + len(waiting))
            if self.states.rows > count:
                self.states.trim(slots, count)

    def clear(self) -> None:
        """Drop all slots and their arrays."""
        self.pools.clear()
        if self.states is not None:
            self.states = StatePool(self.states.layers)

    # --- blocks of the prefix cache ---

    def copy(self, slot: Slot, names: ArrayNames, start: int, end: int) -> mx.array:
        """A copy of tokens `start` to `end` of arrays of one shape, [arrays, 1, heads, tokens, dim]."""
        return self.storage.read(slot.pool.arrays(names), slot.index, start, end)

    def restore(self, slot: Slot, names: ArrayNames, columns: mx.array, start: int = 0) -> None:
        """Write columns of arrays of one shape, as `copy` gives them, from column `start` on."""
        self.storage.write(slot.pool.arrays(names), slot.index, start, columns)
