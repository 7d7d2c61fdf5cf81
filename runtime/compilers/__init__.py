"""Compilers: one protocol, one module per way of compiling, and the choice among them."""

from __future__ import annotations

from qla.runtime.compilers.base import Binary, Compiler, CompilerIdentity
from qla.targets.base import Target

__all__ = ["Binary", "Compiler", "CompilerIdentity", "compiler_for"]


def compiler_for(target: Target) -> Compiler:
    """The compiler that builds for `target` here.

    CUDA targets take NVRTC; AMD targets hiprtc where ROCm is installed, else the clang in the `ziglang` package; the
    host takes that clang too. Whether one is installed shows when it is used, so that this never fails.
    """
    # Imported here: naming a compiler must not load one, and importing qla must not either.
    if target.language == "cuda":
        from qla.runtime.compilers.nvrtc import Nvrtc

        return Nvrtc(target)
    if target.language == "hip":
        from qla.runtime.compilers.hiprtc import Hiprtc

        hiprtc = Hiprtc(target)
        if hiprtc.available():
            return hiprtc
        from qla.runtime.compilers.zig import ZigHip

        return ZigHip(target)
    from qla.runtime.compilers.zig import ZigHost

    return ZigHost(target)
