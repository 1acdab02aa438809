"""The supervisor, with real child processes that die in real ways."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.processes import wait_until_dead
from tests.support.workers import wait_until
from zmqengine.config import WorkerConfig
from zmqengine.worker.process.parent import EXIT_HOPELESS, ParentProcess, SupervisorLink

pytestmark = pytest.mark.process

START_S = 60.0
"""What a loaded machine may take to start a few interpreters."""

Start = Callable[..., "Supervised"]

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from zmqengine.config import WorkerConfig
from zmqengine.protocol.addresses import Endpoints
from zmqengine.worker.process.parent import ParentProcess, watch_supervisor
config = WorkerConfig.from_json(os.environ["ZMQENGINE_WORKER_CONFIG"])
here = Path(os.environ["TEST_DIR"])
life = len(list(here.glob("life-*")))

def gone():
    (here / f"drained-{os.getpid()}").touch()
    os._exit(0)

link = watch_supervisor(gone)

def begin():
    (here / "new").write_text(str(os.getpid()))
    os.replace(here / "new", here / f"life-{life}")

def serve_until_supervisor_is_gone():
    import select
    while True:
        select.select([link], [], [])
        link.check()
"""


class Supervised:
    """A supervisor process whose workers run `body`."""

    def __init__(
        self, directory: Path, body: str, parent: str = "", *, kill_after_s: float = 60.0, **options: object
    ) -> None:
        self.directory = directory
        worker = directory / "worker.py"
        worker.write_text(PRELUDE + textwrap.dedent(body))
        config = WorkerConfig(**({"restart_wait_ms": 1} | options))  # type: ignore[arg-type]
        program = textwrap.dedent(f"""
            import sys
            from zmqengine.config import WorkerConfig
            from zmqengine.worker.process import supervisor
            supervisor.KILL_AFTER_S = {kill_after_s}
            config = WorkerConfig.from_json({config.to_json()!r})
            sys.exit(supervisor.supervise(config, command=[sys.executable, {str(worker)!r}]))
        """)
        command = [sys.executable, "-c", program]
        if parent:
            command = [sys.executable, "-c", textwrap.dedent(parent).replace("COMMAND", repr(command))]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            env=os.environ | {"TEST_DIR": str(directory)},
            text=True,
        )

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, once it has ended."""
        _, stderr = self.process.communicate(timeout=START_S)
        return self.process.returncode, stderr

    def worker_pid(self, life: int = 0) -> int:
        """The process id of that life of the worker, once it has begun."""
        return int(wait_for(self.directory / f"life-{life}").read_text())

    def lives(self) -> int:
        """How often a worker began."""
        return len(list(self.directory.glob("life-*")))


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Start]:
    """Starts supervisors and leaves nothing running."""
    started: list[Supervised] = []

    def start(body: str, parent: str = "", **options: Any) -> Supervised:
        started.append(Supervised(tmp_path, body, parent, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        for life in tmp_path.glob("life-*"):
            kill(int(life.read_text()))


def test_a_worker_that_ends_well_ends_its_supervisor(supervise: Start) -> None:
    """A drained worker is not started again."""
    run = supervise("begin()")
    assert run.end() == (0, "")
    assert run.lives() == 1


def test_a_worker_that_is_killed_is_started_again(supervise: Start) -> None:
    """SIGKILL, as by the out-of-memory killer (mlx-lm #854, #1390, #1909), costs one restart."""
    run = supervise("begin()\nif life == 0:\n    serve_until_supervisor_is_gone()")
    os.kill(run.worker_pid(), signal.SIGKILL)
    code, stderr = run.end()
    assert code == 0
    assert run.lives() == 2
    assert "the worker was killed by SIGKILL: starting it again in 0.0 s (1 of 5)" in stderr


def test_a_worker_that_always_fails_is_given_up_with_one_clear_last_line(supervise: Start) -> None:
    """smg servicer: failures are bounded, and what ends it is not logged-and-continued for ever."""
    run = supervise("begin()\nsys.exit(7)", restarts_max=3)
    code, stderr = run.end()
    assert code == 1
    assert run.lives() == 4
    last = stderr.splitlines()[-1]
    assert "giving up: the worker exited with code 7, after 3 restarts" in last
    assert "Traceback" not in stderr


def test_the_wait_before_a_restart_doubles(supervise: Start) -> None:
    """Back-off, up to its bound."""
    run = supervise("begin()\nsys.exit(7)", restarts_max=4, restart_wait_ms=100, restart_wait_max_ms=300)
    _, stderr = run.end()
    waits = [line.split("again in ")[1].split()[0] for line in stderr.splitlines() if "again in" in line]
    assert waits == ["0.1", "0.2", "0.3", "0.3"]


def test_restarts_are_counted_anew_after_a_quiet_time(supervise: Start) -> None:
    """A worker that was ready for the window starts with a clean record: months of uptime do not add up."""
    run = supervise(
        """
        import fcntl, termios
        begin()
        link.report(ready=True)
        # The window begins when the supervisor has read it.
        while fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, bytes(4)) != bytes(4):
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(7 if life < 3 else 0)
        """,
        restarts_max=1,
        restart_window_s=0.1,
    )
    code, stderr = run.end()
    assert code == 0, stderr
    assert run.lives() == 4


def test_a_worker_that_never_becomes_ready_gets_no_clean_record(supervise: Start) -> None:
    """However slowly it fails, a worker that never serves is given up."""
    run = supervise("begin()\ntime.sleep(0.2)\nsys.exit(7)", restarts_max=1, restart_window_s=0.1)
    code, _ = run.end()
    assert code == 1
    assert run.lives() == 2


@pytest.mark.parametrize("code", [2, EXIT_HOPELESS])
def test_a_worker_that_would_fail_again_is_not_started_again(supervise: Start, code: int) -> None:
    """smg #1427 review: construction failure ends start-up, with a code that is not zero."""
    run = supervise(f"begin()\nsys.exit({code})")
    assert run.end() == (code, "")
    assert run.lives() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_the_worker_and_ends_the_supervisor_with_it(supervise: Start, number: int) -> None:
    """The worker gets SIGTERM once, ends in its own time, and its code 0 is the supervisor's."""
    run = supervise("""
        def drain(*_):
            (here / f"drained-{os.getpid()}").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, drain)
        begin()
        while True:
            signal.pause()
    """)
    pid = run.worker_pid()
    run.process.send_signal(number)
    assert run.end() == (0, "")
    assert (run.directory / f"drained-{pid}").exists()
    assert run.lives() == 1


def test_a_second_signal_reaches_the_worker_too(supervise: Start) -> None:
    """The first drains, the second ends at once."""
    run = supervise("""
        def stop(*_):
            (here / f"signal-{len(list(here.glob('signal-*')))}").touch()
            if (here / "signal-1").exists():
                os._exit(1)
        signal.signal(signal.SIGTERM, stop)
        begin()
        while True:
            signal.pause()
    """)
    run.worker_pid()
    run.process.terminate()
    wait_for(run.directory / "signal-0")
    run.process.terminate()
    code, stderr = run.end()
    assert code == 1
    assert "while it was stopping" in stderr
    assert run.lives() == 1


def test_a_third_signal_kills_the_worker(supervise: Start) -> None:
    """Whoever presses Ctrl-C once more does not wait for the limit, which is a minute away."""
    run = supervise("""
        def stop(*_):
            (here / f"signal-{len(list(here.glob('signal-*')))}").touch()
        signal.signal(signal.SIGTERM, stop)
        begin()
        while True:
            signal.pause()
    """)
    pid = run.worker_pid()
    for number in range(2):
        run.process.terminate()
        wait_for(run.directory / f"signal-{number}")
    run.process.terminate()
    code, stderr = run.end()
    assert code == 1
    assert "the worker was killed by SIGKILL while it was stopping" in stderr
    wait_until_dead(pid)


def test_a_worker_that_does_not_drain_is_killed_at_the_limit(supervise: Start) -> None:
    """A stopped worker cannot keep its supervisor from ending."""
    run = supervise(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nbegin()\nserve_until_supervisor_is_gone()",
        drain_timeout_s=0,
        kill_after_s=0.2,
    )
    pid = run.worker_pid()
    os.kill(pid, signal.SIGSTOP)
    run.process.terminate()
    code, stderr = run.end()
    assert code == 1
    assert "did not end in time" in stderr
    wait_until_dead(pid)


def test_a_signal_while_backing_off_ends_the_supervisor(supervise: Start) -> None:
    """Nobody waits out a long back-off to stop a supervisor."""
    run = supervise("begin()\nsys.exit(7)", restart_wait_ms=600_000, restart_wait_max_ms=600_000)
    assert run.process.stderr is not None
    assert "again in 600.0 s" in run.process.stderr.readline()
    run.process.terminate()
    code, _ = run.end()
    assert code == 0
    assert run.lives() == 1


def test_a_worker_drains_when_its_supervisor_is_killed(supervise: Start) -> None:
    """SIGKILL of the supervisor leaves no orphan."""
    run = supervise("begin()\nserve_until_supervisor_is_gone()")
    pid = run.worker_pid()
    run.process.kill()
    run.process.wait()
    wait_for(run.directory / f"drained-{pid}")
    wait_until_dead(pid)


def test_what_a_worker_starts_does_not_hide_the_supervisors_death(supervise: Start) -> None:
    """The link is not inherited by grandchildren, which might outlive everybody."""
    run = supervise("""
        import subprocess
        grandchild = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                                      stdin=subprocess.PIPE, close_fds=False)
        begin()
        serve_until_supervisor_is_gone()
    """)
    pid = run.worker_pid()
    run.process.kill()
    run.process.wait()
    wait_until_dead(pid)


def test_what_a_worker_starts_with_all_it_inherits_does_not_get_the_link() -> None:
    """Not every library closes what it need not pass on."""
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    link = SupervisorLink(theirs.detach(), lambda: None)
    with ours, subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as child:
        link.close()
        ours.settimeout(START_S)
        assert ours.recv(1) == b""
        child.communicate()


def test_with_die_with_parent_the_whole_tree_follows_its_top(supervise: Start) -> None:
    """--die-with-parent: SIGKILL of whoever started the supervisor drains the worker."""
    run = supervise(
        "begin()\nserve_until_supervisor_is_gone()",
        parent="""
            import subprocess
            subprocess.Popen(COMMAND).wait()
        """,
        die_with_parent=True,
    )
    pid = run.worker_pid()
    run.process.kill()
    run.process.wait()
    wait_until_dead(pid)


@pytest.mark.parametrize(
    "way", ["", "from zmqengine.worker.process import parent; parent._exit_fd = parent._polled_exit_fd"]
)
def test_an_unsupervised_process_notices_its_parents_death(supervise: Start, way: str) -> None:
    """`ParentProcess` works by a descriptor of the parent, and by looking where there is none."""
    run = supervise(f"""
        {way}
        if life == 0:
            import subprocess
            begin()
            subprocess.run([sys.executable, __file__])
        if life > 1:
            # The supervisor's next worker: nobody watches over it once the test has ended.
            sys.exit(0)
        parent = ParentProcess(gone)
        assert not parent.check()
        begin()
        import select
        select.select([parent], [], [])
        parent.check()
    """)
    grandchild = run.worker_pid(1)
    kill(run.worker_pid(0))
    wait_for(run.directory / f"drained-{grandchild}")


class Queue:
    """A kqueue whose one event is a byte in a pipe."""

    asked: ClassVar[list[tuple[int, int, int, int]]] = []
    writer = -1

    def __init__(self) -> None:
        self._reader, Queue.writer = os.pipe()

    def control(self, events: list[tuple[int, int, int, int]], most: int) -> None:
        assert most == 0, "it does not wait"
        Queue.asked = events

    def fileno(self) -> int:
        return self._reader

    def close(self) -> None:
        os.close(self._reader)


def test_on_macos_a_kqueue_tells_of_the_parents_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its descriptor, which outlives the object that made it."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(select, "kqueue", Queue, raising=False)
    monkeypatch.setattr(select, "kevent", lambda *fields: fields, raising=False)
    for value, name in enumerate(("KQ_FILTER_PROC", "KQ_EV_ADD", "KQ_NOTE_EXIT")):
        monkeypatch.setattr(select, name, value, raising=False)
    told: list[None] = []
    parent = ParentProcess(lambda: told.append(None))
    assert Queue.asked == [(os.getppid(), 0, 1, 2)]
    assert not parent.check()
    os.write(Queue.writer, b"x")
    assert select.select([parent], [], [], 60)[0]
    assert parent.check()
    assert parent.check()
    assert len(told) == 1
    parent.close()
    os.close(Queue.writer)


def test_a_restarted_worker_gets_the_ports_it_had(supervise: Start) -> None:
    """With tcp port 0 the first life chooses the ports and every later one binds the same."""
    run = supervise(
        """
        (here / f"bind-{life}").write_text(f"{config.bind} {config.bind_cmd} {config.bind_out}")
        if life == 0:
            link.report(endpoints=Endpoints(*[f"tcp://127.0.0.1:{port}" for port in (7001, 7002, 7003)]))
        begin()
        sys.exit(7 if life == 0 else 0)
        """,
        bind="tcp://127.0.0.1:0",
    )
    code, _ = run.end()
    assert code == 0
    assert (run.directory / "bind-0").read_text().split() == ["tcp://127.0.0.1:0", "None", "None"]
    assert (run.directory / "bind-1").read_text().split() == [
        f"tcp://127.0.0.1:{port}" for port in (7001, 7002, 7003)
    ]


def test_the_options_travel_outside_the_argument_list(supervise: Start) -> None:
    """What `ps` shows of a worker names no key file and no address."""
    run = supervise(
        "(here / 'argv').write_text(repr(sys.orig_argv))\nassert config.name == 'hidden'\nbegin()",
        name="hidden",
    )
    assert run.end() == (0, "")
    assert "hidden" not in (run.directory / "argv").read_text()


def wait_for(path: Path) -> Path:
    """The path, once it exists."""
    wait_until(path.exists, f"{path.name} never came")
    return path


def kill(pid: int) -> None:
    """SIGKILL, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
