"""What every compiler offers, and what they share: identities, kept sources, wheel folders."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Protocol

from qla.codegen import elf
from qla.codegen.spec import SUFFIX, Source
from qla.errors import CompilationError
from qla.targets.base import Target


@dataclass(frozen=True)
class CompilerIdentity:
    """Which compiler made a binary.

    Parameters
    ----------
    name : of the way of compiling, e.g. ``"nvrtc"``.
    version : for people.
    build : tells two builds of one version apart; no path or date is in it.
    """

    name: str
    version: str
    build: str


@dataclass(frozen=True)
class Binary:
    """A built kernel and how it came about."""

    data: bytes
    log: str
    seconds: float
    compiler: CompilerIdentity


class Compiler(Protocol):
    """Turns a rendered source into a binary for one target."""

    target: Target

    def identity(self) -> CompilerIdentity:
        """Who would compile; raises `CompilerNotFoundError` where nobody would."""
        ...

    def compile(self, source: Source) -> Binary:
        """Build the source; raises `CompilerNotFoundError` or `CompilationError`."""
        ...


def failed(source: Source, identity: CompilerIdentity, why: str, log: str) -> CompilationError:
    """The error for a refused source; keeps the source where the user can compile it by hand."""
    message = f"{source.spec.name} for {source.spec.target}: {identity.name} {identity.version} {why}"
    return CompilationError(message, log, keep_source(source))


def keep_source(source: Source) -> str:
    """Write the rendered source to a private folder that survives, and return its path."""
    try:
        path = Path(tempfile.mkdtemp(prefix="qla-failed-")) / f"{source.entry}{SUFFIX[source.language]}"
        path.write_text(source.text, encoding="utf-8")
    except OSError as error:
        # The compiler's own message matters more than a place to keep the text.
        return f"(could not be written: {error})"
    return str(path)


def wheel_folders(package: str) -> list[Path]:
    """Where an installed package (also one spread over several folders) lies; empty where it is not installed."""
    spec = importlib.util.find_spec(package)
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []


def mapped_libraries(stem: str) -> list[Path]:
    """Files whose name begins with `stem` that this process has mapped (Linux; elsewhere none)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return sorted(Path(p) for p in paths if Path(p).name.startswith(stem))


@cache
def file_identity(path: Path, distribution: str = "") -> str:
    """What tells this build of a file from any other, as cheaply as can be trusted.

    The linker's build id where there is one; else the hash that the installed package recorded (if the size still
    agrees), because hashing a compiler of some 200 MB at every start costs half a second; else the file's SHA-256.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as view:
                if build_id := elf.gnu_build_id(view):
                    return f"gnu:{build_id}"
        if distribution and (recorded := _recorded_hash(distribution, path, size)):
            return f"record:{recorded}"
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _recorded_hash(distribution: str, path: Path, size: int) -> str:
    try:
        files = metadata.distribution(distribution).read_text("RECORD") or ""
    except metadata.PackageNotFoundError:
        return ""
    wanted = "/".join(path.parts[-2:]) + ","
    for line in files.splitlines():
        if line.startswith(wanted):
            value, _, recorded_size = line[len(wanted) :].rpartition(",")
            return value if recorded_size == str(size) else ""
    return ""
