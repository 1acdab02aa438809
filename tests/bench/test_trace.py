"""Files of arrival times and lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from zmqengine.bench.scenarios.trace import SAMPLE, TraceLine, read_trace
from zmqengine.bench.targets.target import TargetError


def test_a_trace_is_json_lines_or_csv(tmp_path: Path) -> None:
    """The same requests from either, by time; other columns do not matter."""
    (tmp_path / "a.jsonl").write_text(
        '{"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 4, "who": "x"}\n'
        '{"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 8}\n'
    )
    (tmp_path / "a.csv").write_text("who,arrival_s,prompt_tokens,output_tokens\nx,1.5,10,4\ny,0.5,20,8\n")
    expected = [TraceLine(0.5, 20, 8), TraceLine(1.5, 10, 4)]
    assert read_trace(tmp_path / "a.jsonl") == expected
    assert read_trace(tmp_path / "a.csv") == expected


def test_a_trace_may_say_what_prompts_share(tmp_path: Path) -> None:
    """Tokens at the beginning that are the same in all of them."""
    path = tmp_path / "shared.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,shared_tokens\n0,10,4,6\n1,20,8,\n")
    assert read_trace(path) == [TraceLine(0, 10, 4, 6), TraceLine(1, 20, 8, 0)]


@pytest.mark.parametrize(
    "line", ["{}", "[1]", "nonsense", '{"arrival_s": "x", "prompt_tokens": 1, "output_tokens": 1}']
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    """With its number and the file's name."""
    path = tmp_path / "broken.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(TargetError, match=r"broken\.jsonl: request 2"):
        read_trace(path)


def test_the_sample_is_a_trace() -> None:
    """Forty requests in about eight seconds."""
    lines = read_trace(SAMPLE)
    assert len(lines) == 40
    assert 5 < lines[-1].arrival_s < 15
