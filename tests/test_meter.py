"""What a run measures: speed, padding, waiting, memory."""

import ctypes
import time

import numpy as np
import psutil
import pytest
from measured_steps import STEP, meter_of


# ---------------------------------------------------------------------------------------------------------------------
# The meter


def test_the_meter_measures_padding_and_waiting_time():
    def slow():
        for _ in range(2):
            time.sleep(0.05)
            yield STEP

    meter, steps = meter_of(), slow()
    for _ in range(2):
        with meter.waiting():
            step = next(steps)
        time.sleep(0.05)
        meter.add(step)
    row = meter.row(0.1, 0)
    assert row["padding_share"] == 0.25 and row["loss"] == 5 and row["data_wait_share"] == pytest.approx(0.5, abs=0.2)
    assert meter.waited == 0
    assert meter.totals["train_pairs"] == 6 and meter.speed()["train_padding_share"] == 0.25


def test_mfu_is_arithmetic_divided_by_time_and_peak():
    meter = meter_of(STEP, STEP, peak=1e5)
    time.sleep(0.02)
    row = meter.row(0.1, 10)
    seconds = 2 * 60 / row["tokens_per_second"]
    assert seconds >= 0.02 and row["seconds_left"] == pytest.approx(10 * seconds / 2)
    assert row["mfu"] == pytest.approx(2 * (7 * 60 + 1200) / (seconds * 1e5))
    assert meter.speed()["train_mfu"] == pytest.approx(row["mfu"])


@pytest.mark.skipif(
    not hasattr(psutil.Process().memory_info(), "shared"), reason="the system does not tell them apart"
)
def test_memory_is_the_memory_of_the_process_without_the_files_it_maps(tmp_path):
    (tmp_path / "file").write_bytes(bytes(64_000_000))
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # returns memory that earlier tests have freed; else it would count as `held`
    meter = meter_of(STEP)
    before = meter.row(0.1, 0)["memory_mb"]
    mapped = np.memmap(tmp_path / "file", mode="r")
    assert mapped.sum() == 0
    meter.add(STEP)
    assert meter.row(0.1, 0)["memory_mb"] < before + 16
    held = np.ones(64_000_000, np.uint8)
    meter.add(STEP)
    most = meter.row(0.1, 0)["memory_mb"]
    assert most > before + 48
    del held
    meter.add(STEP)
    meter.row(0.1, 0)
    assert meter.speed()["train_memory_mb"] == most
