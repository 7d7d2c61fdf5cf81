"""Errors cross process boundaries: a pool that cannot rebuild one waits for it forever."""

from __future__ import annotations

import copy
import pickle

import pytest

from qla.errors import CaptureError, CompilationError, HipError, QlaError, UnsupportedError

ERRORS = [
    UnsupportedError("q", "torch.int32", "bf16, fp16", "Cast it"),
    CompilationError("kernel for host", "line 3: no", "/tmp/kernel.cpp"),
    HipError("cannot load k on device 0", "hipErrorNoBinaryForGpu", 209),
    CaptureError("run this first"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_survives_pickling_and_copying(error: QlaError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)
