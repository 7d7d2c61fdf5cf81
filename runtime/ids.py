"""The two ids of a kernel: what it is (`kernel_id`), and who built it and how (`build_id`).

Both are SHA-256 over labelled, length-prefixed fields, so that no two different lists of fields give the same bytes. No
path, user or date is in either: two machines agree on them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping

from qla.codegen.spec import Source
from qla.runtime.compilers import CompilerIdentity
from qla.runtime.compilers.cpu import cpu_features
from qla.targets import TARGETS

# Raised when the meaning of a field changes or a kernel that is cached must not be found any more.
SCHEMA = 1

# Variables that the compilers which run inside our process read and that can alter the code. The zig compilers run as
# children that are given none of the kind, so they have no list.
#   NVRTC: seen by tracing what the library asks for (13.0); PREPEND is documented beside APPEND for other versions.
#   hiprtc: its own options, and those with which the code object manager finds its device libraries and headers.
ENVIRONMENT: Mapping[str, tuple[str, ...]] = {
    "nvrtc": (
        "NVRTC_APPEND_FLAGS",
        "NVRTC_PREPEND_FLAGS",
        "NVRTCWIZ",
        "NV_NVVM_VERSION",
        "NVVM_IR_VER_CHK",
        "CAN_FINALIZE_DEBUG",
        "EDG_BASE",
        "EDG_MODULES_PATH",
    ),
    "hiprtc": (
        "HIPRTC_COMPILE_OPTIONS_APPEND",
        "HIPRTC_LINK_OPTIONS_APPEND",
        "CCC_OVERRIDE_OPTIONS",
        "HIP_DEVICE_LIB_PATH",
        "HIP_PATH",
        "ROCM_PATH",
        "LLVM_PATH",
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "SOURCE_DATE_EPOCH",
    ),
}


def kernel_id(source: Source, flags: Iterable[str], cpu_features: Iterable[str]) -> str:
    """What the kernel is: needs no compiler, and is the same on every machine.

    Parameters
    ----------
    source : rendered text, entry and ABI.
    flags : handed to the compiler.
    cpu_features : resolved features of the CPU for host kernels (never ``native``); empty for all others.
    """
    fields = [
        ("kind", "kernel"),
        ("target", source.spec.target),
        ("language", source.language),
        ("entry", source.entry),
        ("text", source.text),
    ]
    fields += [(f"abi {field.kind}", field.name) for field in source.abi]
    fields += [("flag", flag) for flag in flags]
    fields += [("cpu", feature) for feature in cpu_features]
    return _digest(fields)


def build_id(kernel_id: str, compiler: CompilerIdentity, env: Mapping[str, str]) -> str:
    """Who built the kernel, and with what in the environment: keys the user cache.

    Parameters
    ----------
    kernel_id : of the kernel.
    compiler : who would build it.
    env : variables that alter code, as `altering_environment` picks them.
    """
    fields = [
        ("kind", "build"),
        ("kernel", kernel_id),
        ("compiler", compiler.name),
        ("version", compiler.version),
        ("build", compiler.build),
    ]
    fields += [(f"env {name}", env[name]) for name in sorted(env)]
    return _digest(fields)


def identify(source: Source) -> str:
    """`kernel_id` of a source with its target's flags and, on host, this CPU's features."""
    target = TARGETS[source.spec.target]
    return kernel_id(source, target.flags, cpu_features() if target.language == "c++" else ())


def altering_environment(compiler: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables now set that can alter what the named compiler makes. Set but empty counts as not set."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in ENVIRONMENT.get(compiler, ()) if environ.get(name)}


def _digest(fields: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.sha256(b"qla %d\n" % SCHEMA)
    for label, value in fields:
        # Lengths go first: with separators alone, a value that contains one could pass for two fields.
        for part in (label.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()
