"""The bundled models, each of about a million parameters: pico, and pico-tools, which calls tools.

Their weights are here; how they were made is in `tools/pico` of the repository.
"""

from pathlib import Path

BUNDLED = ("pico", "pico-tools")
"""Names of the bundled models, the default first."""


def model_path(name: str = "pico") -> Path:
    """The directory of a bundled model, in mlx-lm's own format: a plain folder of this package."""
    assert name in BUNDLED, name
    return Path(__file__).parent / ("model" if name == "pico" else "tools_model")
