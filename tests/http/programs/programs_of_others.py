"""Runs the scripts in `programs/`: they drive client programs that others wrote, which are not among our dependencies.

`ZMQENGINE_TEST_PROGRAMS` names a directory with their `node_modules` and environments of Python, in their newest
releases. `ZMQENGINE_TEST_NODE`, which `.ci/run` sets, names one with those of `programs/package.json` alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DIRECTORY = os.environ.get("ZMQENGINE_TEST_PROGRAMS", "")
NODE_DIRECTORY = DIRECTORY or os.environ.get("ZMQENGINE_TEST_NODE", "")

ENDS_S = 600
"""Some import for minutes on a machine that is busy with other things."""

wanted = pytest.mark.skipif(not DIRECTORY, reason="ZMQENGINE_TEST_PROGRAMS is not set")
node_wanted = pytest.mark.skipif(
    not NODE_DIRECTORY,
    reason="neither ZMQENGINE_TEST_NODE (set by .ci/run where node and npm are) nor ZMQENGINE_TEST_PROGRAMS is set",
)


def results_of(script: str, *arguments: str, environment: str, scratch: Path) -> list[dict[str, str]]:
    """What each check of a script came to, its name and its error; printed as well. It has to end by itself.

    A script in Python runs in this environment of the directory.
    """
    if script.endswith(".py"):
        command = [f"{DIRECTORY}/{environment}/bin/python", str(HERE / script)]
    else:
        # Node looks for packages beside the script.
        copied = shutil.copy(HERE / script, scratch)
        shutil.copy(HERE / "run_checks.mjs", scratch)
        (scratch / "node_modules").symlink_to(Path(NODE_DIRECTORY) / "node_modules")
        command = ["node", str(copied)]
    ran = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    results = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    print(*(f"{result['error'] or 'ok':60.160} {result['name']}" for result in results), sep="\n")
    assert ran.returncode == 0, ran.stderr[-2000:]
    return results
