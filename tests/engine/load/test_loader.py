"""Loading a model: wholly, on this thread, or with one clear error."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from tests.support.models import CHAT_TEMPLATE, EOS, VOCAB_SIZE
from zmqengine import pico
from zmqengine.checkpoint.cache_shape import context_tokens
from zmqengine.engine.load.loader import evaluate, find_arrays, load
from zmqengine.engine.load.tokenizer_export import export_tokenizer
from zmqengine.engine.open import open_mlx_engine
from zmqengine.engine.options import EngineOptions
from zmqengine.errors import ModelLoadError


@pytest.fixture
def broken(model_directory, tmp_path):
    """A copy to break."""
    return shutil.copytree(model_directory, tmp_path / "broken")


def test_a_directory_loads_with_its_facts(model_directory):
    """Name, vocabulary, context and end tokens are the model's own; progress ends at 1."""
    stages: list[tuple[str, float | None]] = []
    loaded = load(str(model_directory), lambda stage, fraction: stages.append((stage, fraction)))
    info = loaded.info
    assert (info.name, info.vocab_size, info.context_tokens) == ("random-llama", VOCAB_SIZE, 2048)
    assert info.eos_token_ids == {1}
    assert info.parameter_bytes > 100_000
    assert stages[-1] == ("reading weights", 1.0)


def test_every_array_is_found_even_where_it_is_no_parameter():
    """vllm-mlx #479, omlx #1304: frozen buffers, tables in plain objects and private attributes are lazy leaves too."""

    class Table:
        def __init__(self):
            self.angles = mx.arange(3)
            self.itself = self

    class Layer(nn.Module):  # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.weight = mx.zeros((2,))
            self._frequencies = mx.ones((4,))
            self.table = Table()
            self.towers = [{"left": nn.Linear(2, 2)}]  # type: ignore[attr-defined]
            object.__setattr__(self, "hidden", (mx.zeros((7,)),))
            self.freeze()

    shapes = sorted(array.shape for array in find_arrays(Layer()))
    assert shapes == [(2,), (2,), (2, 2), (3,), (4,), (7,)]


def test_a_loaded_model_holds_nothing_lazy(model_directory):
    """vllm-mlx #479, omlx #1485: another thread can read every array, which it cannot while one is lazy."""
    model = load(str(model_directory)).model
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: [np.array(array).size > 0 for array in find_arrays(model)]).result()
        lazy = mx.ones((3,)) + 1
        with pytest.raises(RuntimeError, match="Stream"):
            pool.submit(np.array, lazy).result()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "JSON"),
        (lambda d: (d / "config.json").write_text('{"model_type": "nothing_like_it"}'), "nothing_like_it"),
        (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\x10" * 40), "cannot load"),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-999]),
            "cannot load",
        ),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "cannot load"),
        (lambda d: (d / "tokenizer.json").unlink(), "cannot load"),
    ],
)
def test_a_broken_model_is_one_clear_error(broken, spoil, message):
    """smg #1427 review: construction failure ends the start; the message names the directory or what is missing."""
    spoil(broken)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(str(broken))
    assert "\n" not in str(caught.value)
    assert str(broken) in str(caught.value)


@pytest.mark.parametrize("model", ["/no/such/model", "no-such-model", "a/b/c", "~/no-such-model"])
def test_a_model_that_is_not_there_is_one_clear_error(model):
    """Neither a directory nor a hub id."""
    with pytest.raises(ModelLoadError, match="there is no directory"):
        load(model)


def test_a_device_that_is_lost_while_loading_is_not_the_models_fault(model_directory, monkeypatch):
    """Its own error ends the process with a code that the supervisor restarts; a lack of memory would come back."""

    def fails(*arrays):
        raise RuntimeError(told)

    monkeypatch.setattr(mx, "eval", fails)
    told = "[METAL] Command buffer execution failed: victim (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
    with pytest.raises(RuntimeError, match="InnocentVictim"):
        load(str(model_directory))
    told = "[metal::malloc] Resource limit (499000) exceeded."
    with pytest.raises(ModelLoadError, match="499000"):
        load(str(model_directory))


