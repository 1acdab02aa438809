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
from zmqengine.doctor.model import look_at_model

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


NVFP4 = {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
COMPRESSED = {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}


@pytest.mark.parametrize(
    ("config", "tensor", "refused"),
    [
        (NVFP4, "model.layers.0.mlp.down_proj.scales", False),
        (NVFP4, "model.layers.0.mlp.down_proj.global_scale", True),
        (NVFP4, "model.layers.0.mlp.switch_mlp.down_proj.global_scale", False),
        (MODELOPT, "model.layers.0.mlp.down_proj.weight_scale_2", True),
        (MODELOPT, "model.layers.0.mlp.down_proj.weight_scale", False),
        (COMPRESSED, "model.layers.0.mlp.down_proj.weight_global_scale", True),
        ({}, "model.layers.0.mlp.down_proj.weight_scale_2", False),
    ],
)
def test_weights_with_a_scale_that_no_product_reads_are_refused(
    tmp_path: Path, config: dict[str, Any], tensor: str, refused: bool
) -> None:
    """mlx #3911: they load, or fail with a list of names. `models` and `doctor` say the same as the worker."""
    config = {"model_type": "llama", **config}
    directory = written(tmp_path, config)
    write_tensors(directory / "model.safetensors", {tensor: ("F32", 4), "a": ("BF16", 100)})
    reason = why_not_supported(directory, config)
    assert ("have a global scale" in reason) == refused
    assert (tensor in reason) == refused
    if refused:
        (finding,) = look_at_model(str(directory), 1 << 30)
        assert (finding.level, "have a global scale" in finding.text) == ("fail", True)
        with pytest.raises(CheckpointError, match="have a global scale"):
            open_checkpoint(directory)
