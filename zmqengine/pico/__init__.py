"""The bundled model: about a million parameters, trained by `zmqengine.pico.train` on `zmqengine.pico.corpus`."""

from pathlib import Path


def model_path() -> Path:
    """The directory of the bundled model, in mlx-lm's own format; a plain folder inside the installed package."""
    return Path(__file__).parent / "model"
