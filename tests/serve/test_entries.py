"""The list of models: files, directories, names, aliases, and mistakes in them."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from zmqengine.checkpoint.estimate import open_checkpoint
from zmqengine.cli.advice import one_line
from zmqengine.cli.commands.serve import _greeting
from zmqengine.engine.host.environment import expects_gpu
from zmqengine.errors import ConfigError, UnknownModel
from zmqengine.pico import BUNDLED, model_path
from zmqengine.serve.entries import directory_name, read_offer
from zmqengine.serve.model import TTL_S

ROOT = Path("/tmp/zs/.serve")


@pytest.fixture(autouse=True)
def _empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model of whoever runs the tests is found."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))


def test_an_entry_of_a_file_has_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        """
        memory = "8G"
        options = { rows-max = 4 }
        [[model]]
        name = "small"
        path = "pico"
        aliases = ["gpt-4o"]
        pin = true
        ttl = -1
        preload = true
        draft = "pico"
        options = { prompt-cache-bytes = "16M", context-max = 512 }
        [[model]]
        name = "pico-tools"
        """
    )
    offer = read_offer([str(file)], ROOT, {"cache_dir": "auto"})
    assert offer.budget_bytes == 8 << 30
    entry = offer.find("gpt-4o")
    config = entry.config
    assert (entry.name, entry.pin, entry.preload, entry.ttl_s) == ("small", True, True, float("inf"))
    assert (config.model, config.draft, config.rows_max, config.context_max) == ("pico", "pico", 4, 512)
    assert (config.prompt_cache_bytes, config.cache_dir) == (16 << 20, "auto")
    # That of its worker, and not the model's 2,048.
    assert entry.context_tokens == 512
    assert config.endpoints.ctl == f"ipc://{ROOT}/small/ctl"
    assert offer.find("pico-tools").ttl_s == TTL_S


def test_the_memory_is_of_the_weights_a_chat_and_the_draft() -> None:
    checkpoint = open_checkpoint(model_path())
    weights = checkpoint.weights.total_bytes
    need = read_offer(["pico"], ROOT, {}).find("pico").need_bytes
    assert weights < need == checkpoint.need_bytes(on_gpu=expects_gpu())
    drafted = read_offer(["pico"], ROOT, {"draft": "pico-tools"}).find("pico").need_bytes
    assert drafted >= need + open_checkpoint(model_path("pico-tools")).weights.total_bytes


def test_adapters_are_in_the_memory_of_an_entry(tmp_path: Path) -> None:
    """As much as their worker takes at most; one that cannot be read is named as the reason for which none starts."""
    arrays = {
        "layers.0.mlp.up_proj.lora_a": mx.zeros((64, 4)),
        "layers.0.mlp.up_proj.lora_b": mx.zeros((4, 128)),
    }
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), arrays)
    plain = read_offer(["pico"], ROOT, {}).find("pico")
    one, two = (
        read_offer(["pico"], ROOT, {"adapter": [f"{name}={tmp_path}" for name in names]}).find("pico")
        for names in ("a", "ab")
    )
    assert list(two.config.adapters) == ["a", "b"]
    assert plain.need_bytes < one.need_bytes < two.need_bytes
    assert one.need_bytes - plain.need_bytes >= 2 * (64 * 4 + 4 * 128) * 4
    lost = read_offer(["pico"], ROOT, {"adapter": [f"c={tmp_path / 'none'}"]}).find("pico")
    assert lost.never.startswith("the adapter c: cannot read ")


def test_the_workers_divide_the_memory_of_the_list(tmp_path: Path) -> None:
    """`memory` bounds what they hold together, caches included, and not only what is loaded."""
    file = tmp_path / "models.toml"
    file.write_text(
        "memory = '8G'\n[[model]]\nname = 'pico'\n"
        "[[model]]\nname = 'limited'\npath = 'pico'\noptions = { memory-limit = '2G' }"
    )
    offer = read_offer([str(file)], ROOT, {})
    assert offer.find("pico").config.memory_total_bytes == 8 << 30
    assert offer.find("limited").need_bytes == 2 << 30
    given = read_offer([str(file)], ROOT, {}, 4 << 30)
    assert (given.budget_bytes, given.find("pico").config.memory_total_bytes) == (4 << 30, 4 << 30)
    assert read_offer(["pico"], ROOT, {}).find("pico").config.memory_total_bytes is None
    # A worker whose signature has changed is replaced.
    changed = {
        name
        for name, entry in offer.entries.items()
        if entry.facts.signature != given.entries[name].facts.signature
    }
    assert changed == {"pico"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[model]]\nname = 'a'\npinn = true", "pinn"),
        ("[[model]]\nname = 'a'\npath = 'pico'\noptions = { rows-maxx = 1 }", "rows-maxx"),
        ("[[model]]\nname = 'a'\npath = 'pico'\noptions = { rows-max = 0 }", "rows-max"),
        ("[[model]]\nname = 'a'\npath = 'pico'\noptions = { bind = 'x' }", "bind"),
        ("[[model]]\nname = 'a'\npath = 'pico'\n[[model]]\nname = 'a'\npath = 'pico'", "two of this name"),
        ("[[model]]\nname = 'a'\npath = '/nowhere'", "no directory"),
        ("[[model]]\nname = 'a'\npath = './nowhere'", "no directory ./nowhere"),
        (
            "[[model]]\nname='a'\npath='pico'\naliases=['b']\n[[model]]\nname='b'\npath='pico'",
            "alias 'b' of 'a' is also a name of 'b'",
        ),
        ("[[model]]\nname='a'\npath='pico'\naliases=['x', 'x']", "alias 'x' of 'a' is also"),
        ("memory = 'much'", "models.toml: memory: 'much' is not a size"),
        ("memory = 0", "memory"),
        ("[[model]]\nname = 'a'\npath = 'pico'\naliases = [\"b\\u001b[31m\"]", "model 'a'.*cannot be shown"),
        ("[[model]]\nname='a'\npath='pico'\noptions = { memory-limit = '2X' }", "'a': memory-limit: '2X'"),
        ("[[model]]\nname='a'\npath='~no-such-user/x'", "model 'a'.*home directory"),
        (f"[[model]]\nname='a'\npath='{'a' * 300}/b'", "model 'a'.*too long"),
        ("[[model]]\nname = ''", "length"),
        ("[[model]]\nname = 'a'\npath = 'pico'\nttl = -2", "ttl"),
        ("[[model]", "line 1"),
        ("[model]\nname = 'a'", r"\[\[model\]\]"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as raised:
        read_offer([str(file)], ROOT, {})
    assert "\n" not in raised.value.message.split(": ")[0]
    assert one_line(raised.value) == raised.value.message.rstrip(".")


def test_a_directory_offers_every_model_in_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(model_path(), tmp_path / "models" / name)
    (tmp_path / "models" / "two" / "model.safetensors").unlink()
    offer = read_offer([str(tmp_path / "models")], ROOT, {})
    assert set(offer.entries) == {"one", "two"}
    assert not offer.find("one").never
    assert "safetensors" in offer.find("two").never
    assert set(read_offer([str(tmp_path / "models" / "one")], ROOT, {}).entries) == {"one"}


def test_nothing_stands_for_everything_on_this_machine(tmp_path: Path) -> None:
    shutil.copytree(model_path(), tmp_path / "hub" / "models--owner--name" / "snapshots" / "1")
    shutil.copytree(model_path(), tmp_path / ".lmstudio" / "models" / "maker" / "other")
    # Damaged files of other programs hide no model.
    (tmp_path / "hub" / "models--owner--name" / "refs").mkdir()
    (tmp_path / "hub" / "models--owner--name" / "refs" / "main").write_bytes(b"\xff")
    (tmp_path / ".lmstudio" / "settings.json").write_text('{"downloadsFolder": "~no-such-user/models"}')
    offer = read_offer([], ROOT, {})
    assert set(offer.entries) == {*BUNDLED, "owner/name", "maker/other"}
    assert offer.find("other").name == "maker/other"


def test_a_model_that_is_not_here_is_not_fetched() -> None:
    """mlx-lm#1892: a request must not begin a download."""
    assert "zmqengine pull owner/none" in read_offer(["owner/none"], ROOT, {}).find("owner/none").never


