"""The other side of `benchmarks.images features`: mlx-vlm in its own environment, with the same BLAS.

`python -m benchmarks.images_of_others DIRECTORY` answers each line, the grids of an image and a seed, with the
seconds that its features took: of processor time on a CPU, on the clock on a GPU.
"""

# mypy: ignore-errors
import json
import sys
import time
from pathlib import Path

from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
from mlx_vlm.utils import load_model

from tests.vision.by_mlx_vlm import inputs_of
from zmqengine.engine.host.backend import on_gpu

clock = time.perf_counter if on_gpu() else time.process_time

directory = Path(sys.argv[1])
model = load_model(directory)
given = json.loads((directory / "config.json").read_text())
vision = given["vision_config"]
case = {
    "config": given,
    "processor": json.loads((directory / "preprocessor_config.json").read_text()),
    "patch": vision["patch_size"],
    "token": given.get("image_token_id") or given["image_token_index"],
}
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    pixels, more = inputs_of({**case, "seed": asked["seed"]}, asked["grids"], mx)
    tokens = mx.array([[case["token"]] * asked["features"]])
    mx.eval(pixels, tokens)
    started = clock()
    found = model.get_input_embeddings(tokens, pixels, **more)
    mx.eval(found.inputs_embeds, *(getattr(found, "deepstack_visual_embeds", None) or []))
    print(
        json.dumps({"seconds": clock() - started, "first": found.inputs_embeds[0, 0, :4].tolist()}),
        flush=True,
    )
