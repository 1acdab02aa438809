"""Rows with LoRA adapters: alone, mixed and cached they are those of the model with the adapter fused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests.support.drafts import Erring, speculator
from tests.support.engines import Run, finish, greedy, make_engine, runner_of, step
from tests.support.models import LLAMA, VOCAB_SIZE, build_model, save_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.checkpoint.adapters import adapters_bytes
from zmqengine.engine.adapter_files import read_files
from zmqengine.engine.adapters.loaded import LoadedAdapters
from zmqengine.engine.adapters.lora_files import Lora, Pair, read_lora
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.open import open_mlx_engine
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.seeds import seed_key
from zmqengine.errors import ConfigError, ModelLoadError, NeverFits

COUNT = 12
KEYS = {
    "first": ["self_attn.q_proj", "self_attn.v_proj"],
    "second": [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    ],
    "third": ["mlp.up_proj"],
}  # fmt: skip
RANKS = {"first": 4, "second": 8, "third": 2}


def tokens(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def factors_of(model: Any) -> dict[str, mx.array]:
    """The factors of a model with mlx-lm's adapters, by name."""
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    return {path: array for path, array in arrays.items() if "lora_" in path}


def with_lora(name: str) -> tuple[Any, dict[str, Any]]:
    """The small model with random adapters of mlx-lm's own, and their configuration."""
    model = build_model(LLAMA)
    config = {"rank": RANKS[name], "scale": 3.0, "dropout": 0.0, "keys": KEYS[name]}
    linear_to_lora_layers(model, LLAMA["num_hidden_layers"], config)
    mx.random.seed(sum(map(ord, name)))
    arrays = {path: 0.3 * mx.random.normal(array.shape) for path, array in factors_of(model).items()}
    model.load_weights(list(arrays.items()), strict=False)
    return model, config


def write_mlx_lm(directory: Path, name: str) -> Path:
    """As mlx-lm's training writes it."""
    model, config = with_lora(name)
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "adapters.safetensors"), factors_of(model))
    about = {"fine_tune_type": "lora", "num_layers": LLAMA["num_hidden_layers"], "lora_parameters": config}
    (directory / "adapter_config.json").write_text(json.dumps(about))
    return directory


def write_peft(directory: Path, name: str, **changes: Any) -> Path:
    """As PEFT writes it."""
    model, _ = with_lora(name)
    directory.mkdir(parents=True)
    arrays = {
        f"base_model.model.{path[:-1]}{path[-1].upper()}.weight": mx.contiguous(array.T)
        for path, array in factors_of(model).items()
    }
    mx.save_safetensors(str(directory / "adapter_model.safetensors"), arrays)
    rank = RANKS[name]
    about = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 3 * rank,
        "bias": "none",
        "use_dora": False,
        **changes,
    }
    (directory / "adapter_config.json").write_text(json.dumps(about))
    return directory


