"""The store: one compilation however many ask, and no kernel lost however bad the disk is."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import pytest

from qla.codegen.spec import KernelSpec, Limits, Source
from qla.errors import CompilationError
from qla.runtime import store as module
from qla.runtime.compilers import Binary, CompilerIdentity
from qla.runtime.compilers.zig import ZigHost
from qla.runtime.store import CacheWarning, DirectoryLayer, Store, default_layers
from qla.targets import TARGETS
from qla.targets.base import Target

TEXT = 'extern "C" __attribute__((visibility("default"))) int kernel(int x) { return x + 1; }'


def source(text: str = TEXT) -> Source:
    spec = KernelSpec("gated_delta_rule", "scan", "bf16", 64, 64, "host")
    return Source(spec, "kernel", "c++", text, (), Limits(1, 0, 0, 64))


class FakeCompiler:
    """Gives the source's text back, slowly enough for others to get in the way."""

    def __init__(self, target: Target, seconds: float = 0.0, build: str = "1") -> None:
        self.target, self.seconds, self.build = target, seconds, build

    def identity(self) -> CompilerIdentity:
        return CompilerIdentity("fake", "1.0", self.build)

    def compile(self, source: Source) -> Binary:
        time.sleep(self.seconds)
        return Binary(source.text.encode(), "log", self.seconds, self.identity())


def fake_store(**options: Any) -> Store:
    return Store(choose=FakeCompiler, **options)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("QLA_CACHE_DIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with warnings.catch_warnings():
        # What a test does not expect is an error.
        warnings.simplefilter("error", CacheWarning)
        yield folder


def entries(folder: Path) -> list[Path]:
    return sorted(p.parent for p in folder.glob("**/kernels/*/*/meta.json"))


def test_second_store_finds_what_the_first_built(cache: Path) -> None:
    first, second = fake_store(), fake_store()
    built = first.get(source())
    assert second.get(source()) == built
    assert (first.compilations, second.compilations) == (1, 0)
    assert second.get(source()) is second.get(source())


def test_entry_holds_kernel_source_and_metadata(cache: Path) -> None:
    fake_store().get(source())
    (entry,) = entries(cache)
    assert sorted(p.name for p in entry.iterdir()) == ["kernel.bin", "meta.json", "source"]
    assert (entry / "source").read_text() == TEXT
    meta = json.loads((entry / "meta.json").read_text())
    assert meta["build_id"] == entry.name
    assert meta["compiler"] == {"name": "fake", "version": "1.0", "build": "1"}
    for folder in (cache, *entry.relative_to(cache).parents, entry):
        assert stat.S_IMODE((cache / folder).stat().st_mode) == 0o700
    assert list((cache / "v1" / "staging").iterdir()) == []


def test_other_source_or_compiler_is_another_entry(cache: Path) -> None:
    fake_store().get(source())
    fake_store().get(source(TEXT + "\n"))
    other = Store(choose=lambda target: FakeCompiler(target, build="2"))
    other.get(source())
    assert other.compilations == 1
    assert len(entries(cache)) == 3


def test_environment_that_alters_code_is_another_entry(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.ids.ENVIRONMENT, "fake", ("FAKE_FLAGS",))  # type: ignore[call-overload]
    fake_store().get(source())
    monkeypatch.setenv("FAKE_FLAGS", "-O0")
    fake_store().get(source())
    assert len(entries(cache)) == 2


def test_lookup_creates_nothing(cache: Path) -> None:
    key = module.Key(source(), lambda: FakeCompiler(TARGETS["host"]))
    assert [layer.get(key) for layer in default_layers()] == [None, None]
    assert not cache.exists()


def test_kernel_id_is_enough_where_a_layer_needs_no_compiler() -> None:
    class Pack:
        name = "pack"

        def get(self, key: module.Key) -> Binary | None:
            return Binary(key.kernel_id.encode(), "", 0.0, CompilerIdentity("pack", "", ""))

        def put(self, key: module.Key, binary: Binary) -> Binary:
            raise OSError("read-only")

    def refuse(target: Target) -> FakeCompiler:
        raise AssertionError("a compiler was asked for")

    assert (
        Store([Pack(), *default_layers()], choose=refuse).get(source()).data == module.ids.identify(source()).encode()
    )


def run_store(barrier: Any, results: Any, seconds: float) -> None:
    class Slow(ZigHost):
        def compile(self, source: Source) -> Binary:
            time.sleep(seconds)
            return super().compile(source)

    own = Store(choose=Slow)
    barrier.wait(60)
    try:
        results.put((own.compilations, own.get(source()).data, own.compilations))
    except BaseException as error:
        results.put((0, repr(error), -1))


def test_eight_processes_compile_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    barrier, results = context.Barrier(8), context.Queue()
    processes = [context.Process(target=run_store, args=(barrier, results, 0.3)) for _ in range(8)]
    for process in processes:
        process.start()
    got = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(after for _, _, after in got) == [0] * 7 + [1]
    assert len({data for _, data, _ in got}) == 1
    assert got[0][1][:4] == b"\x7fELF"
    assert len(entries(cache)) == 1


def test_threads_compile_once_and_share_the_object() -> None:
    own = Store(choose=lambda target: FakeCompiler(target, 0.1))
    start = threading.Barrier(8)

    def get(_: int) -> Binary:
        start.wait()
        return own.get(source())

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(get, range(8)))
    assert own.compilations == 1
    assert all(binary is got[0] for binary in got)


