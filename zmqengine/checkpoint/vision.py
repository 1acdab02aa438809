"""Vision card of a checkpoint, from its configs and its tokenizer: no arrays are read here.

The rules and defaults are those of transformers' image processors, which read the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from zmqengine.errors import ModelLoadError
from zmqengine.vision_card import ResizeFilter, VisionCard

_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
# Pillow's numbers, which image processors write into their configs.
_FILTERS: dict[int, ResizeFilter] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
_IDEFICS_ROWS = 6
_LFM_ROWS = 10


@dataclass(frozen=True, slots=True)
class VisionRecipe:
    """How a checkpoint sees: the card for front-ends, and what the worker computes with.

    `family` is the file of `engine/vision/towers` that reads it. `mean` and `std` are of red, green and blue, for
    pixels from 0 to 1.
    """

    family: str
    card: VisionCard
    mean: tuple[float, ...]
    std: tuple[float, ...]
    config: dict[str, Any]

    @property
    def has_three_positions(self) -> bool:
        """Whether its text model gives a token three positions."""
        return self.family == "qwen"


def read_vision(directory: Path, tokenizer_json: bytes) -> VisionRecipe | None:
    """The recipe of a model's directory; None for a model that sees nothing, or whose images are not supported.

    `tokenizer_json` is its tokenizer. Raises `ModelLoadError` for a checkpoint that lacks what the card says.
    """
    config = _json(directory / "config.json")
    has_tower = isinstance(config.get("vision_config"), dict)
    return recipe_of(directory, tokenizer_json) if has_tower and why_blind(directory) is None else None


def recipe_of(directory: Path, tokenizer_json: bytes) -> VisionRecipe:
    """The recipe of a model of a known family, whether or not its text model can read the features."""
    config = _json(directory / "config.json")
    family, mean_and_std, make = _FAMILIES[_model_type(config)]
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    given = _Given(config, _image_processor(directory), _processor(directory), tokenizer)
    try:
        card = make(given)
    except (KeyError, TypeError, IndexError) as error:
        raise ModelLoadError(
            f"{directory}: the configs of its vision tower lack {error}: fetch the model again, or one that is whole"
        ) from error
    mean, std = (
        tuple(float(number) for number in given.processor.get(name) or default)
        for name, default in zip(("image_mean", "image_std"), mean_and_std, strict=True)
    )
    return VisionRecipe(family, card, mean, std, config)


def why_blind(directory: Path) -> str | None:
    """The reason for which a model with a vision tower takes no images here; None for any other model."""
    config = _json(directory / "config.json")
    kind = _model_type(config)
    if "vision_config" not in config and "vision_tower" not in config:
        return None
    if kind in _FAMILIES and kind not in _REFUSED and _looks_as_known(config):
        return None
    unknown = (
        "only one with Pixtral's tower is known" if kind == "llava" else "its vision tower is not known here"
    )
    reason = _REFUSED.get(kind, unknown)
    known = ", ".join(sorted(set(_FAMILIES) - set(_REFUSED)))
    return f"images of a {kind or 'model of no type'} are not supported: {reason}; a model of {known} sees"


@dataclass(frozen=True, slots=True)
class _Given:
    """The files of a checkpoint. `processor` is of images, `whole` of images and text."""

    config: dict[str, Any]
    processor: dict[str, Any]
    whole: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def vision(self) -> dict[str, Any]:
        return dict(self.config["vision_config"])

    def token(self, name: str) -> int:
        """The id of a token by its text."""
        token_id = self.tokenizer.token_to_id(name)
        if token_id is None:
            raise KeyError(f"the token {name} in tokenizer.json")
        return int(token_id)

    def text(self, text: str) -> list[int]:
        """The ids of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def image_token(self, default: str) -> int:
        """The id of a feature, where older and newer configs name it."""
        for name in ("image_token_id", "image_token_index"):
            if self.config.get(name) is not None:
                return int(self.config[name])
        return self.token(str(self.whole.get("image_token") or default))

    def filter(self, default: ResizeFilter) -> ResizeFilter:
        """The resampling, by the protocol's name."""
        return _FILTERS.get(int(self.processor.get("resample") or 0), default)


def _muse(given: _Given) -> VisionCard:
    vision, processor = given.vision, given.processor
    patch, merge = int(vision.get("patch_size", 14)), int(vision.get("merge_size", 2))
    token = given.image_token("<|patch|>")
    return VisionCard(
        kind="muse_spark", patch=patch, merge=merge, resize="cells", filter=given.filter("lanczos"),
        pixels_min=(patch * merge) ** 2,
        pixels_max=int(processor.get("max_image_tokens", 4096)) * (patch * merge) ** 2,
        placeholder=token, token=token,
        begin=[given.token("<|image_start|>")], end=[given.token("<|image_end|>")],
    )  # fmt: skip


