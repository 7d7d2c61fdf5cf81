"""What is refused, with which words, and that it is refused before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import Any

import inputs
import pytest
import reference
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import qla
import qla.runtime
from qla import validate
from qla.runtime.problem import Problem, Result

Change = Callable[[dict[str, Any]], dict[str, Any]]
GDN, DELTA, KDA, GLA = "chunk_gated_delta_rule", "chunk_delta_rule", "chunk_kda", "chunk_gla"
BETAS, GATES = (GDN, DELTA, KDA), (GDN, KDA, GLA)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Put a recorder in place of the runtime; the list is what it was asked to run."""
    problems: list[Problem] = []

    def run(problem: Problem) -> Result:
        problems.append(problem)
        return Result(problem.v, None)

    fake = ModuleType("qla.runtime.plan")
    fake.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "qla.runtime.plan", fake)
    monkeypatch.setattr(qla.runtime, "plan", fake, raising=False)
    return problems


class FakeDriver:
    """A driver that counts launches."""

    processors = 4

    def __init__(self) -> None:
        self.launches = 0

    def load(self, binary: bytes, source: Any) -> None: ...

    def launch(self, kernel: None, blocks: int, arguments: Any, stream: int) -> None:
        self.launches += 1

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The runtime, without compiler and kernels."""
    from qla.runtime import plan

    fake = FakeDriver()
    monkeypatch.setattr(plan, "driver_for", lambda target, index: fake)
    monkeypatch.setattr(plan, "fetch_binary", lambda source: b"")
    monkeypatch.setattr(plan, "layouts", {})
    monkeypatch.setattr(plan, "_plans", {})
    return fake


def arguments(name: str, **options: Any) -> dict[str, Any]:
    return inputs.make(name, **{"T": 6, "B": 2, "H": 2, "HV": 4, "K": 64, "V": 128, **options})


def call(name: str, a: dict[str, Any]) -> Any:
    return getattr(qla, name)(**a)


def to(argument: str, change: Callable[[Any], Any]) -> Change:
    return lambda a: a | {argument: change(a[argument])}


def put(**values: Any) -> Change:
    return lambda a: a | values


def packed(bounds: list[int], host: bool = False, **options: Any) -> Change:
    """Make it one row of 12 tokens with these boundaries; `host` gives them as `cu_seqlens_cpu`, valid ones beside."""

    def change(a: dict[str, Any]) -> dict[str, Any]:
        a = {n: x.flatten(0, 1)[None] if n in ("q", "k", "v", "g", "beta") else x for n, x in a.items()}
        cu = torch.tensor(bounds)
        valid = torch.linspace(0, 12, len(bounds)).long()
        return a | ({"cu_seqlens": valid, "cu_seqlens_cpu": cu} if host else {"cu_seqlens": cu}) | options

    return change


# (ops, change, the argument the error names, words of the message)
ALL = reference.FUNCTIONS
CASES: list[tuple[tuple[str, ...], Change, str, str]] = [
    (ALL, put(q=None), "q", "got None"),
    (ALL, put(k=[1.0]), "k", "a list"),
    (ALL, to("q", lambda x: x[0]), "q", r"\[B, T, H, K\]"),
    (ALL, to("v", lambda x: x[:, :, 0]), "v", r"\[B, T, HV, V\]"),
    (ALL, to("k", lambda x: x[:, :5]), "k", r"got \[2, 5, 2, 64\].*\[2, 6, 2, 64\]"),
    (ALL, to("v", lambda x: x[:1]), "v", r"got \[1, 6, 4, 128\]"),
    (ALL, to("q", lambda x: x[..., :32]), "q", r"K = 32.*\(64, 128\)"),
    (ALL, to("v", lambda x: x[..., :96]), "v", r"V = 96.*\(64, 128\)"),
    (ALL, to("v", lambda x: x[:, :, :3]), "v", "HV a multiple of H"),
    (ALL, to("v", lambda x: x[:, :, :1]), "v", "HV a multiple of H"),
    (ALL, to("q", lambda x: x[:, :, :0]), "q", "at least one head"),
    (ALL, to("q", lambda x: x.double()), "q", "float64.*bfloat16 or float16"),
    (ALL, to("k", lambda x: x.half()), "k", "got float16; supported: bfloat16"),
    (ALL, to("v", lambda x: x.float()), "v", "got float32; supported: bfloat16"),
    (ALL, to("k", lambda x: x.to("meta")), "k", "device"),
    (ALL, to("q", lambda x: x.to("meta")), "q", "meta"),
    (ALL, to("q", lambda x: x.to_sparse()), "q", "strided"),
    (ALL, to("v", lambda x: x.to_sparse()), "v", "sparse_coo.*strided"),
    (GATES, put(g=None), "g", "got None"),
    (GATES, to("g", lambda x: x[:, :, :2]), "g", "HV"),
    ((GDN,), to("g", lambda x: x[..., None]), "g", r"\[B, T, HV\]"),
    ((KDA, GLA), to("g", lambda x: x[..., 0]), "g", r"\[B, T, HV, K\]"),
    (GATES, to("g", lambda x: x.double()), "g", "float64"),
    (BETAS, put(beta=None), "beta", "got None"),
    (BETAS, to("beta", lambda x: x[:, :, :2]), "beta", r"\[B, T, HV\] = \[2, 6, 4\]"),
    (BETAS, to("beta", lambda x: x.long()), "beta", "int64"),
    (ALL, put(scale=torch.tensor(0.1)), "scale", "a number"),
    (ALL, put(scale=float("nan")), "scale", "float32"),
    (ALL, put(scale=1e39), "scale", "float32"),
    (ALL, put(scale=-(10**400)), "scale", "float32"),
    (ALL, put(initial_state=torch.zeros(2, 4, 128, 64)), "initial_state", r"\[N, HV, K, V\]"),
    (ALL, put(initial_state=torch.zeros(1, 4, 64, 128)), "initial_state", r"\[2, 4, 64, 128\]"),
    (ALL, put(initial_state=torch.zeros(2, 2, 64, 128)), "initial_state", r"\[2, 4, 64, 128\]"),
    (ALL, put(initial_state=torch.zeros(2, 4, 64, 128).bfloat16()), "initial_state", "bfloat16; supported: float32"),
    (GATES, put(initial_state=torch.zeros(2, 4, 64, 128), state_v_first=True), "initial_state", "state_v_first=False"),
    (ALL, put(cu_seqlens=torch.tensor([0, 6, 12])), "q", "batch size 2 with cu_seqlens"),
    (ALL, put(cu_seqlens_cpu=torch.tensor([0, 6, 12])), "cu_seqlens_cpu", "together with cu_seqlens"),
    (ALL, packed([0, 6, 13]), "cu_seqlens", r"0 \.\. T = 12"),
    (ALL, packed([-1, 6, 12]), "cu_seqlens", r"0 \.\. T = 12"),
    (ALL, packed([0, 7, 6, 12]), "cu_seqlens", "7 followed by 6 at index 2"),
    (ALL, packed([0, 6, 13], host=True), "cu_seqlens_cpu", r"0 \.\. T = 12"),
    (ALL, packed([0, 7, 6, 12], host=True), "cu_seqlens_cpu", "never decrease"),
    (ALL, packed([0, 6, 12], cu_seqlens_cpu=torch.tensor([0, 12])), "cu_seqlens_cpu", r"\[3\]"),
    (ALL, packed([0, 6, 12], cu_seqlens=torch.tensor([0, 6, 12]).short()), "cu_seqlens", "int32 or int64"),
    (ALL, packed([0, 6, 12], cu_seqlens=torch.tensor([[0, 6, 12]])), "cu_seqlens", r"\[N \+ 1\]"),
    (ALL, packed([0, 6, 12], cu_seqlens=torch.zeros(0).long()), "cu_seqlens", r"\[N \+ 1\]"),
    (ALL, packed([0, 6, 12], cu_seqlens=[0, 6, 12]), "cu_seqlens", "a list"),
    (ALL, packed([0, 6, 12], cu_seqlens=torch.zeros(3).long().to("meta")), "cu_seqlens", "where q is"),
    (ALL, packed([0, 6, 12], cu_seqlens_cpu=torch.zeros(3).long().to("meta")), "cu_seqlens_cpu", "on the CPU"),
    (ALL, packed([0, 6, 12], initial_state=torch.zeros(1, 4, 64, 128)), "initial_state", r"\[2, 4, 64, 128\]"),
    ((GDN, KDA), put(allow_neg_eigval=True), "allow_neg_eigval", "use_beta_sigmoid_in_kernel=True"),
    ((GDN, KDA), put(use_gate_in_kernel=True), "A_log", "use_gate_in_kernel=False"),
    ((GDN, KDA), put(use_gate_in_kernel=True, A_log=torch.zeros(2)), "A_log", r"4 elements, shape \[HV\]"),
    ((GDN, KDA), put(use_gate_in_kernel=True, A_log=torch.zeros(4).double()), "A_log", "float64"),
    ((GDN, KDA), put(use_gate_in_kernel=True, A_log=torch.zeros(8)[::2]), "A_log", "contiguous"),
    ((GDN,), put(use_gate_in_kernel=True, A_log=torch.zeros(4), dt_bias=torch.zeros(64)), "dt_bias", "4 elements"),
    ((KDA,), put(use_gate_in_kernel=True, A_log=torch.zeros(4), dt_bias=torch.zeros(4)), "dt_bias", "256 elements"),
    ((KDA,), put(use_gate_in_kernel=True, lower_bound=0.0), "lower_bound", "negative"),
    ((KDA,), put(use_gate_in_kernel=True, lower_bound=float("-inf")), "lower_bound", "float32"),
    ((KDA,), put(use_gate_in_kernel=True, lower_bound=-(10**400)), "lower_bound", "float32"),
    ((KDA,), put(use_gate_in_kernel=True, lower_bound="-5"), "lower_bound", "number"),
    ((KDA,), put(use_gate_in_kernel=True, lower_bound=-6.0, safe_gate=True), "lower_bound", r"\[-5, 0\)"),
    ((KDA,), put(use_gate_in_kernel=True, A_log=torch.zeros(4), safe_gate=True), "lower_bound", r"\[-5, 0\)"),
    ((KDA,), put(disable_recompute=True), "disable_recompute", "backward"),
    ((KDA,), put(return_intermediate_states=True), "return_intermediate_states", "False"),
    ((KDA,), packed([0, 6, 12], use_graph=True, max_num_seqs=3), "max_num_seqs", "Pad cu_seqlens"),
    ((GDN, KDA), put(cp_context=object()), "cp_context", "Context parallelism"),
    ((GDN, DELTA), put(chunk_size=128), "chunk_size", r"\(16, 32, 64\)"),
    ((KDA,), put(chunk_size=16), "chunk_size", r"\(32, 64\)"),
]


@pytest.mark.parametrize(
    ("name", "change", "argument", "words"),
    [pytest.param(n, c[1], *c[2:], id=f"{n}-{c[2]}-{i}") for i, c in enumerate(CASES) for n in c[0]],
)
def test_refused(name: str, change: Change, argument: str, words: str, launched: list[Problem]) -> None:
    with pytest.raises(qla.UnsupportedError, match=words) as caught:
        call(name, change(arguments(name)))
    assert caught.value.argument == argument
    assert isinstance(caught.value, ValueError)
    assert not launched


def warm_up(name: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Make valid calls of many kinds, twice: the second of each must not check its arguments one by one again."""
    plain = arguments(name)
    valid = [plain, plain | {"initial_state": torch.zeros(2, 4, 64, 128), "scale": 1.0, "output_final_state": True}]
    bounds = packed([0, 6, 12])(plain)
    valid += [bounds, bounds | {"cu_seqlens_cpu": bounds["cu_seqlens"]}, packed([0, 3, 6, 12])(plain)]
    valid += [packed([0, 3, 6, 12], host=True)(plain), bounds | {"initial_state": torch.zeros(2, 4, 64, 128)}]
    if name in (GDN, KDA):
        gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}
        bias = torch.zeros(4 if name == GDN else 256)
        valid += [plain | gate, plain | gate | {"dt_bias": bias}]
        valid += [plain | {"state_v_first": True, "initial_state": torch.zeros(2, 4, 128, 64)}]
        valid += [plain | {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "chunk_size": 64}]
    if name == KDA:
        valid += [plain | gate | {"lower_bound": -5.0}, plain | gate | {"lower_bound": -5.0, "safe_gate": True}]
        valid += [bounds | {"use_graph": True, "max_num_seqs": 2}]
    for a in valid:
        call(name, a)
    launches = driver.launches
    with monkeypatch.context() as patch:
        patch.setattr(validate, "forward_problem", None)
        for a in valid:
            call(name, a)
    assert driver.launches == 2 * launches > 0
    return valid