def test_different_kernels_are_built_in_parallel() -> None:
    together = threading.Barrier(2)

    class Meeting(FakeCompiler):
        def compile(self, source: Source) -> Binary:
            # Broken, and so an error, unless the other thread gets here too.
            together.wait(20)
            return super().compile(source)

    own = Store(choose=Meeting)
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(lambda text: own.get(source(text)).data, ["a", "b"]))) == 2


def test_a_failed_compilation_can_be_tried_again(cache: Path) -> None:
    class Flaky(FakeCompiler):
        tries = 0

        def compile(self, source: Source) -> Binary:
            Flaky.tries += 1
            if Flaky.tries == 1:
                raise CompilationError("refused", "log", "path")
            return super().compile(source)

    own = Store(choose=Flaky)
    with pytest.raises(CompilationError):
        own.get(source())
    assert entries(cache) == []
    assert own.get(source()).data == TEXT.encode()
    assert own.compilations == 1


def test_a_held_lock_delays_but_does_not_prevent(cache: Path) -> None:
    fake_store().get(source())
    (lock,) = (cache / "v1" / "locks").iterdir()  # it stays after release
    entry = entries(cache)[0]
    entry.rename(entry.parent / "gone")
    own = fake_store(lock_seconds=0.2)
    with filelock.FileLock(str(lock)):
        began = time.monotonic()
        assert own.get(source()).data == TEXT.encode()
        assert 0.2 <= time.monotonic() - began < 20
    assert own.compilations == 1
    assert entry.is_dir()
    assert lock.exists()


def test_the_loser_of_a_race_adopts_the_winner(cache: Path) -> None:
    layer = DirectoryLayer("cache", lambda: cache)
    key = module.Key(source(), lambda: FakeCompiler(TARGETS["host"]))
    first = Binary(b"first", "", 1.0, CompilerIdentity("fake", "1.0", "1"))
    second = Binary(b"second", "", 2.0, CompilerIdentity("fake", "1.0", "1"))
    assert layer.put(key, first) == first
    assert layer.put(key, second) == first
    assert layer.get(key) == first
    assert list((cache / "v1" / "staging").iterdir()) == []


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: flip(entry / "kernel.bin"),
        lambda entry: (entry / "kernel.bin").write_bytes(b""),
        lambda entry: (entry / "kernel.bin").unlink(),
        lambda entry: (entry / "meta.json").write_text("{"),
        lambda entry: (entry / "meta.json").write_text("[]"),
        lambda entry: (entry / "meta.json").write_text((entry / "meta.json").read_text().replace(entry.name, "0" * 64)),
    ],
    ids=["flipped", "truncated", "no kernel", "no json", "other json", "other kernel's"],
)
def test_a_bad_entry_is_replaced_and_reported_once(cache: Path, damage: Any) -> None:
    fake_store().get(source())
    (entry,) = entries(cache)
    damage(entry)
    own = fake_store()
    with pytest.warns(CacheWarning, match="bad cache entry") as caught:
        assert own.get(source()).data == TEXT.encode()
    assert len(caught) == 1
    assert own.compilations == 1
    after = fake_store()
    assert after.get(source()).data == TEXT.encode()
    assert after.compilations == 0
    assert len(list((cache / "v1" / "bad").iterdir())) == 1


