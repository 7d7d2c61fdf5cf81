"""Intervals and verdicts, from numbers with known ratios."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from qla.bench.cli import app
from qla.bench.compare import between_files
from qla.bench.verdict import Interval, Verdict, classify, conclude, paired, unpaired

FAST, SLOW, SAME, AMBIGUOUS = Verdict


def interval(low: float, middle: float, high: float) -> Interval:
    return Interval(math.log(low), math.log(middle), math.log(high))


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        ((0.99, 1.0, 1.01), SAME),
        ((1.005, 1.015, 1.025), SAME),  # a change, and not one that matters
        ((1.05, 1.1, 1.15), SLOW),
        ((1.001, 1.04, 1.08), SLOW),
        ((0.99, 1.1, 1.2), AMBIGUOUS),
        ((1.001, 1.02, 1.04), AMBIGUOUS),
        ((0.85, 0.9, 0.95), FAST),
        ((0.96, 0.98, 1.0), AMBIGUOUS),
    ],
)
def test_one_interval(ratio: tuple[float, float, float], verdict: Verdict) -> None:
    assert classify(interval(*ratio), 0.03) is verdict


def test_a_change_must_be_seen_twice_and_not_in_the_control() -> None:
    slow, same, wide = interval(1.05, 1.1, 1.15), interval(0.99, 1.0, 1.01), interval(0.9, 1.0, 1.1)
    assert conclude(slow, None, None, 0.03) is SLOW
    assert conclude(slow, same, slow, 0.03) is SLOW
    assert conclude(slow, same, same, 0.03) is AMBIGUOUS
    assert conclude(slow, same, wide, 0.03) is AMBIGUOUS
    assert conclude(slow, slow, slow, 0.03) is AMBIGUOUS
    assert conclude(same, interval(0.9, 0.92, 0.95), None, 0.03) is AMBIGUOUS
    assert conclude(same, wide, None, 0.03) is SAME


def test_intervals_hold_what_they_should() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for n in range(200):
        # Processes differ by 1 %, measurements within one by 0.5 %.
        rounds = math.log(1.1) + generator.normal(0, 0.01, (8, 1)) + generator.normal(0, 0.005, (8, 5))
        found = paired(rounds.tolist(), seed=n)
        held += found.low < math.log(1.1) < found.high
        assert found.half_width < 0.02
    assert held > 170
    a = generator.normal(1, 0.01, 50)
    found = unpaired(a, 1.1 * generator.normal(1, 0.01, 50))
    assert found.low < math.log(1.1) < found.high


def test_no_change_is_no_verdict() -> None:
    generator = np.random.default_rng(2)
    verdicts = []
    for n in range(200):
        rounds = generator.normal(0, 0.01, (5, 1)) + generator.normal(0, 0.01, (5, 5))
        verdicts.append(classify(paired(rounds.tolist(), seed=n), 0.03))
    assert SLOW not in verdicts
    assert FAST not in verdicts
    assert verdicts.count(SAME) > 190


def rows(path: Path, factors: dict[str, float], seed: int, device: str = "NVIDIA H200") -> Path:
    generator = np.random.default_rng(seed)
    lines = []
    for workload, factor in factors.items():
        times = (factor * generator.normal(1, 0.005, 20)).tolist()
        row: dict[str, Any] = {
            "key": workload + device, "peer": "qla", "status": "ok", "seed": "h200", "op": "GDNFwd", "device": device,
            "workload": workload, "dtype": "bfloat16", "device_ms": float(np.median(times)), "samples_ms": times,
        }  # fmt: skip
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


def test_two_results_files(tmp_path: Path) -> None:
    planted = {"tp8-2048": 1.1, "tp4-2048": 1.0, "tp2-2048": 0.8, "tp1-2048": 1.004}
    a = rows(tmp_path / "a.jsonl", dict.fromkeys(planted, 1.0), 1)
    b = rows(tmp_path / "b.jsonl", planted, 2)
    result = CliRunner().invoke(app, ["compare", str(a), str(b)])
    assert result.exit_code == 1
    assert "## NVIDIA H200" in result.output
    assert "| GDNFwd | 4 | 1 | 1 | 2 | 0 |" in result.output
    assert "| tp8-2048 | bfloat16 | **SLOW** |" in result.output
    assert "| tp2-2048 | bfloat16 | FAST |" in result.output
    assert "without a control" in result.output
    assert CliRunner().invoke(app, ["compare", str(b), str(a), "--name", "tp8"]).exit_code == 0
    assert CliRunner().invoke(app, ["compare", str(a), str(a)]).exit_code == 0


def test_files_share_devices_only(tmp_path: Path) -> None:
    a = rows(tmp_path / "a.jsonl", {"tp8-2048": 1.0}, 1)
    other = rows(tmp_path / "b.jsonl", {"tp8-2048": 1.0}, 1, device="MI325X")
    assert CliRunner().invoke(app, ["compare", str(a), str(other)]).exit_code == 2
    assert CliRunner().invoke(app, ["compare", str(a), "HEAD"]).exit_code == 2
    assert CliRunner().invoke(app, ["compare", str(a), str(tmp_path / "none.jsonl")]).exit_code == 2
    both = [json.loads(line) for path in (a, other) for line in path.read_text().splitlines()]
    assert list(between_files(both, both, 0.03)) == ["NVIDIA H200", "MI325X"]
