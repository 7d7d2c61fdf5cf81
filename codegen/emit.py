"""Rendered kernels as files, and the commands that build them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qla.codegen.render import render
from qla.codegen.spec import SUFFIX, KernelSpec
from qla.targets import TARGETS


def file_name(spec: KernelSpec) -> str:
    """Name of a kernel's source file; the commands in the text's first lines count on it."""
    return spec.name + SUFFIX[TARGETS[spec.target].language]


def build_commands(spec: KernelSpec) -> list[str]:
    """Shell commands, each of which builds the source in the folder where it lies; the first is the usual one."""
    return TARGETS[spec.target].build.replace("{name}", spec.name).splitlines()


def write(specs: Sequence[KernelSpec], folder: Path) -> list[Path]:
    """Render all kernels, then write each to a file of its own; nothing is written if one cannot be rendered."""
    texts = [(folder / file_name(spec), render(spec).text) for spec in specs]
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts:
        path.write_text(text, encoding="utf-8")
    return [path for path, _ in texts]
