"""The bundled model: about a million parameters, trained by `pico.train` on what `pico.corpus` writes."""

from pathlib import Path


def model_path() -> Path:
    """The directory of the bundled model, in mlx-lm's own format: a plain folder beside this file."""
    return Path(__file__).parent / "model"
