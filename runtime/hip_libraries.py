"""Which HIP libraries this process has mapped, and that hip-python opens those and no second copy.

Streams, addresses and modules of one copy of the HIP runtime mean nothing to another.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qla.errors import LaunchError

RUNTIME = "libamdhip64"
_lock = threading.RLock()


def mapped_runtimes(maps: str = "/proc/self/maps", stem: str = RUNTIME) -> list[str]:
    """Paths of the HIP runtime libraries (or others of that name) mapped into this process; none but on Linux."""
    try:
        lines = Path(maps).read_text().splitlines()
    except OSError:
        return []
    names = (line.split(maxsplit=5)[5] for line in lines if f"/{stem}.so" in line)
    return list(dict.fromkeys(names))


def check_one_runtime(paths: Sequence[str]) -> None:
    """Refuse two copies of the HIP runtime."""
    if len(paths) > 1:
        raise LaunchError(
            f"two HIP runtimes are loaded: {', '.join(paths)}. hip-python must use the one of torch: "
            f"point ROCM_PATH and LD_LIBRARY_PATH at it"
        )


def library_in_use(stem: str) -> str | None:
    """The library of that name that is mapped, else the one beside the mapped HIP runtime; None where there is none."""
    if mapped := mapped_runtimes(stem=stem):
        return mapped[0]
    for runtime in mapped_runtimes():
        if beside := sorted(Path(runtime).parent.glob(f"{stem}.so*")):
            return str(beside[0])
    return None


@contextmanager
def mapped_first() -> Iterator[None]:
    """Have hip-python open the mapped libraries; around the first call into each, where it looks for the file.

    By itself it prefers a folder that the environment names, which may hold another copy. Versions without a search of
    their own ask the loader for the bare name, which is then that of the mapped library.
    """
    try:
        search: Any = importlib.import_module("rocm.bindings.util.paths")
        usual = search.get_library_path
    except (ImportError, AttributeError):
        yield
        return

    def get_library_path(shortname: str, *arguments: Any, **options: Any) -> Any:
        found = library_in_use(f"lib{shortname}")
        return os.fsencode(found) if found else usual(shortname, *arguments, **options)

    with _lock:
        # Read again: another thread may have been here, and must not have its replacement put back.
        usual = search.get_library_path
        search.get_library_path = get_library_path
        try:
            yield
        finally:
            search.get_library_path = usual
