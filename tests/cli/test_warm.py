"""`zmqengine warm`, against a real worker process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import RunningWorker

Run = Callable[..., subprocess.CompletedProcess[str]]
StartWorker = Callable[..., RunningWorker]


def test_a_prompt_is_read_once_and_kept(start_worker: StartWorker, run: Run, tmp_path: Path) -> None:
    """A conversation and a text; what was kept already is not read again, and a broken file is one line."""
    worker = start_worker(prompt_cache_bytes=1 << 20)
    conversation, text, broken = tmp_path / "head.json", tmp_path / "head.txt", tmp_path / "broken.json"
    conversation.write_text(json.dumps({"messages": [{"role": "system", "content": "Be brief."}]}))
    text.write_text("Once upon a time")
    for file in (conversation, text):
        first, second = (run("warm", "-w", worker.name, str(file)) for _ in range(2))
        assert (first.returncode, first.stdout) == (0, "")
        tokens, new = (int(word) for word in first.stderr.split() if word.isdigit())
        assert tokens == new > 5
        assert f"{tokens} tokens are kept, 1 of them new" in second.stderr
    for content, said in ((b'{"messages": 5}', "messages"), (b"\xff\xfe", "not UTF-8")):
        broken.write_bytes(content)
        refused = run("warm", "-w", worker.name, str(broken))
        assert refused.returncode == 2
        assert said in refused.stderr
