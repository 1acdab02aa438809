"""The watchdog, in real processes that hang for real."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.support.workers import wait_until
from zmqengine.worker.process.watchdog import Watchdog

pytestmark = pytest.mark.process

TIMEOUT_S = 1.0
HANG_S = 0.3
"""The time-out of what hangs whatever it is: one that holds the interpreter's lock computes for ten times as long."""
START_S = 60.0
"""What a loaded machine may take to start an interpreter."""

HANGS = {
    "blocks for ever in C": """
        import ctypes
        libc = ctypes.CDLL(None)
        start()
        libc.sleep(3600)
    """,
    "waits for a lock that nobody gives back": """
        import threading
        lock = threading.Lock()
        lock.acquire()
        start()
        lock.acquire()
    """,
    "sleeps in C and holds the interpreter lock": """
        import ctypes
        libc = ctypes.PyDLL(None)
        start()
        libc.sleep(3600)
    """,
    "computes in C and holds the interpreter lock": """
        import re
        pattern = re.compile(r"(a+)+$")
        start()
        pattern.match("a" * 200 + "b")
    """,
    "loops in Python": """
        start()
        while True:
            pass
    """,
    "calls and returns in Python, and so do other threads": """
        import threading
        def deep(level):
            return level and deep(level - 1)
        def churn():
            while True:
                deep(40)
        for _ in range(4):
            threading.Thread(target=churn, daemon=True).start()
        start()
        churn()
    """,
}


@pytest.mark.parametrize("how", HANGS)
def test_a_pass_that_hangs_ends_the_process_with_its_stacks(how: str) -> None:
    """mlx-lm #1505, #1834: a generation thread that is deadlocked is noticed, however it hangs."""
    process, started_s = start_watched(HANGS[how], HANG_S)
    _, stderr = process.communicate(timeout=START_S)
    took_s = time.monotonic() - started_s
    assert process.returncode == -signal.SIGALRM, stderr
    assert "most recent call first" in stderr
    assert "in actor_pass" in stderr
    assert took_s >= HANG_S * 0.9


def test_passes_within_the_bound_go_on() -> None:
    """A process that beats lives for longer than the bound, which is one that no busy machine keeps it from beating."""
    process, _ = start_watched(
        """
        import time
        start()
        end_s = time.monotonic() + 1.2 * TIMEOUT_S
        while time.monotonic() < end_s:
            watchdog.beat()
            time.sleep(0.01)
        watchdog.close()
        """,
        timeout_s=3.0,
    )
    _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == 0, stderr


def test_a_paused_watchdog_lets_an_idle_worker_wait() -> None:
    """Waiting for work is no hang, and neither is loading before the first beat."""
    process, _ = start_watched("""
        import time
        start()
        watchdog.pause()
        time.sleep(1.5 * TIMEOUT_S)
        watchdog.beat()
        watchdog.pause()
        watchdog.pause()
        watchdog.close()
    """)
    _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == 0, stderr


def test_a_hang_after_a_pause_is_noticed() -> None:
    """The beat that follows a pause watches at once."""
    process, _ = start_watched("""
        import time
        start()
        watchdog.pause()
        watchdog.beat()
        while True:
            pass
    """)
    _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == -signal.SIGALRM, stderr


def test_a_timeout_of_zero_watches_nothing() -> None:
    """`--pass-timeout 0` turns the watchdog off."""
    process, _ = start_watched("watchdog = Watchdog(0)\nwatchdog.beat()\nprint('here 0', flush=True)")
    _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == 0, stderr


@pytest.mark.parametrize("seconds", [1.5, 5.0])
def test_a_process_that_was_stopped_goes_on(seconds: float) -> None:
    """A debugger, a paused container or a SIGSTOP in the middle of a pass is no hang, however often it comes."""
    process, _ = start_watched("""
        import time
        start()
        end_s = time.process_time() + 0.1 * TIMEOUT_S
        while time.process_time() < end_s:
            pass
        watchdog.close()
    """)
    for _ in range(2):
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds * TIMEOUT_S / 2)
        process.send_signal(signal.SIGCONT)
    _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == 0, stderr


def test_a_hang_is_noticed_although_the_process_was_stopped() -> None:
    """A stop does not count, and what was silent before it still does."""
    process, _ = start_watched(HANGS["blocks for ever in C"])
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5 * TIMEOUT_S)
    process.send_signal(signal.SIGCONT)
    _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == -signal.SIGALRM, stderr


def test_an_idle_worker_has_no_timer_and_no_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause lasts: the timer goes within a tick, and the next beat watches again."""
    armed: list[float] = []
    monkeypatch.setattr("signal.setitimer", lambda _, timeout: armed.append(timeout))
    with Watchdog(0.5) as watchdog:
        for _ in range(100):
            watchdog.beat()
            watchdog.pause()
        wait_until(lambda: armed[-1:] == [0], "the timer is not taken back")
        before = len(armed)
        assert before < 10
        time.sleep(0.3)
        assert len(armed) == before
        watchdog.beat()
        wait_until(lambda: armed[-1] == pytest.approx(5.0), "nothing is watched after a pause")
    assert armed[-1] == 0


def start_watched(body: str, timeout_s: float = TIMEOUT_S) -> tuple[subprocess.Popen[str], float]:
    """A process that runs `body` as a pass; returns it once the pass has begun, and when that was."""
    program = textwrap.dedent(f"""
        import time
        from zmqengine.worker.process.watchdog import Watchdog
        TIMEOUT_S = {timeout_s}
        watchdog = Watchdog(TIMEOUT_S)
        def start():
            # The clock is one for all processes, and this one is not told late what it says.
            print("here", time.monotonic(), flush=True)
            watchdog.beat()
        def actor_pass():
    """) + textwrap.indent(textwrap.dedent(body), "    ").replace(
        "    watchdog =", "    global watchdog; watchdog ="
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program + "\nactor_pass()\n"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline().split()
    assert said[:1] == ["here"], process.communicate()[1]
    return process, float(said[1])
