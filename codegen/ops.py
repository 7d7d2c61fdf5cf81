"""The ops, each as its features. Adding an op is adding a line here (and, if it is new math, a step in a template)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Op:
    """Features of one op (design: per token `S <- e^g S`, then with delta `v' = b (v - S^T k)`, `S += k v'^T`).

    Parameters
    ----------
    delta : the value is corrected by what the state already holds for its key.
    gate : decay of the state: none, one per value head and token, or one per key channel too.
    """

    delta: bool
    gate: Literal["none", "head", "channel"]


OPS: dict[str, Op] = {
    "gated_delta_rule": Op(delta=True, gate="head"),
    "delta_rule": Op(delta=True, gate="none"),
    "kda": Op(delta=True, gate="channel"),
    "gla": Op(delta=False, gate="channel"),
}
