"""The helper that tests wait with fails the test when the wait fails."""

from __future__ import annotations

import pytest

from tests.support.workers import wait_until


def test_a_wait_that_fails_fails_its_test() -> None:
    """vllm-mlx #8 review: a regression test ignored whether its wait succeeded. Ours cannot."""
    with pytest.raises(AssertionError, match="it did not come about"):
        wait_until(lambda: False, "it did not come about", seconds=0.02)