def _pixtral(given: _Given) -> VisionCard:
    is_mistral = _model_type(given.config) == "mistral3"
    token = given.image_token("[IMG]")
    size = given.processor.get("size") or {}
    return VisionCard(
        kind="pixtral",
        patch=int(given.vision.get("patch_size", 16)),
        merge=int(given.config.get("spatial_merge_size", 2)) if is_mistral else 1,
        resize="longest", filter=given.filter("bicubic"),
        side_max=int(size.get("longest_edge") or given.vision.get("image_size") or 1024),
        placeholder=token, token=token,
        line_end=[given.token(str(given.whole.get("image_break_token") or "[IMG_BREAK]"))],
        end=[given.token(str(given.whole.get("image_end_token") or "[IMG_END]"))],
    )  # fmt: skip


def _lfm2(given: _Given) -> VisionCard:
    # Older checkpoints have the numbers of the processor in config.json.
    numbers = {**given.config, **given.processor}
    patch, merge = int(numbers.get("encoder_patch_size", 16)), int(numbers.get("downsample_factor", 2))
    cell = (patch * merge) ** 2
    token = given.image_token("<image>")
    splits = bool(numbers.get("do_image_splitting", True)) and int(numbers.get("max_tiles", 10)) > 1
    names = [
        [f"<|img_row_{row}_col_{column}|>" for column in range(1, _LFM_ROWS + 1)]
        for row in range(1, _LFM_ROWS + 1)
    ]
    return VisionCard(
        kind="lfm2_vl", patch=patch, merge=merge,
        resize="tiles_area" if splits else "area", filter=given.filter("bilinear"),
        pixels_min=int(numbers.get("min_image_tokens", 64)) * cell,
        pixels_max=int(numbers.get("max_image_tokens", 256)) * cell,
        tile=int(numbers.get("tile_size", 512)) if splits else 0,
        tiles_min=int(numbers.get("min_tiles", 2)) if splits else 0,
        tiles_max=int(numbers.get("max_tiles", 10)) if splits else 0,
        pixels_split=int(numbers.get("max_image_tokens", 256) * numbers.get("max_pixels_tolerance", 2.0) * cell)
        if splits
        else 0,
        overview=splits and bool(numbers.get("use_thumbnail", True)),
        placeholder=token, token=token,
        begin=[given.token("<|image_start|>")], end=[given.token("<|image_end|>")],
        tile_begin=_markers(given, names, lambda name: [given.token(name)]) if splits else [],
        overview_begin=[given.token("<|img_thumbnail|>")] if splits else [],
    )  # fmt: skip


def _idefics3(given: _Given) -> VisionCard:
    vision, processor = given.vision, given.processor
    patch = int(vision["patch_size"])
    tile = int((processor.get("max_image_size") or {}).get("longest_edge") or vision["image_size"])
    splits = bool(processor.get("do_image_splitting", True))
    fake, token = given.token("<fake_token_around_image>"), given.image_token("<image>")
    names = [
        [f"<row_{row}_col_{column}>" for column in range(1, _IDEFICS_ROWS + 1)]
        for row in range(1, _IDEFICS_ROWS + 1)
    ]
    whole = [fake, *_piece(given, "<global-img>")]
    return VisionCard(
        kind="idefics3", patch=patch, merge=int(given.config.get("scale_factor", 2)),
        resize="tiles" if splits else "fixed", filter=given.filter("lanczos"),
        side_max=int((processor.get("size") or {}).get("longest_edge") or 4 * tile),
        tile=tile, overview=splits, placeholder=token, token=token,
        single_begin=whole, end=[fake],
        # The reference writes line feeds, one behind each row of tiles and one before the overview.
        row_end=given.text("\n") if splits else [],
        overview_begin=[*given.text("\n\n"), *whole] if splits else [],
        tile_begin=_markers(given, names, lambda name: [fake, *_piece(given, name)]) if splits else [],
    )  # fmt: skip