@pytest.mark.parametrize("name", ALL)
def test_refused_after_valid_calls_of_nearly_the_same_arguments(
    name: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table that makes a warm call short must have no entry for a wrong one."""
    warm_up(name, driver, monkeypatch)
    launches = driver.launches
    for names, change, argument, words in CASES:
        if name in names:
            for _ in range(2):
                with pytest.raises(qla.UnsupportedError, match=words) as caught:
                    call(name, change(arguments(name)))
                assert caught.value.argument == argument
    assert driver.launches == launches


class Lookalike:
    """Everything that a tensor says of itself, and no tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x, name)


OTHER: list[Callable[[torch.Tensor], Any]] = [
    lambda x: None,
    lambda x: x.tolist(),
    lambda x: x.float().numpy(),
    lambda x: x.half(),
    lambda x: x.double(),
    lambda x: x.int(),
    lambda x: x.short(),
    lambda x: x.to("meta"),
    lambda x: x.to_sparse(),
    lambda x: x[:0],
    lambda x: x[None],
    lambda x: torch.cat((x, x), -1),
    lambda x: torch.stack((x, x), -1)[..., 0],
    lambda x: x.flatten(),
    lambda x: x.transpose(0, -1),
    lambda x: x.clone().requires_grad_() if x.is_floating_point() else x.flip(0),
    lambda x: x + 100,
    Lookalike,
]
NUMBERS = (True, 1, 2.0, torch.tensor(1.0), Fraction(1), Fraction(-5), float("nan"), "1", 0.0, -5, -6.0, [1])


