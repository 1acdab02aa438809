"""Description of a checkpoint that makes vectors, from its directory: no arrays are read here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zmqengine.errors import ModelLoadError

Pooling = Literal["cls", "mean", "last", "max"]

FAMILIES = {
    "bert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
    "camembert": "bert",
    "modernbert": "modernbert",
    "nomic_bert": "nomic",
}
"""The file of `encoders/` by `model_type`."""
TWO_WAY_FAMILIES = {"gemma3_text": "gemma3"}
"""Likewise, of decoders where the config has them attend in both directions."""
HEADED_FAMILIES = ("bert", "modernbert")
"""Files of `encoders/` that know a head for scores."""

MISSHAPEN = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors of code that reads a model's JSON files, whose fields may be of any type."""

_NOMIC_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
    "max_trained_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
}
"""Fields by the names of the code that Nomic BERT was published with, and by transformers'."""

# sentence-transformers' names of what it pools, new and old.
_POOLING: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "max": "max",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a checkpoint turns hidden states into vectors.

    `family` is the file of `encoders/` that reads it; empty for a decoder. `is_reranker`: its head gives `labels`
    scores. `pooling` is None where the checkpoint does not say; `dense` are the directories of the products that
    follow it. `tokens_max` bounds a text where the checkpoint does; `prompts` go before a text, by their names, and
    the one named `default_prompt` where none is asked for. A reranker that `is_asked` answers with a yes or a no, as
    Qwen3-Reranker.
    """

    config: dict[str, Any]
    family: str = ""
    labels: int = 0
    pooling: Pooling | None = None
    dense: tuple[Path, ...] = ()
    tokens_max: int | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str = ""
    is_asked: bool = False

    @property
    def is_reranker(self) -> bool:
        """Whether it makes scores and no embeddings."""
        return self.labels > 0

    @property
    def facts(self) -> dict[str, str | bool | int]:
        """Facts for front-ends, beside those of the tokenizer: `prompt_NAME`, the name of the `default_prompt`, and
        `reranker`: how to ask it."""
        prompts: dict[str, str | bool | int] = {f"prompt_{name}": text for name, text in self.prompts}
        if self.default_prompt:
            prompts["default_prompt"] = self.default_prompt
        return {**prompts, "reranker": "qwen3"} if self.is_asked else prompts


def read_recipe(directory: Path) -> Recipe:
    """The recipe of a model's directory. Raises `ModelLoadError` for one that cannot be followed."""
    try:
        return _recipe(directory)
    except MISSHAPEN as error:
        raise ModelLoadError(f"a JSON file in {directory} is not of a model's form: {error}") from error


def _recipe(directory: Path) -> Recipe:
    config = _json(directory / "config.json")
    family = _family(directory, config)
    if family == "nomic":
        config = {
            **{name: config[older] for older, name in _NOMIC_NAMES.items() if older in config},
            **config,
        }
    classifies = str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification")
    if classifies and (family not in HEADED_FAMILIES or config.get("position_embedding_type") == "alibi"):
        raise ModelLoadError(
            f"{directory.name} is a {config['architectures'][0]}: heads for scores are supported on BERT, RoBERTa, "
            "XLM-RoBERTa, CamemBERT and ModernBERT; of other rerankers take one that is asked, as Qwen3-Reranker"
        )
    modules = _modules(directory)
    pooling, dense = _after_transformer(directory, modules)
    of_library = _json(directory / "config_sentence_transformers.json", {})
    prompts = _prompts(of_library)
    default = str(of_library.get("default_prompt_name") or "")
    return Recipe(
        config=config,
        family=family,
        labels=_labels(config) if classifies else 0,
        pooling=pooling,
        dense=dense,
        tokens_max=_tokens_max(directory, directory / _path_of(modules, "Transformer")),
        prompts=prompts,
        default_prompt=default if default in dict(prompts) else "",
        is_asked=_is_asked(directory, config, modules),
    )


