"""Rendering: a pure function whose errors name the place, and text that reads as if written by hand.

The files under `golden` are whole rendered kernels. After a wanted change of templates or schedules write them anew
with ``QLA_UPDATE_GOLDEN=1 pytest tests/codegen/test_render.py`` and look at the difference.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import pytest

from qla.codegen import render as render_module
from qla.codegen.matrix import full
from qla.codegen.ops import OPS
from qla.codegen.render import render
from qla.codegen.spec import FIELD_BYTES, KernelSpec
from qla.errors import TemplateError
from qla.targets import TARGETS

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_SPECS = [
    KernelSpec("gated_delta_rule", "prepare", "bf16", 128, 128, "sm_90a"),
    KernelSpec("gated_delta_rule", "scan", "bf16", 128, 128, "sm_90a"),
    KernelSpec("gated_delta_rule", "scan", "bf16", 128, 128, "sm_90a", schedule="skewed"),
    KernelSpec("gated_delta_rule", "scan", "bf16", 128, 128, "sm_90a", schedule="paired"),
    KernelSpec("gated_delta_rule", "carry", "bf16", 128, 128, "sm_90a"),
    KernelSpec("gated_delta_rule", "combine", "bf16", 64, 64, "sm_90a"),
    KernelSpec("kda", "scan", "fp16", 128, 64, "sm_90a"),
    KernelSpec("kda", "prepare", "bf16", 128, 128, "gfx950"),
    KernelSpec("gated_delta_rule", "scan", "bf16", 128, 128, "gfx942"),
    KernelSpec("gla", "scan", "fp16", 64, 64, "host", saves=True),
    KernelSpec("delta_rule", "prepare", "fp32", 64, 64, "host"),
]
SUFFIXES = {"cuda": "cu", "hip": "hip", "c++": "cpp"}
EVERY_SPEC = [spec for target in TARGETS for spec in full(target)]


# ---- purity ----------------------------------------------------------------------------------------------------------

_DIGESTS = """
import hashlib, json, sys
from qla.codegen.matrix import pairwise
from qla.codegen.render import render
from qla.targets import TARGETS

def digest(spec):
    source = render(spec)
    return hashlib.sha256(repr((source.text, source.abi, source.limits, source.workspace)).encode()).hexdigest()

digests = {f"{t} {s.name}": digest(s) for t in TARGETS for s in pairwise(t)}
cuda = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
print(json.dumps({"digests": digests, "cuda": cuda}))
"""


def digests(seed: str, folder: Path, **environment: str) -> dict[str, Any]:
    """Hashes of all rendered kernels of the pairwise sets, as another process makes them."""
    done = subprocess.run(
        [sys.executable, "-c", _DIGESTS],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": seed, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_another_process_renders_the_same_text(tmp_path: Path) -> None:
    one = digests("1", tmp_path)
    other = digests("4242", Path("/"), LANG="C", HOME=str(tmp_path), TZ="Asia/Tokyo", COLUMNS="40")
    assert one["digests"] == other["digests"]
    assert len(one["digests"]) > 80
    assert not one["cuda"], "rendering must not start CUDA"


def test_rendering_twice_gives_the_same_source() -> None:
    for spec in GOLDEN_SPECS:
        assert render.__wrapped__(spec) == render.__wrapped__(spec) == render(spec)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def overlay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Puts other templates over those of the package."""
    package = render_module.environment()

    def put(templates: Mapping[str, str]) -> None:
        assert package.loader is not None
        # As a loader of files gives them: text and path.
        files = {name: (text, f"/somewhere/{name}", None) for name, text in templates.items()}
        changed = jinja2.FunctionLoader(files.get)
        layered = package.overlay(loader=jinja2.ChoiceLoader([changed, package.loader]))
        monkeypatch.setattr(render_module, "environment", lambda: layered)

    yield put
    render.cache_clear()


def original(name: str) -> str:
    loader = render_module.environment().loader
    assert loader is not None
    return loader.get_source(render_module.environment(), name)[0]


Overlay = Callable[[Mapping[str, str]], None]
SCAN = KernelSpec("gated_delta_rule", "scan", "bf16", 128, 128, "sm_90a")


def refused(spec: KernelSpec) -> str:
    with pytest.raises(TemplateError) as raised:
        render.__wrapped__(spec)
    return str(raised.value)


def line_of(text: str, fragment: str) -> int:
    return text[: text.index(fragment)].count("\n") + 1


def changed_scan(old: str, new: str) -> dict[str, str]:
    text = original("kernels/scan.j2")
    assert text.count(old) == 1
    return {"kernels/scan.j2": text.replace(old, new)}