def verdict(name: str, a: dict[str, Any]) -> str:
    try:
        call(name, a)
    except qla.UnsupportedError as error:
        return f"{error.argument}|{error}"
    return ""


@pytest.mark.parametrize("name", ALL)
def test_a_warm_call_gets_the_same_verdict_as_a_cold_one(
    name: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One argument of a valid call is replaced at a time; the table of earlier calls must change no answer."""
    from qla.runtime import plan

    valid = warm_up(name, driver, monkeypatch)
    refused: set[str] = set()
    for a in valid:
        changes = [(x, change(a[x])) for x in a if isinstance(a[x], torch.Tensor) for change in OTHER]
        changes += [(x, number) for x in ("scale", "lower_bound") for number in NUMBERS if x in a or x == "scale"]
        changes += [(x, not a[x]) for x in a if isinstance(a[x], bool)]
        for x, value in changes:
            warm = verdict(name, a | {x: value})
            with monkeypatch.context() as patch:
                patch.setattr(plan, "layouts", {})
                cold = verdict(name, a | {x: value})
            assert warm == cold, x
            refused |= {x} if cold else set()
    tensors = {x for a in valid for x in a if isinstance(a[x], torch.Tensor)}
    assert refused >= tensors | {"scale"}


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_refused_after_the_same_call_without_grad_mode(name: str, driver: FakeDriver) -> None:
    a = arguments(name, state=True)
    for x in (n for n in a if isinstance(a[n], torch.Tensor)):
        needy = a | {x: a[x].clone().requires_grad_()}
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                call(name, needy)
                call(name, needy)
            with pytest.raises(qla.UnsupportedError, match="no backward yet") as caught:
                call(name, needy)
            assert caught.value.argument == x


@pytest.mark.parametrize("name", ALL)
def test_boundaries_are_read_again_in_every_warm_call(name: str, driver: FakeDriver) -> None:
    a = packed([0, 5, 5, 12])(arguments(name))
    a["cu_seqlens_cpu"] = a["cu_seqlens"].int()
    for x in ("cu_seqlens", "cu_seqlens_cpu"):
        call(name, a)
        for bad in ([0, 5, 4, 12], [-1, 5, 5, 12], [0, 5, 5, 13]):
            good = a[x].clone()
            a[x].copy_(torch.tensor(bad))
            launches = driver.launches
            with pytest.raises(qla.UnsupportedError) as caught:
                call(name, a)
            assert caught.value.argument == x
            assert driver.launches == launches
            a[x].copy_(good)
            call(name, a)


@pytest.mark.parametrize("name", ALL)
def test_unknown_keyword_is_a_type_error(name: str, launched: list[Problem]) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'head_first'"):
        call(name, arguments(name) | {"head_first": False})
    assert not launched


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_refused_and_never_dropped(name: str, launched: list[Problem]) -> None:
    a = arguments(name, state=True)
    if name in (GDN, KDA):
        a |= {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4 if name == GDN else 256)}
    for x in [n for n in a if isinstance(a[n], torch.Tensor)]:
        needy = a | {x: a[x].clone().requires_grad_()}
        with pytest.raises(qla.UnsupportedError, match=r"no backward yet.*no_grad") as caught:
            call(name, needy)
        assert caught.value.argument == x
        assert not launched
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                call(name, needy)
        assert len(launched) == 2
        launched.clear()


@pytest.mark.parametrize("name", [GDN, KDA, GLA])
def test_problem_of_a_call(name: str, launched: list[Problem]) -> None:
    """Tensors arrive as the caller's own objects, options under the runtime's names."""
    a = packed([0, 5, 5, 11])(arguments(name)) | {"initial_state": torch.zeros(3, 4, 128, 64), "state_v_first": True}
    a |= {"cu_seqlens_cpu": a["cu_seqlens"].int()}
    if name != GLA:
        a |= {"use_gate_in_kernel": True, "A_log": torch.zeros(1, 1, 4, 1), "use_qk_l2norm_in_kernel": True}
        a |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "chunk_size": 32, "cp_context": None}
    if name == GDN:
        a |= {"chunk_indices": torch.zeros(4, 2).long()}
    if name == KDA:
        a |= {"dt_bias": torch.zeros(4, 64), "lower_bound": -5, "safe_gate": True, "use_graph": True, "max_num_seqs": 3}
    call(name, a)
    (p,) = launched
    for x in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens", "cu_seqlens_cpu"):
        assert getattr(p, x) is a.get(x), x
    assert (p.op, p.scale) == (name.removeprefix("chunk_"), 64**-0.5)
    assert (p.output_final_state, p.state_v_first, p.saves) == (True, True, False)
    assert {p.qk_l2norm, p.beta_sigmoid, p.beta_double, p.gate_in_kernel} == {name != GLA}
    assert p.lower_bound == (-5.0 if name == KDA else None)


def test_gate_parameters_have_no_effect_without_the_flag(launched: list[Problem]) -> None:
    call(KDA, arguments(KDA) | {"A_log": torch.zeros(7), "lower_bound": -5.0, "safe_gate": True})
    assert (launched[0].A_log, launched[0].lower_bound, launched[0].gate_in_kernel) == (None, None, False)


@pytest.mark.parametrize("name", [GDN, KDA])
def test_older_name_of_the_state_layout(name: str, launched: list[Problem]) -> None:
    with pytest.warns(DeprecationWarning, match="state_v_first") as caught:
        call(name, arguments(name) | {"transpose_state_layout": True})
    assert caught[0].filename == __file__
    assert launched[0].state_v_first
    with pytest.raises(qla.UnsupportedError, match="one of the two names"):
        call(name, arguments(name) | {"transpose_state_layout": True, "state_v_first": True})


@pytest.mark.parametrize("name", ALL)
def test_checks_run_no_operator(name: str, launched: list[Problem]) -> None:
    """Neither a kernel nor a copy nor a view: comparing attributes is what keeps a warm call short."""

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    a = packed([0, 5, 5, 11])(arguments(name)) | {"initial_state": torch.zeros(3, 4, 64, 128)}
    a["cu_seqlens_cpu"] = a["cu_seqlens"].int()
    if name in (GDN, KDA):
        a |= {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}
    with Refuse():
        call(name, a)
    assert len(launched) == 1


def test_float32_is_for_the_cpu(launched: list[Problem]) -> None:
    call(GDN, arguments(GDN, dtype=torch.float32))
    assert launched[0].q.dtype == torch.float32


@pytest.mark.gpu
def test_device_tensors_are_refused_without_a_launch(launched: list[Problem]) -> None:
    a = arguments(GDN, device="cuda")
    for change, argument in (
        (to("k", lambda x: x.cpu()), "k"),
        (to("beta", lambda x: x.cpu()), "beta"),
        (put(initial_state=torch.zeros(2, 4, 64, 128)), "initial_state"),
        (put(q=a["q"].float(), k=a["k"].float(), v=a["v"].float()), "q"),
        (packed([0, 6, 12]), "cu_seqlens"),
    ):
        with pytest.raises(qla.UnsupportedError) as caught:
            call(GDN, change(a))
        assert caught.value.argument == argument
    bad = torch.tensor([0, 7, 6, 12], device="cuda")
    with pytest.raises(qla.UnsupportedError, match="never decrease"):
        call(GDN, packed([0, 7, 6, 12])(a) | {"cu_seqlens": bad, "cu_seqlens_cpu": bad.cpu()})
    assert not launched


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda x: (x[0], x, x, x[..., 0]), "q"),
        (lambda x: (x, x[:, :1], x, x[..., 0]), "k"),
        (lambda x: (x, x, x[:, :, :5], x[..., 0]), "v"),
        (lambda x: (x, x, x, x), "beta"),
        (lambda x: (x, x, x, x[..., 0].transpose(1, 2)), "beta"),
        (lambda x: (x.double(), x.double(), x.double(), x[..., 0]), "q"),
    ],
)
def test_delta_net_chunk_op_refuses(make: Any, argument: str, launched: list[Problem]) -> None:
    with pytest.raises(qla.UnsupportedError) as caught:
        qla.DeltaNetChunkFwd()(*make(torch.zeros(2, 3, 70, 64).bfloat16()))
    assert caught.value.argument == argument
    assert not launched


def test_chunk_ops_have_chunks_of_64() -> None:
    for op in (qla.DeltaNetChunkFwd, qla.GLAChunkFwd):
        assert op(64).chunk_size == 64
        with pytest.raises(qla.UnsupportedError, match="chunk_size"):
            op(chunk_size=32)


def negated(x: torch.Tensor) -> torch.Tensor:
    """A view with the values of x that torch keeps negated in memory."""
    view = torch.imag(torch.complex(torch.zeros_like(x), -x).conj())
    assert view.is_neg()
    assert torch.equal(view, x)
    return view


def emptied(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage has been given back, as sharding wrappers do."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("hidden", [negated, emptied])
@pytest.mark.parametrize("name", ["q", "v", "g", "beta", "initial_state", "A_log"])
def test_elements_that_are_not_at_the_address(name: str, hidden: Callable[..., torch.Tensor], warm: bool) -> None:
    a = inputs.make(
        "chunk_gated_delta_rule", T=70, H=1, HV=2, K=64, V=64, dtype=torch.float32, state=True, use_gate_in_kernel=True
    )
    if warm:
        qla.chunk_gated_delta_rule(**a)
    with pytest.raises(qla.UnsupportedError, match=name):
        qla.chunk_gated_delta_rule(**a | {name: hidden(a[name])})
