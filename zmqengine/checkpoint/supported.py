"""Whether the installed mlx-lm, mlx-vlm or an encoder here reads a checkpoint's type of model. Imports none of them.

mlx-lm has a file in `mlx_lm/models` for each type that it reads, and two tables in `mlx_lm/utils.py` of types that are
read as another one. mlx-vlm, an extra, has a folder for each; those with a `LanguageModel` speak.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zmqengine.checkpoint.drafters import drafter_of
from zmqengine.checkpoint.recipe import read_recipe
from zmqengine.checkpoint.text_config import is_seeing, text_config
from zmqengine.checkpoint.weights import CheckpointError, tensor_names
from zmqengine.errors import ModelLoadError

_RENAME_SCALES = ("muse_spark",)
"""Types whose files mlx-lm renames with their global scales."""
_EXPERTS = (".switch_mlp.", ".experts.", ".switch_glu.")
"""Parts of the names of experts in mlx-lm's models."""


class _MlxLm(NamedTuple):
    types: frozenset[str]
    others: Mapping[str, str]
    """The type that is read in place of a type."""
    by_architecture: Mapping[tuple[str, str], str]


def why_not_supported(directory: Path, config: Mapping[str, Any]) -> str:
    """The reason for which no worker can load the checkpoint in `directory`; empty for one that may load.

    Empty without mlx-lm too.
    """
    if drafter := drafter_of(config):
        return drafter.description
    try:
        if read_recipe(directory).family:
            return ""
    except ModelLoadError as error:
        return str(error)
    mlx_lm = _installed()
    if mlx_lm is None:
        return ""
    if "model_type" not in config:
        return "its config.json names no model_type"
    if config.get("model_file") is not None:
        return f"it asks for code of its own ({config['model_file']}), which is not run here"
    if not _is_of_mlx_lm(mlx_lm, config) and not is_of_mlx_vlm(config):
        told = f"neither mlx-lm nor an encoder here reads a {str(config['model_type'])!r}"
        if _mlx_vlm_root() is not None:
            return f"{told}, and mlx-vlm has no language model of that type"
        return f"{told}: mlx-vlm may, which the extra mlx-vlm installs (pip install 'zmqengine[mlx-vlm]')"
    return _why_no_products(directory, config)


def is_of_mlx_vlm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm's code runs a checkpoint: mlx-lm has none for its type, and the installed mlx-vlm has."""
    mlx_lm, root = _installed(), _mlx_vlm_root()
    if mlx_lm is None or root is None or "model_type" not in config:
        return False
    # The text part of a model that sees is built here.
    if is_seeing(config) or _is_of_mlx_lm(mlx_lm, config):
        return False
    kind = str(config["model_type"]).lower()
    kind = str(_remappings(root / "utils.py").get("MODEL_REMAPPING", {}).get(kind, kind))
    if not kind.isidentifier():
        return False
    files = [*(root / "models" / kind).glob("*.py"), root / "models" / f"{kind}.py"]
    return any("class LanguageModel" in file.read_text("utf-8") for file in files if file.is_file())


def _is_of_mlx_lm(mlx_lm: _MlxLm, config: Mapping[str, Any]) -> bool:
    read_as = text_config(config) if is_seeing(config) else config
    return _type_of(mlx_lm, read_as) in mlx_lm.types


def _why_no_products(directory: Path, config: Mapping[str, Any]) -> str:
    """The reason for which no layer of MLX multiplies with the weights; empty where one does, as far as names tell.

    NVFP4 with a scale for a whole tensor: mlx-lm reads it for experts alone, and by the names of NVIDIA's and
    compressed-tensors' files in the models that rename them (`mlx_lm/models/switch_layers.py`; issue 3911 of MLX).
    """
    if "nvfp4" not in json.dumps(config).lower() and not (directory / "hf_quant_config.json").exists():
        return ""
    if config.get("model_type") in _RENAME_SCALES:
        return ""
    try:
        names = tensor_names(directory)
    except CheckpointError:
        # Reading its weights says more.
        return ""
    published = [name for name in names if name.endswith(("weight_global_scale", "weight_scale_2"))]
    converted = [
        name
        for name in names
        if name.endswith(".global_scale") and not any(part in name for part in _EXPERTS)
    ]
    if not published and not converted:
        return ""
    return (
        f"its NVFP4 weights have a global scale ({min(published + converted)}), which MLX's products do not read: "
        "take a conversion for MLX to NVFP4 without it, MXFP4 or 4 bits"
    )


def _type_of(mlx_lm: _MlxLm, config: Mapping[str, Any]) -> str:
    kind, architectures = str(config["model_type"]), config.get("architectures") or ()
    for architecture in [architectures] if isinstance(architectures, str) else architectures:
        if (kind, architecture) in mlx_lm.by_architecture:
            return mlx_lm.by_architecture[kind, architecture]
    return mlx_lm.others.get(kind, kind)


@functools.cache
def _installed() -> _MlxLm | None:
    # The package itself: looking for a module in it would import it, and MLX with it.
    package = importlib.util.find_spec("mlx_lm")
    if package is None or not package.submodule_search_locations:
        return None
    root = Path(package.submodule_search_locations[0])
    types = frozenset(path.stem for path in (root / "models").glob("*.py"))
    tables = _remappings(root / "utils.py")
    return _MlxLm(types, tables.get("MODEL_REMAPPING", {}), tables.get("MODEL_ARCHITECTURE_REMAPPING", {}))


@functools.cache
def _mlx_vlm_root() -> Path | None:
    """The folder of the installed mlx-vlm."""
    package = importlib.util.find_spec("mlx_vlm")
    locations = None if package is None else package.submodule_search_locations
    return Path(locations[0]) if locations else None


@functools.cache
def _remappings(file: Path) -> dict[str, dict[Any, str]]:
    """The tables of a module of types that are read as another one."""
    tables: dict[str, dict[Any, str]] = {}
    for statement in ast.parse(file.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            for target in statement.targets:
                if isinstance(target, ast.Name) and target.id.endswith("_REMAPPING"):
                    tables[target.id] = ast.literal_eval(statement.value)
    return tables
