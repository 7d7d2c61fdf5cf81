"""MI300X and MI325X (CDNA 3)."""

from qla.targets.base import Schedule, Target

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
    schedules=(
        # All value columns of a head in one workgroup, which lands each tile once.
        Schedule(
            name="serial",
            order=("save", "Sr", "U", "QS", "V", "rows", "W", "V2", "decay", "Vr", "O", "S", "out", "store"),
            rings={"K Kt Q V A P rows": 1},
            streams=4,
        ),
    ),
    flags=("-std=c++17",),
    build="hipcc --genco --offload-arch=gfx942 -O3 -std=c++17 -o {name}.co {name}.hip\n"
    "python -m ziglang clang -x hip --cuda-device-only -nogpulib -nogpuinc --offload-arch=gfx942 "
    "-mcode-object-version=5 -O3 -std=c++17 -S -emit-llvm -o {name}.ll {name}.hip && "
    "python -m ziglang clang --target=amdgcn-amd-amdhsa -mcpu=gfx942 -nogpulib -O3 -Xclang -disable-llvm-passes "
    "-c -x ir -o {name}.o {name}.ll && python -m ziglang ld.lld -shared -o {name}.co {name}.o",
    facts={
        "scan_threads": {1: 64, 2: 128, 4: 256},
        "tile_pad": 4,  # numbers after each row of a tile in LDS
        "mfma_k": 8,  # of the 32x32 matrix product
        "bf16_conversion": False,
        "transposing_reads": False,
    },
)
