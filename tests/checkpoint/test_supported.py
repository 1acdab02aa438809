"""Types of models that a worker can load, told without importing mlx-lm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_estimate import write_tensors
from zmqengine.checkpoint.estimate import open_checkpoint
from zmqengine.checkpoint.supported import why_not_supported
from zmqengine.checkpoint.weights import CheckpointError

mlx_lm_utils = pytest.importorskip("mlx_lm.utils")


def written(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


CONFIGS: list[dict[str, Any]] = [
    *({"model_type": kind} for kind in mlx_lm_utils.MODEL_REMAPPING),
    *(
        {"model_type": kind, "architectures": [architecture]}
        for kind, architecture in mlx_lm_utils.MODEL_ARCHITECTURE_REMAPPING
    ),
    {"model_type": "llama"},
    {"model_type": "whisper"},
    {"model_type": "no_such_model", "architectures": "LlamaForCausalLM"},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_a_type_is_supported_where_mlx_lm_has_classes_for_it(tmp_path: Path, config: dict[str, Any]) -> None:
    """By mlx-lm's own search for them, its renamed types included."""
    reason = why_not_supported(written(tmp_path, config), config)
    try:
        mlx_lm_utils._get_classes(config)
    except ValueError:
        assert f"neither mlx-lm nor an encoder here reads a {config['model_type']!r}" in reason
    else:
        assert reason == ""


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "bert"}, ""),
        ({"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2"}}, ""),
        ({"model_type": "lfm2_vl", "text_config": {"model_type": "lfm2"}}, ""),
        (
            {"model_type": "internvl_chat", "llm_config": {"model_type": "internlm9"}},
            "reads a 'internvl_chat'",
        ),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}, "heads for scores"),
        ({"model_type": "qwen3", "is_causal": False}, "attends in both directions"),
        ({"model_type": "llama", "model_file": "mine.py"}, "code of its own (mine.py)"),
        ({}, "names no model_type"),
    ],
)
def test_encoders_and_models_that_see_are_known_too(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    """Encoders built here load; a model that sees counts by its text model, or is refused with the reason."""
    reason = why_not_supported(written(tmp_path, config), config)
    assert (told in reason) if told else reason == ""


def test_nothing_is_imported_to_tell(tmp_path: Path) -> None:
    """A launcher and a listing have no MLX in their process."""
    write_tensors(tmp_path / "model.safetensors", {"a": ("F32", 40)})
    written(tmp_path, {"model_type": "no_such_model"})
    with pytest.raises(CheckpointError, match="no_such_model"):
        open_checkpoint(tmp_path)
    program = (
        "import sys; from pathlib import Path\n"
        "from zmqengine.checkpoint.supported import why_not_supported\n"
        f"assert why_not_supported(Path({str(tmp_path)!r}), {{'model_type': 'no_such_model'}})\n"
        "assert not {'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
