"""What the chips of the targets can do, from their makers' documents: what predicted times are made of.

Nothing here is measured. The sources, by what they are cited as below:

- [MI325X], [MI355X]: AMD's data sheets of the two: compute units, peak engine clock, memory bandwidth, peak bf16.
- [CDNA 3 ISA]: "AMD Instinct MI300" Instruction Set Architecture, section 7.1 (MFMA: passes of four cycles). The cycles
  are those that AMD's matrix instruction calculator prints (`matrix_calculator.py -a cdna3 -i ... -d`, line "Execution
  cycles"; its lines "VALU co-execution cycles" are these less 4, in which the product is issued).
- [CDNA 4 ISA]: the same of the MI350, and AMD's "Matrix Core Programming on AMD CDNA 3 and CDNA 4 Architecture" (ROCm
  blogs), table of instructions and cycles: the products of twice the k take as long as those of CDNA 3.
- [CDNA 3], [CDNA 4]: AMD's white papers of the architectures: four SIMDs of 16 lanes, 512 registers per lane, LDS of
  64 KiB and 128 bytes per clock; LDS of 160 KiB with reads at twice that, transcendental functions at twice the rate.
- [LLVM]: AMDGPU backend, `AMDGPUBaseInfo.cpp`: granules of registers and LDS, waves per SIMD.
- [CUDA]: CUDA C++ Programming Guide: table "Throughput of Native Arithmetic Instructions" (8.x, compute capability 9.0)
  and "Technical Specifications per Compute Capability".
- [H200]: NVIDIA's data sheet and "NVIDIA H100 Tensor Core GPU Architecture": 4096 bf16 operations per clock and
  multiprocessor; the clock is that of the machine on which docs/performance.md was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """A device, as the model of `qla.codegen.model` sees it.

    Parameters
    ----------
    name, target : what people call it, and which target's code it runs.
    processors : compute units or multiprocessors.
    mhz : clock, in cycles per microsecond.
    bandwidth : of memory, in bytes per microsecond.
    tflops : peak of dense bf16 products.
    lanes : threads of a wave (warp).
    schedulers : SIMDs (sub-partitions) of a processor.
    issue_cycles : between two instructions of one wave.
    issues_shared : the waves of a scheduler share these cycles (CUDA); else each has its own (CDNA, where in a cycle
        several waves may issue instructions of different kinds).
    registers : 32-bit registers per lane of a scheduler.
    register_granule : in which they are given to a wave, per lane.
    most_waves : per scheduler.
    most_workgroups : per processor.
    shared_bytes, shared_granule, shared_reserved : shared memory (LDS) of a processor, in which portions it is given
        out, and what is taken per workgroup beside what was asked.
    shared_read, shared_write : bytes per cycle of a processor.
    shared_lanes : lanes per cycle that the banks serve, with up to four bytes each.
    l1_bytes : per cycle and processor, between vector registers and memory.
    matrix : cycles of a scheduler for one matrix instruction, by its shape and type.
    slow : cycles of a scheduler for vector instructions that take longer than others, by the beginning of their name.
    vector_cycles : for all others.
    """

    name: str
    target: str
    processors: int
    mhz: int
    bandwidth: float
    tflops: float
    lanes: int
    schedulers: int
    issue_cycles: int
    issues_shared: bool
    registers: int
    register_granule: int
    most_waves: int
    most_workgroups: int
    shared_bytes: int
    shared_granule: int
    shared_reserved: int
    shared_read: int
    shared_write: int
    shared_lanes: int
    l1_bytes: int
    matrix: Mapping[str, int]
    slow: Mapping[str, int]
    vector_cycles: int


# Operands of 16 bits; the last is float32.
_CDNA3_MATRIX = {"32x32x8": 32, "16x16x16": 16, "16x16x4_f32": 32}
_QUARTER_RATE = ("v_mul_lo_u32", "v_mul_hi_u32", "v_mul_hi_i32", "v_mad_u64_u32", "v_mad_i64_i32")
_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")

MI325X = Chip(
    name="MI325X",
    target="gfx942",
    processors=304,
    mhz=2100,
    bandwidth=6.0e6,
    tflops=1307,
    lanes=64,
    schedulers=4,
    issue_cycles=4,  # [CDNA 3]: a SIMD's turn comes every four cycles
    issues_shared=False,
    registers=512,
    register_granule=8,
    most_waves=8,
    most_workgroups=16,
    shared_bytes=65536,
    shared_granule=512,
    shared_reserved=0,
    shared_read=128,
    shared_write=128,
    shared_lanes=32,
    l1_bytes=64,
    matrix=_CDNA3_MATRIX,
    slow=dict.fromkeys((*_QUARTER_RATE, *_TRANSCENDENTAL), 16),
    vector_cycles=4,  # 64 lanes on 16
)

MI355X = Chip(
    name="MI355X",
    target="gfx950",
    processors=256,
    mhz=2400,
    bandwidth=8.0e6,
    tflops=2516,
    lanes=64,
    schedulers=4,
    issue_cycles=4,
    issues_shared=False,
    registers=512,
    register_granule=8,
    most_waves=8,
    most_workgroups=16,
    shared_bytes=163840,
    shared_granule=1280,
    shared_reserved=0,
    shared_read=256,  # [CDNA 4]; only reads of 8 and 16 bytes per lane come near
    shared_write=128,
    shared_lanes=32,
    l1_bytes=64,
    matrix={**_CDNA3_MATRIX, "32x32x16": 32, "16x16x32": 16},
    slow={**dict.fromkeys(_QUARTER_RATE, 16), **dict.fromkeys(_TRANSCENDENTAL, 8)},
    vector_cycles=4,
)

H200 = Chip(
    name="H200",
    target="sm_90a",
    processors=132,
    mhz=1755,
    bandwidth=4.8e6,
    tflops=989,
    lanes=32,
    schedulers=4,
    issue_cycles=1,
    issues_shared=True,
    registers=512,  # 65536 of a multiprocessor, on 4 times 32 lanes
    register_granule=8,
    most_waves=16,
    most_workgroups=32,
    shared_bytes=233472,
    shared_granule=128,
    shared_reserved=1024,
    shared_read=128,
    shared_write=128,
    shared_lanes=32,
    l1_bytes=64,
    # mma.sync: 16 bits at the rate of wgmma (of which codegen/instruction_costs.py has the rule), tf32 at half of it.
    matrix={"HMMA.16816": 4, "HMMA.1688.F32.TF32": 4, "HMMA.1688": 2, "HMMA.1684.F32.TF32": 2},
    # [CUDA], results per clock of a multiprocessor: 16 special functions and conversions of one number; 64 integer and
    # logical operations, comparisons, minima and packed conversions; 32 shuffles; all else counts as 128.
    slow={
        **dict.fromkeys(("MUFU", "F2F", "I2F", "F2I", "POPC", "FLO", "BREV"), 8),
        "SHFL": 4,
        **dict.fromkeys(("IADD", "VIADD", "IMAD", "LEA", "IABS", "IMNMX", "VIMNMX", "ISETP", "FSETP", "FMNMX"), 2),
        **dict.fromkeys(("LOP", "PLOP", "SHF", "PRMT", "SEL", "FSEL", "MOV", "CS2R", "P2R", "R2P", "BMSK", "SGXT"), 2),
        **dict.fromkeys(("F2FP", "I2FP"), 2),
    },
    vector_cycles=1,
)

CHIPS: dict[str, Chip] = {chip.target: chip for chip in (MI325X, MI355X, H200)}