def test_a_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch):
    """The hub's client raises many kinds of errors; ours is one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="could not be fetched from the hub"):
        load("zmqengine-tests/no-such-model")


def test_a_file_is_no_model(model_directory):
    """The usual slip: naming the weights."""
    with pytest.raises(ModelLoadError, match="give the directory"):
        load(str(model_directory / "model.safetensors"))


def test_the_bundle_turns_text_into_the_ids_that_mlx_lm_would(model_directory):
    """The special tokens that the tokenizer adds, the template and the strings that it may use are all there."""
    from mlx_lm.utils import load_tokenizer

    bundle = load(str(model_directory)).tokenizer
    theirs = load_tokenizer(str(model_directory))
    ours = Tokenizer.from_str(bundle.tokenizer_json.decode())
    text = "the cat sat. <|user|> été 漢"
    assert ours.encode(text).ids == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)
    assert bundle.chat_template == CHAT_TEMPLATE
    assert bundle.special_tokens["eos_token"] == EOS
    assert bundle.eos_token_ids == [1]


def test_the_bundles_hash_follows_its_content(model_directory, broken):
    """Two loads agree; another template is another hash."""
    first, second = load(str(model_directory)).tokenizer, load(str(model_directory)).tokenizer
    assert first == second
    path = broken / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))
    other = load(str(broken)).tokenizer
    assert other.tokenizer_json == first.tokenizer_json
    assert other.hash != first.hash


def test_hints_for_reasoning_and_tools_come_along(broken):
    """What mlx-lm infers of a template is told to the front-end."""
    path = broken / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = CHAT_TEMPLATE + "{% for t in tools %}<tool_call>{{ tool_call.name }}{% endfor %}"
    path.write_text(json.dumps({**config, "chat_template": template}))
    tokens = json.loads((broken / "tokenizer.json").read_text())
    for id_, word in ((VOCAB_SIZE - 2, "<think>"), (VOCAB_SIZE - 1, "</think>")):
        tokens["added_tokens"].append(
            {
                "id": id_,
                "content": word,
                "special": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        )
    tokens["model"]["vocab"] = {w: i for w, i in tokens["model"]["vocab"].items() if i < VOCAB_SIZE - 2}
    tokens["model"]["merges"] = []
    (broken / "tokenizer.json").write_text(json.dumps(tokens))
    facts = load(str(broken)).tokenizer.facts
    assert (facts["think_start"], facts["think_end"]) == ("<think>", "</think>")
    assert facts["tool_parser"] == "json_tools"
    assert (facts["tool_call_start"], facts["tool_call_end"]) == ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 131072}}, 131072),
        ({"max_position_embeddings": None, "max_seq_len": 77}, 77),
        ({}, 8192),
    ],
)
def test_the_context_is_read_from_whatever_key_the_config_uses(config, tokens):
    """Vision models keep it in a nested part."""
    assert context_tokens(config) == tokens


def test_pico_opens_by_its_name():
    """The default model of a worker, with facts for its status."""
    opened = open_mlx_engine(str(pico.model_path()), EngineOptions(rows_max=3), name="pico")
    assert opened.engine.info.name == "pico"
    assert opened.engine.rows_max == 3
    assert opened.memory_limit_bytes > 1 << 28
    assert opened.facts["model_path"] == str(pico.model_path())
    assert all(isinstance(value, str) for value in opened.facts.values())
    assert opened.tokenizer.chat_template
    opened.engine.close()


def test_weights_are_evaluated_in_pieces(monkeypatch):
    """mlx-lm #1572: one computation of over 300 GB outlasted the 5 s that macOS gives the GPU."""
    model = {"weights": [mx.zeros((10, 10)) for _ in range(20)]}
    pieces: list[int] = []
    told: list[float] = []
    monkeypatch.setattr("zmqengine.engine.load.loader._EVALUATED_BYTES", 1000)
    monkeypatch.setattr(mx, "eval", lambda arrays: pieces.append(sum(array.nbytes for array in arrays)))
    assert evaluate(model, told.append) == 20 * 400
    assert sum(pieces) == 20 * 400
    assert max(pieces) < 1000 + 400
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_loading_leaves_the_limit_on_open_files_alone():
    """mlx-lm lowers it to 2048 when it is imported; a worker has a socket for each front-end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        # Other than what mlx-lm sets, which it may have done in this process.
        "import resource; _, hard = resource.getrlimit(resource.RLIMIT_NOFILE);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard));"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE);"
        "import zmqengine.engine.load.loader;"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before, resource.getrlimit(resource.RLIMIT_NOFILE)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_the_bundle_tells_how_to_sample(model_directory, tmp_path):
    """Front-ends have no other way to know."""
    directory = shutil.copytree(model_directory, tmp_path / "advised")
    (directory / "generation_config.json").write_text('{"temperature": 0.7}')
    assert load(str(directory)).tokenizer.facts["default_temperature"] == "0.7"
    assert load(str(directory)).tokenizer.hash != load(str(model_directory)).tokenizer.hash


def test_every_template_of_a_tokenizer_is_exported(model_directory):
    """A model may have another one for chats with tools; the default one is told once."""
    tokenizer = load_tokenizer(model_directory)
    tokenizer._tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    exported = export_tokenizer(tokenizer)
    assert exported.chat_template == "a"
    templates = {name: text for name, text in exported.facts.items() if name.startswith("chat_template_")}
    assert templates == {"chat_template_tool_use": "b"}
