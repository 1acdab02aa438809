"""A seeded source of choices that keeps to one side of the train and held-out split."""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

Split = Literal["train", "held_out"]
Choice = TypeVar("Choice")

HELD_OUT_SHARE = 0.05
_ATTEMPTS_MAX = 100_000


def split_of(key: str) -> Split:
    """The side of the split that `key` belongs to; the same in every process and for every seed."""
    first_bytes = hashlib.sha256(key.encode()).digest()[:4]
    return "held_out" if int.from_bytes(first_bytes, "big") < HELD_OUT_SHARE * 2**32 else "train"


class Draw:
    """Choices from a seed, restricted to one split.

    Two draws made with the same seed and split give the same choices.
    """

    def __init__(self, seed: int, split: Split) -> None:
        self.split = split
        self._random = random.Random(f"{seed}/{split}")

    def one(self, choices: Sequence[Choice]) -> Choice:
        """One of `choices`, all equally likely."""
        return choices[self._random.randrange(len(choices))]

    def several(self, choices: Sequence[Choice], count: int) -> list[Choice]:
        """`count` different members of `choices`, in random order."""
        return self._random.sample(choices, count)

    def number(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return self._random.randint(low, high)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random.random() < probability

    def keyed(self, make: Callable[[], Choice], key: Callable[[Choice], str]) -> Choice:
        """The first value of `make()` whose `key` lies in this split.

        Raises AssertionError if `make` can hardly ever give one: its values then vary too little to be split.
        """
        for _ in range(_ATTEMPTS_MAX):
            value = make()
            if split_of(key(value)) == self.split:
                return value
        raise AssertionError(f"no {self.split} value found")
