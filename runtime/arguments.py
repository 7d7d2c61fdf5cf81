"""The argument block: the one C struct a kernel takes, filled from a `Problem`.

A block has two kinds of members. Scalars (sizes, strides, flags) follow from the layout of a call and are written once
per layout; addresses and tensor maps differ from call to call. `Packer` compiles an abi once into a template for the
first and a few `struct.Struct` runs for the second (one run where the abi keeps its pointers together), so that a warm
call writes nothing else.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from qla.codegen.abi import FLAGS
from qla.codegen.planner import Deal
from qla.codegen.spec import FIELD_BYTES, Field
from qla.errors import LaunchError
from qla.runtime.problem import Problem

MAPS = ("q_map", "k_map", "v_map", "o_map")
POINTERS = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state"),
    *("final_state", "o", "states", "A_out", "w_out", "u_out"),
)
WORKSPACE_PREFIX = "ws_"

_DYNAMIC = ("tensormap", "ptr")
_FORMATS = {"tensormap": "128s", "ptr": "Q", "i64": "q", "i32": "i", "f32": "f"}
_MAP_ALIGNMENT = 64
_BLOCK_ALIGNMENT = 128
_STRIDES = {
    **{name: tuple(f"{name}_stride_{x}" for x in "bthd") for name in ("q", "k", "v", "o", "g", "beta")},
    **{name: tuple(f"{name}_stride_{x}" for x in "nhkv") for name in ("initial", "final")},
    # By meaning: with the value dimension first, the third stride is that of v.
    **{f"{name}_v_first": tuple(f"{name}_stride_{x}" for x in "nhvk") for name in ("initial", "final")},
}
_TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


_Run = tuple[Callable[..., None], int, Callable[[Any], Any]]  # pack_into of its struct, its offset, picker of values


class ArgumentBlock:
    """Aligned memory for one argument block, with what CUDA and HIP want around it.

    Parameters
    ----------
    template : initial bytes; its length is the size of the struct.

    Attributes
    ----------
    address : of the struct, 128-byte aligned.
    params : address of a one-element array that holds `address` (CUDA's ``kernelParams``).
    extra : address of HIP's ``extra`` list (buffer pointer, buffer size, end).
    view : the struct's bytes, writable.
    """

    __slots__ = ("_memory", "address", "extra", "params", "view")

    def __init__(self, template: bytes) -> None:
        size = len(template)
        tail = -size % 8
        room = size + tail + 8 * (1 + 5 + 1)
        self._memory = ctypes.create_string_buffer(room + _BLOCK_ALIGNMENT)
        base = ctypes.addressof(self._memory)
        skip = -base % _BLOCK_ALIGNMENT
        self.address = base + skip
        self.params = self.address + size + tail
        self.extra = self.params + 8
        size_at = self.extra + 40
        whole = memoryview(self._memory).cast("B")[skip : skip + room]
        self.view = whole[:size]
        self.view[:] = template
        # HIP_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END are 1, 2 and 3.
        struct.pack_into("=7Q", whole, size + tail, self.address, 1, self.address, 2, size_at, 3, size)


class Packer:
    """An abi, compiled.

    Parameters
    ----------
    abi : members of the struct in order; naturally aligned, tensor maps at 64 bytes.
    supply : names of the addresses and tensor maps, in the order in which `pack` is given their values.
    """

    __slots__ = ("_runs", "_scalars", "_template", "names", "offsets", "size")

    def __init__(self, abi: Sequence[Field], supply: Sequence[str]) -> None:
        self.names = tuple(f.name for f in abi)
        if len(set(self.names)) != len(self.names):
            raise LaunchError(f"argument block lists a member twice: {', '.join(self.names)}")
        self.offsets: dict[str, tuple[str, int]] = {}
        position, widest, layout = 0, 8, "="
        for f in abi:
            size = FIELD_BYTES[f.kind]
            alignment = _MAP_ALIGNMENT if f.kind == "tensormap" else size
            padding = -position % alignment
            self.offsets[f.name] = (f.kind, position + padding)
            layout += f"{padding}x{size}x" if f.kind in _DYNAMIC else f"{padding}x{_FORMATS[f.kind]}"
            position += padding + size
            widest = max(widest, alignment)
        padding = -position % widest
        self.size = position + padding
        self._template = struct.Struct(f"{layout}{padding}x")
        self._scalars = tuple(f.name for f in abi if f.kind not in _DYNAMIC)
        self._runs = self._compile_runs(supply)

    def _compile_runs(self, supply: Sequence[str]) -> tuple[_Run, ...]:
        places = {name: i for i, name in enumerate(supply)}
        runs: list[tuple[int, str, list[int]]] = []
        end = -1
        for name, (kind, offset) in self.offsets.items():
            if kind not in _DYNAMIC:
                continue
            if name not in places:
                raise LaunchError(f"argument block asks for {kind} {name!r}; known are {', '.join(supply)}")
            if offset != end:
                runs.append((offset, "=", []))
            start, layout, indices = runs[-1]
            runs[-1] = (start, layout + _FORMATS[kind], [*indices, places[name]])
            end = offset + FIELD_BYTES[kind]
        return tuple((struct.Struct(layout).pack_into, start, _picker(indices)) for start, layout, indices in runs)

    def template(self, scalars: Mapping[str, float]) -> bytes:
        """Bytes of a block with the scalars of one layout and no addresses yet."""
        try:
            return self._template.pack(*[scalars[name] for name in self._scalars])
        except KeyError as error:
            raise LaunchError(f"argument block asks for {error}, which no call provides") from error
        except struct.error as error:
            for name in self._scalars:
                kind, value = self.offsets[name][0], scalars[name]
                try:
                    struct.pack("=" + _FORMATS[kind], value)
                except struct.error:
                    raise LaunchError(f"{name} = {value} does not fit the kernel's {kind}") from error
            raise

    def pack(self, block: ArgumentBlock, values: Sequence[Any]) -> None:
        """Write addresses and tensor maps, given in the order of `supply`."""
        view = block.view
        for pack_into, offset, pick in self._runs:
            pack_into(view, offset, *pick(values))

    def unpack(self, data: bytes | memoryview) -> dict[str, Any]:
        """Members of a block by name, for reports and tests."""
        return {
            name: struct.unpack_from("=" + _FORMATS[kind], data, offset)[0]
            for name, (kind, offset) in self.offsets.items()
        }


def _picker(indices: Sequence[int]) -> Callable[[Any], Any]:
    if len(indices) == 1:
        only = indices[0]
        return lambda values: (values[only],)
    return itemgetter(*indices)


def type_code(tensor: torch.Tensor | None) -> int:
    """Code by which kernels tell the element types of gates and their parameters; 0 for an absent one."""
    if tensor is None:
        return 0
    try:
        return _TYPE_CODES[tensor.dtype]
    except KeyError:
        raise LaunchError(f"no kernel reads gates of {tensor.dtype}") from None


def flags(problem: Problem) -> int:
    """Run-time features of a call as bits."""
    given = {
        "L2NORM": problem.qk_l2norm,
        "BETA_SIGMOID": problem.beta_sigmoid,
        "BETA_DOUBLE": problem.beta_double,
        "GATE_IN_KERNEL": problem.gate_in_kernel,
        "LOWER_BOUND": problem.lower_bound is not None,
    }
    return sum(FLAGS[name] for name, value in given.items() if value)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def scalars(problem: Problem, deal: Deal, sequences: int, segment_chunks: int = 0) -> dict[str, float]:
    """Every scalar that an argument block may ask for.

    Parameters
    ----------
    problem : the call.
    deal : how `prepare` is dealt out.
    sequences : number of sequences; the batch size where there is no `cu_seqlens`.
    segment_chunks : chunks of a segment; 0 where sequences are not split.
    """
    batch, tokens, heads, dk = problem.q.shape
    value_heads, dv = problem.v.shape[2:]
    cu_seqlens, initial = problem.cu_seqlens, problem.initial_state
    values: dict[str, float] = {
        "batch": batch,
        "tokens": tokens,
        "sequences": sequences,
        "heads": heads,
        "value_heads": value_heads,
        "has_cu_seqlens": int(cu_seqlens is not None),
        "cu_is_int64": int(cu_seqlens is not None and cu_seqlens.dtype == torch.int64),
        "g_type": type_code(problem.g),
        "beta_type": type_code(problem.beta),
        "A_log_type": type_code(problem.A_log),
        "dt_bias_type": type_code(problem.dt_bias),
        "flags": flags(problem),
        "items": deal.items,
        "heads_at_once": deal.heads,
        "group": value_heads // heads,
        "passes": deal.passes,
        "stride": deal.stride,
        "apart": int(deal.apart),
        "segment_chunks": segment_chunks,
        "scale": problem.scale,
        "lower_bound": 0.0 if problem.lower_bound is None else problem.lower_bound,
    }
    g, beta = problem.g, problem.beta
    values.update(zip(_STRIDES["q"], problem.q.stride(), strict=True))
    values.update(zip(_STRIDES["k"], problem.k.stride(), strict=True))
    values.update(zip(_STRIDES["v"], problem.v.stride(), strict=True))
    values.update(zip(_STRIDES["o"], contiguous_strides(problem.v.shape), strict=True))
    # A gate per head has no stride along channels.
    values.update(zip(_STRIDES["g"], (0, 0, 0, 0) if g is None else (*g.stride(), 0), strict=False))
    values.update(zip(_STRIDES["beta"], (0, 0, 0) if beta is None else beta.stride(), strict=False))
    state = (sequences, value_heads, *((dv, dk) if problem.state_v_first else (dk, dv)))
    suffix = "_v_first" if problem.state_v_first else ""
    initial_strides = (0, 0, 0, 0) if initial is None else initial.stride()
    values.update(zip(_STRIDES["initial" + suffix], initial_strides, strict=True))
    values.update(zip(_STRIDES["final" + suffix], contiguous_strides(state), strict=True))
    return values
