"""An engine on the kernels for CUDA makes the tokens that it makes on MLX's operations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from tests.support.drafters import TARGET, drafting_runner, right_model_and_drafter
from tests.support.drafts import Erring, Widths, speculator
from tests.support.engines import Run, finish, make_engine, step
from tests.support.heads import headed_runner, right_model_and_head
from tests.support.models import SLIDING, VOCAB_SIZE, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.adapters.loaded import LoadedAdapters
from zmqengine.engine.adapters.lora_files import Lora, Pair
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.kv.slots import Slot, Slots
from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.families import read_weights
from zmqengine.engine.models.ops import Ops, PlainOps
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.head_drafts import HeadDrafts

pytestmark = pytest.mark.cuda_emulated

CONTEXT = 2048
SHARED = [7 * number % VOCAB_SIZE for number in range(80)]


@pytest.fixture(scope="module")
def weights(request: pytest.FixtureRequest) -> DecoderWeights:
    """Two layers of these kinds."""
    config = {
        **SLIDING,
        "hidden_size": 128,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "layer_types": request.param,
    }
    model = build_model(config)
    model.set_dtype(mx.float16)
    return read_weights(model)


def engine_on(weights: DecoderWeights, ops: Ops, **options: Any) -> Any:
    decoder: Any = DecoderModel(weights, ops, replays=isinstance(ops, CudaOps))
    return make_engine(SlotRunner(decoder, CONTEXT), context_tokens=CONTEXT, **options)


def requests(count: int, tokens: int) -> list[RowRequest]:
    """Half of them begin alike. The first outgrows its slot."""
    draw = random.Random(3)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((3, 20, 50)))] for _ in range(count)]
    prompts[0] = [draw.randrange(VOCAB_SIZE) for _ in range(512 - tokens // 2)]
    return [
        RowRequest(row, [*SHARED, *prompt] if row % 2 else prompt, draw.randrange(tokens // 2, tokens + 1))
        for row, prompt in enumerate(prompts)
    ]


def live(engine: Any, rows: list[RowRequest], removed: int, parked: int) -> Run:
    """Rows come in turn; of two in decode one is removed, and the other comes back after others have joined."""
    run = Run()
    away = None
    for number, request in enumerate(rows):
        assert engine.insert([request]) == []
        for _ in range(1 + number % 3):
            step(engine, run)
        if number == parked + 2:
            assert run.ids(parked)
            assert not run.ended(parked)
            engine.park(parked)
            away = replace(rows[parked], emitted=run.ids(parked))
        if number == parked + 4:
            assert away is not None
            engine.insert([away])
        if number == removed + 2:
            assert not run.ended(removed)
            engine.remove([removed])
    return finish(engine, run)


FULL, WINDOW = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("kernels", "drafts", "weights"),
    [
        ("plain_kernels", False, [WINDOW, FULL]),
        ("plain_kernels", True, [WINDOW, FULL]),
        # Windows leave more tokens nearly as likely as others, which a rounding tips. Each kernel as written has tests
        # of its own, which take a CPU less than the prompts here.
        pytest.param("kernels_as_written", True, [FULL, FULL], marks=pytest.mark.weekly),
    ],
    indirect=["kernels", "weights"],
)
def test_rows_make_the_tokens_of_plain_operations(
    kernels: str, weights: DecoderWeights, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that join, move to larger slots, are removed, parked and restored, and that draft."""
    rows = requests(10, 24)
    wanted = Run()
    reference = engine_on(weights, PlainOps())
    assert reference.insert(rows) == []
    finish(reference, wanted)
    known = {(tuple(row.prompt), Row(row, VOCAB_SIZE, CONTEXT).key): wanted.ids(row.row) for row in rows}
    moves: list[tuple[int, int]] = []
    move = Slots.move

    def noted(self: Slots, slot: Slot, tokens: int, computed: int) -> Slot:
        larger = move(self, slot, tokens, computed)
        moves.append((slot.capacity, larger.capacity))
        return larger

    monkeypatch.setattr(Slots, "move", noted)
    engine = engine_on(weights, CudaOps(), speculator=speculator(Erring(known)) if drafts else None)
    run = live(engine, rows, removed=3, parked=4)
    assert run.failures == []
    assert moves == [(512, 1024)]
    assert bool(run.drafts) == drafts
    # Restored from the blocks of a row before.
    assert [run.cached(number) for number in (5, 7, 9)] == [len(SHARED)] * 3
    assert run.ids(3) == wanted.ids(3)[: len(run.ids(3))]
    others = [number for number in range(10) if number != 3]
    assert [run.ids(number) for number in others] == [wanted.ids(number) for number in others]


class Noted(HeadDrafts):
    """Keeps its drafts by row and number of tokens before them."""

    noted: dict[tuple[int, int], Sequence[int]]

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        drafts = super().draft(rows, counts)
        for row, tokens in zip(rows, drafts, strict=True):
            self.noted[row.id, len(row.tokens)] = tokens
        return drafts


