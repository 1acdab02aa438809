"""KV cache memory: bytes reserved for rows, and the rest for the prefix cache, within one limit."""

from __future__ import annotations

from zmqengine.engine.interface import Engine, EngineMemory, VectorEngine
from zmqengine.errors import ConfigError
from zmqengine.worker.process.memory_pressure import Level

IMAGES_SHARE = 1 / 16
"""Share of the limit for the pixels of images; as much is for their features."""
WORKSPACE_SHARE = 0.1
"""Share of the limit kept free for a step's workspace; more where the engine's own estimate is higher."""


class MemoryLedger:
    """Bytes within one limit: weights, padding, images and workspace first, then rows, then the prefix cache.

    A row's reservation bounds its KV cache until the reservation is extended, so the sum of all reservations bounds the
    KV bytes of every step. The prefix cache gets what rows leave, up to `prompt_cache_bytes`, or up to
    `prompt_cache_share` of what weights, padding and workspace leave.

    Raises `ConfigError` when nothing is left for rows.
    """

    def __init__(
        self,
        engine: Engine | VectorEngine,
        *,
        limit_bytes: int,
        prompt_cache_share: float,
        prompt_cache_bytes: int | None = None,
    ) -> None:
        self._engine = engine
        # An engine of vectors has no KV caches.
        self._generator = engine if isinstance(engine, Engine) else None
        self._prompt_cache_share = prompt_cache_share
        self._prompt_cache_bytes = prompt_cache_bytes
        self.limit_bytes = limit_bytes
        sees = engine.info.vision is not None
        self.pixels_bytes_max = int(limit_bytes * IMAGES_SHARE) if sees else 0
        """The most bytes that pixels of images take."""
        taken = self._taken_bytes(limit_bytes)
        self.kv_bytes_max = limit_bytes - taken
        if self.kv_bytes_max < self.project_bytes(2):
            raise ConfigError(
                f"weights, padding and workspace take {taken} bytes, which leaves nothing of the memory limit of "
                f"{limit_bytes}: raise --memory-limit or take a smaller model"
            )
        self.reserved_bytes = 0
        self._room_told = -1
        self._relief_bytes: int | None = None

    def resize(self, limit_bytes: int, least_bytes: int) -> None:
        """Change the limit. It leaves at least the reserved bytes, and `least_bytes`, for rows."""
        taken = self._taken_bytes(limit_bytes)
        least_bytes = max(least_bytes, self.reserved_bytes, self.project_bytes(2))
        self.limit_bytes, self.kv_bytes_max = limit_bytes, limit_bytes - taken
        self.kv_bytes_max = max(self.kv_bytes_max, least_bytes)
        self.limit_bytes = self.kv_bytes_max + taken
        if self._generator is not None:
            self._generator.limit_memory(self.limit_bytes)

    def make_room(self, bytes_: int) -> None:
        """Take `bytes_` from rows and the prefix cache until the next `resize`; rows have reserved none of them."""
        self.kv_bytes_max -= bytes_
        assert self.reserved_bytes <= self.kv_bytes_max, "room that rows have was taken"
        self.settle()

    def relieve(self, level: Level) -> None:
        """Bound the prefix cache while the system is short of memory: to half of its present size, or to nothing."""
        if level == "normal":
            self._relief_bytes = None
        elif level == "critical":
            self._relief_bytes = 0
        elif self._relief_bytes is None:
            self._relief_bytes = self._engine.memory().prompt_cache // 2

    def fits(self, bytes_: int) -> bool:
        """Whether `bytes_` more can be reserved now."""
        return self.reserved_bytes + bytes_ <= self.kv_bytes_max

    def change(self, bytes_: int) -> None:
        """Reserve bytes; a negative number returns them."""
        self.reserved_bytes += bytes_
        assert 0 <= self.reserved_bytes <= self.kv_bytes_max, "a reservation was not asked for"

    def settle(self) -> None:
        """Limit empty rows, and then the prefix cache, to the memory that rows leave. Called before every step, so that
        the limit holds during it."""
        if self._generator is None:
            return
        most = self._prompt_cache_bytes
        if most is None:
            most = int(self.kv_bytes_max * self._prompt_cache_share)
        left_bytes = self.kv_bytes_max - self.reserved_bytes
        # Memory of allocated but empty rows is not free for the prefix cache.
        room = max(0, min(most, left_bytes - self._generator.trim(left_bytes)))
        if self._relief_bytes is not None:
            room = min(room, self._relief_bytes)
        if room != self._room_told:
            self._room_told = room
            if self._generator.limit_prompt_cache(room):
                # Parked rows leave empty ones.
                self._generator.trim(left_bytes)

    @property
    def prompt_cache_bytes(self) -> int:
        """Limit of the prefix cache, in bytes."""
        return max(0, self._room_told)

    def project_bytes(self, tokens: int) -> int:
        """Maximum bytes of KV cache of a row of `tokens`."""
        return 0 if self._generator is None else self._generator.project_bytes(tokens)

    def largest_tokens(self, tokens_max: int) -> int:
        """Maximum tokens, up to `tokens_max`, that fit in memory for a single row; at least 1."""
        low, high = 1, tokens_max
        while low < high:
            middle = (low + high + 1) // 2
            if self.project_bytes(middle) <= self.kv_bytes_max:
                low = middle
            else:
                high = middle - 1
        return low

    def _taken_bytes(self, limit_bytes: int) -> int:
        memory = self._engine.memory()
        workspace = max(memory.workspace, int(limit_bytes * WORKSPACE_SHARE))
        taken = memory.weights + workspace + self.pixels_bytes_max
        if self._generator is None:
            return taken
        return taken + self._generator.padding_bytes_max + self._generator.images_bytes_max

    def parts(self, memory: EngineMemory) -> dict[str, int]:
        """Bytes by purpose, and the limit on their sum, for metrics."""
        return {
            "weights": memory.weights,
            "kv": memory.kv - memory.padding,
            "padding": memory.padding,
            "parked": memory.parked,
            "prompt_cache": memory.prompt_cache,
            "images": memory.images,
            "workspace": memory.workspace,
            "buffers": memory.buffers,
            "limit": self.limit_bytes,
        }

    def numbers(self, memory: EngineMemory) -> dict[str, int]:
        """Bytes by the names that `status` shows."""
        return {
            "memory_limit_bytes": self.limit_bytes,
            "weights_bytes": memory.weights,
            "kv_bytes": memory.kv,
            "kv_padding_bytes": memory.padding,
            "kv_projected_bytes": self.reserved_bytes,
            "kv_bytes_max": self.kv_bytes_max,
            "parked_bytes": memory.parked,
            "prompt_cache_bytes": memory.prompt_cache,
            "prompt_cache_bytes_max": self._room_told,
            "image_features_bytes": memory.images,
            "workspace_bytes": memory.workspace,
            "cache_bytes": memory.buffers,
            "active_bytes": memory.active,
            "peak_bytes": memory.peak,
        }
