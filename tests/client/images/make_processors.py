"""Grids and pixels of images by the published processors of transformers.

`python tests/client/images/make_processors.py` writes `data/processors.json`; it needs an environment with transformers
and torch. The file has hashes: the pictures follow from their sizes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZES = [
    (1, 1), (7, 5), (40, 40), (64, 64), (65, 63), (90, 31), (31, 90), (120, 80), (128, 128), (129, 257), (200, 30),
    (30, 200), (256, 256), (300, 301), (333, 111), (97, 400), (500, 500), (640, 480), (999, 77),
]  # fmt: skip
RAW = {"do_rescale": False, "do_normalize": False}
# The card's rule and numbers, the processor and its arguments, and whether its pixels are Pillow's.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], bool]] = {
    "qwen2_vl": (
        {"resize": "area", "filter": "bicubic", "patch": 4, "merge": 2, "pixels_min": 256, "pixels_max": 16384},
        "qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
        {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 1,
         "size": {"shortest_edge": 256, "longest_edge": 16384}},
        True,
    ),
    "pixtral": (
        {"resize": "longest", "filter": "bicubic", "patch": 8, "merge": 1, "side_max": 128},
        "pixtral.image_processing_pil_pixtral:PixtralImageProcessorPil",
        {"patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 128}},
        True,
    ),
    "idefics3": (
        {"resize": "tiles", "filter": "lanczos", "patch": 8, "merge": 2, "side_max": 128, "tile": 32, "tiles_max": 16,
         "overview": True},
        "idefics3.image_processing_pil_idefics3:Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}},
        True,
    ),
    "smolvlm": (
        {"resize": "tiles", "filter": "lanczos", "patch": 8, "merge": 2, "side_max": 128, "tile": 64, "tiles_max": 4,
         "overview": True},
        "smolvlm.image_processing_pil_smolvlm:SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
        True,
    ),
    "internvl": (
        {"resize": "tiles_ratio", "filter": "bicubic", "patch": 8, "merge": 2, "tile": 32, "tiles_min": 1,
         "tiles_max": 6, "overview": True},
        "got_ocr2.image_processing_pil_got_ocr2:GotOcr2ImageProcessorPil",
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6},
        True,
    ),
    "lfm2_vl": (
        {"resize": "tiles_area", "filter": "bilinear", "patch": 8, "merge": 2, "tile": 32, "tiles_min": 2,
         "tiles_max": 6, "pixels_min": 512, "pixels_max": 1536, "pixels_split": 3072, "overview": True},
        "lfm2_vl.image_processing_lfm2_vl:Lfm2VlImageProcessor",
        {"encoder_patch_size": 8, "downsample_factor": 2, "tile_size": 32, "min_tiles": 2, "max_tiles": 6,
         "min_image_tokens": 2, "max_image_tokens": 6, "max_num_patches": 64},
        False,
    ),
}  # fmt: skip


def picture(width: int, height: int) -> Image.Image:
    """The picture of this size, smooth and noisy."""
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    noise = (across * 7919 + down * 104729) % 61
    channels = [across * 255 // max(1, width), down * 255 // max(1, height), (across + down) % 200]
    return Image.fromarray(
        np.stack([np.clip(each + noise, 0, 255) for each in channels], -1).astype(np.uint8)
    )


def patches(tile: np.ndarray, patch: int) -> tuple[list[int], bytes]:
    """The grid and the patches of a tile (3, height, width), as SPEC.md orders them."""
    pixels = np.round(tile).astype(np.uint8).transpose(1, 2, 0)
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    return [rows, columns], pixels.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2).tobytes()


def tiles_of(name: str, processor: Any, image: Image.Image, card: dict[str, Any]) -> list[np.ndarray]:
    """The tiles of a picture, (3, height, width) each."""
    made = processor([image], return_tensors="np" if "Pil" in type(processor).__name__ else "pt", **RAW)
    pixels = np.asarray(made["pixel_values"], dtype=np.float32)
    patch, merge = card["patch"], card["merge"]
    if name == "qwen2_vl":
        _, rows, columns = (int(side) for side in np.asarray(made["image_grid_thw"])[0])
        blocks = pixels.reshape(rows // merge, columns // merge, merge, merge, 3, patch, patch)
        return [blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)]
    if name == "pixtral":
        height, width = (int(side) for side in np.asarray(made["image_sizes"])[0])
        return [pixels[0, :, :height, :width]]
    if name == "lfm2_vl":
        shapes = np.asarray(made["spatial_shapes"])
        return [
            flat[: rows * columns].reshape(rows, columns, patch, patch, 3).transpose(4, 0, 2, 1, 3).reshape(
                3, rows * patch, columns * patch
            )
            for flat, (rows, columns) in zip(pixels, shapes, strict=True)
        ]  # fmt: skip
    return list(pixels[0] if pixels.ndim == 5 else pixels)


def main() -> None:
    """Write the cases."""
    import importlib

    cases: dict[str, Any] = {}
    for name, (card, path, arguments, exact) in CASES.items():
        module, _, kind = path.partition(":")
        processor = getattr(importlib.import_module(f"transformers.models.{module}"), kind)(**arguments)
        images = []
        for width, height in SIZES:
            if max(width, height) > 200 * min(width, height):
                continue
            try:
                tiles = tiles_of(name, processor, picture(width, height), card)
            except (ValueError, RuntimeError) as error:  # Sizes that the processor itself cannot take.
                print(name, width, height, error)
                continue
            made = [patches(tile, card["patch"]) for tile in tiles]
            digest = hashlib.blake2b(b"".join(pixels for _, pixels in made), digest_size=8).hexdigest()
            images.append(
                {
                    "size": [width, height],
                    "grids": [grid for grid, _ in made],
                    "pixels": digest if exact else "",
                }
            )
        cases[name] = {"card": card, "images": images}
    data = Path(__file__).parent / "data" / "processors.json"
    data.write_text(json.dumps(cases, separators=(",", ":")).replace('{"size"', '\n{"size"') + "\n", "utf-8")


if __name__ == "__main__":
    main()