def headed() -> Callable[[Ops | None], SlotRunner]:
    """Runners of a model with its own head."""
    model, head = right_model_and_head(
        {
            **ARCHITECTURES["mimo"],
            "hidden_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
    )
    # What it attends to decides more of its drafts.
    head.layer.self_attn.o_proj.weight = 3 * head.layer.self_attn.o_proj.weight
    model.set_dtype(mx.float16)
    return lambda ops: headed_runner(model, head, ops)


def tapped() -> Callable[[Ops | None], SlotRunner]:
    """Runners of a model with an EAGLE-3 drafter."""
    config = {
        **TARGET,
        "hidden_size": 128,
        "head_dim": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model, told, tensors = right_model_and_drafter(config)
    # The hidden states decide some of its drafts.
    tensors["midlayer.hidden_norm.weight"] = mx.full((128,), 0.3)
    model.set_dtype(mx.float16)
    return lambda ops: drafting_runner(model, told, tensors, ops)


@pytest.mark.parametrize("runners", [headed, tapped])
@pytest.mark.parametrize("kernels", ["plain_kernels"], indirect=True)
def test_a_head_drafts_on_the_kernels_as_on_plain_operations(
    kernels: str, runners: Callable[[], Callable[[Ops | None], SlotRunner]]
) -> None:
    """Its keys and values are written in place, too: by prompts, verify blocks and drafts of rows that come and go."""
    open_runner = runners()
    rows, runs, sources = requests(10, 24), [], []
    for ops in (None, CudaOps()):
        runner = open_runner(ops)
        assert runner.launches_ahead == (ops is not None)
        drafting, source = Widths([], (1, 2, 4)), Noted(runner, VOCAB_SIZE)
        source.noted = {}
        drafting.model = source
        engine = make_engine(runner, context_tokens=CONTEXT, speculator=drafting)
        source.noted.clear()
        run = live(engine, rows, removed=3, parked=4)
        assert run.failures == []
        assert [run.cached(number) for number in (5, 7, 9)] == [len(SHARED)] * 3
        assert sum(draft.accepted for draft in run.drafts) > 10
        runs.append(run)
        sources.append(source.noted)
    plain, ours = runs
    others = [number for number in range(10) if number != 3]
    assert [ours.ids(number) for number in others] == [plain.ids(number) for number in others]
    both = [(sources[0][place], sources[1][place]) for place in sources[0].keys() & sources[1].keys()]
    alike = [one[: len(other)] == other[: len(one)] for one, other in both]
    assert len(alike) > 30
    assert sum(alike) > 0.9 * len(alike)


@pytest.mark.parametrize(
    ("kernels", "weights"), [("plain_kernels", [FULL, FULL])], indirect=["kernels", "weights"]
)
def test_rows_of_eight_adapters_make_the_tokens_of_plain_operations(
    kernels: str, weights: DecoderWeights
) -> None:
    """Beside rows of none, that join, are removed, parked and restored; in traces, and in long steps without."""
    names = ["", *(f"a{number}" for number in range(8))]
    mx.random.seed(5)
    widths = {"self_attn.q_proj": (128, 256), "self_attn.o_proj": (256, 128), "mlp.up_proj": (128, 128)}
    loras = [
        Lora(
            name,
            name,
            {
                (layer, module): Pair(
                    0.1 * mx.random.normal((inputs, rank)), 0.1 * mx.random.normal((rank, outputs))
                )
                for layer in range(2)
                for module, (inputs, outputs) in widths.items()
            },
        )
        for rank, name in enumerate(names[1:], start=2)
    ]
    rows = [
        replace(row, adapter=names[row.row % 9], cache_scope=names[row.row % 9]) for row in requests(10, 24)
    ]
    wanted, plain = Run(), Run()
    for adapted, run in ((True, wanted), (False, plain)):
        runner = SlotRunner(DecoderModel(weights, PlainOps()), CONTEXT)
        engine = make_engine(runner, context_tokens=CONTEXT, adapters=LoadedAdapters(runner, loras))
        engine.insert(rows if adapted else [replace(row, adapter="", cache_scope="") for row in rows])
        finish(engine, run)
    differ = [row.row for row in rows if wanted.ids(row.row) != plain.ids(row.row)]
    assert len(differ) >= 6
    runner = SlotRunner(DecoderModel(weights, CudaOps(), replays=True), CONTEXT)
    engine = make_engine(runner, context_tokens=CONTEXT, adapters=LoadedAdapters(runner, loras))
    run = live(engine, rows, removed=3, parked=4)
    assert run.failures == []
    others = [number for number in range(10) if number != 3]
    assert [run.ids(number) for number in others] == [wanted.ids(number) for number in others]
    assert run.ids(3) == wanted.ids(3)[: len(run.ids(3))]
