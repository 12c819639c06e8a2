"""What a run measures: speed, padding, waiting, memory, and loss spikes."""

import ctypes
import math
import re
import time

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_steps import SKIPPED, STEP, meter_of, operations, strictly

from d2l_bert.training.meter import SpikeDetector, used_memory


# ---------------------------------------------------------------------------------------------------------------------
# The meter


def test_the_meter_measures_padding_and_waiting_time():
    def slow():
        for _ in range(2):
            time.sleep(0.05)
            yield STEP

    meter = meter_of()
    for step in meter.waiting(slow()):
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


# ---------------------------------------------------------------------------------------------------------------------
# Loss spikes


def warnings_of(losses, detector=None):
    """The steps, counted from 1, for which a spike is reported."""
    detector = detector or SpikeDetector()
    return [step for step, loss in enumerate(losses, 1) if detector.update(step, loss)]


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.005, 0.05, 0.2]))
def test_noise_around_a_falling_loss_gives_no_warning_in_20000_steps(seed, size):
    steps = np.arange(20_000)
    falling = 3 + 7 * np.exp(-steps / 300) + np.exp(-steps / 5000)
    assert not warnings_of(falling + np.random.default_rng(seed).normal(0, size, len(steps)))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(60, 900), st.sampled_from([1, 5, 1000]))
def test_a_jump_is_reported_once_whether_the_loss_returns_or_stays(seed, place, lasting):
    losses = 4 + np.random.default_rng(seed).normal(0, 0.05, 1000)
    losses[place : place + lasting] += 2
    assert warnings_of(losses) == [place + 1]


def test_two_jumps_far_apart_are_both_reported_and_a_jump_down_is_not():
    losses = 4 + np.random.default_rng(0).normal(0, 0.05, 2000)
    losses[[500, 1500]] += 2
    losses[1000] -= 2
    assert warnings_of(losses) == [501, 1501]


def test_a_jump_in_the_first_steps_is_not_reported():
    losses = np.r_[np.full(20, 4.0), 30.0, np.full(40, 4.0)] + np.random.default_rng(0).normal(0, 0.05, 61)
    assert not warnings_of(losses)


def test_the_warning_states_the_loss_and_the_losses_before():
    detector = SpikeDetector()
    for step, loss in enumerate(4 + np.random.default_rng(0).normal(0, 0.05, 300), 1):
        detector.update(step, loss)
    line = detector.update(301, 9.5)
    jump, before, usual = map(float, re.findall(r"\d\.\d{3}", line))
    assert line.startswith("step 301: ") and "\n" not in line
    assert jump == 9.5 and before == pytest.approx(4, abs=0.03) and usual == pytest.approx(0.04, abs=0.015)


def test_a_loss_that_is_not_finite_does_not_change_the_detector():
    detector = SpikeDetector()
    warnings_of([4.0, 4.1, 3.9], detector)
    before = detector.state()
    assert detector.update(4, math.nan) is None and detector.update(5, math.inf) is None and detector.state() == before


def test_resumed_spike_detection_warns_at_the_same_steps():
    losses = 4 + np.random.default_rng(0).normal(0, 0.05, 400)
    losses[[100, 130, 200]] += 2  # step 131 falls into the silence after step 101
    whole = SpikeDetector()
    expected = warnings_of(losses, whole)
    assert expected == [101, 201]
    for stop in (0, 10, 99, 100, 101, 125, 180, 300):
        first = SpikeDetector()
        found = warnings_of(losses[:stop], first)
        resumed = SpikeDetector(strictly(first.state()))
        found += [stop + step for step in warnings_of(losses[stop:], resumed)]
        assert found == expected and resumed.state() == whole.state(), stop
