"""Describes the machine that trains, and estimates the energy of the training as power times time."""

import os
import platform
import re
import subprocess
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from d2l_bert.training.openmp import is_supported


# The power of a CPU core and of a GB of memory in "Green Algorithms" (Lannelongue, Grealey and Inouye, 2021; Advanced
# Science 8, 2100707). 12 W is the value for a CPU of unknown type; known CPUs have 3.8 to 23.8 W per core.
WATTS_PER_CORE, WATTS_PER_GB = 12.0, 0.3725

# Variables that set the number of OpenMP's threads, their cores, and how long they spin at a barrier.
OPENMP_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_DYNAMIC", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY"),
    *("GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME", "KMP_AFFINITY"),
)

CPUINFO = Path("/proc/cpuinfo")


def describe_machine(accelerator: Accelerator) -> dict:
    """
    The entry `machine` of run_config.json, as this process sees the machine. It has no host or user name.

    `threads` is the number of threads of each process, `openmp` the environment variables of OpenMP, `short_waits`
    whether `openmp.short_waits` adapts OpenMP's waits to other programs, `memory_gb` the machine's memory in 10^9
    bytes, and `accelerator` the name of the GPU, or None on a CPU.
    """
    return {
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "openmp": {name: os.environ[name] for name in OPENMP_VARIABLES if name in os.environ},
        "short_waits": is_supported(os.environ),
        "processor": processor_name(),
        "accelerator": accelerator_name(accelerator.device),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def processor_name() -> str:
    """The model of the CPU, such as `AMD EPYC-Genoa`; if the system reports none, the family, such as `aarch64`."""
    name = None
    if platform.system() == "Darwin":
        name = _output_of("sysctl", "-n", "machdep.cpu.brand_string")
    elif CPUINFO.exists() and (match := re.search(r"^model name\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)):
        name = " ".join(match[1].split())
    if name in (None, "", "unknown"):  # sandboxes report "unknown", Linux on ARM reports no model
        return platform.processor() or platform.machine()
    return name


def accelerator_name(device: torch.device) -> str | None:
    """PyTorch's name of the GPU; None for a CPU."""
    if device.type == "cpu":
        return None
    return torch.backends.mps.get_name() if device.type == "mps" else torch.cuda.get_device_name(device)


def train_energy(machine: dict, speed: dict[str, float]) -> dict[str, float | str]:
    """
    An estimate of the energy of the training: E = P x t.

    t is `train_seconds`, the time of all steps, without evaluations and saves; for a resumed run it includes the steps
    before the checkpoint. P is the power of all processes, as if each had run on this machine from the first step on:

    - On an NVIDIA GPU, the power limit that the driver enforces. This is an upper bound for the GPU, and does not
      include the rest of the machine.
    - On a CPU, the formula of Green Algorithms: 12 W for each thread, as if the thread kept a core busy, and 0.3725 W
      for each GB. Green Algorithms counts the memory reserved for a task. A run reserves none, so the peak memory of
      the processes counts instead, without memory-mapped text (`train_memory_mb`). Memory is a few per cent of the
      power, and the watts of the cores may be wrong by a factor of two or three. The processes of the loader are not
      included.

    Cooling and the other overhead of a data centre (PUE) are not included.

    Args:
        machine: what `describe_machine` returned.
        speed: `train_seconds` and `train_memory_mb`, as in metrics.json.

    Returns:
        `train_power_watts`, `train_power_source` (a sentence that says where the watts come from) and
        `train_energy_kwh`; an empty dict if the power of the device is unknown.
    """
    device, processes = torch.device(machine["device"]), machine["processes"]
    if device.type == "cpu":
        threads, gigabytes = processes * machine["threads"], processes * speed["train_memory_mb"] / 1e3
        watts = threads * WATTS_PER_CORE + gigabytes * WATTS_PER_GB
        source = (
            f"{threads} {'thread' if threads == 1 else 'threads'} at {WATTS_PER_CORE:g} W and {gigabytes:.1f} GB of "
            f"memory at {WATTS_PER_GB} W, as Green Algorithms (Lannelongue et al., 2021) estimates a CPU of unknown "
            f"type"
        )
    elif device.type == "cuda" and (limit := power_limit(device)) is not None:
        watts = processes * limit
        source = (
            f"{processes} x {limit:g} W, the power limit that the driver of the {machine['accelerator']} reports: an "
            f"upper bound for the GPU, not including the rest of the machine"
        )
    else:
        return {}
    return {
        "train_power_watts": watts,
        "train_power_source": source,
        "train_energy_kwh": watts * speed["train_seconds"] / 3.6e6,
    }


def power_limit(device: torch.device) -> float | None:
    """The power limit that the driver enforces for an NVIDIA GPU, in watts; None if the driver reports none."""
    # Ask by uuid: PyTorch and the driver may number the GPUs differently.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    query = ("--query-gpu=enforced.power.limit", "--format=csv,noheader,nounits")
    try:
        return float(_output_of("nvidia-smi", f"--id=GPU-{uuid}", *query) or "")
    except ValueError:
        return None


def _output_of(*command):
    """What a program writes to stdout; None if the program is missing, fails, or takes over 30 seconds."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()
