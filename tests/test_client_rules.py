"""Rules for front-ends by name or key."""

from __future__ import annotations

import pytest

from zmqengine.client_rules import ClientRules
from zmqengine.config import WorkerConfig
from zmqengine.errors import ConfigError

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def rules(*texts: str) -> ClientRules:
    return ClientRules.parse(texts, "--share", low=0.01, high=100, default=1)


def test_the_first_rule_that_names_a_front_end_holds() -> None:
    """Shell patterns on its name, in the order given; nobody is left without a value."""
    table = rules("chat-admin=8", "chat*=4", "*-[0-9]=0.5")
    assert table.of("chat-admin") == 8
    assert table.of("chat-7") == 4
    assert table.of("index-7") == 0.5
    assert table.of("Chat") == 1
    assert table.of("") == 1


def test_a_key_is_named_by_its_beginning_and_no_name_counts_for_it() -> None:
    """Keys have all of a pattern's characters, and equals signs: they are compared as they are."""
    table = rules(f"key:{KEY}=3", "key:a=*?[b]c=d=2")
    assert table.of("anyone", KEY) == 3
    assert table.of("anyone", "a=*?[b]c=d and more") == 2
    assert table.of(f"key:{KEY}", "") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chat", "write NAME=NUMBER, as in --share 'chat*=100'"),
        ("=4", "write NAME=NUMBER"),
        ("chat=", "a number from 0.01 to 100"),
        ("chat=0", "a number from 0.01 to 100"),
        ("chat=nan", "a number from 0.01 to 100"),
        ("chat=many", "a number from 0.01 to 100"),
        ("key:rq:rM=2", "8 or more characters of the public key"),
    ],
)
def test_a_rule_that_cannot_work_is_refused_with_what_to_write(text: str, said: str) -> None:
    """When the worker starts, not when the first front-end comes."""
    with pytest.raises(ConfigError) as refused:
        WorkerConfig(share=("ok=1", text))
    assert said in str(refused.value)


def test_the_worker_reads_its_rules_from_its_options() -> None:
    """Shares are 1 and every priority is allowed unless a rule says otherwise; both survive the supervisor."""
    config = WorkerConfig.from_json(WorkerConfig(share=("a=2",), priority_min=("b*=1",)).to_json())
    assert (config.shares.of("a"), config.shares.of("b")) == (2, 1)
    assert (config.priorities_min.of("a"), config.priorities_min.of("b1")) == (-100, 1)
    with pytest.raises(ConfigError, match=r"--priority-min 'b=-101': .* from -100 to 100"):
        WorkerConfig(priority_min=("b=-101",))
