"""The import of transformers, which mlx-lm needs for tokenizers alone. This module must not import MLX."""

from __future__ import annotations

import os
import sys

from zmqengine.engine.models.transformers_names import kept_names


def import_transformers() -> None:
    """Import it without torch: where that is installed transformers imports it too, for seconds, and its tokenizers do
    not use it."""
    # As mlx-lm has it: without torch transformers says so.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    hidden = "torch" not in sys.modules
    if hidden:
        # The import system takes None for a module that does not exist.
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        # Names that mlx-lm imports: they are lazy, and each loads a part of the package.
        with kept_names():
            from transformers import (  # noqa: F401
                AutoTokenizer,
                PreTrainedTokenizer,
                PreTrainedTokenizerFast,
            )
    finally:
        if hidden:
            del sys.modules["torch"]
