"""The bundled models, each of about a million parameters: pico, pico-tools, which calls tools, pico-embed, which
turns sentences into vectors, and pico-eye, which sees.

Their weights are here; how they were made is in `tools/pico` of the repository.
"""

from pathlib import Path

BUNDLED = ("pico", "pico-tools", "pico-embed", "pico-eye")
"""Names of the bundled models, the default first."""


def model_path(name: str = "pico") -> Path:
    """The directory of a bundled model, in its published format: a plain folder of this package."""
    folders = dict(zip(BUNDLED, ("model", "tools_model", "embed_model", "eye_model"), strict=True))
    return Path(__file__).parent / folders[name]
