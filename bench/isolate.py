"""Workers as seen from outside: a process per peer, whose death costs one answer."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

__all__ = ["Process", "Setup", "WorkerError"]

_START_S = 300.0  # importing some peers compiles
_ADDR_NO_RANDOMIZE = 0x0040000  # of personality(2)
_C = ctypes.CDLL(None)


@dataclass(frozen=True)
class Setup:
    """What a worker is told first.

    Parameters
    ----------
    peer : key of `peers.PEERS`.
    device : ``cuda`` or ``cpu``; empty takes the GPU where there is one.
    repetitions : behind each median.
    core : to run on, with one thread, timed by processor time; -1 for all of them and the clock.
    tuning : choices to force, as `tunings` lists them.
    trace : on a GPU, take device time from a trace of all kernels; else from events, which need no setting up.
    slowdown : factor by which calls in blocks are made longer, to see whether that is found.
    """

    peer: str = "qla"
    device: str = ""
    repetitions: int = 10
    core: int = -1
    tuning: Mapping[str, Any] = field(default_factory=dict)
    trace: bool = True
    slowdown: float = 1.0


class WorkerError(RuntimeError):
    """A worker died or did not answer in time; `late` tells which."""

    def __init__(self, reason: str, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


def _settle() -> None:
    """Have no random addresses after exec; where that is not allowed, they stay random."""
    _C.personality(_ADDR_NO_RANDOMIZE)


class Process:
    """A worker process. It starts up by itself until something is asked of it, so several can at the same time.

    Parameters
    ----------
    setup : its first request.
    folders : go before everything else that it imports from.
    environment : variables on top of ours.
    python : interpreter.
    settled : with its memory at the same addresses each time, where the system (Linux) allows that. Where the stack
        lies alone makes a kernel of the CPU 5 % faster or slower.
    """

    def __init__(
        self,
        setup: Setup,
        folders: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        settled: bool = False,
    ) -> None:
        inherited = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([*folders, *([inherited] if inherited else [])])
        variables = {**os.environ, **(environment or {}), **({"PYTHONPATH": path} if path else {})}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [python, "-m", "qla.bench.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=variables,
            start_new_session=True,  # so that the compilers it starts go with it
            preexec_fn=_settle if settled and sys.platform == "linux" else None,
        )  # fmt: skip
        self._buffer = b""
        self._until = time.monotonic() + _START_S
        with suppress(OSError):  # dead already: that shows when it is asked
            self._send(asdict(setup))

    @cached_property
    def hello(self) -> dict[str, Any]:
        """The answer to the setup: what is measured, with what; `status` is ``unavailable`` where the peer is not."""
        try:
            hello: dict[str, Any] = json.loads(self._line(max(0.0, self._until - time.monotonic())))
        except WorkerError as error:
            hello = {"status": "unavailable", "reason": str(error)}
        if hello["status"] != "ok":
            self.close()
        return hello

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and return its answer; after a `WorkerError` the process is gone."""
        if self.hello["status"] != "ok":
            raise WorkerError(self.hello["reason"])
        try:
            self._send(request)
        except OSError:
            raise self._died() from None
        answer: dict[str, Any] = json.loads(self._line(timeout))
        if answer.get("lost"):
            self.close()
        return answer

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, until = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self.close(late=True)
                raise WorkerError(f"no answer within {timeout:.0f} s", late=True)
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._died()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _died(self) -> WorkerError:
        """What the process left behind."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        code = self._process.returncode
        how = f"exit code {code}"
        if code is not None and code < 0:
            with suppress(ValueError):
                how = signal.Signals(-code).name
        self._errors.seek(0)
        said = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        self.close()
        return WorkerError(f"process died ({how}){': ' + said[-1][:200] if said else ''}")

    @property
    def running(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None and not self._errors.closed

    def close(self, late: bool = False) -> None:
        """End the process and everything that it started; one that is `late` already is given no more time."""
        if self._errors.closed:
            return
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        # A worker ends when its requests do; what hangs is killed.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if late else 2)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
