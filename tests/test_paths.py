"""One rule for the cache directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqengine.paths import cache_directory

_VARIABLES = ("ZMQENGINE_CACHE_DIR", "XDG_CACHE_HOME")


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, "/home/x/.cache/zmqengine"),
        ("darwin", {}, "/home/x/Library/Caches/zmqengine"),
        ("linux", {"XDG_CACHE_HOME": "/c"}, "/c/zmqengine"),
        ("darwin", {"XDG_CACHE_HOME": "/c"}, "/c/zmqengine"),
        ("darwin", {"XDG_CACHE_HOME": "/c", "ZMQENGINE_CACHE_DIR": "/own"}, "/own"),
        ("linux", {"ZMQENGINE_CACHE_DIR": "~/own"}, "/home/x/own"),
    ],
)
def test_the_cache_directory_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, platform: str, environment: dict[str, str], expected: str
) -> None:
    """By our own variable first, then as the system has it."""
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv("HOME", "/home/x")
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)
