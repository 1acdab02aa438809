"""A front-end process of `zmqengine demo`, on the client library alone.

It prints one JSON object per line: `{"ready": true}`; after a line on its input, `{"text": ...}` for each chunk, and
figures at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time

from zmqengine.cli.advice import one_line
from zmqengine.errors import ZmqEngineError
from zmqengine_client import Client


def main() -> None:
    """`python -m zmqengine.cli.commands.demo.front_end ADDRESS PROMPT SEED MAX_TOKENS`."""
    address, prompt, seed, max_tokens = sys.argv[1:]
    with Client(address, name=f"demo {os.getpid()}") as client:
        client.tokenizer()
        _say(ready=True)
        sys.stdin.readline()
        started_s = time.monotonic()
        first_s = None
        stream = client.generate(prompt, max_tokens=int(max_tokens), temperature=0.8, seed=int(seed))
        for chunk in stream:
            first_s = first_s or time.monotonic()
            _say(text=chunk.text)
        ended_s = time.monotonic()
    first_s = first_s or ended_s
    tokens = len(stream.result.tokens)
    _say(
        tokens=tokens,
        first_ms=(first_s - started_s) * 1000,
        tokens_per_s=tokens / (ended_s - started_s),
        resumed=stream.result.resumed,
    )


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    try:
        main()
    except ZmqEngineError as error:
        sys.exit(f"zmqengine: {one_line(error)}")
