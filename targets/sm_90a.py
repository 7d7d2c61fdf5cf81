"""H100 and H200 (compute capability 9.0, with the `a` that wgmma and setmaxnreg need)."""

from qla.targets.base import Costs, Schedule, Target, tuned

# Tiles that are needed at the same time travel together: one barrier, one wait.
_RINGS = {"K Kt V rows": 3, "Q": 3, "A": 3, "P": 3}

# Nothing runs on from one chunk into the next, so the compiler needs no extra waits: measured faster than "skewed".
_SERIAL = ("save", "Sr", "U", "QS", "V", "rows", "W", "V2", "decay", "Vr", "O", "S", "out", "store", "await")

# On an H200; where a sweep was measured, tuned/sm_90a.json takes their place.
_COSTS = Costs(
    scan_chunk_us={"none": (0.88, 1.0), "head": (0.88, 1.0), "channel": (1.0, 1.5)},
    # Of a pair of column blocks: 944 instead of 1055 us for 8 x 8192 tokens of 64 heads.
    pair_chunk_us={"none": (1.3, 1.85), "head": (1.33, 1.87)},
    # Two of them fit on a multiprocessor, but with channel gates one.
    carry_chunk_us={"none": (0.64, 0.96), "head": (0.64, 0.96), "channel": (0.9, 1.8)},
    reach_chunks={"head": 17},  # with gates logsigmoid(x + 2), x standard normal
    combine_step_us=1.75,
    combine_short_step_us=0.02,  # of looking whether there is anything to do
    launch_us=5.0,
    prepare_us={
        (True, "head"): {1: 2.0, 2: 1.7, 4: 1.27},
        (True, "none"): {1: 1.8, 2: 1.5, 4: 1.04},
        (True, "channel"): {1: 6.6},
        (False, "channel"): {1: 4.2},
    },
    bandwidth=4.3e6,
)

TARGET = Target(
    name="sm_90a",
    language="cuda",
    device="sm_90",
    hardware="H100, H200",
    vocabulary="sm_90a",
    dtypes=("bf16", "fp16"),
    shared_limit=232448,
    asynchronous=True,
    threads={"none": 128, "head": 128, "channel": 256},
    block_columns=64,
    chunk={"none": 64, "head": 64, "channel": 64},
    schedules=(
        Schedule(name="serial", order=_SERIAL, rings=_RINGS, unroll=3),
        # Both column blocks of a head of 128 values share K, Q, A and P: less to load where the chip is full. With
        # channel gates three buffers of two forms of K do not fit, and most of what is loaded is a value head's own.
        Schedule(name="paired", order=_SERIAL, rings=_RINGS, streams=2, unroll=3, gates=("none", "head")),
        # The state update and O of chunk n run while the values of chunk n + 1 are prepared. Row factors are fetched
        # before the state update: a shared-memory load issued while it runs waits some 250 cycles.
        Schedule(
            name="skewed",
            order=(
                *("Vr", "land P", "S", "O", ">save", ">Sr", ">U", "out", "store", ">QS", ">V", ">rows", ">decay"),
                *(">land A", ">W", ">V2"),
            ),
            rings=_RINGS,
            unroll=3,
        ),
    ),
    flags=("-std=c++17", "-default-device", "-ftz=true"),
    build="nvcc -cubin -gencode=arch=compute_90a,code=sm_90a -std=c++17 -ftz=true -o {name}.cubin {name}.cu",
    # Chain warpgroup, load warp, store warp. With two column blocks, a whole third warpgroup loads and stores, since
    # `setmaxnreg` is for warpgroups.
    # In `prepare`, each of the four warps inverts the matrix of a value head (with channel gates there is one head).
    # Registers let four workgroups of it run on a multiprocessor.
    facts={"scan_threads": {1: 192, 2: 384}, "teams": 4, "prepare_workgroups": 4},
    processors=132,
    segments=True,
    costs=tuned("sm_90a", _COSTS),
)
