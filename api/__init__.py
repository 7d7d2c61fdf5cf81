"""Chunked delta-rule linear attention (Gated DeltaNet, DeltaNet, KDA, GLA) as generated kernels.

Names are resolved on first use, so that `import qla` and the code generator need neither torch nor a device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qla.errors import (
    CaptureError,
    CompilationError,
    CompilerNotFoundError,
    LaunchError,
    QlaError,
    ScheduleError,
    TemplateError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from qla.chunk_ops import DeltaNetChunkFwd, GLAChunkFwd
    from qla.ops import chunk_delta_rule, chunk_gated_delta_rule, chunk_gla, chunk_kda
    from qla.planning import explain

    __version__: str

_HOMES = {
    "chunk_gated_delta_rule": "qla.ops",
    "chunk_delta_rule": "qla.ops",
    "chunk_kda": "qla.ops",
    "chunk_gla": "qla.ops",
    "DeltaNetChunkFwd": "qla.chunk_ops",
    "GLAChunkFwd": "qla.chunk_ops",
    "explain": "qla.planning",
}

__all__ = [
    "CaptureError",
    "CompilationError",
    "CompilerNotFoundError",
    "DeltaNetChunkFwd",
    "GLAChunkFwd",
    "LaunchError",
    "QlaError",
    "ScheduleError",
    "TemplateError",
    "UnsupportedError",
    "__version__",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "explain",
]


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("qla")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