def test_a_misspelt_name_is_told_what_is_alike() -> None:
    offer = read_offer(["pico", "pico-tools"], ROOT, {})
    with pytest.raises(UnknownModel, match="did you mean pico-tools"):
        offer.find("pico-tool")
    with pytest.raises(UnknownModel, match=r"does not exist; there are pico, pico-tools$"):
        offer.find("gpt-4o")


def test_names_of_files_are_short_plain_and_never_shared() -> None:
    names = ["pico", "Pico", "a/b", "a-b", "A" * 60, "A" * 61, "../../x", "ü", ".serve", "a b", "ctl"]
    made = [directory_name(name) for name in names]
    # A file system may ignore case, and the launcher's own socket is `ctl`.
    assert len({"ctl", *(name.lower() for name in made)}) == len(made) + 1
    assert all(len(name) <= 40 and "/" not in name and not name.startswith(".") for name in made)
    assert made[0] == "pico"


def test_a_model_of_another_type_is_on_the_list_with_its_reason(tmp_path: Path) -> None:
    """Among the models of this machine and of a directory; the greeting counts it and does not offer it."""
    pytest.importorskip("mlx_lm")
    for name, kind in (("maker/sings", "whisper"), ("maker/writes", "qwen3")):
        directory = tmp_path / ".lmstudio" / "models" / name
        shutil.copytree(model_path(), directory)
        config = directory / "config.json"
        config.write_text(config.read_text().replace('"qwen3"', f'"{kind}"'))
    offer = read_offer([], ROOT, {})
    assert "neither mlx-lm nor an encoder here reads a 'whisper'" in offer.find("sings").never
    assert offer.find("writes").never == ""
    greeting = _greeting(offer, 8 << 30, "http://localhost:8000").splitlines()
    assert greeting[0] == f"models: {', '.join([*BUNDLED, 'maker/writes'])}"
    assert greeting[1].startswith("not loadable: 1;")
    listed = read_offer([str(tmp_path / ".lmstudio" / "models" / "maker")], ROOT, {})
    assert [bool(entry.never) for entry in listed.entries.values()] == [True, False]


@pytest.mark.parametrize(("limit", "sees"), [("200M", False), ("2G", True)])
def test_a_model_without_room_for_an_image_does_not_say_that_it_sees(
    tmp_path: Path, limit: str, sees: bool
) -> None:
    """Where its entry gives it a limit of its own."""
    file = tmp_path / "models.toml"
    file.write_text(f'[[model]]\nname = "pico-eye"\n[model.options]\nmemory-limit = "{limit}"\n')
    entry = read_offer([str(file)], ROOT, {}).find("pico-eye")
    assert ("vision" in entry.capabilities) == sees


@pytest.mark.parametrize("memory", ["999999999999G", "99999999999999999999", "1e30"])
def test_memory_that_no_machine_has_is_refused(tmp_path: Path, memory: str) -> None:
    """In one sentence."""
    file = tmp_path / "models.toml"
    file.write_text(f'memory = "{memory}"\n[[model]]\nname = "pico"\n')
    with pytest.raises(ConfigError, match="memory"):
        read_offer([str(file)], ROOT, {})
