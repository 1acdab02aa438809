"""Modules that are imported when one of their names is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Union

import pytest

from zmqengine.engine.models.later import imported_later

SOURCE = """
made = []
class Thing:
    kind = "thing"
    def __init__(self, name):
        made.append(name)
"""


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that is on the path, and `Thing` of it, bound where it is imported later."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "things_of_later", raising=False)
    (tmp_path / "things_of_later.py").write_text(SOURCE)
    with imported_later("things_of_later"):
        from things_of_later import Thing  # type: ignore[import-not-found]
    return Thing


def test_a_name_is_bound_without_an_import(later: Any) -> None:
    """Annotations of it import nothing either; a call, an attribute and `isinstance` do."""
    assert Union[later, None]  # noqa: UP007 - as mlx-lm writes them
    assert "things_of_later" not in sys.modules
    thing = later("one")
    module = sys.modules["things_of_later"]
    assert module.made == ["one"]
    assert type(thing) is module.Thing
    assert isinstance(thing, later)
    assert not isinstance(1, later)
    assert later.kind == "thing"


def test_what_was_imported_is_taken_as_it_is(later: Any) -> None:
    """And `before` is called before an import alone."""
    calls: list[int] = []
    later.kind  # noqa: B018 - imports it
    module = sys.modules["things_of_later"]
    with imported_later("things_of_later", before=lambda: calls.append(1)):
        from things_of_later import Thing
    assert Thing is module.Thing
    assert calls == []


def test_the_engine_is_imported_without_transformers(tmp_path: Path) -> None:
    """Nor the hub's client; mlx-lm's own calls, from anywhere in the process, import them when they are made."""
    script = (
        "import sys\n"
        "from zmqengine.engine.models import mlx_lm as ours\n"
        "names = 'transformers', 'huggingface_hub', 'mlx_lm.tokenizer_utils'\n"
        "assert not [name for name in names if name in sys.modules]\n"
        "import mlx_lm\n"
        "from zmqengine.pico import model_path\n"
        "model, tokenizer = mlx_lm.load(str(model_path()))\n"
        "assert isinstance(tokenizer, sys.modules['mlx_lm.generate'].TokenizerWrapper)\n"
        "assert type(tokenizer) is sys.modules['mlx_lm.tokenizer_utils'].TokenizerWrapper\n"
        "assert 'torch' not in sys.modules\n"
        "assert mlx_lm.generate(model, tokenizer, 'Tom', max_tokens=3)\n"
    )
    environment = os.environ | {"ZMQENGINE_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", script], check=False, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
