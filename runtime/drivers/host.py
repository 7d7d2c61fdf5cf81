"""The CPU: shared objects called through ctypes, workgroups spread over the cores by Python threads.

ctypes releases the interpreter's lock during a call, so plain threads use all cores and no OpenMP is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from qla.codegen.spec import Source
from qla.errors import LaunchError
from qla.runtime.arguments import ArgumentBlock

_PIECES_PER_CORE = 4
_MAX_BLOCKS = (1 << 31) - 1

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


@dataclass(frozen=True)
class HostKernel:
    """A loaded kernel: ``entry(args, block_begin, block_end)`` and what keeps it loaded."""

    name: str
    entry: Callable[[int, int, int], Any]
    library: ctypes.CDLL


class HostDriver:
    """Driver of the CPU."""

    @property
    def processors(self) -> int:
        """Cores that this process may use."""
        return _cores()

    def load(self, binary: bytes, source: Source) -> HostKernel:
        """Load a shared object from memory, or from a private temporary file where that is not possible."""
        try:
            library = _open(binary, source.entry)
            entry = getattr(library, source.entry)
        except (OSError, AttributeError) as error:
            raise LaunchError(f"cannot load {source.entry} on the CPU: {error}") from error
        entry.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        entry.restype = None
        return HostKernel(source.entry, entry, library)

    def launch(self, kernel: HostKernel, blocks: int, arguments: ArgumentBlock, stream: int) -> None:
        """Run all blocks on all cores; returns when they are done."""
        if blocks > _MAX_BLOCKS:
            raise LaunchError(f"{kernel.name}: {blocks} blocks are more than {_MAX_BLOCKS}")
        workers = min(_cores(), blocks)
        if workers <= 1:
            kernel.entry(arguments.address, 0, blocks)
            return
        step = max(1, blocks // (workers * _PIECES_PER_CORE))
        # Threads draw pieces from one counter, so a slow piece or a busy pool delays nobody else; the calling thread
        # draws too, so a call made from within the pool cannot wait for itself.
        pieces = itertools.count(0, step)
        share = (kernel.entry, arguments.address, pieces, step, blocks)
        others: list[Future[None]] = []
        try:
            with contextlib.suppress(RuntimeError):  # no new threads while Python exits: this one draws all
                others += (_workers().submit(_draw, *share) for _ in range(workers - 1))
            _draw(*share)
        finally:
            # Also when interrupted (Ctrl-C): the caller frees what the others are still writing to.
            _finish(others)

    def stream(self) -> int:
        """The CPU has no streams."""
        return 0

    def capturing(self) -> bool:
        """The CPU has no graphs either."""
        return False

    def tensor_map(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, chunk: int
    ) -> Callable[[int], bytes]:
        """Nor tensor maps."""
        raise LaunchError("a host kernel asks for a tensor map, which the CPU does not have")


def _draw(entry: Callable[[int, int, int], Any], address: int, pieces: Iterator[int], step: int, blocks: int) -> None:
    for begin in pieces:
        if begin >= blocks:
            return
        entry(address, begin, min(begin + step, blocks))


def _finish(futures: list[Future[None]]) -> None:
    """Wait for all, come what may; an interrupt while waiting is raised when they are done."""
    interrupt: BaseException | None = None
    for future in futures:
        while not (future.cancel() or future.done()):
            try:
                wait([future])
            except BaseException as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
    for future in futures:
        if not future.cancelled():
            future.result()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _workers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, _cores() - 1), thread_name_prefix="qla")
        return _pool


def _forget_pool() -> None:
    # Threads do not survive a fork, and the lock may have been held by one of them.
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _open(binary: bytes, name: str) -> ctypes.CDLL:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(binary)
            # Left open: the loader takes two libraries of one path for the same, and a closed number is used again.
            return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
        except OSError:
            os.close(descriptor)  # no /proc, or memory files may not be executed; the file below tells if it fails too
    with tempfile.TemporaryDirectory(prefix="qla-") as folder:
        path = os.path.join(folder, f"{name}.so")
        with open(path, "wb") as file:
            file.write(binary)
        return ctypes.CDLL(path)
