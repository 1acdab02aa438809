"""Seeing: the features of the images that rows in prefill need, computed piece by piece and kept by contents.

A row is read up to the first feature that is missing. Images are computed one at a time, those of the oldest row first,
in the order in which it needs them. Features are found by scope and hash; the least recently used go first, so each
step marks those that rows still need, the oldest row's last.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from zmqengine.engine.interface import RowImage
from zmqengine.engine.row import Row
from zmqengine.engine.vision.eye import Eye
from zmqengine.engine.vision.tower import Features, TowerJob

Name = tuple[str, bytes]
"""Scope and hash of an image."""


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
        self._piece_s = 0.0

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

    def work(self, row: Row, image: RowImage, seconds_max: float) -> None:
        """Compute pieces of an image for about `seconds_max`, one at least; 0 is for no limit."""
        name = (row.scope, image.hash)
        if self._job is None or self._job[0] != name:
            pixels = np.frombuffer(image.pixels, np.uint8).reshape(-1, self._eye.card.patch_bytes)
            self._job = name, self._eye.tower.begin(pixels, image.grids)
        job = self._job[1]
        started_s = time.perf_counter()
        passed_s = 0.0
        while not seconds_max or not passed_s or passed_s + self._piece_s <= seconds_max:
            goes_on = job.step()
            self.counts["image_pieces"] += 1
            now_s = time.perf_counter() - started_s
            self._piece_s, passed_s = now_s - passed_s, now_s
            if not goes_on:
                self._job = None
                self._keep(name, job.features())
                return

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

    def embeddings(self, inputs: mx.array, rows: Sequence[Row]) -> mx.array | None:
        """Embeddings of `inputs` [rows, width], the next tokens of each row, with features in their places.

        None if no row has a feature among them.
        """
        found = []
        for place, row in enumerate(rows):
            end = min(row.computed_tokens + inputs.shape[1], row.prefill_tokens - 1)
            for image, places in _ahead(row):
                within = np.flatnonzero((places >= row.computed_tokens) & (places < end))
                if len(within):
                    found.append((place, row, image, places[within] - row.computed_tokens, within))
        if not found:
            return None
        embedded = self._eye.embed(inputs)
        for place, row, image, columns, within in found:
            features = self._features[row.scope, image.hash].main[mx.array(within)]
            embedded[place, mx.array(columns)] = features.astype(embedded.dtype)
        return embedded


def _ahead(row: Row) -> list[tuple[RowImage, np.ndarray]]:
    """The images of a row with features that it has not read, and the places of their features in its prompt."""
    return [(image, places) for image, places in row.features if places[-1] >= row.computed_tokens]
