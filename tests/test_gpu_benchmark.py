"""`benchmarks/gpu.py`, on a CPU with tiny sizes: each step gives its results, and one that fails ends no other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def steps_of(*options):
    """The rows of JSON that the script printed, by the names of their steps."""
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry", *map(str, options)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {}
    for line in found.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows.setdefault(row["step"], []).append(row)
    return rows


@pytest.mark.slow
def test_the_script_measures_speed_beside_stock_bert(books):
    speeds = ["speed-128-padded", "speed-128-varlen", "speed-128-stock"]
    rows = steps_of("--corpus", books, "--only", *speeds)
    assert [*rows] == speeds
    for (row,) in rows.values():
        assert row["tokens_per_s"] > 0 and 0 < row["mfu"] < 1


@pytest.mark.slow
def test_a_step_that_fails_says_how_and_leaves_the_others_alone(tmp_path):
    rows = steps_of("--corpus", tmp_path / "missing", "--only", "speed-128-padded", "environment", "speed-512-packed")
    assert [*rows] == ["environment", "speed-128-padded", "speed-512-packed"], "in the order of their value"
    assert any("product_tflops" in row for row in rows["environment"])
    (failed,) = rows["speed-128-padded"]
    assert failed["failed"] == 1 and "missing" in "".join(failed["last_lines"])
