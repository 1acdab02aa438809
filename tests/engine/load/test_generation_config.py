"""How the makers of a model want it sampled, read from beside its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqengine.engine.load.generation_config import sampling_facts


@pytest.mark.parametrize(
    ("written", "facts"),
    [
        (
            '{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": true}',
            {"default_temperature": "0.6", "default_top_p": "0.95", "default_top_k": "20"},
        ),
        ('{"temperature": 1, "top_k": null, "top_p": 7}', {"default_temperature": "1.0"}),
        ('{"temperature": true, "top_p": "0.9", "top_k": -1}', {}),
        ("[1]", {}),
        ("{", {}),
        (None, {}),
    ],
)
def test_how_its_makers_want_a_model_sampled_is_told(
    tmp_path: Path, written: str | None, facts: dict[str, str]
) -> None:
    """Only what is a number within bounds; a file that cannot be read is none."""
    if written is not None:
        (tmp_path / "generation_config.json").write_text(written)
    assert sampling_facts(tmp_path) == facts
