"""Random models, made once."""

from __future__ import annotations

import pytest

from tests.support.models import HYBRID, LLAMA, MAMBA, SLIDING, build_model, save_model

CONFIGS = {"llama": LLAMA, "sliding": SLIDING, "mamba": MAMBA, "hybrid": HYBRID}


@pytest.fixture(scope="session")
def models():
    """A random model of each shape."""
    return {name: build_model(config) for name, config in CONFIGS.items()}


@pytest.fixture
def model(models):
    """The plain one."""
    return models["llama"]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    """A random llama on disk, as mlx-lm loads it."""
    return save_model(tmp_path_factory.mktemp("models") / "random-llama")
