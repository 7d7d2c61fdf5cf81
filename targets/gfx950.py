"""MI350X and MI355X (CDNA 4)."""

from qla.targets.base import Schedule, Target

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
    build="hipcc --genco --offload-arch=gfx950 -O3 -std=c++17 -o {name}.co {name}.hip\n"
    "python -m ziglang clang -x hip --cuda-device-only -nogpulib -nogpuinc --offload-arch=gfx950 "
    "-mcode-object-version=5 -O3 -std=c++17 -S -emit-llvm -o {name}.ll {name}.hip && "
    "python -m ziglang clang --target=amdgcn-amd-amdhsa -mcpu=gfx950 -nogpulib -O3 -Xclang -disable-llvm-passes "
    "-c -x ir -o {name}.o {name}.ll && python -m ziglang ld.lld -shared -o {name}.co {name}.o",
    facts={
        "scan_threads": {1: 64, 2: 128, 4: 256},
        "tile_pad": 4,  # numbers after each row of a tile in LDS
        "mfma_k": 16,  # of the 32x32 matrix product
        "bf16_conversion": True,
        "transposing_reads": True,
    },
)
