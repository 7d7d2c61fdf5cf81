"""Any CPU: plain loops that the compiler vectorizes, with the same 16-bit roundings as on a GPU."""

from qla.targets.base import Schedule, Target

TARGET = Target(
    name="host",
    language="c++",
    device="cpu",
    hardware="any CPU",
    vocabulary="host",
    dtypes=("bf16", "fp16", "fp32"),
    shared_limit=0,
    asynchronous=False,
    threads={"none": 1, "head": 1, "channel": 1},
    block_columns=0,
    chunk={"none": 64, "head": 64, "channel": 64},
    schedules=(
        Schedule(
            name="serial",
            order=("save", "Sr", "U", "QS", "V", "rows", "W", "V2", "decay", "Vr", "O", "S", "out", "store"),
            rings={"K Kt Q V A P rows": 1},
        ),
    ),
    # Sums may be reordered, so that they vectorize; NaN and infinity keep their meaning.
    flags=("-fno-math-errno", "-ffp-contract=fast", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
    build="python -m ziglang c++ -std=c++20 -O3 -fno-math-errno -ffp-contract=fast -fassociative-math "
    "-fno-signed-zeros -fno-trapping-math -ffreestanding -nostdlib -fno-exceptions -fno-rtti -fPIC -shared "
    "-o {name}.so {name}.cpp",
    facts={"scan_threads": {1: 1}},
)