@pytest.mark.parametrize(
    ("template", "old", "new", "spec"),
    [
        ("kernels/scan.j2", 'tile("Q", "q", C, K)', 'tile("Q", "q", C, Keys)', SCAN),
        ("kernels/scan.j2", 'if gate == "head" }}', 'if gates == "head" }}', SCAN),
        ("tile/sm_90a_scan.j2", "__launch_bounds__({{ threads }}, ", "__launch_bounds__({{ treads }}, ", SCAN),
        ("tile/sm_90a.j2", "typedef u16 number;  // {{ dtype }}", "typedef u16 number;  // {{ type }}", SCAN),
        (
            "kernels/prepare.j2",
            '{%- set channel = gate == "channel" %}',
            '{%- set channel = gait == "channel" %}',
            KernelSpec("kda", "prepare", "bf16", 128, 128, "host"),
        ),
    ],
)
def test_an_undefined_name_is_an_error_that_gives_template_and_line(
    overlay: Overlay, template: str, old: str, new: str, spec: KernelSpec
) -> None:
    text = original(template)
    line = line_of(text, old)
    overlay({template: text.replace(old, new, 1)})
    message = refused(spec)
    assert spec.name in message
    assert spec.target in message
    assert "is undefined" in message
    assert f"{template}:{line}" in message


def test_a_syntax_error_gives_template_and_line(overlay: Overlay) -> None:
    text = original("kernels/scan.j2")
    fragment = "{%- if saves %}"
    overlay({"kernels/scan.j2": text.replace(fragment, "{%- if saves and %}", 1)})
    assert f"scan.j2:{line_of(text, fragment)}" in refused(SCAN)


PRODUCT, ROWS = "product(V2, A, W);", "load_rows(left, rows.left);"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (PRODUCT, "multiply(V2, A, W);", r"step V2: unknown verb `multiply`; known: product, .*save_state"),
        (PRODUCT, "product(V2, A);", r"step V2: `product` takes 3 arguments, got 2: product\(V2, A\);"),
        (PRODUCT, "to_operand(V2, A, W);", r"step V2: `to_operand` takes 2 arguments, got 3"),
        (PRODUCT, "product(V2, B, W);", r"step V2: `B` names nothing declared; declared: K, Q, V, A, P, S,"),
        (PRODUCT, "product(V2, flipped(A), W);", r"step V2: `flipped\(A\)` names nothing declared"),
        (PRODUCT, "product(V2, A, W)", r"step V2: `product\(V2, A, W\)` is not a statement"),
        (PRODUCT, "V2 = A * W;", r"step V2: `V2 = A \* W;` is not a statement"),
        (ROWS, "load_rows(left, row.left);", r"step rows: `row\.left` names nothing declared"),
        (ROWS, "load_rows(left, rows);", r"step rows: `rows` names nothing declared"),
        (ROWS, "load_rows(left, rows.right);", r"step rows: `rows\.right` names nothing declared; .*rows\.left"),
    ],
)
def test_a_bad_statement_is_an_error_that_names_its_step(overlay: Overlay, old: str, new: str, expected: str) -> None:
    overlay(changed_scan(old, new))
    assert re.search(expected, refused(SCAN))


def test_kernel_templates_come_from_the_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "scan.j2").write_text("{{ nonsense }}")
    monkeypatch.chdir(tmp_path)
    assert render.__wrapped__(SCAN).text == render(SCAN).text


# ---- names and the argument block ------------------------------------------------------------------------------------


def test_distinct_specs_have_distinct_names() -> None:
    for target in TARGETS:
        specs = full(target)
        assert len({s.name for s in specs}) == len(specs) == len(set(specs))


@pytest.mark.parametrize("target", TARGETS)
def test_text_of_every_supported_kernel(target: str) -> None:
    """Everything that can be told from text alone, for all supported kernels of a target."""
    for spec in full(target):
        source = render(spec)
        assert source.spec == spec
        assert source.entry == spec.name
        assert source.language == TARGETS[target].language
        assert re.fullmatch(r"[a-z0-9_]+", source.entry)
        check_text(source.text, source.entry)
        assert source.text.startswith(f"// {spec.name} for {target}: ")
        for command in TARGETS[target].build.splitlines():
            assert f"\n//   {command.replace('{name}', spec.name)}\n" in source.text
        check_arguments(source.text, [(f.name, f.kind) for f in source.abi])
        assert source.limits.chunk == TARGETS[target].chunk[spec.features.gate]


def check_text(text: str, entry: str) -> None:
    assert "#include" not in text
    assert len(re.findall(rf"\b{entry}\(", text)) == 1
    assert "{name}" not in text
    assert 'extern "C"' in text
    assert not re.search(r"\{%\D|%\}|\{#|#\}|\bUndefined\b|\bNone\b|\bTrue\b|\bFalse\b", text)
    lines = text.split("\n")
    assert lines[-1] == ""
    assert lines[-2] != ""
    assert "\t" not in text
    for before, line in pairwise(lines):
        assert line == line.rstrip()
        assert line or before or line is lines[-1], "two empty lines"
    # But for commands and the operands of inline assembly.
    assert [line for line in lines if len(line) > 230 and not line.startswith("//   ") and '"' not in line] == []
    code = re.sub(r"//[^\n]*|\"[^\"\n]*\"", "", text)
    defined = re.findall(
        r"^(?:template <[^\n]*> )?(?:DEV|static) [^\n(=]*?(\w+)\(|^#define (\w+)|^struct [^\n{]*?(\w+) \{",
        code,
        re.MULTILINE,
    )
    assert [name for names in defined for name in names if name and len(re.findall(rf"\b{name}\b", code)) == 1] == []
    for opening, closing in ("()", "[]", "{}"):
        assert code.count(opening) == code.count(closing)


