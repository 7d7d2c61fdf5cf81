"""The workloads: 571 published ones and 103 that peers were measured on, named as published, and filters over them.

A `Case` is data: shapes, options, sequence lengths, and the times that others need for it. `inputs` turns it into
tensors and a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

__all__ = ["OPS", "Case", "Dims", "Op", "load", "select"]

CHUNK = 64
"""Tokens per chunk in every published shape and formula."""

# Heads (H, HV) of the names in data/h200.json, with K = V = 128. The rest of a name is the lengths of its sequences.
HEADS = {
    "tp8": (2, 8),
    "tp4": (4, 16),
    "tp2": (8, 32),
    "tp1": (16, 64),
    "35b": (16, 32),
    "27b": (16, 48),
    "2b": (16, 16),
    "sym": (32, 32),
}
_KDA_HEADS = {"tp1": 32, "tp4": 8, "tp8": 4}


@dataclass(frozen=True)
class Op:
    """What an op of the workloads is to us.

    Parameters
    ----------
    name : of the function or class in `qla`.
    delta : has the delta rule.
    gate : whether there is a decay, and one per what.
    head_major : tensors are `[B, H, T, D]`, else `[B, T, H, D]`.
    saves : also returns chunk states and, with the delta rule, the factors w, u and A.
    """

    name: str
    delta: bool
    gate: Literal["none", "head", "channel"]
    head_major: bool = False
    saves: bool = False


OPS: Mapping[str, Op] = {
    "GDNFwd": Op("chunk_gated_delta_rule", True, "head"),
    "KDAFwd": Op("chunk_kda", True, "channel"),
    "DeltaNetFwd": Op("chunk_delta_rule", True, "none"),
    "GLAFwd": Op("chunk_gla", False, "channel"),
    "DeltaNetChunkFwd": Op("DeltaNetChunkFwd", True, "none", head_major=True, saves=True),
    "GLAChunkFwd": Op("GLAChunkFwd", False, "channel", saves=True),
}
"""The ops that can be run; the workloads have others (backward, one-token kernels), which `load` gives all the same."""


@dataclass(frozen=True)
class Dims:
    """Sizes of a case; `sequences` is B, or the number of packed sequences."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    dk: int
    dv: int
    sequences: int