def test_an_unusable_folder_is_passed_over_with_one_warning(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file where the folder should be")
    own = fake_store()
    with pytest.warns(CacheWarning, match="user cache") as caught:
        own.get(source())
    # A second warning would be an error here.
    own.get(source(TEXT + "\n"))
    assert len(caught) == 1
    assert len(entries(tmp_path / "temporary")) == 2
    again = fake_store()
    again.get(source())
    assert again.compilations == 0


def test_a_read_only_cache_is_still_read(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_store().get(source())

    def refuse(self: Path, *_: Any, **__: Any) -> None:
        if cache in (self, *self.parents):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        original(self, *_, **__)

    original = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", refuse)
    own = fake_store()
    own.get(source())
    assert own.compilations == 0
    with pytest.warns(CacheWarning, match="Read-only file system"):
        own.get(source(TEXT + "\n"))
    assert own.compilations == 1
    assert len(entries(tmp_path / "temporary")) == 1


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_loses_no_kernel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, name = {"write": (module, "_write"), "fsync": (os, "fsync"), "rename": (Path, "rename")}[call]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        own = fake_store()
        with pytest.warns(CacheWarning, match="No space left") as caught:
            built = own.get(source())
        # Memory is the last layer.
        assert own.get(source()) is built
    assert built.data == TEXT.encode()
    assert len(caught) == 2
    assert own.compilations == 1
    for folder in (cache, tmp_path / "temporary"):
        assert entries(folder) == []
        assert [p for p in folder.glob("**/staging/*")] == []


def test_a_folder_that_everybody_can_write_is_not_trusted(cache: Path) -> None:
    fake_store().get(source())
    (entry,) = entries(cache)
    for folder in (cache, cache / "v1", entry.parent, entry):
        folder.chmod(0o777)
        own = fake_store()
        with pytest.warns(CacheWarning, match="written by everybody"):
            own.get(source())
        # Either the temporary folder has it, or it was built for it.
        assert own.compilations == (folder == cache)
        folder.chmod(0o700)


def test_a_folder_of_another_user_is_not_trusted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_store().get(source())
    monkeypatch.setattr(module, "_user", lambda: os.geteuid() + 1)
    own = fake_store()
    with pytest.warns(CacheWarning, match="another user"):
        own.get(source())
    assert own.compilations == 1


def test_cache_folder_is_looked_up_at_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = fake_store()
    monkeypatch.setenv("QLA_CACHE_DIR", str(tmp_path / "later"))
    own.get(source())
    assert len(entries(tmp_path / "later")) == 1


def test_where_the_user_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.user_cache() == tmp_path / "cache"
    monkeypatch.delenv("QLA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert module.user_cache() == tmp_path / "xdg" / "qla"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert module.user_cache() == tmp_path / "home" / ".cache" / "qla"


def test_without_a_home_the_temporary_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("QLA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(CacheWarning, match="user cache") as caught:
        fake_store().get(source())
    assert len(caught) == 1
    assert len(entries(tmp_path / "temporary")) == 1


def test_import_creates_nothing(tmp_path: Path) -> None:
    program = "import qla, qla.runtime.store as s; s.default_store(); s.Store()"
    environment = {**os.environ, "QLA_CACHE_DIR": str(tmp_path / "new"), "TMPDIR": str(tmp_path / "temporary")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=120)
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "temporary").iterdir()) == []
