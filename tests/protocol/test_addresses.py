"""Names and addresses as users type them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqengine.errors import ConfigError
from zmqengine.protocol import addresses


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZMQENGINE_ADDRESS", raising=False)
    monkeypatch.delenv("ZMQENGINE_DIR", raising=False)


def test_nothing_stands_for_the_default_worker_of_this_user() -> None:
    """Two users of a machine do not meet by accident."""
    assert addresses.resolve(None) == f"ipc:///tmp/zmqengine-{os.getuid()}/default/ctl"
    assert addresses.resolve("") == addresses.resolve("default")


def test_the_environment_gives_the_address_and_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that is typed wins over the environment."""
    monkeypatch.setenv("ZMQENGINE_ADDRESS", "tcp://gpu:7000")
    monkeypatch.setenv("ZMQENGINE_DIR", "/run/z")
    assert addresses.resolve(None) == "tcp://gpu:7000"
    assert addresses.resolve("big") == "ipc:///run/z/big/ctl"


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("default", "zmqengine worker"), ("big", "zmqengine worker --name big"),
        ("ipc:///run/x/ctl", "zmqengine worker --bind ipc:///run/x/ctl"),
        ("tcp://gpu:7000", "zmqengine worker --bind tcp://gpu:7000"),
    ],
)  # fmt: skip
def test_the_command_that_starts_a_worker_names_the_address_it_will_have(address: str, command: str) -> None:
    """A user who misses a worker by its name starts one of that name."""
    assert addresses.start_command(addresses.resolve(address)) == command


@pytest.mark.parametrize(
    "address",
    [
        "../up", "a/b", ".hidden", "-x", "x" * 65, "a b", "name\n", "é", "http://h:1", "inproc://x", "ipc://",
        "ipc://relative/ctl", "ipc:///d/cmd", "ipc:///ctl", "ipc:////ctl", "ipc:///./ctl", "ipc:///d\0/ctl",
        "tcp://h", "tcp://h:", "tcp://:1", "tcp://h:65536", "tcp://h:-1",
        "tcp://h:1/x", "tcp://h:1\n", "tcp://::1:5", "tcp://h:999999", "tcp://a:b:1", "tcp://h:1 ",
        "tcp://h:\N{FULLWIDTH DIGIT ONE}",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_a_sentence(address: str) -> None:
    """One line that says what an address looks like, never a ZeroMQ errno."""
    with pytest.raises(ConfigError) as caught:
        addresses.resolve(address)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["ipc:///d/ctl", "tcp://gpu:0", "tcp://gpu:65535", "tcp://*:7000", "tcp://[::1]:7000"]
)
def test_a_full_address_is_taken_as_it_is(address: str) -> None:
    """With every port there is: which ones a worker can bind is another question."""
    assert addresses.resolve(address) == address


def test_a_path_over_the_macos_limit_is_refused_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """103 bytes, counted as the file system counts them, are allowed; 104 name the limit and the way out."""
    directory = "/tmp/" + "d" * (addresses.IPC_PATH_BYTES_MAX - len("/tmp//n/ctl"))
    monkeypatch.setenv("ZMQENGINE_DIR", directory)
    assert len(addresses.resolve("n").removeprefix("ipc://")) == 103
    with pytest.raises(ConfigError, match=r"104 bytes.*103.*ZMQENGINE_DIR"):
        addresses.resolve("nn")
    monkeypatch.setenv("ZMQENGINE_DIR", "/tmp/" + "é" * 47)
    with pytest.raises(ConfigError, match="the system allows 103"):
        addresses.resolve("nnnn")


def test_the_other_two_sockets_follow_from_ctl() -> None:
    """Files side by side, or the next two ports, or any three free ones."""
    assert addresses.endpoints("ipc:///d/ctl") == addresses.Endpoints(
        "ipc:///d/ctl", "ipc:///d/cmd", "ipc:///d/out"
    )
    following = addresses.endpoints("tcp://127.0.0.1:7000")
    assert following == addresses.Endpoints(
        "tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"
    )
    assert addresses.endpoints("tcp://[::1]:0").out == "tcp://[::1]:0"
    assert addresses.endpoints("ipc:///d/ctl").is_ipc
    assert not following.is_ipc
    assert addresses.endpoints("tcp://127.0.0.1:65533").out == "tcp://127.0.0.1:65535"
    with pytest.raises(ConfigError, match="65533"):
        addresses.endpoints("tcp://127.0.0.1:65534")


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "[::]"])
def test_a_wildcard_host_is_the_host_at_which_ctl_was_reached(wildcard: str) -> None:
    """A worker bound to every interface cannot know which one a front-end sees."""
    assert addresses.as_seen_from("tcp://gpu:7000", f"tcp://{wildcard}:7001") == "tcp://gpu:7001"
    assert addresses.as_seen_from("tcp://[fe80::1]:7000", f"tcp://{wildcard}:7001") == "tcp://[fe80::1]:7001"
    assert addresses.as_seen_from("tcp://gpu:7000", "tcp://other:7001") == "tcp://other:7001"
    assert addresses.as_seen_from("ipc:///d/ctl", "ipc:///d/cmd") == "ipc:///d/cmd"


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("ipc:///d/ctl", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://eth0:1", False),
        ("tcp://127.example.org:1", False),
        ("tcp://127.0.0.1.evil:1", False),
        ("tcp://localhost.evil:1", False),
    ],
)
def test_only_this_machines_own_addresses_are_loopback(address: str, loopback: bool) -> None:
    """A name that merely begins like loopback is not: keys would be waived for it."""
    assert addresses.is_loopback(address) is loopback


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    """Nothing else is raised, and what is accepted is a full address whose parts can be derived."""
    try:
        full = addresses.resolve(text)
    except ConfigError:
        return
    assert full.startswith(("ipc:///", "tcp://"))
    if full.startswith("ipc://"):
        assert addresses.ipc_path(full).parent != Path("/")
        assert addresses.endpoints(full).cmd.startswith("ipc://")
