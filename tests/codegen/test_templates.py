"""Kernel templates are written once: walks their syntax trees for what may not be in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jinja2
import pytest
from jinja2 import nodes
from sources import declare

from qla.codegen.ops import OPS
from qla.codegen.program import DIVISIBLE, GROUPS, VERBS, Program
from qla.codegen.render import environment, render
from qla.codegen.spec import KernelSpec
from qla.targets import TARGETS

# `channel` is set from `gate`; `outputs` from the stage.
FEATURES = {"delta", "gate", "channel", "saves", "loads", "outputs", "reach"}  # and what follows from them on a target
VALUES = {"none", "head", "channel", "tile", "strided"}
VENDOR = re.compile(
    r"cuda|hip\b|nvidia|nvrtc|\bamd|hopper|cdna|rocm|zig|clang|target|vendor|sm_?\d|gfx\d|wgmma|mfma|\bmma\b|tma\b|"
    r"mbarrier|\basm\b|threadIdx|blockIdx|__shared__|__global__|__builtin|#if|\bwarp|\bwave|\blane",
    re.IGNORECASE,
)
OP_WORDS = {word for op in OPS for word in op.split("_")} | {"gdn", "deltanet", "delta"}
KERNELS = ("prepare", "scan")


def names_of(kind: str) -> list[str]:
    return [name for name in environment().list_templates() if name.startswith(f"{kind}/") and name.endswith(".j2")]


def text_of(name: str) -> str:
    loader = environment().loader
    assert loader is not None
    return loader.get_source(environment(), name)[0]


def tree_of(name: str) -> nodes.Template:
    return environment().parse(text_of(name))


def everything(node: nodes.Node, kind: Any) -> Iterator[Any]:
    """The node itself and all below it, where they are of a kind."""
    if isinstance(node, kind):
        yield node
    yield from node.find_all(kind)


def conditions(tree: nodes.Node) -> Iterator[tuple[nodes.Expr, set[str]]]:
    """What decides which text is emitted: tests of `if`, inline `if` and loops, and what loops run over.

    With each come the names that it may use besides features of ops.
    """
    for node in tree.find_all((nodes.If, nodes.CondExpr, nodes.For)):
        if node.test is not None:
            yield node.test, set()
        if isinstance(node, nodes.For):
            yield node.iter, {"C", "K", "V", "range"}


def faults(source: str) -> list[str]:
    """What a kernel template must not do, with line numbers."""
    tree = environment().parse(source)
    loops = {n.name for loop in tree.find_all(nodes.For) for n in everything(loop.target, nodes.Name)} | {"loop"}
    found = []
    for test, others in conditions(tree):
        names = {n.name for n in everything(test, nodes.Name)}
        if strange := names - FEATURES - loops - others:
            found.append(f"line {test.lineno}: condition on {', '.join(sorted(strange))}")
        strings = {c.value for c in everything(test, nodes.Const) if isinstance(c.value, str)}
        if strange := strings - VALUES:
            found.append(f"line {test.lineno}: condition compares with {', '.join(sorted(strange))}")
    for attribute in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if isinstance(attribute.node, nodes.Name) and attribute.node.name in ("spec", "facts"):
            found.append(f"line {attribute.lineno}: reads {attribute.node.name}")
    for name in tree.find_all(nodes.Name):
        if VENDOR.search(name.name) or name.name == "dtype":
            found.append(f"line {name.lineno}: uses {name.name}")
    for data in tree.find_all(nodes.TemplateData):
        # Comments may say why; code may not test for a vendor or use its words.
        code = re.sub(r"//[^\n]*", "", data.data)
        if match := VENDOR.search(code):
            found.append(f"line {data.lineno}: writes {match[0]}")
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_conditions_of_a_kernel_template_use_features_of_ops_only(kernel: str) -> None:
    assert list(conditions(tree_of(f"kernels/{kernel}.j2"))), "it specializes"
    assert faults(text_of(f"kernels/{kernel}.j2")) == []


def test_all_kernel_templates_are_walked() -> None:
    assert names_of("kernels") == [f"kernels/{kernel}.j2" for kernel in sorted(KERNELS)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{% if target == 'sm_90a' %}x{% endif %}", "condition on target"),
        ("{% if gate == 'cuda' %}x{% endif %}", "compares with cuda"),
        ("{{ 'x' if spec.dtype == 'bf16' }}", "condition on spec"),
        ("{% for x in range(3) if facts.mfma_k %}x{% endfor %}", "condition on facts"),
        ("{{ spec.target }}", "reads spec"),
        ("{{ dtype }}", "uses dtype"),
        ("float x = threadIdx.x;", "writes threadIdx"),
        ("#ifdef __HIP__", "writes #if"),
    ],
)
def test_the_walk_finds_a_fault(text: str, what: str) -> None:
    assert any(what in fault for fault in faults(text)), faults(text)


def test_the_walk_accepts_features_and_loops() -> None:
    text = "{% if delta and gate != 'none' %}{% for d in range(K) if not saves %}{{ d }}{% endfor %}{% endif %}// warp"
    assert faults(text) == []


# ---- verbs -----------------------------------------------------------------------------------------------------------


def verbs_of(program: Program) -> set[str]:
    return {s.verb for step in program.steps.values() for s in step.statements}


def test_every_verb_is_used_by_scan() -> None:
    used = set().union(*(verbs_of(declare(op, saves)) for op in OPS for saves in (False, True)))
    assert used == set(VERBS)
    assert set(GROUPS) == {verb for verb, letters in VERBS.items() if set(letters) & set("WA")}
    assert set(DIVISIBLE) <= set(VERBS)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("op", "saves"), [(op, saves) for op in OPS for saves in (False, True) if OPS[op].saves or not saves]
)
def test_every_vocabulary_implements_the_verbs_of_an_op(target: str, op: str, saves: bool) -> None:
    text = render(KernelSpec(op, "scan", "bf16", 128, 128, target, saves=saves)).text
    for verb in verbs_of(declare(op, saves)):
        assert re.search(rf"\bvoid {verb}\(|\bauto {verb} = \[", text), f"{target} has no {verb}"


def defined_names(text: str) -> set[str]:
    """Names of what a piece of emitted code defines or calls."""
    return set(re.findall(r"\b([A-Za-z_]\w*)\s*\(", text)) | set(re.findall(r"\bstruct (?:__\w+\(\d+\) )?(\w+)", text))


def test_no_verb_is_named_after_an_op() -> None:
    names = set(VERBS)
    for template in names_of("tile"):
        names |= {macro.name for macro in tree_of(template).find_all(nodes.Macro)} | {template[5:-3]}
    for target in TARGETS:
        for op in OPS:
            for stage in KERNELS:
                source = render(KernelSpec(op, stage, "bf16", 64, 64, target))  # type: ignore[arg-type]
                names |= defined_names(source.text) - {source.entry}
    assert {"product", "gram", "solve_unit_lower"} <= names
    assert [name for name in sorted(names) if OP_WORDS & set(name.lower().split("_"))] == []


def test_steps_are_not_named_after_an_op_either() -> None:
    for op in OPS:
        for step in declare(op, True).steps.values():
            assert not OP_WORDS & {step.name.lower(), *re.findall(r"\w+", step.math.lower())}


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_undefined_name_in_any_condition_would_be_an_error(kernel: str) -> None:
    assert environment().undefined is jinja2.StrictUndefined
    with pytest.raises(jinja2.UndefinedError):
        environment().get_template(f"kernels/{kernel}.j2").render()
