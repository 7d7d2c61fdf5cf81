"""The ops, each as its features: all that rendering and compiling look at.

An op whose features all exist is a line here; new math is a step in a template too. What else a public op needs is in
`docs/architecture.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Op:
    """Features of one op: per token `S <- e^g S`, then with delta `v' = b (v - S^T k)`, and `S += k v'^T`.

    Parameters
    ----------
    delta : the value is corrected by what the state already holds for its key.
    gate : decay of the state: none, one per value head and token, or one per key channel too.
    saves : kernels that also write chunk states, and the factors of a delta op, are supported.
    """

    delta: bool
    gate: Literal["none", "head", "channel"]
    saves: bool = False


OPS: dict[str, Op] = {
    "gated_delta_rule": Op(delta=True, gate="head"),
    "delta_rule": Op(delta=True, gate="none", saves=True),
    "kda": Op(delta=True, gate="channel"),
    "gla": Op(delta=False, gate="channel", saves=True),
}
