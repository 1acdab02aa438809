"""The options of a worker."""

from __future__ import annotations

import pytest

from zmqengine.config import WorkerConfig
from zmqengine.engine.options import EngineOptions
from zmqengine.errors import ConfigError
from zmqengine.option import options_of
from zmqengine.protocol.addresses import Endpoints
from zmqengine_http.config import HttpConfig


def test_options_survive_the_way_to_a_child_process() -> None:
    """What the supervisor writes, its worker reads."""
    config = WorkerConfig(
        model="/models/one",
        name="one",
        rows_max=3,
        memory_limit_bytes=1 << 30,
        drain_timeout_s=1.5,
        supervise=False,
    )
    assert WorkerConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows_max": 0}, "--rows-max is 0: it must be from 1 to 4096"),
        ({"pass_timeout_s": float("nan")}, "--pass-timeout is nan"),
        ({"lease_ms": 10**12}, "from 100 to 86400000"),
        ({"memory_limit_bytes": 1}, "--memory-limit is 1"),
        ({"wired_limit": "some"}, "weights, off, all or a size"),
        ({"fault_drop_frames": 1.0}, "from 0 to 0.99"),
        ({"log_level": "loud"}, "one of debug, info, warning, error"),
        ({"model": ""}, "--model is empty"),
        ({"engine": "other"}, "must be mlx"),
        ({"name": "a b"}, "'a b' is not a worker address"),
        ({"name": "ipc:///tmp/x/ctl"}, "use --bind"),
        ({"bind": "tcp://127.0.0.1"}, "tcp://HOST:PORT"),
        ({"bind": "tcp://127.0.0.1:1", "bind_out": "ipc:///tmp/x/out"}, "different kinds"),
        ({"authorized_keys": "/keys"}, "belong together"),
        ({"server_key": "/key"}, "belong together"),
        ({"server_key": "/key", "authorized_keys": "/keys"}, "keys are for tcp"),
        ({"operator_keys": "/keys"}, "--operator-keys needs"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(options: dict[str, object], said: str) -> None:
    """The message says which option, and what it may be."""
    with pytest.raises(ConfigError) as refused:
        WorkerConfig(**options)  # type: ignore[arg-type]
    assert said in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "192.0.2.1", "example.org"])
def test_an_address_that_others_reach_needs_keys(host: str) -> None:
    """A worker without keys binds this machine's own addresses only."""
    bind = f"tcp://{host}:5555"
    with pytest.raises(ConfigError, match="zmqengine keygen"):
        WorkerConfig(bind=bind)
    with pytest.raises(ConfigError, match="zmqengine keygen"):
        WorkerConfig(bind="tcp://127.0.0.1:5555", bind_out=bind)
    assert WorkerConfig(bind=bind, server_key="/key", authorized_keys="/keys").uses_curve


@pytest.mark.parametrize("text", ["", "[]", '{"rows_max": "three"}', '{"rows": 3}', '{"rows_max": 0}'])
def test_text_that_is_no_configuration_is_refused(text: str) -> None:
    """Never a default in place of what was meant."""
    with pytest.raises(ConfigError):
        WorkerConfig.from_json(text)


def test_a_restart_binds_the_addresses_of_the_first_life() -> None:
    """Port 0 is chosen once."""
    real = Endpoints("tcp://127.0.0.1:5", "tcp://127.0.0.1:9", "tcp://127.0.0.1:7")
    config = WorkerConfig(bind="tcp://127.0.0.1:0").pinned(real)
    assert config.endpoints == real
    assert WorkerConfig.from_json(config.to_json()).endpoints == real


@pytest.mark.parametrize("config", [WorkerConfig, EngineOptions, HttpConfig])
def test_every_option_has_a_flag_of_its_own_and_a_default_within_its_bounds(config: type) -> None:
    """What can be declared wrong."""
    options = options_of(config)
    flags = [option.flag for option in options]
    assert len(set(flags)) == len(flags)
    for option in options:
        option.check(option.default)
        assert option.about.help.endswith((".", ")")), option.name


def test_every_number_has_bounds() -> None:
    """A bound that was forgotten is a number that nobody checks."""
    for option in options_of(WorkerConfig):
        if (int in option.kinds or float in option.kinds) and bool not in option.kinds:
            low, high = option.about.within
            assert low is not None, option.name
            assert high is not None, option.name
            for beyond in (low - 1, high + 1, float("nan"), float("inf")):
                with pytest.raises(ConfigError, match=option.flag):
                    option.check(beyond)
