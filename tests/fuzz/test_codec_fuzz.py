"""The kept corpus, and the short form of the coverage-guided fuzzer."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import seeds, target

ROOT = Path(__file__).resolve().parents[2]
SECONDS = int(os.environ.get("ZMQENGINE_FUZZ_SECONDS", "10"))
HERE = Path(__file__).parent


def test_every_input_of_the_corpus_is_decoded_or_refused() -> None:
    """What once led somewhere new still leads nowhere bad; both outcomes are in the corpus."""
    inputs = [path.read_bytes() for path in sorted(seeds.CORPUS.iterdir())]
    assert len(inputs) > 50
    outcomes = [target.check(data) for data in inputs]
    assert any(outcomes)
    assert not all(outcomes)


def test_every_seed_is_well_understood() -> None:
    """The examples are accepted by the fuzzer's target, or it would be looking at nothing."""
    accepted = sum(target.check(data) for data in seeds.seeds())
    assert accepted >= len(seeds.specification.examples())


def test_the_words_of_the_protocol_are_those_the_fuzzer_knows() -> None:
    """A field that is added to the protocol is added to the dictionary: `python -m tests.fuzz.seeds`."""
    assert seeds.WORDS.read_text(encoding="ascii") == seeds.words()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no build for this platform"
)
def test_a_fuzzer_that_follows_coverage_finds_nothing_new(tmp_path: Path) -> None:
    """$ZMQENGINE_FUZZ_SECONDS of libFuzzer on the codec, from the kept corpus."""
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.fuzz_codec",
        f"-max_total_time={SECONDS}",
        f"-dict={seeds.WORDS}",
        f"-artifact_prefix={tmp_path}/",
        "-rss_limit_mb=1024",
        str(tmp_path),
        str(seeds.CORPUS),
    ]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + 60, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    runs = re.search(r"Done (\d+) runs", ended.stderr)
    assert runs
    assert int(runs[1]) > 1000
