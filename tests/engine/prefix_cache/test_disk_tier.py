"""Tier on disk: the next engine does not prefill again what this one did, for every kind of cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engines import finish, make_engine
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.prefix_cache.disk.tier import PIECE_BYTES, DiskTier
from zmqengine.engine.step.mlx_engine import MlxEngine

CLOSE_S = 60.0


def on_disk(model: Any, path: Path) -> MlxEngine:
    engine = make_engine(model)
    engine.keep_on_disk("a model", EngineOptions(cache_dir=str(path), cache_dir_free_bytes=0))
    return engine


def tier(engine: MlxEngine) -> DiskTier:
    assert engine.disk is not None
    return engine.disk


def answer(engine: MlxEngine, prompt: list[int], row: int = 0, max_tokens: int = 8) -> list[int]:
    assert not engine.insert([RowRequest(row=row, prompt=prompt, max_tokens=max_tokens)])
    return finish(engine).ids(row)


def restore(engine: MlxEngine, prompt: list[int], awaited_by: str = "a row") -> int:
    """As the worker does before a row joins; returns the tokens that the plan promised."""
    tier(engine).release(awaited_by)
    tokens = np.array(prompt, np.uint32)
    plan = tier(engine).plan(tokens, tier(engine).salt(""))
    if plan is None:
        return 0
    blocks = tier(engine).read(plan, tokens)
    while blocks:
        tier(engine).restore(blocks, 1, awaited_by)
    return plan.tokens


def read_tokens(engine: MlxEngine) -> int:
    return engine.stats().prompt_tokens


def prompt_of(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(5, VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("name", ["llama", "sliding", "mamba", "hybrid"])
def test_after_a_restart_only_tails_are_read(models: dict[str, Any], name: str, tmp_path: Path) -> None:
    """The same tokens come out as from a cold engine, and what was read by an earlier one is not read again."""
    model = models[name]
    prompt = prompt_of(1, 400)
    first = on_disk(model, tmp_path)
    output = answer(first, prompt)
    longer = [*prompt, *output, *prompt_of(2, 30)]
    tier(first).close(CLOSE_S)

    cold = make_engine(model)
    expected = answer(cold, longer)
    second = on_disk(model, tmp_path)
    promised = restore(second, longer)
    assert promised >= len(prompt)
    assert answer(second, longer) == expected
    assert read_tokens(second) == len(longer) - 1 - promised
    assert read_tokens(second) <= 30 + 1
    tier(second).close()


def test_blocks_that_outlive_a_failed_step_are_still_saved(models: dict[str, Any], tmp_path: Path) -> None:
    """And none that did not."""
    model, prompt = models["llama"], prompt_of(1, 430)
    first = on_disk(model, tmp_path)
    answer(first, prompt)
    answer(first, prompt_of(2, 300))
    first.reset(keep_prompts=True)
    tier(first).close(CLOSE_S)
    second = on_disk(model, tmp_path)
    assert restore(second, prompt) == 429
    assert restore(second, prompt_of(2, 300), "other") < 299
    tier(second).close()


def test_the_same_prompt_again_is_not_read_at_all(models: dict[str, Any], tmp_path: Path) -> None:
    """Its last block was written with the answer in it. Another prompt that only begins like it gets what they share,
    and the tokens of a cold engine."""
    model, prompt = models["llama"], prompt_of(1, 430)
    first = on_disk(model, tmp_path)
    output = answer(first, prompt)
    tier(first).close(CLOSE_S)

    engine = on_disk(model, tmp_path)
    assert restore(engine, prompt) == 429
    assert answer(engine, prompt) == output
    assert read_tokens(engine) == 0

    engine.limit_prompt_cache(0)
    engine.limit_prompt_cache(1 << 30)
    other = [*prompt[:410], *prompt_of(2, 20)]
    restore(engine, other)
    assert answer(engine, other) == answer(make_engine(model), other)
    assert read_tokens(engine) == 429 - 410
    tier(engine).close()


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_part_of_a_block_is_read_where_caches_can_be_cut_and_nowhere_else(
    models: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """A block on disk goes on otherwise than the prompt: a state after it is not a state of the prompt."""
    model, prompt = models[name], prompt_of(1, 410)
    first = on_disk(model, tmp_path)
    answer(first, prompt)
    tier(first).close(CLOSE_S)

    engine = on_disk(model, tmp_path)
    plan = tier(engine).plan(np.array(prompt, np.uint32), tier(engine).salt(""))
    assert plan is not None
    whole = tier(engine).read(plan, np.array(prompt, np.uint32))
    last = whole[-1]
    other = [*prompt[: last.start + 20], *prompt_of(2, 400)]
    blocks = tier(engine).read(plan, np.array(other, np.uint32))
    if name == "llama":
        assert [block.key for block in blocks] == [block.key for block in whole]
    else:
        assert last.form
        assert last.key not in [block.key for block in blocks]
        assert not blocks or blocks[-1].form
    while blocks:
        tier(engine).restore(blocks, PIECE_BYTES, "a row")
    assert answer(engine, other) == answer(make_engine(model), other)
    tier(engine).close()


def test_what_is_awaited_stays_while_there_is_other_room(models: dict[str, Any], tmp_path: Path) -> None:
    """Others that are read before its row begins do not have it go; rows that need its memory do. Each token that was
    restored is counted once as a hit on disk."""
    model, prompt = models["llama"], prompt_of(1, 400)
    first = on_disk(model, tmp_path)
    answer(first, prompt)
    tier(first).close(CLOSE_S)

    engine = on_disk(model, tmp_path)
    assert restore(engine, prompt) == 384
    held = engine.memory().prompt_cache
    engine.limit_prompt_cache(held + held // 2)
    for seed in range(2, 6):
        answer(engine, prompt_of(seed, 150))
    before = read_tokens(engine)
    for tier_name in ("disk", "memory"):
        hits = dict(engine.stats().prompt_cache)
        answer(engine, prompt)
        tier(engine).release("a row")
        found = engine.stats().prompt_cache
        assert found[f"{tier_name}_hit_tokens"] - hits[f"{tier_name}_hit_tokens"] >= 384
    assert found["disk_hit_tokens"] == 384
    assert read_tokens(engine) - before <= 15

    engine.limit_prompt_cache(0)
    assert restore(engine, prompt) == 384
    engine.limit_prompt_cache(held)
    restore(engine, prompt)
    assert engine.memory().prompt_cache > 0
    engine.limit_prompt_cache(0)
    assert engine.memory().prompt_cache == 0
    tier(engine).close()


def test_what_is_computed_sooner_is_neither_written_nor_read(models: dict[str, Any], tmp_path: Path) -> None:
    """Bytes a second from the disk are measured at each read, and held against tokens a second of the model."""
    # A read of less than a megabyte is not measured.
    model, prompt = models["llama"], prompt_of(1, 2500)
    first = on_disk(model, tmp_path)
    answer(first, prompt)
    tier(first).close(CLOSE_S)

    engine = on_disk(model, tmp_path)
    assert restore(engine, prompt) >= 2432
    engine.limit_prompt_cache(0)
    engine.limit_prompt_cache(1 << 30)
    tier(engine).note_prefill(1e12)
    assert restore(engine, prompt) == 0
    assert tier(engine).numbers()["not_worth"] == 1
    answer(engine, prompt_of(2, 200))
    assert not tier(engine).has_work
    tier(engine).note_prefill(1.0)
    assert restore(engine, prompt) >= 640
    answer(engine, prompt_of(3, 200))
    assert tier(engine).has_work
    tier(engine).close()


def test_what_memory_has_no_room_for_comes_back(models: dict[str, Any], tmp_path: Path) -> None:
    """Four conversations in turn on room for two: what went from memory is restored, and nothing is read twice."""
    model = models["llama"]
    tokens = 320
    engine = on_disk(model, tmp_path)
    answer(engine, prompt_of(0, tokens))
    room = 2 * engine.memory().prompt_cache
    engine.limit_prompt_cache(room)
    cold = make_engine(model)
    talks = [prompt_of(seed, 200) for seed in range(4)]
    new = 0
    start = read_tokens(engine)
    for turn in range(4):
        for talk in talks:
            new += 30 + (170 if turn == 0 else 0)
            restore(engine, talk)
            reply = answer(engine, talk)
            assert engine.memory().prompt_cache <= room
            while tier(engine).has_work or engine.disk.numbers()["waiting_bytes"]:
                tier(engine).save(PIECE_BYTES)
            assert reply == answer(cold, talk)
            talk.extend([*reply, *prompt_of(turn, 30)])
    assert engine.disk.numbers()["read_blocks"] > 0
    # Of every reply the last token has not been read yet, and every row begins with one.
    assert read_tokens(engine) - start <= new + 16
    tier(engine).close()
