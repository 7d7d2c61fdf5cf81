"""Names, order and defaults of the public functions, and what importing the package costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version

import pytest

import qla

# Those of flash-linear-attention 0.6.0.
SIGNATURES = {
    "chunk_gated_delta_rule": (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs"
    ),
    "chunk_delta_rule": (
        "q, k, v, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, **kwargs"
    ),
    "chunk_kda": (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, "
        "lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs"
    ),
    "chunk_gla": (
        "q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(qla, name)).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ", ".join(str(p) for p in bare) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_docstring_has_every_section(name: str) -> None:
    text = inspect.getdoc(getattr(qla, name)) or ""
    for section in ("Parameters", "Returns", "Raises", "arXiv"):
        assert section in text
    for parameter in inspect.signature(getattr(qla, name)).parameters:
        assert parameter in text, parameter


def test_every_public_name_resolves() -> None:
    for name in qla.__all__:
        assert getattr(qla, name) is not None
        assert name in dir(qla)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = qla.no_such_name


def test_version_is_that_of_the_distribution() -> None:
    assert qla.__version__ == version("qla")


def test_import_is_light() -> None:
    """Importing the package, its errors and the generator needs neither torch nor a compiler nor a driver."""
    code = "import sys, qla, qla.codegen.spec; print({'torch', 'cupy', 'hip', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
