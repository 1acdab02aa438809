"""Random numbers that depend on nothing but a seed and an index, on every machine."""

from __future__ import annotations

_MASK = 0xFFFFFFFFFFFFFFFF


def mix(number: int) -> int:
    """64 well-mixed bits of `number`, taken modulo 2**64. One step of splitmix64 (Steele et al., OOPSLA 2014)."""
    number = (number * 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def seed_key(seed: int) -> int:
    """The start of the sequence of `seed`, so that neighbouring seeds have sequences far apart."""
    return mix(seed ^ 0x5851F42D4C957F2D)


def uniform(key: int, index: int) -> float:
    """Number `index` of the sequence, in [0, 1): a multiple of 2**-23, so exact in float32."""
    return (mix(key + index) >> 41) * 2.0**-23
