"""`benchmarks/gpu.py`, on a CPU with tiny sizes: each step gives its results, and one that fails ends no other."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks import gpu


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


SLOW = """#!/bin/sh
echo 'JSON {"tokens_per_s": 5}'
sleep 300 &
echo $! > "$CHILD"
printf 'half a letter: \\303'
sleep 300
"""


def test_a_step_that_takes_too_long_is_killed_with_what_it_has_started_and_its_results_are_kept(tmp_path, monkeypatch):
    script = tmp_path / "slow"
    script.write_text(SLOW)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    result, failed = gpu.run_step("environment", 2, tmp_path, on_cpu=True)
    assert result == {"tokens_per_s": 5}
    assert failed["failed"] == "killed after 2 s" and "half a letter" in failed["last_lines"][-1]
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((tmp_path / "child").read_text()))
        limit = time.monotonic() + 10
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < limit, child
            time.sleep(0.01)


@pytest.mark.parametrize("code", [0, 3])
def test_a_step_without_a_result_has_failed(tmp_path, monkeypatch, code):
    script = tmp_path / "silent"
    script.write_text(f"#!/bin/sh\nexit {code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    (row,) = gpu.run_step("environment", 20, tmp_path, on_cpu=True)
    assert row["failed"] == code


def test_all_steps_together_take_no_longer_than_the_budget_and_the_others_say_so(monkeypatch, capsys):
    """Each takes as long as it may; what is left for the last one is less than its limit."""
    clock = SimpleNamespace(now=0.0)

    def run_step(name, seconds, folder, on_cpu):
        clock.now += seconds
        return [{"took": seconds}]

    monkeypatch.setattr(gpu, "run_step", run_step)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: clock.now))
    gpu.run_steps(SimpleNamespace(device="cpu", budget=240, only=[""], dry=False))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["step"] for row in rows] == [*gpu.STEPS]
    assert [row["took"] for row in rows if "took" in row] == [60, 150, 30]
    assert [row.get("skipped") for row in rows[3:]] == ["no time left"] * (len(rows) - 3)
