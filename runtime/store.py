"""Where built kernels are kept: in this process, in the user's cache folder, else in a temporary folder.

An entry is a folder that appears whole or not at all; the lock only saves work. Every rule below holds with many
processes at once and with folders that are read-only, full or missing: a kernel that was built is always returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from qla.codegen.spec import Source
from qla.runtime import ids
from qla.runtime.compilers import Binary, Compiler, CompilerIdentity, compiler_for
from qla.targets import TARGETS
from qla.targets.base import Target

# Layout of a cache folder; a newer one goes beside it, so that two versions of qla share a cache folder in peace.
_LAYOUT = "v1"
_LOCK_SECONDS = 300.0


class CacheWarning(UserWarning):
    """A cache folder is passed over, or an entry in it is bad. Kernels still work; they may be built again."""


@dataclass(frozen=True)
class Key:
    """The two ids of a kernel; the one that needs a compiler is formed only when somebody asks for it."""

    source: Source
    compiler: Callable[[], Compiler]

    @cached_property
    def kernel_id(self) -> str:
        return ids.identify(self.source)

    @cached_property
    def build_id(self) -> str:
        identity = self.compiler().identity()
        return ids.build_id(self.kernel_id, identity, ids.altering_environment(identity.name))


class Layer(Protocol):
    """One place for kernels."""

    name: str

    def get(self, key: Key) -> Binary | None:
        """The kernel, checked, or None. Creates nothing and raises `OSError` only if the place cannot be read."""
        ...

    def put(self, key: Key, binary: Binary) -> Binary:
        """Keep the kernel and return the one that is kept (another process may have been first).

        Raises `OSError` where the place cannot be written.
        """
        ...


class MemoryLayer:
    """This process. Keyed by what the kernel is: one process has one compiler for it."""

    name = "memory"

    def __init__(self) -> None:
        self._kept: dict[str, Binary] = {}

    def get(self, key: Key) -> Binary | None:
        return self._kept.get(key.kernel_id)

    def put(self, key: Key, binary: Binary) -> Binary:
        # setdefault is atomic: all threads end up with one object.
        return self._kept.setdefault(key.kernel_id, binary)


class DirectoryLayer:
    """A folder shared by processes.

    Parameters
    ----------
    name : for messages.
    root : gives the folder, or None where there is none; asked at first use.
    """

    def __init__(self, name: str, root: Callable[[], Path | None]) -> None:
        self.name, self._find_root = name, root
        self._bad: set[str] = set()

    @cached_property
    def root(self) -> Path | None:
        return self._find_root()

    def get(self, key: Key) -> Binary | None:
        entry = self._entry(key)
        if not entry.is_dir():
            return None
        for folder in self._levels(entry):
            _refuse_unsafe(folder)
        return self._read(entry, key)

    def put(self, key: Key, binary: Binary) -> Binary:
        entry = self._entry(key)
        self._make(entry.parent)
        # Inside the cache folder, because a rename is atomic only within one file system.
        stage = self._make(self._base() / "staging" / uuid.uuid4().hex)
        try:
            _fill(stage, key, binary)
            return self._publish(stage, entry, key, binary)
        finally:
            # Gone already if it was renamed into place.
            shutil.rmtree(stage, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, key: Key, seconds: float) -> Iterator[None]:
        """Hold the kernel's lock; go on without it if it cannot be had in time (or at all: some file systems).

        The file stays: to remove it would let two processes hold "the" lock, one on the old file and one on the new.
        """
        folder = self._make(self._base() / "locks")
        lock = FileLock(str(folder / f"{key.build_id}.lock"), timeout=seconds)
        with contextlib.suppress(Timeout):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _existing_root(self) -> Path:
        if self.root is None:
            raise FileNotFoundError("there is no such folder")
        return self.root

    def _base(self) -> Path:
        return self._existing_root() / _LAYOUT

    def _entry(self, key: Key) -> Path:
        # Two levels, so that no folder gets very long.
        return self._base() / "kernels" / key.build_id[:2] / key.build_id

    def _levels(self, folder: Path) -> list[Path]:
        """The cache folder and all folders from it down to `folder`."""
        root = self._existing_root()
        parts = folder.relative_to(root).parts
        return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]

    def _make(self, folder: Path) -> Path:
        """Create a folder level by level: only the last one would get the private mode otherwise."""
        for level in self._levels(folder):
            level.mkdir(mode=0o700, parents=level == self.root, exist_ok=True)
            _refuse_unsafe(level)
        return folder

    def _publish(self, stage: Path, entry: Path, key: Key, binary: Binary) -> Binary:
        for _ in range(8):
            try:
                # Atomic; fails if the target is a folder with something in it.
                stage.rename(entry)
            except OSError:
                if not entry.exists():
                    raise
            else:
                _sync_folder(entry.parent)
                return binary
            # Somebody else was first. Theirs counts if it is whole; if it is not, out of the way with it and try again.
            if (winner := self._read(entry, key)) is not None:
                return winner
            self._set_aside(entry)
        raise OSError(f"{entry} could not be replaced")

    def _set_aside(self, entry: Path) -> None:
        aside = self._make(self._base() / "bad")
        # Another process may have done it at this moment.
        with contextlib.suppress(FileNotFoundError):
            entry.rename(aside / f"{entry.name}.{uuid.uuid4().hex[:8]}")

    def _read(self, entry: Path, key: Key) -> Binary | None:
        try:
            meta = json.loads((entry / "meta.json").read_bytes())
            data = (entry / "kernel.bin").read_bytes()
            whole = (
                meta["build_id"] == key.build_id
                and meta["size"] == len(data)
                and meta["sha256"] == hashlib.sha256(data).hexdigest()
            )
            if whole:
                compiler = CompilerIdentity(**meta["compiler"])
                return Binary(data, str(meta["log"]), float(meta["seconds"]), compiler)
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            # Files are missing, or the metadata is not what we write.
            pass
        # If the whole entry is gone, another process has set it aside between the look and the read: nothing to say.
        if entry.exists() and entry.name not in self._bad:
            self._bad.add(entry.name)
            warnings.warn(f"bad cache entry {entry}: it is set aside and built again", CacheWarning, stacklevel=6)
        return None


class Store:
    """Kernels by source: found in a layer, or compiled and kept.

    Parameters
    ----------
    layers : looked through in order; a built kernel goes to the first that takes it, and into memory. By default the
        user's cache folder, then a temporary one.
    choose : gives the compiler of a target.
    lock_seconds : how long to wait for another process that is building the same kernel.

    Attributes
    ----------
    compilations : kernels that this store has compiled.
    """

    def __init__(
        self,
        layers: Sequence[Layer] | None = None,
        choose: Callable[[Target], Compiler] = compiler_for,
        lock_seconds: float = _LOCK_SECONDS,
    ) -> None:
        self.layers: list[Layer] = list(default_layers() if layers is None else layers)
        self.memory = MemoryLayer()
        self.compilations = 0
        self._choose, self._lock_seconds = choose, lock_seconds
        self._guard = threading.Lock()
        self._building: dict[str, threading.Lock] = {}
        self._reported: set[str] = set()

    def get(self, source: Source) -> Binary:
        """The built kernel; compiles it if no layer has it.

        Raises
        ------
        CompilerNotFoundError, CompilationError
        """
        key = Key(source, lambda: self._choose(TARGETS[source.spec.target]))
        if (found := self.memory.get(key)) is not None:
            return found
        # One thread of this process builds a kernel while the others wait for it; different kernels go in parallel.
        with self._guard:
            building = self._building.setdefault(key.kernel_id, threading.Lock())
        with building:
            found = self.memory.get(key) or self._find(key) or self._build(key)
            return self.memory.put(key, found)

    def _find(self, key: Key) -> Binary | None:
        for layer in self.layers:
            try:
                if (found := layer.get(key)) is not None:
                    return found
            except OSError as error:
                self._report(layer, error)
        return None

    def _build(self, key: Key) -> Binary:
        with self._locked(key) as waited:
            # Whoever held the lock before us has most likely published it.
            if waited and (found := self._find(key)) is not None:
                return found
            binary = key.compiler().compile(key.source)
            with self._guard:
                self.compilations += 1
            # Published before the lock goes, so that the next holder finds it.
            return self._keep(key, binary)

    def _keep(self, key: Key, binary: Binary) -> Binary:
        for layer in self.layers:
            try:
                return layer.put(key, binary)
            except OSError as error:
                self._report(layer, error)
        return binary

    @contextlib.contextmanager
    def _locked(self, key: Key) -> Iterator[bool]:
        """Hold the kernel's lock in the first folder that can hold one; the value says whether there is one."""
        with contextlib.ExitStack() as stack:
            held = False
            for layer in self.layers:
                if isinstance(layer, DirectoryLayer):
                    try:
                        stack.enter_context(layer.lock(key, self._lock_seconds))
                    except (OSError, NotImplementedError) as error:
                        self._report(layer, error)
                        continue
                    held = True
                    break
            yield held

    def _report(self, layer: Layer, error: Exception) -> None:
        with self._guard:
            if layer.name in self._reported:
                return
            self._reported.add(layer.name)
        warnings.warn(f"kernel cache: {layer.name} cannot be used: {error}", CacheWarning, stacklevel=4)


