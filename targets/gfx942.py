"""MI300X and MI325X (CDNA 3)."""

from qla.targets.base import Target
from qla.targets.cdna import FLAGS, SCAN_THREADS, SCHEDULES, build

TARGET = Target(
    name="gfx942",
    language="hip",
    device="gfx942",
    hardware="MI300X, MI325X",
    vocabulary="cdna",
    dtypes=("bf16", "fp16"),
    shared_limit=65536,
    asynchronous=False,
    threads={"none": 256, "head": 256, "channel": 256},
    block_columns=32,
    # Chunks of 32 where gates are per channel: keys come in two forms, and with 64 tokens neither stage fits in LDS.
    chunk={"none": 64, "head": 64, "channel": 32},
    schedules=SCHEDULES,
    processors=304,
    flags=FLAGS,
    build=build("gfx942"),
    facts={
        "scan_threads": SCAN_THREADS,
        "tile_pad": 4,  # numbers after each row of a tile in LDS
        "mfma_k": 8,  # of the 32x32 matrix product
        "factors": "float",  # of rows: numbers of a block are multiplied before they are rounded
        "queries_in_registers": True,  # in `prepare`, unless gates are per channel
        "bf16_conversion": False,
        "transposing_reads": False,
    },
)
