"""What a run records about its machine and the energy of its training, and when it records nothing."""

import json
import os
import platform
import socket
from types import SimpleNamespace

import pytest
import torch

from d2l_bert.training import energy
from d2l_bert.training.energy import describe_machine, processor_name, train_energy


SPEED = {"train_seconds": 7200.0, "train_memory_mb": 2000.0}
PROCESSOR = {"device": "cpu", "processes": 1, "threads": 4, "accelerator": None}
GPU = {"device": "cuda:1", "processes": 8, "threads": 4, "accelerator": "NVIDIA H200"}

KEYS = {"train_power_watts", "train_power_source", "train_energy_kwh"}


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A fake `nvidia-smi`, for a GPU whose index in PyTorch, 1, is not its index for the driver.

    Returns a function that sets the shell commands of the fake.
    """
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"ab-{device.index}"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def says(lines):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return says


def test_a_cpu_draws_the_watts_of_green_algorithms_for_every_thread_of_every_process():
    """The example of Green Algorithms: 4 threads at 12 W and 2 GB at 0.3725 W, for two hours."""
    figures = train_energy(PROCESSOR, SPEED)
    assert figures.keys() == KEYS
    assert figures["train_power_watts"] == pytest.approx(48.745)
    assert figures["train_energy_kwh"] == pytest.approx(0.09749)
    assert "4 threads at 12 W and 2.0 GB of memory at 0.3725 W" in figures["train_power_source"]
    two = train_energy({**PROCESSOR, "processes": 2}, SPEED)
    assert two["train_power_watts"] == pytest.approx(2 * 48.745)
    assert "8 threads at 12 W and 4.0 GB" in two["train_power_source"]


def test_a_gpu_is_taken_to_draw_the_power_limit_of_its_driver(driver):
    driver('[ "$1" = --id=GPU-ab-1 ] || exit 6\necho 699.50')
    figures = train_energy(GPU, SPEED)
    assert figures["train_power_watts"] == 8 * 699.5
    assert figures["train_energy_kwh"] == pytest.approx(8 * 699.5 * 2 / 1000)
    said = figures["train_power_source"]
    assert "8 x 699.5 W" in said and "NVIDIA H200" in said and "upper bound" in said


@pytest.mark.parametrize(
    "answer", ["exit 6", "echo 700; exit 15", "echo '[N/A]'", "true", "printf '7\\377'", "exec sleep 9"]
)
def test_without_a_usable_answer_of_the_driver_no_energy_is_recorded(driver, monkeypatch, answer):
    run = energy.subprocess.run
    monkeypatch.setattr(
        energy.subprocess, "run", lambda *a, **options: run(*a, **{**options, "timeout": options["timeout"] / 30})
    )
    driver(answer)
    assert train_energy(GPU, SPEED) == {}


def test_without_nvidia_smi_or_for_another_device_no_energy_is_recorded(driver, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert train_energy(GPU, SPEED) == {}
    driver("echo 700")
    assert train_energy(GPU, SPEED).keys() == KEYS
    assert train_energy({**GPU, "device": "mps"}, SPEED) == {}


@pytest.mark.parametrize(
    "cpuinfo, expected",
    [
        (
            "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC-Genoa  Processor\n\nmodel name\t: B\n",
            "AMD EPYC-Genoa Processor",
        ),
        ("model name\t: unknown\n", "family"),
        ("model name\t:\nstepping\t: 1\n", "family"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "family"),
        (None, "family"),
    ],
)
def test_a_cpu_is_named_by_the_system_or_by_its_family(tmp_path, monkeypatch, cpuinfo, expected):
    monkeypatch.setattr(energy, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "family")
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert processor_name() == expected


def test_on_a_mac_the_system_is_asked_for_the_cpus_name(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert processor_name() == "arm"
    (tmp_path / "sysctl").write_text('#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo Apple M2\n')
    (tmp_path / "sysctl").chmod(0o755)
    assert processor_name() == "Apple M2"


def test_a_gpu_has_the_name_that_pytorch_gives_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {device}")
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2")
    names = [
        describe_machine(SimpleNamespace(device=torch.device(device), num_processes=1))["accelerator"]
        for device in ("cpu", "cuda:1", "mps")
    ]
    assert names == [None, "NVIDIA cuda:1", "Apple M2"]


def test_the_record_holds_what_openmp_was_told(monkeypatch):
    for name in energy.OPENMP_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1)
    assert describe_machine(accelerator)["openmp"] == {}
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert describe_machine(accelerator)["openmp"] == {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "1000"}


def test_a_run_records_its_machine_without_the_host_name_and_the_energy_of_its_training(trained):
    machine = json.loads((trained / "run_config.json").read_text())["machine"]
    assert machine.keys() == {
        "device",
        "processes",
        "threads",
        "openmp",
        "short_waits",
        "processor",
        "accelerator",
        "memory_gb",
    }
    assert (machine["accelerator"] is None) == (machine["device"] == "cpu")
    assert machine["processor"] and socket.gethostname() not in machine["processor"]
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine["memory_gb"] == pytest.approx(pages / 1e9, abs=0.1)
    metrics = json.loads((trained / "metrics.json").read_text())
    assert {key: metrics[key] for key in KEYS & metrics.keys()} == train_energy(machine, metrics)
    if machine["device"] == "cpu":
        watts = 12 * machine["threads"] + 0.3725 * metrics["train_memory_mb"] / 1000
        assert metrics["train_power_watts"] == pytest.approx(watts)
        assert metrics["train_energy_kwh"] == pytest.approx(watts * metrics["train_seconds"] / 3600 / 1000)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_power_limit_of_this_gpu_is_plausible():
    limit = energy.power_limit(torch.device("cuda"))
    assert limit is None or 10 < limit < 5000
