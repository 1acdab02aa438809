"""Nothing of CUDA is needed where there is none. `tests.support.without_cuda` runs the whole suite so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.engines import greedy

SCRIPT = """
import json, sys
from tests.support.without_cuda import hide
hide()
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.open import open_mlx_engine
from zmqengine.engine.options import EngineOptions

opened = open_mlx_engine(sys.argv[1], EngineOptions(warm_up_s=1.0))
engine, found = opened.engine, {0: [], 1: []}
assert engine.insert([RowRequest(0, [5, 6, 7], 8), RowRequest(1, [9] * 40, 8)]) == []
while sum(map(len, found.values())) < 16:
    for token in engine.next().tokens:
        found[token.row].append(token.token)
engine.close()

from tests.embedding.checkpoints import engine_of, run
from zmqengine.engine.interface import TextsRequest
from zmqengine.pico import model_path

vectors, failures = run(engine_of(model_path("pico-embed")), [TextsRequest(7, [[5, 6, 7], [8]])])
print(json.dumps([found[0], found[1], opened.facts["model_code"], vectors[7].shape, failures]))
"""


def run(script: str, *arguments: str) -> Any:
    """The end of a script of its own process."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parents[2],
    )


def test_engines_open_and_run_without_the_folder_for_cuda(model, model_directory) -> None:
    """With the tokens of mlx-lm, on the decoder, with speculation as by default; and an encoder."""
    ended = run(SCRIPT, str(model_directory))
    assert ended.returncode == 0, ended.stderr
    *found, code, shape, failures = json.loads(ended.stdout.splitlines()[-1])
    assert found == [greedy(model, [5, 6, 7], 8), greedy(model, [9] * 40, 8)]
    assert (code, shape, failures) == ("ours", [2, 128], [])
