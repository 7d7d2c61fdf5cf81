"""Machine code of Hopper scans: how the products of the chain run, and that nothing of it leaves the registers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import pytest

from qla.codegen import resources
from qla.codegen.ops import OPS
from qla.codegen.render import render, schedule_of
from qla.codegen.spec import KernelSpec
from qla.runtime.compilers.nvrtc import Nvrtc
from qla.targets import TARGETS

TARGET = TARGETS["sm_90a"]
CHUNK = 64

SPECS = [
    KernelSpec(op, "scan", dtype, 128, 128, "sm_90a", schedule=schedule)  # type: ignore[arg-type]
    for op in OPS
    for dtype in TARGET.dtypes
    for schedule in ("", "serial")
]
PAIRS = [
    KernelSpec(op, "scan", dtype, dk, 128, "sm_90a", schedule="paired")  # type: ignore[arg-type]
    for op in ("gated_delta_rule", "delta_rule")
    for dtype in TARGET.dtypes
    for dk in (64, 128)
]
SPECS += PAIRS
SPECS += [
    KernelSpec("gated_delta_rule", "scan", "bf16", 64, 64, "sm_90a"),
    KernelSpec("kda", "scan", "fp16", 64, 128, "sm_90a"),
    KernelSpec("gated_delta_rule", "scan", "bf16", 128, 128, "sm_90a", loads="strided"),
    KernelSpec("delta_rule", "scan", "bf16", 128, 128, "sm_90a", saves=True),
    KernelSpec("gla", "scan", "fp16", 128, 64, "sm_90a", saves=True),
]
CARRIES = [
    KernelSpec("gated_delta_rule", "carry", "bf16", 128, 128, "sm_90a"),
    KernelSpec("delta_rule", "carry", "fp16", 128, 128, "sm_90a"),
    KernelSpec("kda", "carry", "bf16", 128, 128, "sm_90a"),
    KernelSpec("gated_delta_rule", "carry", "bf16", 64, 64, "sm_90a"),
]
SPECS += CARRIES


@dataclass(frozen=True)
class Instruction:
    """One line of machine code: its address, name with modifiers, and operands."""

    address: int
    name: str
    operands: str
    predicate: str


@dataclass(frozen=True)
class Code:
    """A kernel's instructions, the addresses of its labels, and what the compiler said."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    log: str

    def named(self, *stems: str) -> list[Instruction]:
        return [i for i in self.instructions if i.name.split(".")[0] in stems]

    def loops(self) -> Iterator[tuple[int, int]]:
        """Address ranges that a branch closes; retries of a wait, which lie behind the kernel's end, are no loops."""
        for i in self.named("BRA"):
            target = self.labels[match[1]] if (match := re.search(r"`\((\.L_x_\d+)\)", i.operands)) else i.address
            ends = [e.address for e in self.named("EXIT") if not e.predicate]
            if target < i.address and not any(target < end < i.address for end in ends):
                yield target, i.address


_LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*(?:\(\*.*\*\))?\s*;")


