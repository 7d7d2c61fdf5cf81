"""A driver that records what it is asked to launch, kernels that ask for everything there is, and calls of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qla.codegen.abi import segment_workspace
from qla.codegen.spec import Field, KernelSpec, Limits, Source
from qla.runtime.arguments import MAPS, POINTERS, ArgumentBlock, Packer
from qla.runtime.problem import Problem

WORKSPACE = (("a", 8192), ("rows", 1280))
STRIDES = [f"{t}_stride_{x}" for t in ("q", "k", "v", "o", "g") for x in "bthd"]
STATES = [f"{t}_stride_{x}" for t in ("initial", "final") for x in "nhkv"]
INTS = [
    *("batch", "tokens", "sequences", "heads", "value_heads", "has_cu_seqlens", "cu_is_int64", "g_type", "beta_type"),
    *("A_log_type", "dt_bias_type", "flags", "items", "segment_chunks"),
]


def render(spec: KernelSpec) -> Source:
    """A source that asks for everything there is."""
    maps = MAPS if spec.target == "sm_90a" and spec.loads == "tile" else ()
    workspace = WORKSPACE if spec.stage == "prepare" else WORKSPACE[1:]
    states = segment_workspace(spec)
    abi = (
        *(Field(n, "tensormap") for n in maps),
        *(Field(n, "ptr") for n in POINTERS),
        *(Field(f"ws_{n}", "ptr") for n, _ in (*workspace, *states)),
        *(Field(n, "i64") for n in (*STRIDES, *(f"beta_stride_{x}" for x in "bth"), *STATES)),
        *(Field(n, "i32") for n in INTS),
        *(Field(n, "f32") for n in ("scale", "lower_bound")),
    )
    limits = Limits(threads=128, shared_bytes=1024, value_columns=64 if spec.stage == "scan" else 0, chunk=64)
    return Source(spec, spec.name, "cuda", "", abi, limits, workspace)


@dataclass
class Recorder:
    """A driver that decodes every argument block it is given."""

    loaded: list[KernelSpec] = field(default_factory=list)
    launches: list[tuple[str, int, int, dict[str, Any]]] = field(default_factory=list)
    encoded: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]] = field(default_factory=list)
    captures: bool = False
    processors: int = 132
    during: Callable[[], None] | None = None

    def load(self, binary: bytes, source: Source) -> Any:
        assert binary == source.entry.encode()
        self.loaded.append(source.spec)
        names = [n for n, _ in (*WORKSPACE, *segment_workspace(source.spec))]
        return source, Packer(source.abi, (*POINTERS, *MAPS, *(f"ws_{n}" for n in names)))

    def launch(self, kernel: Any, blocks: int, arguments: ArgumentBlock, stream: int) -> None:
        source, packer = kernel
        if self.during is not None:
            self.during()
        self.launches.append((source.spec.stage, blocks, stream, packer.unpack(arguments.view)))

    def stream(self) -> int:
        return 77

    def capturing(self) -> bool:
        return self.captures

    def tensor_map(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, chunk: int
    ) -> Callable[[int], bytes]:
        self.encoded.append((tuple(shape), tuple(strides), dtype, chunk))
        return lambda address: address.to_bytes(8, "little") + bytes(120)


def problem(B: int = 2, T: int = 70, H: int = 2, HV: int = 4, K: int = 128, V: int = 128, **changes: Any) -> Problem:
    """A gated delta rule call with values that tell tensors apart."""
    base = Problem(
        op="gated_delta_rule",
        saves=False,
        q=torch.ones(B, T, H, K, dtype=torch.bfloat16),
        k=torch.ones(B, T, H, K, dtype=torch.bfloat16),
        v=torch.ones(B, T, HV, V, dtype=torch.bfloat16),
        g=torch.zeros(B, T, HV),
        beta=torch.ones(B, T, HV, dtype=torch.bfloat16),
        scale=0.5,
        initial_state=None,
        output_final_state=False,
        state_v_first=False,
        qk_l2norm=False,
        beta_sigmoid=False,
        beta_double=False,
        gate_in_kernel=False,
        A_log=None,
        dt_bias=None,
        lower_bound=None,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    )
    return dataclasses.replace(base, **changes)
