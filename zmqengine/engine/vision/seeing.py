"""Seeing: the features of the images that rows in prefill need, computed piece by piece and kept by contents.

A row is read up to the first feature that is missing. Images are computed one at a time, those of the oldest row first,
in the order in which it needs them. Features are found by scope and hash; the least recently used go first, so each
step marks the ones still needed, the oldest row's last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from zmqengine.engine.interface import RowImage
from zmqengine.engine.row import Row
from zmqengine.engine.vision.eye import Eye
from zmqengine.engine.vision.tower import WHOLE, Features, TowerJob

Name = tuple[str, bytes]
"""Scope and hash of an image."""

# Patches of the first piece, on any machine, as many as a prefill chunk has tokens (step/pacing.py, TOKENS_START); and
# the fewest of a piece (TOKENS_MIN there). They count by their products: a patch of a large image, which attends to all
# others, is many.
_PATCHES_START = 256
_PATCHES_MIN = 32
# Products, attention and the merge differ by what the device is good at, and take turns: the slowest of the last pieces
# counts, for about a layer.
_KEPT = 0.95


class Seeing:
    """Features within `bytes_max`, or of the largest two images if that is more, and the image that is computed now.

    `counts`: events since the start, for `status`.
    """

    def __init__(self, eye: Eye, bytes_max: int, patches_max: int) -> None:
        self.bytes = 0
        self.peak_bytes = eye.tower.peak_bytes(eye.grids(patches_max))
        self.counts = {"images_seen": 0, "image_pieces": 0}
        self._eye = eye
        self._bytes_asked = bytes_max
        self._largest_bytes = 0
        self._features: OrderedDict[Name, Features] = OrderedDict()
        self._job: tuple[Name, TowerJob] | None = None
        # Seconds of a patch in a layer, and patches of the largest piece that was timed.
        self._patch_s = 0.0
        self._room = _PATCHES_START

    # --- what rows wait for ---

    def readable(self, row: Row) -> int:
        """Tokens of a row, from the next one on, that can be read now."""
        for image, places in _ahead(row):
            if (row.scope, image.hash) not in self._features:
                return min(row.remaining, max(0, int(places[0]) - row.computed_tokens))
        return row.remaining

    def wanted(self, rows: Sequence[Row]) -> tuple[Row, RowImage] | None:
        """The image to compute next: the first that the oldest of `rows` misses."""
        for row in reversed(rows):
            for image, _ in reversed(_ahead(row)):
                if (name := (row.scope, image.hash)) in self._features:
                    self._features.move_to_end(name)
        for row in rows:
            for image, _ in _ahead(row):
                if (row.scope, image.hash) not in self._features:
                    return row, image
        return None

    # --- the tower ---

    def work(self, row: Row, image: RowImage, seconds_max: float, clock: Callable[[], float]) -> None:
        """Compute pieces of an image for about `seconds_max` of `clock`, one at least; 0 is for no limit.

        Like a chunk of a prompt a piece is at most twice as large as one that was timed.
        """
        name = (row.scope, image.hash)
        if self._job is None or self._job[0] != name:
            pixels = np.frombuffer(image.pixels, np.uint8).reshape(-1, self._eye.card.patch_bytes)
            self._job = name, self._eye.tower.begin(pixels, image.grids)
        job = self._job[1]
        before_s = clock()
        end_s = before_s + seconds_max
        allowed = self._allowed(seconds_max)
        while True:
            patches = job.step(max(_PATCHES_MIN, allowed) if seconds_max else WHOLE)
            self.counts["image_pieces"] += 1
            if not patches:
                self._job = None
                self._keep(name, job.features())
                return
            now_s = clock()
            self._patch_s = max((now_s - before_s) / patches, _KEPT * self._patch_s)
            self._room = max(self._room, 2 * patches)
            before_s = now_s
            allowed = self._allowed(end_s - now_s)
            if seconds_max and allowed < _PATCHES_MIN:
                return

    def _allowed(self, seconds: float) -> int:
        """Patches that a piece of these seconds may have."""
        return min(self._room, int(seconds / self._patch_s)) if self._patch_s else self._room

    def rest(self) -> None:
        """Drop the image that is computed, as no row needs it any more."""
        self._job = None

    def _keep(self, name: Name, features: Features) -> None:
        self.counts["images_seen"] += 1
        self._features[name] = features
        self.bytes += features.nbytes
        self._largest_bytes = max(self._largest_bytes, features.nbytes)
        while self.bytes > max(self._bytes_asked, 2 * self._largest_bytes):
            self.bytes -= self._features.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Forget all features: they may be what failed."""
        self._job = None
        self._features.clear()
        self.bytes = 0

    # --- what rows read ---

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [rows, width, dim] of tokens [rows, width] by the text model."""
        return self._eye.embed(tokens)

    @property
    def deep_layers(self) -> int:
        """Layers behind which deep features are added."""
        return self._eye.tower.deep_layers

    def features_of(
        self, row: Row, start: int, count: int
    ) -> list[tuple[np.ndarray, mx.array, list[mx.array]]]:
        """Features among `count` tokens of a row from `start` on: their columns, numbers [features, dim], and those to
        add behind each of the first layers."""
        found = []
        for image, places in row.features:
            within = np.flatnonzero((places >= start) & (places < start + count))
            if len(within):
                features = self._features[row.scope, image.hash]
                index = mx.array(within)
                deep = [features.deep[number][index] for number in range(self.deep_layers)]
                found.append((places[within] - start, features.main[index], deep))
        return found


def _ahead(row: Row) -> list[tuple[RowImage, np.ndarray]]:
    """The images of a row with features that it has not read, and the places of their features in its prompt."""
    return [(image, places) for image, places in row.features if places[-1] >= row.computed_tokens]
