"""What a request that leaves it open is sampled with."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple


class SamplingDefaults(NamedTuple):
    """As the model's makers advise, and as OpenAI's API has it where they say nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def sampling_defaults(facts: Mapping[str, object]) -> SamplingDefaults:
    """From the facts of a tokenizer bundle: numbers as text."""
    found: dict[str, float] = {}
    for name, kind in (("temperature", float), ("top_p", float), ("top_k", int)):
        with contextlib.suppress(KeyError, ValueError):
            found[name] = kind(str(facts[f"default_{name}"]))
    return SamplingDefaults(**found)  # type: ignore[arg-type]
