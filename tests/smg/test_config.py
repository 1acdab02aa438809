"""What an adapter can be asked for."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from click.testing import CliRunner

from zmqengine.cli.commands.smg import smg
from zmqengine_client.errors import ConfigError
from zmqengine_smg import SmgConfig


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"listen": "0.0.0.0:50051"}, "--insecure-no-key"),
        ({"listen": "[::]:50051"}, "--insecure-no-key"),
        ({"listen": "example.org:50051"}, "--insecure-no-key"),
        ({"listen": "nonsense"}, "tcp://HOST:PORT"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], named: str) -> None:
    """Before anything is opened, with the option that is meant."""
    with pytest.raises(ConfigError, match=named.replace("[", r"\[")):
        SmgConfig(**options)


def test_the_network_is_open_when_that_is_said() -> None:
    """And loopback always is."""
    assert SmgConfig(listen="0.0.0.0:50051", insecure_no_key=True).listen_address == ("0.0.0.0", 50051)
    assert SmgConfig(listen="[::1]:50051").listen_address == ("[::1]", 50051)


def test_the_command_says_what_is_wrong() -> None:
    """The option's own text reaches the terminal."""
    result = CliRunner().invoke(smg, ["--listen", "0.0.0.0:1"])
    assert isinstance(result.exception, ConfigError)
    assert "--insecure-no-key" in result.exception.message


def test_an_adapter_whose_packages_are_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are imported when the command runs."""
    monkeypatch.setitem(sys.modules, "zmqengine_smg", None)
    result = CliRunner().invoke(smg, ["--listen", "127.0.0.1:0"])
    assert result.exit_code == 1
    assert "pip install 'zmqengine[smg]'" in result.output
