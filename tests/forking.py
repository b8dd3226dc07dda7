"""Processes forked from one that has imported their program: for tests that start a program many times.

An import of the gateway takes two seconds of CPU, a fork of what is imported hundredths of one. What is forked is a
process like any other: killed, signalled and awaited by its own pid, with an environment and a log of its own. It
differs from one that was started by its command line in that command line, which is this module's, and in the
environment that its imports saw.

    python -m tests.forking MODULE CONTROL_FD        what `Imported` runs

One order at a time comes over the control socket, with the descriptors of the log and of the pipe that tells the end.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

_ORDER_BYTES_MAX = 1 << 16
_STATUS_BYTES = 4
_END_S_MAX = 10.0


class Forked:
    """One forked process; its methods are those of subprocess.Popen that tests use, and do as they do."""

    def __init__(self, pid: int, ended: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._awaited(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired after so many seconds."""
        code = self._awaited(timeout)
        if code is None:
            assert timeout is not None, "without one, waiting ends with the process"
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _awaited(self, within_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], within_s)[0]:
            with self._ended as ended:
                status = ended.read(_STATUS_BYTES)
            assert status, f"what waited for the process {self.pid} was killed: how that one ended is not known"
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status))
        return self.returncode


class Imported:
    """A process that has imported a module and forks on demand. It ends with this one."""

    def __init__(self, module: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = (sys.executable, "-m", __name__, module, str(theirs.fileno()))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], *, environment: Mapping[str, str], log: IO[bytes]) -> Forked:
        """`run(arguments)` of the module, in a process of its own.

        environment: all that it has. log: for what it says.
        """
        read_end, write_end = os.pipe()
        ended = os.fdopen(read_end, "rb")
        try:
            order = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
            socket.send_fds(self._control, [order], [log.fileno(), write_end])
        finally:
            os.close(write_end)
        pid = self._control.recv(_STATUS_BYTES)
        assert pid, "what forks has ended: it says why above"
        return Forked(int.from_bytes(pid), ended)

    def close(self) -> None:
        """Idempotent. What was forked goes on."""
        self._control.close()
        try:
            self._process.wait(_END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S_MAX)


def _ordered(control: socket.socket) -> list[str] | None:
    """Forks for each order. Returns, in what was forked, what to run with; None once nobody orders any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever orders ends what was forked
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes who attends away
    gc.collect()
    gc.freeze()
    while True:
        data, (*descriptors,), _, _ = socket.recv_fds(control, _ORDER_BYTES_MAX, 2)
        if not data:
            return None
        order = json.loads(data)
        log, ended = descriptors
        if os.fork() == 0:
            return _attended(control, order, log, ended)
        os.close(log)
        os.close(ended)


def _attended(control: socket.socket, order: dict[str, Any], log: int, ended: int) -> list[str]:
    """Forks once more: returns in the process that was ordered; the other one waits for its end, tells it, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(ended)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        os.environ.clear()  # noqa: TID251  of the program's own process
        os.environ.update(order["environment"])  # noqa: TID251  of the program's own process
        return list(order["arguments"])
    control.send(pid.to_bytes(_STATUS_BYTES))
    control.close()
    os.close(log)
    _, status = os.waitpid(pid, 0)
    os.write(ended, status.to_bytes(_STATUS_BYTES))
    os._exit(0)


def main(module: str, control_fd: int) -> None:
    program = importlib.import_module(module)
    with socket.socket(fileno=control_fd) as control:
        arguments = _ordered(control)
    if arguments is not None:
        program.run(arguments)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
