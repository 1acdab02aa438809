"""Niceness of a worker, told where it decides whose work on the GPU ends."""

from __future__ import annotations

import os
import sys

import pytest

from zmqengine.worker.process.niceness import nice_facts


@pytest.mark.parametrize(
    ("platform", "nice", "told"), [("darwin", 5, True), ("darwin", 0, False), ("linux", 5, False)]
)
def test_a_worker_that_gives_way_on_macos_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, platform: str, nice: int, told: bool
) -> None:
    """omlx #3706: zsh starts what ends in & with nice 5. It is a fact of `status`, which `doctor` reads."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "nice", lambda more: nice + more)
    assert nice_facts() == ({"nice": str(nice)} if told else {})
    assert ("no_bg_nice" in caplog.text) == told