def _family(directory: Path, config: dict[str, Any]) -> str:
    kind = str(config.get("model_type"))
    family = FAMILIES.get(kind, "")
    if not family and (config.get("use_bidirectional_attention") or config.get("is_causal") is False):
        if kind not in TWO_WAY_FAMILIES:
            raise ModelLoadError(
                f"{directory.name} attends in both directions, which a {kind} here does not: its vectors would be "
                "others; take an encoder, or an embedder whose attention is causal"
            )
        family = TWO_WAY_FAMILIES[kind]
    # Remote code of the same model_type differs here. Jina's second models are a `bert` and read, later ones are not.
    positions = config.get("position_embedding_type", "absolute")
    known = ("absolute", "alibi") if kind == "bert" else ("absolute",)
    if family == "bert" and positions not in known:
        raise ModelLoadError(
            f"{directory.name} has positions of the type {positions!r}: a {kind} here has {' or '.join(known)} ones"
        )
    if family and config.get("num_experts"):
        raise ModelLoadError(f"{directory.name} has {config['num_experts']} experts: a {kind} here has none")
    return family


def _is_asked(directory: Path, config: dict[str, Any], modules: list[tuple[str, str]]) -> bool:
    """Whether it is Qwen3-Reranker or made from it, which its config does not tell from the base model's.

    Newer checkpoints have a module for it; of older ones the name is all that there is.
    """
    if config.get("model_type") != "qwen3":
        return False
    # The directory of a model in the hub's cache is named by a commit, and the one above it by the model.
    names = " ".join(part for part in directory.parts[-3:])
    return any(kind == "LogitScore" for kind, _ in modules) or "reranker" in names.lower()


def _json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error


def _modules(directory: Path) -> list[tuple[str, str]]:
    """sentence-transformers' parts of a model, as (kind, path), in order."""
    listed = _json(directory / "modules.json", [])
    return [(str(module["type"]).rpartition(".")[2], str(module.get("path", ""))) for module in listed]


def _path_of(modules: list[tuple[str, str]], kind: str) -> str:
    return next((path for named, path in modules if named == kind), "")


def _after_transformer(
    directory: Path, modules: list[tuple[str, str]]
) -> tuple[Pooling | None, tuple[Path, ...]]:
    pooling: Pooling | None = None
    dense = []
    for kind, path in modules:
        if kind in ("Pooling", "Dense") and not (directory / path / "config.json").is_file():
            # Conversions for MLX take the files of the top directory only.
            raise ModelLoadError(
                f"{directory} lacks {path}/config.json, which modules.json names: copy {path} from the checkpoint that "
                "it was converted from, as vectors depend on it"
            )
        if kind == "Pooling":
            pooling = _pooling(_json(directory / path / "config.json"))
        elif kind == "Dense":
            dense.append(directory / path)
        elif kind not in ("Transformer", "Normalize", "Dropout", "LogitScore"):
            raise ModelLoadError(f"modules.json has a {kind!r}, which makes no vectors that can be served")
    return pooling, tuple(dense)


def _pooling(config: dict[str, Any]) -> Pooling:
    named = config.get("pooling_mode")
    if named is None:
        named = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if config.get("include_prompt") is False:
        raise ModelLoadError("include_prompt is false: a pooling that leaves out the prompt is not supported")
    modes = [named] if isinstance(named, str) else list(named) or ["mean"]
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise ModelLoadError(
            f"the pooling {', '.join(map(str, modes))} is none of cls, mean, lasttoken and max"
        )
    return _POOLING[modes[0]]


def _labels(config: dict[str, Any]) -> int:
    # transformers writes the names of labels where there are more than two, or other than two.
    return int(config.get("num_labels") or len(config.get("id2label") or {}) or 2)


def _tokens_max(directory: Path, transformer: Path) -> int | None:
    # Where sentence-transformers' own file gives none, its limit is the tokenizer's, which is 1e30 for none.
    limit = _json(transformer / "sentence_bert_config.json", {}).get("max_seq_length")
    limit = limit or _json(directory / "tokenizer_config.json", {}).get("model_max_length")
    return int(limit) if limit and limit < int(1e30) else None


def _prompts(config: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    prompts = config.get("prompts") or {}
    return tuple((str(name), text) for name, text in prompts.items() if isinstance(text, str) and text)