@dataclass(frozen=True)
class Case:
    """One workload.

    Parameters
    ----------
    seed : the list it comes from: ``"000"`` and ``"001"`` are published ones, ``"h200"`` is data/h200.json.
    op, workload : as published.
    dtype : of q, k, v and o, as torch names it.
    shapes : of the tensors that go in, by name.
    lengths : of packed sequences; None where there are none.
    host_lengths : the boundaries are also given on the CPU.
    options : keyword arguments.
    peers : milliseconds of device time that others need, by name.
    reduced : made smaller than published.
    """

    seed: str
    op: str
    workload: str
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]
    lengths: tuple[int, ...] | None = None
    host_lengths: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    peers: Mapping[str, float] = field(default_factory=dict)
    reduced: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """Return the case that `dataclasses.asdict` and JSON made `data` of."""
        shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
        lengths = None if data["lengths"] is None else tuple(data["lengths"])
        return cls(**{**data, "shapes": shapes, "lengths": lengths})

    @property
    def name(self) -> str:
        """What distinguishes it from every other case."""
        return f"{self.seed} {self.op} {self.workload} {self.dtype}"

    @property
    def traits(self) -> Op | None:
        """Of its op; None where we have nothing that runs it."""
        return OPS.get(self.op)

    @property
    def dims(self) -> Dims:
        """Its sizes; only for ops that can be run."""
        batch, tokens, heads, dk = self.shapes["q"]
        value_heads, dv = self.shapes["v"][2:]
        if OPS[self.op].head_major:
            tokens, heads, value_heads = heads, tokens, self.shapes["v"][1]
        return Dims(batch, tokens, heads, value_heads, dk, dv, len(self.lengths) if self.lengths else batch)

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """Name and milliseconds of the fastest of the others."""
        return min(self.peers.items(), key=lambda item: item[1]) if self.peers else None

    def sequence_lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return list(self.lengths) if self.lengths else [self.dims.tokens] * self.dims.batch

    def shape_of(self, name: str, dims: Dims) -> tuple[int, ...]:
        """Shape of one of its tensors, were its sizes `dims`."""
        op = OPS[self.op]
        rows = (dims.batch, dims.tokens)
        swap = op.head_major

        def tokenwise(heads: int, *rest: int) -> tuple[int, ...]:
            return (rows[0], heads, rows[1], *rest) if swap else (*rows, heads, *rest)

        state = (dims.dv, dims.dk) if self.options.get("state_v_first") else (dims.dk, dims.dv)
        shapes = {
            "q": tokenwise(dims.heads, dims.dk),
            "k": tokenwise(dims.heads, dims.dk),
            "v": tokenwise(dims.value_heads, dims.dv),
            "beta": tokenwise(dims.value_heads),
            "g": tokenwise(dims.value_heads, *([dims.dk] if op.gate == "channel" else [])),
            "initial_state": (dims.sequences, dims.value_heads, *state),
            "A_log": (dims.value_heads,),
            "dt_bias": (dims.value_heads * (dims.dk if op.gate == "channel" else 1),),
            "cu_seqlens": (dims.sequences + 1,),
            "cu_seqlens_cpu": (dims.sequences + 1,),
        }
        return shapes[name]

    def dtype_of(self, name: str) -> str:
        """Dtype of one of its tensors, in and out.

        Gates and beta per head are float32 as models hand them over; gates per channel, and beta where there is no
        gate, have the dtype of q, k and v (the published bandwidths are those of 2-byte gates).
        """
        if name in ("initial_state", "final_state", "states", "A_log", "dt_bias"):
            return "float32"
        if name in ("cu_seqlens", "cu_seqlens_cpu"):
            return "int64"
        gate = OPS[self.op].gate
        if (name == "g" and gate == "head") or (name == "beta" and gate != "none"):
            return "float32"
        return self.dtype

    def shrink(self, tokens: int, value_heads: int, batch: int = 2, sequences: int = 8) -> Case:
        """Return a smaller case of the same kind: same head dims, options and heads per group.

        Parameters
        ----------
        tokens : at most so many in all sequences together; packed lengths shrink in proportion, to no less than 1.
        value_heads : at most so many, but at least one group.
        batch, sequences : at most so many rows, or packed sequences.
        """
        d = self.dims
        group = d.value_heads // d.heads
        heads = min(d.heads, max(1, value_heads // group))
        lengths = None
        if self.lengths:
            kept = self.lengths[:sequences]
            factor = min(1.0, tokens / sum(kept))
            lengths = tuple(max(1, int(length * factor)) for length in kept)
            d = replace(d, tokens=sum(lengths), sequences=len(lengths))
        else:
            rows = min(d.batch, batch)
            d = replace(d, batch=rows, tokens=max(1, min(d.tokens, tokens // rows)), sequences=rows)
        d = replace(d, heads=heads, value_heads=heads * group)
        if d == self.dims:
            return self
        shapes = {name: self.shape_of(name, d) for name in self.shapes}
        return replace(self, shapes=shapes, lengths=lengths, peers={}, reduced=True)


def _read(name: str) -> str:
    return (files("qla.bench") / "data" / name).read_text(encoding="utf-8")


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths of the sequences in a name: ``"2048"``, ``"1024-7168"`` or ``"8x1024"``."""
    lengths: list[int] = []
    for part in text.split("-"):
        count, _, length = part.rpartition("x")
        lengths += [int(length)] * (int(count) if count else 1)
    return tuple(lengths)


def _prefill(batch: int, lengths: Sequence[int], heads: int, value_heads: int) -> dict[str, tuple[int, ...]]:
    rows = (batch, sum(lengths))
    qk, v, gate = (*rows, heads, 128), (*rows, value_heads, 128), (*rows, value_heads)
    return {"q": qk, "k": qk, "v": v, "g": gate, "beta": gate}


def _signature(case: Case) -> str:
    """Equal for two cases that are the same work under different names."""
    shapes = [case.shapes.get(name) for name in ("q", "v", "g", "initial_state")]
    lengths = case.lengths if case.lengths and len(case.lengths) > 1 else None
    return json.dumps([case.op, case.dtype, shapes, lengths, sorted(case.options.items())])


def _measured() -> list[Case]:
    """All forward rows of data/h200.json as cases."""
    cases = []
    for row in json.loads(_read("h200.json"))["rows"]:
        head, _, rest = row["workload"].partition("-")
        op, options = "GDNFwd", {}
        lengths: tuple[int, ...] = (1,)
        if row["set"] == "gdn_fwd":
            lengths = parse_lengths(rest)
            shapes = _prefill(1, lengths, *HEADS[head])
        elif row["set"] == "decode":
            shapes = _prefill(int(head[1:]), (1,), 16, 32)
            shapes["initial_state"] = (int(head[1:]), 32, 128, 128)
        elif row["set"] == "kda":
            op, options, lengths = "KDAFwd", {"use_qk_l2norm_in_kernel": True}, parse_lengths(rest)
            shapes = _prefill(1, lengths, _KDA_HEADS[head], _KDA_HEADS[head])
            shapes["g"] = shapes["q"]
        else:  # forward that keeps what backward needs, and backward: nothing here is the same work
            continue
        peers = {f"{name} (measured)": times["device_ms"] for name, times in row["peers"].items()}
        packed = lengths if len(lengths) > 1 else None
        label = "h200" if row["set"] == "gdn_fwd" else row["set"]
        cases.append(Case(label, op, row["workload"], "bfloat16", shapes, packed, False, options, peers))
    return cases


def _published() -> list[Case]:
    cases = []
    for line in _read("cases.jsonl").splitlines():
        row = json.loads(line)
        times = row["published"]
        peers = {f"{name} (published)": ms for name, ms in (times.get("alternatives_ms") or times.get("ms")).items()}
        if "device_ms" in times:
            peers["tileops (published)"] = times["device_ms"]
        lengths = tuple(row["seq_lens"]) if row["seq_lens"] else None
        shapes = {name: tuple(shape) for name, shape in row["shapes"].items()}
        names = (row["seed"], row["op"], row["workload"], row["dtype"])
        cases.append(Case(*names, shapes, lengths, row["cu_seqlens_cpu"], row["options"], peers))
    return cases


@cache
def load() -> tuple[Case, ...]:
    """Return all workloads; a published one also has the measured times of peers on the same work."""
    measured = _measured()
    times = {_signature(case): case.peers for case in measured}
    published = [replace(case, peers={**case.peers, **times.get(_signature(case), {})}) for case in _published()]
    return (*published, *(case for case in measured if case.seed == "h200"))


def _matches(text: str, patterns: str, whole: bool) -> bool:
    """Whether text fits one of the comma-separated patterns: with wildcards, or literally (whole, or a part)."""
    wanted = [p.strip().lower() for p in patterns.split(",") if p.strip()]
    text = text.lower()
    return not wanted or any(
        fnmatchcase(text, p) if set(p) & set("*?[") else (text == p if whole else p in text) for p in wanted
    )


def select(cases: Iterable[Case], *, op: str = "", seed: str = "", name: str = "", dtype: str = "") -> list[Case]:
    """Return the cases that fit every filter.

    Parameters
    ----------
    cases : to choose from.
    op, seed : whole names, comma-separated, wildcards allowed, any case.
    name : parts of workload names, or patterns with wildcards for whole ones.
    dtype : ``bf16``, ``fp16`` or torch's names.
    """
    long = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    dtypes = ",".join(long.get(d.strip(), d) for d in dtype.split(","))
    return [
        case
        for case in cases
        if _matches(case.op, op, True)
        and _matches(case.seed, seed, True)
        and _matches(case.workload, name, False)
        and _matches(case.dtype, dtypes, True)
    ]
