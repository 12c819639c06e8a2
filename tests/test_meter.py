"""What a run measures: speed, padding, waiting, memory."""

import ctypes
import time

import numpy as np
import psutil
import pytest
import torch
from measured_steps import SKIPPED, STEP, meter_of, operations, strictly

from d2l_bert.training.meter import used_memory


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


def test_the_entries_of_a_row_keep_their_order():
    names = (
        "loss mlm_loss nsp_loss grad_norm learning_rate tokens_per_second padding_share data_wait_share seconds_left"
    )
    assert list(meter_of(STEP).row(0.1, 0)) == [*names.split(), "mfu", "memory_mb"]
    assert "nsp_loss" not in meter_of(STEP, task=None).row(0.1, 0)


def test_mfu_is_arithmetic_divided_by_time_and_peak():
    meter = meter_of(STEP, STEP, peak=1e5)
    time.sleep(0.02)
    row = meter.row(0.1, 10)
    seconds = 2 * 60 / row["tokens_per_second"]
    assert seconds >= 0.02 and row["seconds_left"] == pytest.approx(10 * seconds / 2)
    assert row["mfu"] == pytest.approx(2 * (7 * 60 + 1200) / (seconds * 1e5))
    assert meter.speed()["train_mfu"] == pytest.approx(row["mfu"])


def test_skipped_steps_count_for_the_time_but_not_for_the_mean_losses():
    meter = meter_of(STEP, SKIPPED, STEP._replace(mlm_loss=2.0, grad_norm=1.5), SKIPPED)
    time.sleep(0.02)
    row = strictly(meter.row(0.1, 0))
    assert (row["mlm_loss"], row["nsp_loss"], row["loss"], row["grad_norm"]) == (3, 1, 4, 1)
    assert row["skipped_steps"] == 2
    assert row["tokens_per_second"] == pytest.approx(4 * 60 / meter.totals["train_seconds"])
    assert "skipped_steps" not in meter_of(STEP).row(0.1, 0)


def test_a_row_of_skipped_steps_only_has_no_losses_and_is_strict_json():
    row = strictly(meter_of(SKIPPED, SKIPPED).row(0.1, 0))
    assert row["skipped_steps"] == 2
    assert not {"loss", "mlm_loss", "nsp_loss", "grad_norm"} & set(row) and row["tokens_per_second"] > 0


def test_the_time_of_a_save_between_two_rows_does_not_count_and_that_of_the_steps_before_does():
    meter = meter_of(STEP)
    time.sleep(0.05)
    with meter.clock_stopped():
        time.sleep(0.5)
    meter.add(STEP)
    meter.row(0.1, 0)
    assert 0.05 <= meter.totals["train_seconds"] < 0.5


def test_totals_continue_from_a_checkpoint_on_a_machine_with_another_peak():
    first = meter_of(STEP, SKIPPED, peak=1e5)
    time.sleep(0.01)
    first.row(0.1, 0)
    second = meter_of(STEP, state=strictly(first.totals), peak=3e5)
    time.sleep(0.01)
    second.row(0.1, 0)
    parts = [first.totals["train_seconds"], second.totals["train_seconds"] - first.totals["train_seconds"]]
    speed = strictly(second.speed())
    assert speed["train_seconds"] == sum(parts) and speed["train_skipped_steps"] == 1
    assert second.totals["train_arithmetic"] == 3 * operations(STEP)
    assert speed["train_mfu"] == pytest.approx(3 * operations(STEP) / (parts[0] * 1e5 + parts[1] * 3e5))


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_memory_on_a_gpu_is_the_peak_since_the_last_row():
    device = torch.device("cuda")
    used_memory(device)
    before = used_memory(device)
    torch.empty(64_000_000, dtype=torch.uint8, device=device)  # freed at once
    assert used_memory(device) == pytest.approx(before + 64, abs=1)
    assert used_memory(device) == pytest.approx(before, abs=1)
