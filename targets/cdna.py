"""What the CDNA targets have in common; each file beside this has its own numbers."""

from qla.targets.base import Schedule

# All value columns of a head in one workgroup, which lands each tile once.
SCHEDULES = (
    Schedule(
        name="serial",
        order=("save", "Sr", "U", "V", "W", "V2", "QS", "decay", "Vr", "rows", "O", "out", "store", "S"),
        rings={"K Kt Q A P rows": 1, "V": 1},
        streams=4,
    ),
)
SCAN_THREADS = {1: 64, 2: 128, 4: 256}  # a wave to a column block
FLAGS = ("-std=c++17",)


def build(arch: str) -> str:
    """The commands that build a source: with ROCm, and with the package ziglang alone."""
    return (
        f"hipcc --genco --offload-arch={arch} -O3 -std=c++17 -o {{name}}.co {{name}}.hip\n"
        f"python -m ziglang clang -x hip --cuda-device-only -nogpulib -nogpuinc --offload-arch={arch} "
        "-mcode-object-version=5 -O3 -std=c++17 -S -emit-llvm -o {name}.ll {name}.hip && "
        f"python -m ziglang clang --target=amdgcn-amd-amdhsa -mcpu={arch} -nogpulib -O3 -Xclang -disable-llvm-passes "
        "-c -x ir -o {name}.o {name}.ll && python -m ziglang ld.lld -shared -o {name}.co {name}.o"
    )
