"""A model trained to say a JSON document again with one field changed, and one of less than a quarter of its size.

`train.py` trained both on what `documents.py` writes. They are bundled: `path("model")` and `path("draft")`.
"""

from pathlib import Path

BUNDLED = ("model", "draft")


def path(name: str) -> Path:
    """The directory of one of the two, in mlx-lm's own format."""
    assert name in BUNDLED, name
    return Path(__file__).parent / name
