"""Rows that see: the same tokens as from one plain call, whatever shares the engine, and bounded work between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.engines import Run, finish, greedy, once, step
from tests.support.eyes import (
    CARD,
    build_muse,
    greedy_with_images,
    image_of,
    make_seeing_engine,
    request_of,
    tower,
)
from tests.support.images import Picture, prompt_of
from tests.support.models import build_model
from zmqengine.engine.image_names import named
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.row import Row
from zmqengine.engine.vision.eye import Eye
from zmqengine.engine.vision.seeing import Seeing
from zmqengine.engine.vision.tower import Features
from zmqengine.engine.vision.towers.cutting import MERGE_SHARE

PICTURE = Picture(CARD, ((6, 10),))
CHANGED = Picture(CARD, ((6, 10),), change=50)
SMALL = Picture(CARD, ((2, 4),), seed=3)
TWO = ([5, 6, 7], PICTURE, [9] * 40, SMALL, [8, 8])
ONE = ([4] * 30, CHANGED, [1, 2])


class WatchedTower:
    """A tower of `pieces` pieces an image that notes which images begin, and may fail."""

    deep_layers = 0
    parameter_bytes = 0

    def __init__(self, pieces: int = 1) -> None:
        self.pieces = pieces
        self.begun: list[bytes] = []
        self.fails_at: int | None = None

    def begin(self, pixels: np.ndarray, grids: Any) -> Any:
        self.begun.append(pixels.tobytes())
        return _WatchedJob(self, tower().begin(pixels, grids))

    def peak_bytes(self, grids: Any) -> int:
        return tower().peak_bytes(grids)


class TimedTower:
    """A tower on a machine whose clock counts patches."""

    deep_layers = 0
    parameter_bytes = 0

    def __init__(self, patch_s: float) -> None:
        self.patch_s = patch_s
        self.now_s = 0.0

    def begin(self, pixels: np.ndarray, grids: Any) -> Any:
        return _TimedJob(self, tower().begin(pixels, grids))

    def peak_bytes(self, grids: Any) -> int:
        return tower().peak_bytes(grids)


class _TimedJob:
    def __init__(self, owner: TimedTower, job: Any) -> None:
        self.owner, self.features = owner, job.features
        self.job = job

    def step(self, patches_max: int = 0) -> int:
        made: int = self.job.step(patches_max)
        self.owner.now_s += made * self.owner.patch_s
        return made


class _WatchedJob:
    def __init__(self, owner: WatchedTower, job: Any) -> None:
        self.owner, self.job, self.left = owner, job, owner.pieces

    def step(self, patches_max: int = 0) -> int:
        if self.owner.fails_at == len(self.owner.begun):
            raise RuntimeError("the tower fails")
        self.left -= 1
        if self.left <= 0:
            while self.job.step():
                pass
        return self.left > 0

    def features(self) -> Features:
        found: Features = self.job.features()
        return found


def test_the_pieces_of_muse_spark_are_its_one_call() -> None:
    """Layer by layer and image by image, to the last bit of what mlx-lm computes at once."""
    muse = once(build_model, "muse", build_muse)
    for picture in (PICTURE, SMALL, Picture(CARD, ((40, 12),), seed=9)):
        pixels = np.frombuffer(picture.pixels, np.uint8).reshape(-1, CARD.patch_bytes)
        job = tower().begin(pixels, picture.grids)
        while job.step():
            pass
        whole = muse.encode_image(image_of(picture))
        assert mx.array_equal(job.features().main, whole)
        cut = tower().begin(pixels, picture.grids)
        while made := cut.step(7):
            # The least that is merged is a row of cells.
            assert made <= max(7, picture.grids[0][1] * CARD.merge * MERGE_SHARE)
        assert mx.allclose(cut.features().main, whole, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("patch_s", [1e-6, 1e-3, 1e-2])
def test_pieces_of_an_image_follow_the_time_of_its_patches(patch_s: float) -> None:
    """A fast machine computes many layers at once, a slow one a part of one: no work is longer than its time."""
    picture = Picture(CARD, ((24, 24),))
    watched = TimedTower(patch_s)
    seeing = Seeing(Eye(CARD, watched, lambda tokens: tokens), 1 << 20, CARD.patches_max)
    row = Row(request_of(0, [5], picture, [6]), 1000, 1000, CARD.token)
    works = []
    while (wanted := seeing.wanted([row])) is not None:
        before_s = watched.now_s
        seeing.work(*wanted, 0.2, lambda: watched.now_s)
        works.append(watched.now_s - before_s)
    # The first pieces are those of a machine that is not known yet.
    assert max(works[1:], default=0) <= max(0.2, 32 * patch_s) * 1.001
    layers = len(tower()._model.model.vision_tower.layers)
    # Attention to 576 patches counts beside the products.
    whole = 576 * (1 + tower()._attention_share(576, None))
    assert len(works) <= 2 + layers * whole * patch_s / 0.2 * 2


@pytest.mark.parametrize("grid", [(12, 12), (40, 12), (48, 48)])
def test_an_image_takes_no_more_memory_than_is_booked_for_it(grid: tuple[int, int]) -> None:
    """ollama #17804: 125 GB for one image. The ledger keeps `peak_bytes` free."""
    picture, watched = Picture(CARD, (grid,)), tower()
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(-1, CARD.patch_bytes)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    job = watched.begin(pixels, picture.grids)
    while job.step():
        pass
    assert 0 < mx.get_peak_memory() - before <= watched.peak_bytes([grid])


