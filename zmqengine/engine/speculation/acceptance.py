"""The acceptance rate of draft tokens."""

from __future__ import annotations

# Judged tokens for which the prior rate counts.
_PRIOR_TOKENS = 2
# A higher rate would favour a longer draft in every case.
_RATE_MAX = 0.98


class Acceptance:
    """Moving average of the share of draft tokens that are accepted: a mean at first, then one of weight `weight`.

    The `prior` counts as two tokens. `judged`: tokens that were compared with the model's choice.
    """

    __slots__ = ("_weight", "judged", "rate")

    def __init__(self, prior: float, weight: float) -> None:
        self.rate = prior
        self.judged = 0
        self._weight = weight

    def judge(self, accepted: int, *, rejected: bool) -> None:
        """Count `accepted` tokens, and the one after them if it was `rejected`."""
        for index in range(accepted + rejected):
            self.judged += 1
            weight = max(self._weight, 1 / (self.judged + _PRIOR_TOKENS))
            self.rate += weight * ((index < accepted) - self.rate)

    def expected(self, tokens: int) -> float:
        """Mean number of accepted tokens of a draft of `tokens`, up to the first that is rejected."""
        rate = min(self.rate, _RATE_MAX)
        return rate * (1 - rate**tokens) / (1 - rate)
