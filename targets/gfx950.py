"""MI350X and MI355X (CDNA 4)."""

from qla.targets.base import Target
from qla.targets.cdna import FLAGS, SCAN_THREADS, SCHEDULES, build

TARGET = Target(
    name="gfx950",
    language="hip",
    device="gfx950",
    hardware="MI350X, MI355X",
    vocabulary="cdna",
    dtypes=("bf16", "fp16"),
    shared_limit=163840,
    asynchronous=False,
    threads={"none": 256, "head": 256, "channel": 256},
    block_columns=32,
    chunk={"none": 64, "head": 64, "channel": 64},
    schedules=SCHEDULES,
    processors=256,
    flags=FLAGS,
    build=build("gfx950"),
    facts={
        "scan_threads": SCAN_THREADS,
        "tile_pad": 4,  # numbers after each row of a tile in LDS
        "mfma_k": 16,  # of the 32x32 matrix product
        "factors": "float",  # of rows: numbers of a block are multiplied before they are rounded
        "queries_in_registers": True,  # in `prepare`, unless gates are per channel
        "bf16_conversion": True,
        "transposing_reads": True,
    },
)
