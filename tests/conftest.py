"""Shared fixtures: where a test runs and in which dtype, what tests say of themselves, and those that need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can import `reference` and `inputs`

# The reference is a loop of small products: a second thread gains little, and waits for the first on a busy machine.
torch.set_num_threads(1)

GPU = torch.cuda.is_available()
_NOT_RUN = pytest.StashKey[int]()
_HOST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GPU_DTYPES = (torch.bfloat16, torch.float16)


def _label(value: Any) -> str:
    return str(value).removeprefix("torch.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill `device` (and `dtype`): the CPU always, "cuda" as tests marked `gpu`; float32 on the CPU only."""
    names = metafunc.fixturenames
    marked = {arg for mark in metafunc.definition.iter_markers("parametrize") for arg in _arguments(mark)}
    if "device" not in names or "device" in marked:
        return
    gpu = pytest.mark.gpu
    if "dtype" in names and "dtype" not in marked:
        cases = [pytest.param("cpu", d, id=f"cpu-{_label(d)}") for d in _HOST_DTYPES]
        cases += [pytest.param("cuda", d, id=f"cuda-{_label(d)}", marks=gpu) for d in _GPU_DTYPES]
        metafunc.parametrize(("device", "dtype"), cases)
    else:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


def _arguments(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, take out the tests that need one and keep their number for the summary."""
    if GPU:
        return
    needy = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[_NOT_RUN] = len(needy)
    if needy:
        config.hook.pytest_deselected(items=needy)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of pytest-xdist, send the number to the process that prints the summary."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["gpu_not_run"] = session.config.stash.get(_NOT_RUN, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the number from a worker; every worker collects all tests, so they agree."""
    count = getattr(node, "workeroutput", {}).get("gpu_not_run", 0)
    node.config.stash[_NOT_RUN] = max(count, node.config.stash.get(_NOT_RUN, 0))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what tests recorded as their summary, and how many did not run for want of a GPU: green never hides them."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(value)
    count = config.stash.get(_NOT_RUN, 0)
    if count:
        terminalreporter.write_line(f"{count} gpu tests not run: no GPU", yellow=True)