C_TYPES = {"tensormap": "CUtensorMap", "ptr": "void*", "i64": "i64", "i32": "int", "f32": "float"}


def check_arguments(text: str, abi: list[tuple[str, str]]) -> None:
    """The struct in the text is the abi, member by member, and the text reads no other member."""
    match = re.search(r"struct Args \{\n(.*?)\n\};", text, re.DOTALL)
    assert match is not None
    members = [line.strip().rstrip(";").rsplit(" ", 1) for line in match[1].splitlines()]
    assert [(name, kind) for kind, name in members] == [(name, C_TYPES[kind]) for name, kind in abi]
    names = [name for name, _ in abi]
    assert len(set(names)) == len(names)
    assert {kind for _, kind in abi} <= set(FIELD_BYTES)
    kinds = [kind for _, kind in abi]
    assert kinds == sorted(kinds, key=list(FIELD_BYTES).index), "widest first, so that there is no padding between"
    read = set(re.findall(r"\bargs(?:\.|->)(\w+)", text)) | set(re.findall(r"\bargs->(\w+)", text))
    assert read <= set(names)
    pointers = {name for name, kind in abi if kind in ("ptr", "tensormap")}
    # Where tensor maps are read, the tensors that they are of come along.
    assert pointers - read <= {name.removesuffix("_map") for name in pointers if name.endswith("_map")}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_prepare_makes_the_workspace_that_scan_reads(op: str, target: str) -> None:
    for dtype in TARGETS[target].dtypes:
        for dk, dv in ((64, 64), (128, 64), (64, 128), (128, 128)):
            prepare = render(KernelSpec(op, "prepare", dtype, dk, dv, target))  # type: ignore[arg-type]
            scan = render(KernelSpec(op, "scan", dtype, dk, dv, target))  # type: ignore[arg-type]
            assert dict(prepare.workspace) == dict(scan.workspace)
            assert prepare.limits.chunk == scan.limits.chunk
            named = {f"ws_{name}" for name, _ in prepare.workspace}
            assert named == {f.name for f in prepare.abi if f.name.startswith("ws_")}
            # Where segments begin there are states, which `carry` and `combine` make.
            read = {f.name for f in scan.abi if f.name.startswith("ws_")}
            assert read == named | ({"ws_carry"} if TARGETS[target].segments else set())
            assert all(size > 0 and size % 16 == 0 for _, size in scan.workspace)


def test_kernels_of_different_specs_differ_in_more_than_their_name() -> None:
    """A feature that changes nothing would be a kernel too many."""
    for target in TARGETS:
        seen: dict[str, KernelSpec] = {}
        for spec in full(target):
            source = render(spec)
            body = source.text.replace(source.entry, "kernel")
            same = seen.setdefault(hashlib.sha256(body.encode()).hexdigest(), spec)
            assert same == spec, f"{same.name} and {spec.name} are one kernel"


def test_a_pair_of_column_blocks_shares_what_it_loads_but_its_values() -> None:
    for spec in (spec for spec in EVERY_SPEC if spec.schedule == "paired"):
        single, pair = render(replace(spec, schedule="")), render(spec)
        assert (pair.abi, pair.workspace) == (single.abi, single.workspace)
        assert (single.limits.value_columns, pair.limits.value_columns) == (64, 128)
        assert (single.limits.threads, pair.limits.threads) == (192, 384)
        # Three more buffers of V, one of O, and its two barriers.
        assert pair.limits.shared_bytes - single.limits.shared_bytes == 4 * 64 * 64 * 2 + 2 * 8
    handing_over = {spec for spec in EVERY_SPEC if "setmaxnreg" in render(spec).text}
    assert handing_over == {spec for spec in EVERY_SPEC if spec.schedule == "paired"}


# ---- golden files ----------------------------------------------------------------------------------------------------


def golden_path(spec: KernelSpec) -> Path:
    return GOLDEN / f"{spec.target}-{spec.name}.{SUFFIXES[TARGETS[spec.target].language]}"


@pytest.mark.parametrize("spec", GOLDEN_SPECS, ids=lambda spec: f"{spec.target}-{spec.name}")
def test_golden(spec: KernelSpec) -> None:
    text, path = render(spec).text, golden_path(spec)
    if os.environ.get("QLA_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    difference = list(difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "rendered", lineterm=""))
    assert not difference, "\n".join(difference[:60])


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {golden_path(spec).name for spec in GOLDEN_SPECS}
