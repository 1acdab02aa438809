"""Python child processes that import installed packages alone, whatever the current directory holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

# `-m` and `-c` put the current directory first on the path. Python 3.10 has no option against it.
_RUN = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
_PATH = "PYTHONPATH"


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Command that runs `module` as `python -m` does, without the current directory on the path.

    A cloned repository may hold a file with the name of any module that a child imports. Such a child is started with
    `python_environment`.
    """
    return (sys.executable, "-c", _RUN, module, *arguments)


def python_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment and `more`, without empty entries of PYTHONPATH, which name the current directory."""
    environment = {**os.environ, **(more or {})}
    entries = [entry for entry in environment.pop(_PATH, "").split(os.pathsep) if entry]
    return {**environment, _PATH: os.pathsep.join(entries)} if entries else environment


def leave_current_directory() -> None:
    """Take the current directory off this process's path where an empty entry of PYTHONPATH put it there.

    A program that is installed in place, in the current directory, keeps it.
    """
    here, entries = os.getcwd(), os.environ.get(_PATH, "")
    if entries and "" in entries.split(os.pathsep) and not __file__.startswith(here + os.sep):
        sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]