def test_the_largest_image_is_the_one_whose_peak_fits() -> None:
    """A patch more a side and it does not; with no room at all there is none."""
    eye = Eye(CARD, tower(), lambda tokens: tokens)
    whole = tower().peak_bytes(eye.grids(CARD.patches_max))
    assert eye.largest_patches(whole) == CARD.patches_max
    patches = eye.largest_patches(whole // 3)
    assert 0 < patches < CARD.patches_max
    assert tower().peak_bytes(eye.grids(patches)) <= whole // 3
    assert eye.largest_patches(100) == 0


@pytest.mark.parametrize("shape", ["llama", "sliding", "hybrid"])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("chunk", [512, 7])
def test_rows_with_and_without_images_share_steps(
    models: dict[str, Any], shape: str, ours: bool, chunk: int
) -> None:
    """Each makes the tokens that it makes alone, cut anywhere, beside others, from prompts read as they come."""
    model = models[shape]
    engine = make_seeing_engine(
        model, ours=ours, prompt_cache_bytes=0, prefill_chunk=chunk, prefill_chunk_idle=chunk
    )
    engine.insert([request_of(0, *TWO, max_tokens=8), request_of(1, [5] * 20, max_tokens=8)])
    run = Run()
    for _ in range(3):
        step(engine, run)
    engine.insert([request_of(2, *ONE, max_tokens=8)])
    finish(engine, run)
    assert not run.failures
    assert run.ids(0) == greedy_with_images(model, 8, *TWO)
    assert run.ids(1) == greedy(model, [5] * 20, 8)
    assert run.ids(2) == greedy_with_images(model, 8, *ONE)


@pytest.mark.parametrize("shape", ["llama", "sliding", "hybrid"])
def test_the_next_turn_reads_only_what_is_new(models: dict[str, Any], shape: str) -> None:
    """An image is found in the prefix cache again; one that differs in a pixel is not, and gives other numbers."""
    model, watched = models[shape], WatchedTower()
    engine = make_seeing_engine(model, watched=watched)
    turn = ([4] * 70, PICTURE, [1, 2])
    engine.insert([request_of(0, *turn, max_tokens=8)])
    said = finish(engine).ids(0)
    longer = (*turn, [*said, 9, 9, 9])
    engine.insert([request_of(1, *longer, max_tokens=8, logprobs=0)])
    run = finish(engine)
    assert run.ids(1) == greedy_with_images(model, 8, *longer)
    assert run.cached(1) >= 70 + len(PICTURE.ids)
    assert len(watched.begun) == 1, "the features were not needed again"
    changed = ([4] * 70, CHANGED, [1, 2], [*said, 9, 9, 9])
    engine.insert([request_of(2, *changed, max_tokens=8, logprobs=0)])
    finish(engine, run)
    assert run.ids(2) == greedy_with_images(model, 8, *changed)
    assert run.cached(2) <= 71
    assert watched.begun == [PICTURE.pixels, CHANGED.pixels]
    first, second = run.tokens[1][0].logprobs, run.tokens[2][0].logprobs
    assert first is not None
    assert second is not None
    assert first.logprob != second.logprob


def test_a_scope_sees_neither_the_features_nor_the_prompts_of_another(model: Any) -> None:
    """Each computes its own, and the same tokens come out."""
    watched = WatchedTower()
    engine = make_seeing_engine(model, watched=watched)
    run = Run()
    for row, scope in enumerate(("a", "b", "a")):
        engine.insert([request_of(row, [4] * 70, PICTURE, [1, 2], max_tokens=4, cache_scope=scope)])
        finish(engine, run)
    assert [run.cached(row) for row in range(3)] == [0, 0, 70 + len(PICTURE.ids) + 1]
    assert len(watched.begun) == 2
    assert run.ids(0) == run.ids(1) == run.ids(2)


@pytest.mark.parametrize("steps", [1, 3, 6, 12])
def test_a_parked_row_goes_on_with_the_same_tokens(models: dict[str, Any], steps: int) -> None:
    """Before its image, while that is computed, in prefill and in decode; with its caches kept or gone."""
    model = models["llama"]
    for kept in (1 << 20, 0):
        engine = make_seeing_engine(
            model, watched=WatchedTower(3), prompt_cache_bytes=kept, prefill_chunk_idle=16, prefill_chunk=16,
            prefill_ms=0.001,
        )  # fmt: skip
        run = Run()
        engine.insert([request_of(0, *TWO, max_tokens=8)])
        for _ in range(steps):
            step(engine, run)
        engine.park(0)
        engine.insert([request_of(7, [6] * 9, max_tokens=3)])
        finish(engine, run)
        engine.insert([request_of(1, *TWO, max_tokens=8, emitted=run.ids(0))])
        finish(engine, run)
        assert run.ids(0) + run.ids(1) == greedy_with_images(model, 8, *TWO)


@pytest.mark.parametrize("shape", ["llama", "hybrid"])
def test_after_a_restart_the_prompt_is_found_on_disk(
    models: dict[str, Any], shape: str, tmp_path: Path
) -> None:
    """By the image's contents: its tower does not run again. Another image's prompt is not taken for it."""
    model = models[shape]
    options = EngineOptions(cache_dir=str(tmp_path), cache_dir_free_bytes=0)
    parts = ([4] * 70, PICTURE, [3] * 150, SMALL, [1, 2])
    first = make_seeing_engine(model)
    first.keep_on_disk("eye", options)
    first.insert([request_of(0, *parts, max_tokens=8)])
    expected = finish(first).ids(0)
    assert first.disk is not None
    first.disk.close(60.0)
    watched = WatchedTower()
    second = make_seeing_engine(model, watched=watched)
    second.keep_on_disk("eye", options)
    disk = second.disk
    assert disk is not None
    for picture in (CHANGED, PICTURE):
        prompt, places = prompt_of([4] * 70, picture, *parts[2:])
        ids = named(prompt, [one.row_image(at) for one, at in places], CARD.token)
        plan = disk.plan(ids, disk.salt(""))
        # The block in which the image begins is found by the tokens before it.
        blocks = 0 if plan is None else len(plan.keys)
        assert blocks >= 3 if picture is PICTURE else blocks <= 2
    assert plan is not None
    found = disk.read(plan, ids)
    while found:
        disk.restore(found, 1, "a row")
    second.insert([request_of(1, *parts, max_tokens=8)])
    run = finish(second)
    assert run.ids(1) == expected == greedy_with_images(model, 8, *parts)
    assert run.cached(1) >= 192
    assert PICTURE.pixels not in watched.begun


def test_images_are_computed_between_steps_in_bounded_pieces(model: Any) -> None:
    """lmstudio #289, ollama #17804: rows that decode make a token in every step beside an image of many pieces, and a
    text prompt is not held up by it."""
    watched = WatchedTower(10)
    engine = make_seeing_engine(model, watched=watched, prefill_ms=0.001, prefill_chunk=32)
    engine.insert([request_of(0, [5, 6], max_tokens=200)])
    run = Run()
    for _ in range(4):
        step(engine, run)
    engine.insert([request_of(1, *ONE, max_tokens=3), request_of(2, [3] * 80, max_tokens=3)])
    made = [0]
    for _ in range(12):
        before = engine.stats()
        result = engine.next()
        after = engine.stats()
        made.append(after.images["image_pieces"] - before.images["image_pieces"])
        assert made[-1] <= 1
        assert not (made[-1] and after.prompt_tokens > before.prompt_tokens), "one of both in a step"
        run.prefills += result.prefills
        for token in result.tokens:
            run.tokens.setdefault(token.row, []).append(token)
    # On a CPU the first token of a row lands by itself.
    assert len(run.ids(0)) >= 10
    assert 2 in run.tokens, "the text is read between the pieces"
    assert 1 not in run.tokens
    finish(engine, run)
    assert run.ids(1) == greedy_with_images(model, 3, *ONE)


def test_an_image_that_no_row_needs_any_more_is_dropped(model: Any) -> None:
    """An abort while it is computed frees the tower for the next one."""
    watched = WatchedTower(10)
    engine = make_seeing_engine(model, watched=watched, prefill_ms=0.001)
    engine.insert([request_of(0, *ONE, max_tokens=3)])
    engine.next()
    engine.remove([0])
    engine.insert([request_of(1, [5], SMALL, [6], max_tokens=3)])
    run = finish(engine)
    assert run.ids(1) == greedy_with_images(model, 3, [5], SMALL, [6])
    assert engine.stats().images["images_seen"] == 1


def test_features_stay_within_their_bytes(model: Any) -> None:
    """Many images pass through room for two; each prompt is right, and none is computed twice for one row."""
    pictures = [Picture(CARD, ((6, 10),), seed=seed) for seed in range(8)]
    watched = WatchedTower()
    one = 15 * 64 * 4
    engine = make_seeing_engine(model, watched=watched, images_bytes_max=one, prompt_cache_bytes=0)
    parts = [part for picture in pictures for part in ([7, 8], picture)]
    engine.insert([request_of(0, *parts, [5], max_tokens=4), request_of(1, pictures[7], [5], max_tokens=4)])
    run = Run()
    while not run.ended(0):
        step(engine, run)
        assert engine.memory().images <= 2 * one
    finish(engine, run)
    assert run.ids(0) == greedy_with_images(model, 4, *parts, [5])
    assert run.ids(1) == greedy_with_images(model, 4, pictures[7], [5])
    assert len(watched.begun) <= 9


def test_a_tower_that_fails_leaves_an_engine_that_can_be_reset(model: Any) -> None:
    """The worker resets the engine then, and the other rows go on."""
    watched = WatchedTower()
    watched.fails_at = 1
    engine = make_seeing_engine(model, watched=watched)
    engine.insert([request_of(0, *ONE, max_tokens=3)])
    with pytest.raises(RuntimeError, match="the tower fails"):
        engine.next()
    engine.reset()
    engine.insert([request_of(1, *ONE, max_tokens=3)])
    assert finish(engine).ids(1) == greedy_with_images(model, 3, *ONE)


def test_names_of_features_are_no_token_ids_and_differ_by_contents() -> None:
    """An image has the same names at every index of a prompt; two images share none."""
    first, places = prompt_of([5], PICTURE, [6], SMALL)
    names = named(first, [one.row_image(at) for one, at in places], CARD.token)
    again, at = prompt_of([5, 5, 5], PICTURE)
    shifted = named(again, [one.row_image(place) for one, place in at], CARD.token)
    other, at = prompt_of([5], CHANGED)
    changed = named(other, [one.row_image(place) for one, place in at], CARD.token)
    features = names[names >= 1 << 31]
    assert len(features) == 15 + 2
    assert names[:2].tolist() == [5, 301]
    assert set(shifted[shifted >= 1 << 31]) == set(features[:15].tolist())
    assert not set(changed[changed >= 1 << 31]) & set(features.tolist())