@cache
def default_store() -> Store:
    """The store of this process."""
    return Store()


# A child that was forked while another thread compiled has that thread's locks, but not the thread.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=default_store.cache_clear)


def default_layers() -> list[Layer]:
    """The user's cache folder, then a temporary one. Where they lie is decided at first use."""
    return [DirectoryLayer("the user cache", user_cache), DirectoryLayer("the temporary cache", temporary_cache)]


def user_cache() -> Path | None:
    """`QLA_CACHE_DIR`, else `XDG_CACHE_HOME/qla`, else `~/.cache/qla`; None where there is no home."""
    if explicit := os.environ.get("QLA_CACHE_DIR"):
        return Path(explicit).absolute()
    # The specification of XDG_CACHE_HOME has relative values ignored.
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(xdg):
        return Path(xdg) / "qla"
    try:
        return Path.home() / ".cache" / "qla"
    except RuntimeError:
        return None


def temporary_cache() -> Path | None:
    """A folder of this user's own in the system's temporary folder; None where there is none that can be written."""
    try:
        return Path(tempfile.gettempdir()) / f"qla-{_user()}"
    except OSError:
        return None


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _refuse_unsafe(folder: Path) -> None:
    """Raise `PermissionError` for a folder in which somebody else could have put code for us to run."""
    if not hasattr(os, "geteuid"):
        return
    # Follow a link to what it names (a cache on another disk is ordinary); that folder's owner and mode decide.
    status = folder.stat()
    if status.st_uid != _user():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{folder} can be written by everybody")


def _fill(stage: Path, key: Key, binary: Binary) -> None:
    meta: dict[str, Any] = {
        "schema": ids.SCHEMA,
        "kernel_id": key.kernel_id,
        "build_id": key.build_id,
        "kernel": key.source.spec.name,
        "target": key.source.spec.target,
        "entry": key.source.entry,
        "size": len(binary.data),
        "sha256": hashlib.sha256(binary.data).hexdigest(),
        "compiler": asdict(binary.compiler),
        "seconds": binary.seconds,
        "log": binary.log,
    }
    _write(stage / "kernel.bin", binary.data)
    _write(stage / "source", key.source.text.encode())
    _write(stage / "meta.json", json.dumps(meta, indent=1).encode())
    _sync_folder(stage)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        # Before the rename, or a crash could leave a whole folder with empty files.
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    # Not every system lets a folder be opened, nor every file system be told; the entry is whole all the same.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