def told(name: str, prompt: list[int]) -> list[int]:
    """The output of mlx-lm's own generator, with the adapter fused into the weights."""
    if not name:
        return greedy(build_model(LLAMA), prompt, COUNT)
    model, _ = with_lora(name)
    fused = [(path, module.fuse()) for path, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(fused))
    return greedy(model, prompt, COUNT)


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> list[Lora]:
    """Three adapters, one of them PEFT's."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        read_lora("first", write_mlx_lm(root / "first", "first")),
        read_lora("second", write_peft(root / "second", "second")),
        read_lora("third", write_mlx_lm(root / "third", "third")),
    ]


def engine_with(loras: list[Lora], kernels: Any = "auto", *, replays: bool = False, **options: Any) -> Any:
    """An engine of the small model with these adapters."""
    runner = runner_of(build_model(LLAMA), kernels)
    assert isinstance(runner, SlotRunner)
    if replays:
        runner = SlotRunner(DecoderModel(runner.decoder.weights, runner.decoder.ops, replays=True), 2048)
    return make_engine(runner, adapters=LoadedAdapters(runner, loras), **options)


def request(row: int, prompt: list[int], name: str, **fields: Any) -> RowRequest:
    return RowRequest(row, prompt, COUNT, adapter=name, cache_scope=name, **fields)


@pytest.mark.parametrize(("kernels", "replays"), [("auto", False), ("mlx", False), ("mlx", True)])
def test_rows_of_different_adapters_in_one_batch_are_those_of_fused_models(
    loras: list[Lora], kernels: str, replays: bool
) -> None:
    """Beside rows without one, of unlike lengths, prompts and decode in one step, and again from the prefix cache."""
    engine = engine_with(loras, kernels, replays=replays, prefill_chunk=16)
    names = ["first", "", "second", "third", "first", "second"]
    prompts = [tokens(length, seed) for seed, length in enumerate((40, 23, 40, 5, 17, 70))]
    expected = [told(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
    assert len({tuple(told(name, prompts[0])) for name in ("", *KEYS)}) == 4
    for base in (0, len(names)):
        rows = [request(base + at, prompt, names[at]) for at, prompt in enumerate(prompts)]
        assert engine.insert(rows) == []
        run = finish(engine)
        assert [run.ids(row.row) for row in rows] == expected
    assert run.cached(len(names)) == len(prompts[0]) - 1
    traces = engine._runner.decoder._adapted_traces._calls
    assert {adapted for _, _, adapted in traces} == ({True} if replays else set())


@pytest.mark.parametrize("bits", [None, 8])
def test_models_in_half_precision_and_quantised_ones_mix_adapters(
    loras: list[Lora], bits: int | None
) -> None:
    """Whose products MLX does not gather on a CPU, in prefill and in decode."""

    def built() -> Any:
        model = build_model(LLAMA)
        model.set_dtype(mx.bfloat16)
        if bits is not None:
            quantize(model, group_size=32, bits=bits)
        return model

    runner = runner_of(built())
    engine = make_engine(runner, adapters=LoadedAdapters(runner, loras))
    prompts = {name: tokens(20, index) for index, name in enumerate(("", *KEYS))}
    rows = [request(row, prompt, name, logprobs=0) for row, (name, prompt) in enumerate(prompts.items())]
    engine.insert(rows)
    run = finish(engine)
    for row, (name, prompt) in enumerate(prompts.items()):
        theirs = built()
        if name:
            model, config = with_lora(name)
            linear_to_lora_layers(theirs, LLAMA["num_hidden_layers"], config)
            theirs.load_weights(list(factors_of(model).items()), strict=False)
        logits = theirs(mx.array([prompt + run.ids(row)]))[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for index, token in enumerate(run.tokens[row]):
            assert token.logprobs is not None
            wanted = float(logprobs[len(prompt) - 1 + index, token.token])
            assert token.logprobs.logprob == pytest.approx(wanted, abs=0.15)


def test_a_row_alone_is_the_same(loras: list[Lora]) -> None:
    """One product for a whole prompt in place of one for each token."""
    engine = engine_with(loras)
    prompt = tokens(50, 9)
    for row, name in enumerate(("second", "", "third")):
        engine.insert([request(row, prompt, name)])
        assert finish(engine).ids(row) == told(name, prompt)


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe", "gemma3_text", "gemma4_text", "gemma4 mixture", "qwen3_5 mixture", "qwen3_next", "gpt_oss",
        "glm4_moe", "lfm2", "lfm2_moe",
    ],
)  # fmt: skip
def test_rows_of_each_family_are_those_of_adapted_models(tmp_path: Path, kind: str) -> None:
    """With every product of a layer that mlx-lm's training adapts by default: attention, recurrences, experts, routers
    and inputs of layers. Prompts are long enough for pairs of token and expert to be sorted."""
    config = {**ARCHITECTURES[kind], "vocab_size": VOCAB_SIZE}
    # Opened before it is adapted: opening reads plain modules.
    runner = runner_of(build_model(config))
    assert isinstance(runner, SlotRunner)
    theirs = build_model(config)
    given = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    linear_to_lora_layers(theirs, 99, given)
    mx.random.seed(7)
    arrays = {path: 0.2 * mx.random.normal(array.shape) for path, array in factors_of(theirs).items()}
    theirs.load_weights(list(arrays.items()), strict=False)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), arrays)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_parameters": given}))
    lora = read_lora("own", tmp_path)
    assert len(lora.pairs) * 2 == len(arrays)
    # A second one has numbers of its own, and other ranks.
    halves = {key: Pair(pair.down[..., :2], pair.up[..., :2, :]) for key, pair in [*lora.pairs.items()][::2]}
    other = Lora("other", "", halves)
    engine = make_engine(runner, adapters=LoadedAdapters(runner, [other, lora]))
    prompts = [tokens(40, 1), tokens(12, 2), tokens(40, 1), tokens(40, 1)]
    names_of_rows = ("own", "own", "", "other")
    engine.insert([request(row, prompts[row], name, logprobs=0) for row, name in enumerate(names_of_rows)])
    run = finish(engine)
    assert [run.ids(row) for row in (0, 1)] == [greedy(theirs, prompt, COUNT) for prompt in prompts[:2]]
    assert run.ids(2) == greedy(build_model(config), prompts[2], COUNT)
    # A random model may repeat itself with any adapter.
    first, plain, third = (run.tokens[row][0].logprobs for row in (0, 2, 3))
    assert first is not None
    assert plain is not None
    assert third is not None
    assert len({round(each.logprob, 3) for each in (first, plain, third)}) == 3
    logits = theirs(mx.array([prompts[0]]))[0, -1].astype(mx.float32)
    assert first.logprob == pytest.approx(float(mx.max(logits - mx.logsumexp(logits))), abs=5e-3)


@pytest.mark.parametrize(("kernels", "replays"), [("auto", False), ("mlx", True)])
def test_adapters_come_and_go_while_rows_run(
    loras: list[Lora], tmp_path: Path, kernels: str, replays: bool
) -> None:
    """Rows in prefill and decode go on with the same tokens, of the adapters that stay and of those that come."""
    second = read_files("second", write_peft(tmp_path / "second", "second"))
    engine = engine_with(loras[:1], kernels, replays=replays, prefill_chunk=16)
    bytes_of_first = engine.info.parameter_bytes
    names = ["first", "", "second", "first", "second"]
    prompts = [tokens(length, length) for length in (50, 9, 21, 30, 12)]
    rows = [request(row, prompt, names[row]) for row, prompt in enumerate(prompts)]
    run, asked = Run(), list[int]()
    engine.insert(rows[:2])
    step(engine, run)
    engine.load_adapter(second, asked.append)
    assert list(engine.info.adapters) == ["first", "second"]
    engine.insert(rows[2:3])
    step(engine, run)
    finish(engine, run)
    engine.unload_adapter("second")
    assert engine.info.parameter_bytes == bytes_of_first
    engine.insert(rows[3:4])
    step(engine, run)
    engine.load_adapter(second, asked.append)
    finish(engine, run)
    assert asked[0] == asked[1] > engine.info.parameter_bytes - bytes_of_first > 0
    engine.unload_adapter("first")
    engine.insert(rows[4:])
    finish(engine, run)
    assert [run.ids(row.row) for row in rows] == [told(*each) for each in zip(names, prompts, strict=True)]


def test_an_adapter_that_is_refused_leaves_the_others_as_they_were(loras: list[Lora], tmp_path: Path) -> None:
    """For want of room, or for its shapes."""
    engine = engine_with(loras[:1])
    info, prompt = engine.info, tokens(20, 1)

    def refuse(bytes_: int) -> None:
        raise NeverFits(f"{bytes_} bytes")

    with pytest.raises(NeverFits, match="bytes"):
        engine.load_adapter(read_files("x", write_peft(tmp_path / "x", "second")), refuse)
    damaged = read_files("x", tmp_path / "x")._replace(arrays=b"nothing")
    with pytest.raises(ModelLoadError, match="the adapter x cannot be read"):
        engine.load_adapter(damaged, lambda bytes_: None)
    assert engine.info == info
    engine.insert([request(0, prompt, "first")])
    assert finish(engine).ids(0) == told("first", prompt)


def test_a_model_that_mlx_lm_runs_takes_none(tmp_path: Path) -> None:
    """With the reason."""
    engine = make_engine(runner_of(build_model(LLAMA), "mlx-lm"))
    with pytest.raises(ModelLoadError, match="mlx-lm's own code"):
        engine.load_adapter(read_files("x", write_peft(tmp_path / "x", "first")), lambda bytes_: None)


def test_experts_with_names_of_their_own_are_read(tmp_path: Path) -> None:
    """As PEFT writes them; some of them without the others are refused."""
    kind = {**ARCHITECTURES["qwen3_moe"], "vocab_size": VOCAB_SIZE}
    name = "base_model.model.model.layers.0.mlp.experts.{}.up_proj.lora_{}.weight"
    runner = runner_of(build_model(kind))
    (up, *_), inputs = runner.decoder.layers[0].mlp.gate_up, kind["hidden_size"]
    experts, half = up.weight.shape[0], up.outputs // 2
    mx.random.seed(3)
    arrays = {}
    for expert in range(experts):
        arrays[name.format(expert, "A")] = 0.3 * mx.random.normal((2, inputs))
        arrays[name.format(expert, "B")] = 0.3 * mx.random.normal((half, 2))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), arrays)
    theirs = build_model(kind)
    module = theirs.layers[0].mlp.switch_mlp.up_proj
    added = [2 * arrays[name.format(each, "B")] @ arrays[name.format(each, "A")] for each in range(experts)]
    module.weight = module.weight + mx.stack(added).astype(module.weight.dtype)
    engine = make_engine(runner, adapters=LoadedAdapters(runner, [read_lora("x", tmp_path)]))
    prompt = tokens(40, 5)
    engine.insert([request(0, prompt, "x")])
    assert finish(engine).ids(0) == greedy(theirs, prompt, COUNT)
    del arrays[name.format(1, "A")], arrays[name.format(1, "B")]
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), arrays)
    with pytest.raises(ModelLoadError, match=r"some experts of mlp\.experts\.up_proj of layer 0"):
        read_lora("x", tmp_path)


def test_layers_of_a_vision_tower_are_not_those_of_the_decoder(loras: list[Lora], tmp_path: Path) -> None:
    """Whose names end alike."""
    directory = write_peft(tmp_path / "x", "first")
    file = str(directory / "adapter_model.safetensors")
    arrays: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
    towers = {
        key.replace("model.layers", "vision_tower.encoder.layers"): each for key, each in arrays.items()
    }
    mx.save_safetensors(file, {**arrays, **towers})
    with pytest.raises(ModelLoadError, match="vision_tower"):
        read_lora("x", directory)


def test_drafts_of_rows_with_adapters_are_verified_with_them(loras: list[Lora]) -> None:
    """Verify blocks of several columns, rows of both kinds in one, drafts that are right and wrong."""
    names = ["first", "", "second"]
    prompts = [tokens(length, length) for length in (20, 31, 9)]
    expected = [told(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
    known = Erring({(tuple(prompt), seed_key(0)): out for prompt, out in zip(prompts, expected, strict=True)})
    for replays in (False, True):
        engine = engine_with(loras, "mlx", replays=replays, speculator=speculator(known))
        engine.insert([request(row, prompt, names[row]) for row, prompt in enumerate(prompts)])
        run = finish(engine)
        assert [run.ids(row) for row in range(3)] == expected
        assert sum(draft.accepted for draft in run.drafts)


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_that_join_leave_and_come_back_keep_their_adapter(loras: list[Lora], drafts: bool) -> None:
    """A row is removed in decode, another one parked and resumed after others have joined, with drafts and without."""
    names = ["first", "second", "third", "", "second"]
    prompts = [tokens(length, length) for length in (30, 12, 25, 8, 70)]
    expected = [told(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
    known = Erring({(tuple(prompt), seed_key(0)): out for prompt, out in zip(prompts, expected, strict=True)})
    engine = engine_with(loras, "mlx", speculator=speculator(known) if drafts else None)
    rows = [request(row, prompt, names[row]) for row, prompt in enumerate(prompts)]
    run = Run()
    engine.insert(rows[:3])
    while not (run.ids(0) and run.ids(1)):
        step(engine, run)
    engine.park(0)
    engine.remove([1])
    engine.insert(rows[3:])
    step(engine, run)
    engine.insert([replace(rows[0], row=9, emitted=run.ids(0))])
    finish(engine, run)
    assert [run.ids(row) for row in (2, 3, 4)] == expected[2:]
    assert run.ids(0) + run.ids(9) == expected[0]
    assert run.ids(1) == expected[1][: len(run.ids(1))]


def test_adapters_share_no_prefix(loras: list[Lora]) -> None:
    """Blocks of one prompt are kept apart by the adapters' scopes."""
    engine = engine_with(loras)
    prompt = tokens(100, 3)
    for row, name in enumerate(("first", "second", "first")):
        engine.insert([request(row, prompt, name)])
        run = finish(engine)
        assert run.cached(row) == (99 if row == 2 else 0)


