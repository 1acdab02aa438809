"""What earlier systems learned the hard way, and which of our tests would notice if we had to learn it again.

Each row is a public report of a system that does our job. This is an index: a test is found for a row if its docstring
names the report and its name or docstring has the row's word. Whether it proves what is owed is up to that test.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.workers import wait_until

TESTS = Path(__file__).resolve().parent


class Obligation(NamedTuple):
    """`word` is a pattern that tells apart the rows of one report."""

    report: str
    owed: str
    word: str = ""


KEPT = [
    Obligation("smg #1427 A", "load, step, remove and close on one thread", "thread"),
    Obligation("smg #1427 B", "drain all commands, then exactly one step", "one step"),
    Obligation("smg #1427 B", "the staggered burst is a benchmark scenario", "burst"),
    Obligation("smg #1427 C", "no redundant stream wrapper", "stream"),
    Obligation("smg #1427 review", "construction failure ends start-up, non-zero", "construction"),
    Obligation("smg #1427 review", "the warm-up row is removed when a step raises", "warm.up"),
    Obligation("smg #1427 review", "an abort counts in every phase", "between"),
    Obligation("smg #1427 review", "removal is per row and idempotent", "phantom"),
    Obligation("smg #1427 review", "a terminal answer to every live request before close", "shutdown"),
    Obligation("smg servicer", "bounded retries, then exit", "bounded"),
    Obligation("smg servicer", "a seed belongs to its row", "seed"),
    Obligation("vllm-mlx #8", "a cancel takes effect between two steps", "cancel"),
    Obligation("vllm-mlx #8 review", "no lock around MLX", "lock"),
    Obligation("vllm-mlx #8 review", "errors during a cancel are logged with the request", "logged"),
    Obligation("vllm-mlx #8 review", "tests assert what they wait for", "wait"),
    Obligation("vllm-mlx #8", "a benchmark of 1, 2, 4 and 8 users", "TTFT"),
    Obligation("vllm-mlx #593", "control answers during a long step", "describe|status"),
    Obligation("vllm-mlx #479", "every lazy leaf is evaluated at load", "lazy"),
    Obligation("vllm-mlx #479 review", "tokenise in the front-end, off its event loop", "tokenis"),
    Obligation("vllm-mlx #479 review", "slow passes are logged with their phases", "slow pass"),
    Obligation("vllm-mlx #479", "tool arguments in single quotes are understood", "single quotes"),
    Obligation("omlx #1304", "no module-level stream", "module-level"),
    Obligation("omlx #1304", "two models at once are measured", "two"),
    Obligation("omlx #1485", "loaded arrays are not bound to the loader's stream", "lazy"),
    Obligation("omlx #1437, #1423", "cache arrays are evaluated on the engine's thread", "cache"),
    Obligation("mlx-lm #1505, #1834", "liveness is progress", "watchdog|blocked|deadlock"),
    Obligation("mlx-lm #854, #1390, #1909", "projected admission", "admission"),
    Obligation("mlx-lm #854, #1390, #1909", "a crash is a pause", "kill"),
    Obligation(
        "mlx-openai-server #321, omlx #2260", "leases: who gave up does not keep the GPU busy", "lease|grace"
    ),
    Obligation("lmstudio #1709, omlx #2031", "one step is bounded in time", "bounded|chunk"),
    Obligation("omlx #3047", "priorities are the order of service", "priorit"),
    Obligation("vllm-mlx #799, ollama #17183, mlx-lm #1007", "parameters are honoured or refused", "refused"),
    Obligation("mlx-lm #1441", "a malformed tool call falls back to text", "call"),
    Obligation("omlx #2012", "a malformed tool call falls back to text", "call"),
    Obligation("mlx-lm #1776, #1892, omlx #1970", "a worker has one model", "one"),
    Obligation("smg bench", "1, 4, 16 and 64 users complete", "complete"),
    Obligation("mlx-lm 0.32.2, measured", "every id is checked against the vocabulary", "vocabulary"),
    Obligation("mlx_lm.server 0.32.2", "an empty prompt is refused by name", "empty|prompt"),
    Obligation("mlx_lm.server", "`stop: 4` is refused by name", "stop: 4"),
    Obligation("smg servicer 0.14.1", "a row that always raises blocks nobody", "raise|empty prompt"),
    Obligation("mlx-openai-server, measured", "bounds, deadlines, leases", "deadline|bounds"),
    Obligation("mlx_lm.server", "every pass admits: nobody waits for a timer", "timer"),
    Obligation("mlx_lm.server, measured", "200 of 200 at once", "200"),
    Obligation("mlx_lm.server, mlx-vlm, mlx-openai-server, measured", "who left is noticed", "leaves"),
    Obligation("vllm-mlx, measured", "cache budgets that hold and are told", "budget"),
]

# Rows that ask for something this version cannot be asked to do.
NOT_APPLICABLE = {
    "vllm-mlx #479, images": "prompts are token ids and nothing else: there is no image to key a cache by",
    "omlx #1485, drafts": "there is no draft model; what is loaded is held to the same rule",
}


def named_tests() -> list[tuple[str, str]]:
    """Name and docstring of every test, on one line."""
    found = []
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.append((node.name, " ".join((ast.get_docstring(node) or "").split())))
    return found


def test_every_report_of_an_earlier_system_has_a_test_that_names_it() -> None:
    """A row without a test would be a lesson that we only read."""
    named = named_tests()
    missing = [
        row
        for row in KEPT
        if not any(
            row.report in docstring
            and re.search(row.word, f"{name} {docstring}".replace("_", " "), flags=re.IGNORECASE)
            for name, docstring in named
        )
    ]
    assert missing == []


def test_a_wait_that_fails_fails_its_test() -> None:
    """vllm-mlx #8 review: a regression test ignored whether its wait succeeded. Ours cannot."""
    with pytest.raises(AssertionError, match="it did not come about"):
        wait_until(lambda: False, "it did not come about", seconds=0.02)
