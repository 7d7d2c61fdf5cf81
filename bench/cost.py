"""What a case costs at least: bytes, floating-point operations, and the time below which no kernel can get.

With L tokens in a chunk (64, the last chunk of a sequence what is left), per value head and chunk:

- products with the state: ``2 L K V`` each; 3 with the delta rule (K S, Q S, K^T V'), 2 without (Q S, K^T V)
- products inside the chunk: ``2 L L K`` for each of Q K^T and K K^T, ``2 L L V`` for each of P V' and A W; without the
  delta rule only Q K^T and P V; an op that returns w = A K has that product too (u takes the place of A W)

Bytes: every tensor that goes in, read once, and every one that comes out, written once.

Floor: ``max(bytes / bandwidth, operations / rate)`` with the ceilings of the device in data/devices.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from math import prod

import torch

from qla.bench.workloads import CHUNK, OPS, Case

__all__ = ["Ceilings", "Floor", "ceilings", "chunk_flops", "floor", "moved_bytes"]

LATENCY_MS = 0.002
"""A floor below this is less than launching the kernels takes: the case is bound by latency."""


@dataclass(frozen=True)
class Ceilings:
    """Bandwidth and matrix rate of a device, in 1e12 per second; `origin` says where from."""

    tbps: float
    tflops: float
    origin: str


@dataclass(frozen=True)
class Floor:
    """Least time of a case, and what bounds it: ``mem``, ``comp`` or ``lat``."""

    ms: float
    bound: str


def ceilings(device: str) -> Ceilings | None:
    """Ceilings of a device by its name; None where nothing is known."""
    known = json.loads((files("qla.bench") / "data" / "devices.json").read_text(encoding="utf-8"))
    return next((Ceilings(**facts) for name, facts in known.items() if name in device), None)


def chunk_flops(case: Case) -> int:
    """Floating-point operations of the chunk-wise form; a multiply and an add are two."""
    op, d = OPS[case.op], case.dims
    with_state = 2 * d.dk * d.dv * (3 if op.delta else 2)
    inside = 2 * (d.dk + d.dv) * (2 if op.delta else 1) + (2 * d.dk if op.delta and op.saves else 0)

    def chunk(rows: int) -> int:
        return rows * with_state + rows * rows * inside

    per_head = sum(length // CHUNK * chunk(CHUNK) + chunk(length % CHUNK) for length in case.sequence_lengths())
    return d.value_heads * per_head


def outputs(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of what comes out, token-major."""
    op, d = OPS[case.op], case.dims
    rows = (d.batch, d.tokens, d.value_heads)
    states = (d.batch, -(-d.tokens // CHUNK) + 1, d.value_heads, d.dk, d.dv)
    shapes: dict[str, tuple[int, ...]] = {"o": (*rows, d.dv)}
    if op.saves:
        shapes["states"] = states
    if op.saves and op.delta:
        shapes |= {"A": (*rows, CHUNK), "w": (*rows, d.dk), "u": (*rows, d.dv)}
    else:
        shapes["final_state"] = (d.sequences, d.value_heads, d.dk, d.dv)
    return shapes


def moved_bytes(case: Case) -> int:
    """Bytes that any kernel reads and writes at least."""
    shapes = {name: shape for name, shape in case.shapes.items() if name != "cu_seqlens_cpu"}
    if case.lengths:
        shapes["cu_seqlens"] = (len(case.lengths) + 1,)
    shapes |= outputs(case)
    return sum(prod(shape) * getattr(torch, case.dtype_of(name)).itemsize for name, shape in shapes.items())


def floor(case: Case, limits: Ceilings) -> Floor:
    """Least time on a device with these ceilings."""
    memory, compute = moved_bytes(case) / limits.tbps / 1e9, chunk_flops(case) / limits.tflops / 1e9
    ms = max(memory, compute)
    bound = "lat" if ms < LATENCY_MS else "mem" if memory >= compute else "comp"
    return Floor(ms, bound)
