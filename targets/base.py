"""The shape of a target's data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True)
class Schedule:
    """In which order the named steps of a `scan` run, and how deep its tiles are buffered.

    Parameters
    ----------
    name : what `KernelSpec.schedule` calls it.
    order : step names in issue order. A leading ``>`` runs the step one chunk ahead (for chunk n + 1 while the
        others work on chunk n); ``QS:1/2`` issues the first of two halves of the step's products along their inner
        dimension. Steps an op does not have are passed over.
    rings : tiles that travel together ("K V rows"), each with the number of buffers of its ring.
    streams : column blocks (of the target's width) that one workgroup owns. The planner chooses between the default and
        schedules with more of them; the others are there to be measured.
    unroll : chunks per pass of the main loop.
    gates : kinds of gate that it is for.
    """

    name: str
    order: tuple[str, ...]
    rings: Mapping[str, int] = field(default_factory=dict)
    streams: int = 1
    unroll: int = 1
    gates: tuple[str, ...] = ("none", "head", "channel")


@dataclass(frozen=True)
class Costs:
    """Measured times in microseconds, from which a call is planned and its time predicted.

    Parameters
    ----------
    scan_chunk_us : of a chunk of a `scan`, by gate kind: alone on the device, and where each processor has one.
    pair_chunk_us : likewise of a `scan` whose workgroups have two column blocks each.
    carry_chunk_us : likewise of a chunk of a `carry`: alone on a processor, and of two of them where two fit.
    reach_chunks : chunks that a `carry` walks through at least, by gate kind, with decays as models have them; none
        where it always walks through all of a segment.
    combine_step_us, combine_short_step_us : of a segment of `combine`, and of one that no earlier state reaches
        through.
    launch_us : of a kernel more.
    prepare_us : of a (chunk, value head) of a `prepare` with K = 128 on one processor, by (delta, gate), and by the
        number of value heads that share keys and queries from which on it takes that long.
    bandwidth : of memory, in bytes per microsecond.
    """

    scan_chunk_us: Mapping[str, tuple[float, float]]
    pair_chunk_us: Mapping[str, tuple[float, float]]
    carry_chunk_us: Mapping[str, tuple[float, float]]
    reach_chunks: Mapping[str, int]
    combine_step_us: float
    combine_short_step_us: float
    launch_us: float
    prepare_us: Mapping[tuple[bool, str], Mapping[int, float]]
    bandwidth: float

    def updated(self, data: Mapping[str, Any]) -> Costs:
        """These costs with those in their place that `data`, made by `to_json`, has."""
        if unknown := set(data) - {field.name for field in fields(self)}:
            raise ValueError(f"costs have no {', '.join(sorted(unknown))}")

        def frozen(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: frozen(part) for key, part in value.items()}
            return tuple(value) if isinstance(value, list) else value

        values: dict[str, Any] = {name: frozen(value) for name, value in data.items()}
        if "prepare_us" in data:
            values["prepare_us"] = {
                (delta, gate): {int(least): us for least, us in table.items()}
                for delta, gate, table in data["prepare_us"]
            }
        return replace(self, **values)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        tables = [[delta, gate, table] for (delta, gate), table in self.prepare_us.items()]
        return json.loads(json.dumps({**asdict(replace(self, prepare_us={})), "prepare_us": tables}))  # type: ignore[no-any-return]


def tuned(name: str, costs: Costs) -> Costs:
    """Costs of a target, with what a sweep measured (`tuned/NAME.json`, where there is one) in the place of `costs`."""
    file = files("qla.targets") / "tuned" / f"{name}.json"
    return costs.updated(json.loads(file.read_text(encoding="utf-8"))["costs"]) if file.is_file() else costs


@dataclass(frozen=True)
class Target:
    """Facts about a target and the schedules tuned for it.

    Parameters
    ----------
    name : what `KernelSpec.target` and the CLI call it.
    language : of the rendered source; it also decides which compiler and which driver serve the target.
    device : what a device that runs it calls itself: the compute capability as ``sm_90``, the architecture as
        ``gfx942``; ``cpu`` on host.
    hardware : the devices, for people.
    vocabulary : file stem under ``templates/tile`` that implements the verbs.
    dtypes : of q, k, v, o.
    shared_limit : bytes of shared memory (LDS) that one workgroup may use; 0 where there is no such limit.
    asynchronous : how Hopper works, in one word, and how the others do not: products run on beside the statements
        after them and must be awaited; tiles come by tensor maps into rings of several buffers, whose places in shared
        memory the generator plans. Where it is false, statements are done one after the other, a tile has one buffer,
        and no argument is a tensor map.
    threads : of one workgroup of `prepare`, by gate kind.
    block_columns : value columns of one column block; 0 for all of them.
    build : shell commands, one a line, each of which builds a rendered source whose file is called ``{name}``.
    chunk : tokens of a chunk, by gate kind.
    schedules : for `scan`, the default first.
    processors : multiprocessors, compute units or cores of the usual device, where none is at hand to be asked.
    flags : handed to the compiler; part of the kernel id.
    facts : instruction shapes and other numbers that the vocabulary reads.
    segments : a sequence can be split among workgroups of `scan`.
    costs : by which calls are planned; None where nothing was measured, and nothing is split.
    """

    name: str
    language: Literal["cuda", "hip", "c++"]
    device: str
    hardware: str
    vocabulary: str
    dtypes: tuple[str, ...]
    shared_limit: int
    asynchronous: bool
    threads: Mapping[str, int]
    block_columns: int
    chunk: Mapping[str, int]
    schedules: tuple[Schedule, ...]
    flags: tuple[str, ...]
    build: str
    processors: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
    segments: bool = False
    costs: Costs | None = None

    @property
    def loads(self) -> tuple[str, ...]:
        """Ways of loading q, k and v that are kernels of their own: a CPU reads any strides with one."""
        return ("tile",) if self.language == "c++" else ("tile", "strided")

    def schedule(self, name: str = "") -> Schedule:
        """By its name; the default without one."""
        return next(s for s in self.schedules if s.name == (name or self.schedules[0].name))

    def columns(self, dv: int) -> int:
        """Value columns of one column block of head dim `dv`."""
        return self.block_columns or dv

    def scan_threads(self, streams: int) -> int:
        """Threads of a `scan` workgroup with so many column blocks."""
        return int(self.facts["scan_threads"][streams])