def _internvl(given: _Given) -> VisionCard:
    vision, config, processor = given.vision, given.config, given.processor
    tile = side_of(vision["image_size"])
    is_chat = _model_type(config) == "internvl_chat"
    token = given.token(str(given.whole.get("image_token") or "<IMG_CONTEXT>"))
    most = int(config.get("max_dynamic_patch", 12) if is_chat else processor.get("max_patches", 12))
    least = int(config.get("min_dynamic_patch", 1) if is_chat else processor.get("min_patches", 1))
    splits = bool(config.get("dynamic_image_size", True)) if is_chat else True
    return VisionCard(
        kind="internvl", patch=side_of(vision["patch_size"]),
        merge=round(1 / float(config.get("downsample_ratio", 0.5))),
        resize="tiles_ratio" if splits else "fixed", filter=given.filter("bicubic"), tile=tile,
        tiles_min=least if splits else 0, tiles_max=most if splits else 0,
        overview=splits and bool(config.get("use_thumbnail", True)),
        placeholder=token, token=token,
        begin=[given.token("<img>")], end=[given.token("</img>")],
    )  # fmt: skip


def _qwen(given: _Given) -> VisionCard:
    vision, processor = given.vision, given.processor
    size = processor.get("size") or {}
    patch, merge = int(vision["patch_size"]), int(vision.get("spatial_merge_size", 2))
    token = given.image_token("<|image_pad|>")
    kind = _model_type(given.config)
    # The defaults of transformers, of Qwen2-VL's processor and of Qwen3-VL's, which reads larger patches.
    least, most = (56 * 56, 28 * 28 * 1280) if patch == 14 else (256 * 256, 4096 * 4096)
    return VisionCard(
        kind=kind, patch=patch, merge=merge, resize="area", filter=given.filter("bicubic"),
        pixels_min=int(processor.get("min_pixels") or size.get("shortest_edge") or least),
        pixels_max=int(processor.get("max_pixels") or size.get("longest_edge") or most),
        placeholder=token, token=token,
    )  # fmt: skip


_Make = Callable[[_Given], VisionCard]

_FAMILIES: dict[str, tuple[str, tuple[Sequence[float], Sequence[float]], _Make]] = {
    "muse_spark": ("muse_spark", _HALF, _muse),
    "pixtral": ("pixtral", _CLIP, _pixtral),
    "llava": ("pixtral", _CLIP, _pixtral),
    "mistral3": ("pixtral", _CLIP, _pixtral),
    "lfm2_vl": ("siglip", _HALF, _lfm2),
    "idefics3": ("siglip", _HALF, _idefics3),
    "smolvlm": ("siglip", _HALF, _idefics3),
    "internvl_chat": ("internvit", _IMAGENET, _internvl),
    "internvl": ("internvit", _IMAGENET, _internvl),
    "qwen2_vl": ("qwen", _CLIP, _qwen),
    "qwen2_5_vl": ("qwen", _CLIP, _qwen),
    "qwen3_vl": ("qwen", _HALF, _qwen),
    "qwen3_vl_moe": ("qwen", _HALF, _qwen),
    "qwen3_5": ("qwen", _HALF, _qwen),
    "qwen3_5_moe": ("qwen", _HALF, _qwen),
}
_REFUSED = {
    "gemma3": "the tokens of an image attend to each other in both directions, and here a prompt is read in chunks",
    "gemma3n": "its layers take more inputs than embeddings",
    "gemma4": "the tokens of an image attend to each other in both directions, and here a prompt is read in chunks",
    "mllama": "its text attends to images by layers of their own",
}


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", "")).replace("-", "_")


def _looks_as_known(config: Mapping[str, Any]) -> bool:
    """Whether the model has a tower, and that of its family: a llava may have one of many."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return False
    return _model_type(config) != "llava" or vision.get("model_type") == "pixtral"


def _markers(
    given: _Given, names: Sequence[Sequence[str]], ids: Callable[[str], list[int]]
) -> list[list[list[int]]]:
    """Ids before each tile, as far as the tokenizer has a token for its place."""
    known = [[name for name in row if given.tokenizer.token_to_id(name) is not None] for row in names]
    return [[ids(name) for name in row] for row in known if row]


def _piece(given: _Given, name: str) -> list[int]:
    """A marker's ids: its token, or, in a tokenizer without one, its letters."""
    token_id = given.tokenizer.token_to_id(name)
    return given.text(name) if token_id is None else [int(token_id)]


def side_of(value: Any) -> int:
    """Pixels a side, which newer configs give as height and width."""
    return int(value[0]) if isinstance(value, list) else int(value)


def _image_processor(directory: Path) -> dict[str, Any]:
    """Numbers of the image processor; newer checkpoints have them inside `processor_config.json`."""
    inside = _processor(directory).get("image_processor")
    processor = _json(directory / "preprocessor_config.json", {})
    return {**(inside if isinstance(inside, dict) else {}), **processor}


def _processor(directory: Path) -> dict[str, Any]:
    return _json(directory / "processor_config.json", {})


def _json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.is_file():
        return default
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
