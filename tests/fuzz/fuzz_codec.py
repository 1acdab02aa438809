"""The coverage-guided fuzzer of the codec, for as long as it is left running.

    python -m tests.fuzz.fuzz_codec -dict=tests/fuzz/words.dict tests/fuzz/corpus    until it is stopped
    python -m tests.fuzz.fuzz_codec -max_total_time=20 /tmp/new tests/fuzz/corpus
    python -m tests.fuzz.fuzz_codec -merge=1 tests/fuzz/corpus /tmp/new     keep what reaches something new

The options are libFuzzer's. Needs `atheris` (Linux). A finding is written to `crash-*`: add it to the corpus
and mend the codec.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["msgpack", "zmqengine", "tests.fuzz"]):
    from tests.fuzz import target


def main() -> None:
    """Fuzz with libFuzzer's own command line."""
    atheris.Setup(sys.argv, target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
