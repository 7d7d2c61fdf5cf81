"""What can be compared: a git ref, a checkout, an installed version, or a Python that has one.

Each becomes a folder with a package `qla` of links to its code, and with this `bench` in it: both sides are measured by
the same program, also where one of them has none.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["Subject", "SubjectError", "prepared"]

_BENCH = Path(__file__).resolve().parent
_NOT_CODE = {"__pycache__", "api", "bench", "tests"}


class SubjectError(ValueError):
    """Nothing that can be compared."""


@dataclass(frozen=True)
class Subject:
    """One side.

    Parameters
    ----------
    label : what the user called it.
    folder : has the package.
    python : that runs it.
    """

    label: str
    folder: Path
    python: str = sys.executable


def _link(parts: Iterator[Path], package: Path) -> None:
    for part in parts:
        if part.name not in ("__pycache__", "bench"):
            (package / part.name).symlink_to(part)


def assemble(code: Path, into: Path) -> None:
    """Make the package of links.

    Parameters
    ----------
    code : a checkout, a folder with an installed `qla` in it, or that package itself.
    into : empty folder.
    """
    package, code = into / "qla", code.resolve()
    package.mkdir()
    (package / "bench").symlink_to(_BENCH)
    if (code / "api" / "__init__.py").is_file():
        _link((code / "api").iterdir(), package)
        folders = (f for f in code.iterdir() if (f / "__init__.py").is_file() and f.name not in _NOT_CODE)
        _link(folders, package)
        return
    installed = code / "qla" if (code / "qla" / "__init__.py").is_file() else code
    if not (installed / "codegen").is_dir():
        raise SubjectError(f"{code} is neither a checkout nor a folder with an installed qla")
    _link(installed.iterdir(), package)


def _extract(ref: str, into: Path) -> None:
    """Files of a git ref of the repository that this is called in."""
    command = ["git", "archive", "--format=tar", ref]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except FileNotFoundError:
        raise SubjectError(f"{ref!r} is no file or folder, and there is no git") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        raise SubjectError(f"{ref!r} is no file, folder or git ref here: {said[-1]}") from None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        # Python 3.10 has the safe filter from its later patch releases on; the archive is our own either way.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(into, **safe)  # type: ignore[arg-type]


def _home(python: Path) -> Path:
    """Where a Python has its qla."""
    command = [str(python), "-c", "import qla; print(qla.__path__[0])"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SubjectError(f"{python} cannot import qla")
    found = Path(done.stdout.strip().splitlines()[-1])
    return found.parent if found.name == "api" else found


@contextmanager
def prepared(text: str) -> Iterator[Subject]:
    """The side that `text` names: a Python executable, a folder, or else a git ref."""
    with TemporaryDirectory(prefix="qla-compare-") as work:
        folder, path = Path(work) / "package", Path(text)
        folder.mkdir()
        if path.is_file():
            # Not resolved: a virtual environment is found by the path of its link.
            assemble(_home(path.absolute()), folder)
            yield Subject(text, folder, str(path.absolute()))
            return
        code = path
        if not path.is_dir():
            code = Path(work) / "code"
            code.mkdir()
            _extract(text, code)
        assemble(code, folder)
        yield Subject(text, folder)