def test_given_output_has_the_log_probabilities_of_the_adapter(loras: list[Lora]) -> None:
    """Rows in decode and tokens that are scored go through the last layer together, each with its own adapter."""
    engine = engine_with(loras)
    prompt, forced = tokens(20, 1), tokens(6, 2)
    engine.insert(
        [request(0, tokens(9, 4), "first"), request(1, prompt, "second", forced=forced, logprobs=0)]
    )
    run = finish(engine)
    model, _ = with_lora("second")
    logits = model(mx.array([[*prompt, *forced]]))[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for index, (token, id_) in enumerate(zip(run.tokens[1], forced, strict=False)):
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(float(logprobs[19 + index, id_]), abs=1e-3)
    assert run.ids(0) == told("first", tokens(9, 4))


def test_a_worker_opens_them(tmp_path: Path) -> None:
    """With their bytes among those of the weights, and a digest each for the prefix cache on disk."""
    model = save_model(tmp_path / "model")
    pairs = [f"{name}={write_mlx_lm(tmp_path / name, name)}" for name in KEYS]
    plain = open_mlx_engine(str(model), EngineOptions(warm_up_s=0))
    opened = open_mlx_engine(str(model), EngineOptions(warm_up_s=0, adapter=tuple(pairs)))
    info = opened.engine.info
    assert list(info.adapters) == list(KEYS)
    own_bytes = info.parameter_bytes - plain.engine.info.parameter_bytes
    # What a launcher reckons with.
    assert own_bytes <= adapters_bytes({name: tmp_path / name for name in KEYS}, 4)
    assert len(set(info.adapters.values())) == 3
    assert info.parameter_bytes > plain.engine.info.parameter_bytes
    for each in (plain, opened):
        each.engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """By what it has."""
    with pytest.raises(ModelLoadError, match=message):
        read_lora("x", write_peft(tmp_path / "x", "first", **changes))


def test_an_adapter_that_changes_what_none_may_is_refused(tmp_path: Path, loras: list[Lora]) -> None:
    """Another model's, products that are not the decoder's, and experts."""
    other = build_model({**LLAMA, "hidden_size": 32})
    with pytest.raises(ModelLoadError, match="another model"):
        LoadedAdapters(runner_of(other), loras)
    expert = Lora("x", "", {(0, "mlp.switch_mlp.up_proj"): next(iter(loras[2].pairs.values()))})
    with pytest.raises(ModelLoadError, match=r"mlp\.switch_mlp\.up_proj of layer 0"):
        LoadedAdapters(runner_of(build_model(LLAMA)), [expert])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_lora("x", tmp_path)


@pytest.mark.parametrize("pairs", [("a",), ("=b",), ("a:b=c",), ("a=b", "a=c")])
def test_a_pair_that_names_no_adapter_is_refused(pairs: tuple[str, ...]) -> None:
    """With its form."""
    with pytest.raises(ConfigError, match="NAME=DIR"):
        EngineOptions(adapter=pairs)