def parse(text: str, log: str) -> Code:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            waiting.append(label[1])
        elif match := _LINE.match(line):
            address = int(match[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
            instructions.append(Instruction(address, match[3], match[4], match[2] or ""))
    return Code(tuple(instructions), labels, log)


@cache
def code_of(spec: KernelSpec) -> Code:
    built = Nvrtc(TARGET).compile(render(spec))
    return parse(resources.disassemble(built.data, TARGET), built.log)


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead() -> Iterator[None]:
    """All of them, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(code_of, SPECS))
    yield
    code_of.cache_clear()


every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def products_of_a_chunk(spec: KernelSpec) -> Counter[int]:
    """Instructions of one chunk by their n (rows of the block), each with k = 16."""
    op, K, C = spec.features, spec.dk, CHUNK
    # A triangular [C, C] tile: its upper half of rows needs only the first half of k, its lower half all.
    triangle = Counter({C // 2: C // 32 + C // 16})
    outputs = spec.stage == "scan"
    found = Counter({C: K // 16}) if outputs else Counter()  # Q S
    if op.delta:
        found += Counter({C: K // 16})  # K S
        found += triangle  # A W
    # With a gate per channel, P V' goes on with an accumulator that Q S began whole.
    if outputs:
        found += Counter({C: C // 16}) if op.gate == "channel" else triangle
    return found + Counter({K: C // 16})  # Kᵀ V'


def widths(products: list[Instruction]) -> Counter[int]:
    return Counter(int(match[1]) for i in products if (match := re.match(r"HGMMA\.64x(\d+)x16\.F32", i.name)))


def times(count: int, counter: Counter[int]) -> Counter[int]:
    return Counter({key: count * value for key, value in counter.items()})


@every_spec
def test_every_product_takes_its_operand_from_registers(spec: KernelSpec) -> None:
    products = code_of(spec).named("HGMMA")
    assert products
    kind = r"HGMMA\.64x\d+x16\.F32" + (r"\.BF16" if spec.dtype == "bf16" else "")
    for i in products:
        assert re.fullmatch(kind, i.name), i
        # Accumulator, A from registers, B through a descriptor, and the accumulator (or zero) again.
        match = re.fullmatch(r"(R\d+), R\d+, gdesc\[UR\d+\](?:\.tnspB)?, (R\d+|RZ)(?:, !UPT)?(?:, gsb0)?", i.operands)
        assert match, i
        assert match[2] in (match[1], "RZ"), i


def unroll_of(spec: KernelSpec) -> int:
    """Chunks of a pass; one where only the state is wanted, since two such workgroups share a processor."""
    return schedule_of(spec).unroll if spec.stage == "scan" else 1


def copies(spec: KernelSpec) -> int:
    """How often the math of a chunk stands in the code.

    Once per chunk of the unrolled loop, once for what remains, and, where steps run a chunk ahead, once spread over the
    first and the last chunk.
    """
    schedule = schedule_of(spec)
    return unroll_of(spec) + 1 + any(entry.startswith(">") for entry in schedule.order)


@every_spec
def test_the_number_of_products_is_that_of_the_math(spec: KernelSpec) -> None:
    assert widths(code_of(spec).named("HGMMA")) == times(copies(spec), products_of_a_chunk(spec))


@every_spec
def test_the_main_loop_holds_the_products_of_its_chunks(spec: KernelSpec) -> None:
    code, unroll = code_of(spec), unroll_of(spec)
    found = [widths([i for i in code.named("HGMMA") if start <= i.address < end]) for start, end in code.loops()]
    one = products_of_a_chunk(spec)
    assert times(unroll, one) in found
    assert one in found


@every_spec
def test_nothing_else_multiplies_matrices(spec: KernelSpec) -> None:
    code = code_of(spec)
    assert not code.named("HMMA", "IMMA", "DMMA", "IGMMA", "QGMMA", "BGMMA")
    # A product by hand would be made of these; factors of rows are single multiplications.
    assert not code.named("FFMA", "DFMA")


@every_spec
def test_no_accumulator_goes_through_shared_memory(spec: KernelSpec) -> None:
    """The chain writes O, in 16 bits, and nothing else; the load role writes zeros, or 16-bit numbers one by one."""
    code = code_of(spec)
    stored = code.named("STSM")
    assert len(stored) == (CHUNK // 16) * copies(spec) * (spec.stage == "scan")
    assert all(i.name == "STSM.16.MT88.4" for i in stored)
    for i in code.named("STS"):
        if spec.loads == "tile":
            assert i.operands.endswith(", RZ"), i
        else:
            assert i.name == "STS.U16", i
    assert not code.named("ST", "ATOMS", "REDS", "STAS", "RED", "ATOM", "ATOMG")


@every_spec
def test_nothing_is_spilled_or_serialized(spec: KernelSpec) -> None:
    code = code_of(spec)
    assert not code.named("LDL", "STL")
    report = resources.report(b"", code.log, TARGET)
    assert report.problems == ()
    assert report.scratch_bytes == 0
    assert "serialized" not in code.log


@pytest.mark.parametrize("spec", CARRIES, ids=lambda spec: spec.name)
def test_a_carry_has_the_products_of_the_state_alone(spec: KernelSpec) -> None:
    """U = K S, V' = A W and Kᵀ V'; two of its workgroups fit on a multiprocessor where the planner counts on that."""
    K = spec.dk
    one = Counter({64: K // 16}) + Counter({32: 2 + 4}) + Counter({K: 4})
    assert products_of_a_chunk(spec) == one
    assert widths(code_of(spec).named("HGMMA")) == times(2, one)
    report = resources.report(b"", code_of(spec).log, TARGET)
    fits = report.registers * 192 * 2 <= 65536 and (render(spec).limits.shared_bytes + 1024) * 2 <= 233472
    assert TARGET.costs is not None
    alone, two = TARGET.costs.carry_chunk_us[spec.features.gate]
    assert fits == (two < 2 * alone)


def registers_of(i: Instruction) -> int:
    """How many registers a thread must have for an instruction."""
    plain, addresses = re.sub(r"\[.*?\]", "", i.operands), " ".join(re.findall(r"\[.*?\]", i.operands))
    wide = 4 if re.search(r"\.128\b|\.MT88\.4", i.name) else 2 if re.search(r"\.64\b|WIDE", i.name) else 1
    widths = [wide] * plain.count("R")
    if product := re.match(r"HGMMA\.64x(\d+)x16", i.name):
        widths[:2] = [int(product[1]) // 2, 4]
    ends = [int(number) + width for number, width in zip(re.findall(r"\bR(\d+)", plain), widths, strict=False)]
    ends += [int(number) + (2 if wide else 1) for number, wide in re.findall(r"\bR(\d+)(\.64)?", addresses)]
    return max(ends, default=0)


def registers_after(code: Code, start: int) -> int:
    """How many registers the code needs that is reached from an address."""
    at = {i.address: n for n, i in enumerate(code.instructions)}
    todo, seen = [at[start]], set[int]()
    while todo:
        n = todo.pop()
        if n in seen or n == len(code.instructions):
            continue
        seen.add(n)
        i = code.instructions[n]
        if i.name == "BRA":
            todo.append(at[code.labels[re.findall(r"\.L_x_\d+", i.operands)[0]]])
        if i.name not in ("BRA", "EXIT") or i.predicate:
            todo.append(n + 1)
    return max(registers_of(code.instructions[n]) for n in seen)


@pytest.mark.parametrize("spec", PAIRS, ids=lambda spec: spec.name)
def test_warpgroups_of_a_pair_hand_over_no_more_registers_than_the_launch_has(spec: KernelSpec) -> None:
    """What waits for registers that there are not waits forever, and what uses more than it has is undefined."""
    code = code_of(spec)
    threads = render(spec).limits.threads
    assert threads == 3 * 128
    start = resources.report(b"", code.log, TARGET).registers
    assert start * threads <= 65536
    (given_back,), (taken,) = (
        [i for i in code.named("USETMAXREG") if f".{how}" in i.name] for how in ("DEALLOC", "TRY_ALLOC")
    )
    few, many = (int(i.operands.split(", ")[-1], 16) for i in (given_back, taken))
    assert few < start < many
    assert few + 2 * many <= 3 * start
    assert registers_after(code, given_back.address) <= few
    assert registers_after(code, taken.address) <= many
    # All threads meet once, before the roles part: some warps have left when others are done.
    (meeting,) = code.named("BAR")
    assert meeting.address < min(given_back.address, taken.address)
    assert len(code.named("UTMASTG")) == 1
    assert ("setmaxnreg" not in code.log) or "ignored" not in code.log


def test_a_combine_multiplies_floats_by_three_products_of_parts() -> None:
    """16 columns by 16 rows of a warp, eight of K at a time; as many bytes of M on their way for both head dims."""
    for dim, steps in ((64, 2), (128, 1)):
        code = code_of(KernelSpec("gated_delta_rule", "combine", "bf16", dim, dim, "sm_90a"))
        assert not code.named("HGMMA", "LDL", "STL", "F2F", "F2FP")
        products = code.named("HMMA")
        assert {i.name for i in products} == {"HMMA.1688.F32.TF32"}
        assert len(products) == steps * dim // 8 * 2 * 3
        # M is asked for between the products, not after the last of them.
        first, *_, last = (i.address for i in products)
        inside = [i for i in code.named("LDG") if i.name == "LDG.E.128" and first < i.address < last]
        assert len(inside) > steps * dim // 8 * 3 // 4
        assert resources.report(b"", code.log, TARGET).problems == ()


def test_the_state_is_written_only_after_the_chain() -> None:
    """Stores to memory, outside the role that stores O: none inside a loop over chunks."""
    for spec in SPECS:
        if spec.saves:
            continue
        code = code_of(spec)
        for start, end in code.loops():
            inside = [i for i in code.instructions if start <= i.address <= end]
            if any(i.name.startswith("HGMMA") for i in inside):
                assert not [i for i in inside if i.name.startswith("STG")], spec.name


def test_the_reader_of_machine_code_sees_what_it_must() -> None:
    text = """
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R88, R164, gdesc[UR4], RZ, !UPT ;
        /*0020*/                   STS.64 [R5+0x10], R24 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
        /*0050*/                   BRA `(.L_x_1) ;
"""
    code = parse(text, "")
    assert [i.name for i in code.instructions] == ["HGMMA.64x64x16.F32.BF16", "STS.64", "BRA", "EXIT", "BRA"]
    assert list(code.loops()) == [(0x10, 0x30)]
    assert widths(code.named("HGMMA")) == {64: 1}
    assert code.named("STS")[0].operands == "[R5+0x10], R24"
    assert code.instructions[2].predicate == "@!P0"
