"""The adapters that rows may have now: loaded and unloaded between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zmqengine.engine.adapter_files import AdapterFiles
from zmqengine.engine.adapters.lora_deltas import Adapters
from zmqengine.engine.adapters.lora_files import Lora, lora_of
from zmqengine.engine.models.slot_runner import SlotRunner

MakeRoom = Callable[[int], None]
"""Called with a number of bytes before as many are allocated; raises if there is no room for them."""


class LoadedAdapters:
    """The adapters of a runner. Raises `ModelLoadError` for those that its model cannot have."""

    def __init__(self, runner: SlotRunner, loras: Sequence[Lora] = ()) -> None:
        self._runner = runner
        self._adapters = Adapters(runner.decoder.weights)
        if loras:
            adapters = self._adapters
            for lora in loras:
                adapters = adapters.added(lora)
            self._set(adapters)

    @property
    def digests(self) -> Mapping[str, str]:
        """Digests of their files, by name."""
        return self._adapters.digests

    @property
    def bytes(self) -> int:
        """Bytes of their factors."""
        return self._adapters.bytes

    def load(self, files: AdapterFiles, make_room: MakeRoom) -> None:
        """Add an adapter under a new name. The factors of all are stacked anew: until that is done there are two of
        each, for which `make_room` is asked. After an error they are as before."""
        adapters = self._adapters.added(lora_of(files))
        make_room(adapters.bytes)
        self._set(adapters)

    def unload(self, name: str) -> None:
        """Remove an adapter that no row has."""
        self._set(self._adapters.without(name))

    def _set(self, adapters: Adapters) -> None:
        self._adapters = adapters.computed()
        self._runner.adapt(self._adapters)
