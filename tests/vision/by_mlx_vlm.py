"""Features and logits of checkpoints of the cases by mlx-vlm: `python -m tests.vision.by_mlx_vlm DIRECTORY...`.

It needs an environment with mlx-vlm. A directory has a checkpoint as published, and its case as `case.json`; the answer
is one line of JSON for each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.vision.make_cases import pixels_of, tiles_of


def inputs_of(given: dict[str, Any], grids: list[list[int]], mx: Any) -> tuple[Any, dict[str, Any]]:
    """Pixels of one image as mlx-vlm's models take them, and further arguments."""
    patch, family = given["patch"], given["config"]["model_type"]
    mean, std = (
        np.array(given["processor"][name], np.float32)[:, None, None] for name in ("image_mean", "image_std")
    )
    tiles = tiles_of(pixels_of(grids, patch, given["seed"]), grids, patch)
    normal = [(tile.astype(np.float32) / 255 - mean) / std for tile in tiles]
    if family == "lfm2_vl":
        most = max(rows * columns for rows, columns in grids)
        flat = np.zeros((len(tiles), most, 3 * patch**2), np.float32)
        mask = np.zeros((len(tiles), most), np.int32)
        for place, (tile, (rows, columns)) in enumerate(zip(normal, grids, strict=True)):
            cut = tile.reshape(3, rows, patch, columns, patch).transpose(1, 3, 2, 4, 0)
            flat[place, : rows * columns] = cut.reshape(rows * columns, -1)
            mask[place, : rows * columns] = 1
        return mx.array(flat), {"spatial_shapes": mx.array(grids), "pixel_attention_mask": mx.array(mask)}
    if family.startswith("qwen"):
        (tile,), ((rows, columns),) = normal, grids
        cut = tile.reshape(3, rows // 2, 2, patch, columns // 2, 2, patch).transpose(1, 4, 2, 5, 0, 3, 6)
        frames = np.repeat(cut[:, :, :, :, :, None], 2, axis=5)
        return mx.array(frames.reshape(rows * columns, -1)), {
            "image_grid_thw": mx.array([[1, rows, columns]])
        }
    stacked = mx.array(np.stack(normal))
    if family in ("idefics3", "smolvlm"):
        return stacked[None], {}
    size = mx.array([[grids[0][0] * patch, grids[0][1] * patch]])
    return stacked, {"image_sizes": size} if family in ("pixtral", "mistral3") else {}


def main() -> None:
    """Answer for each directory."""
    import mlx.core as mx
    from mlx_vlm.utils import load_model  # type: ignore[import-not-found]

    for name in sys.argv[1:]:
        directory = Path(name)
        given = json.loads((directory / "case.json").read_text())
        model: Any = load_model(directory)
        features = []
        for grids, wanted in zip(given["images"], given["features"], strict=True):
            pixels, more = inputs_of(given, grids, mx)
            tokens = mx.array([[given["token"]] * len(wanted)])
            found = model.get_input_embeddings(tokens, pixels, **more).inputs_embeds[0]
            features.append(np.array(found.astype(mx.float32)).tolist())
        print(json.dumps({"family": given["config"]["model_type"], "features": features}), flush=True)


if __name__ == "__main__":
    main()
