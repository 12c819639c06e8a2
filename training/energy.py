"""Which machine trains, and an estimate of the energy that it takes: power times time."""

import platform
import re
import subprocess
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator


# "Green Algorithms" (Lannelongue, Grealey and Inouye, 2021; Advanced Science 8, 2100707): watts of a core of a
# processor that is not in the table of their calculator, where cores have from 3.8 to 23.8 W; and of a GB of memory.
WATTS_A_CORE, WATTS_A_GB = 12.0, 0.3725

CPUINFO = Path("/proc/cpuinfo")


def describe_machine(accelerator: Accelerator) -> dict:
    """
    What run_config.json says of the machine, as this process sees it: nothing that names it.

    `threads` are those of each process, `memory_gb` is all that the machine has, in 10^9 bytes, and `accelerator` is
    None on a CPU.
    """
    return {
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "processor": processor_name(),
        "accelerator": accelerator_name(accelerator.device),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def processor_name() -> str:
    """A name such as `AMD EPYC-Genoa`; where the system has none, that of the family, such as `aarch64`."""
    name = None
    if platform.system() == "Darwin":
        name = _answer("sysctl", "-n", "machdep.cpu.brand_string")
    elif CPUINFO.exists() and (found := re.search(r"^model name\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)):
        name = " ".join(found[1].split())
    if name in (None, "", "unknown"):  # sandboxes say "unknown", ARM under Linux nothing
        return platform.processor() or platform.machine()
    return name


def accelerator_name(device: torch.device) -> str | None:
    """What PyTorch calls the device; None for a CPU."""
    if device.type == "cpu":
        return None
    return torch.backends.mps.get_name() if device.type == "mps" else torch.cuda.get_device_name(device)


def train_energy(machine: dict, speed: dict[str, float]) -> dict[str, float | str]:
    """
    The energy that training took, by estimate: E = P x t.

    t is `train_seconds`: the steps, of resumed runs from the first on, without evaluations and saves. P is what all
    processes draw together on the machine that ends the run, as if every one were like this one and had been there
    from the start:

    - on an NVIDIA GPU the power limit that its driver enforces: an upper bound for the GPU. The rest of the machine is
      not counted.
    - on a CPU Green Algorithms' sum: 12 W for each thread, as for a core in full use, and 0.3725 W for each GB.
      They count all the memory that was set aside for a task; a run has nothing set aside, so what it held counts, at
      most and without memory-mapped text (`train_memory_mb`). It is a few per cent of the sum, and the cores' watts
      may be wrong by a factor of two or three. The loader's processes are not counted.

    Cooling and whatever else a data centre needs (its PUE) are not in it.

    Args:
        machine: what `describe_machine` returned.
        speed: `train_seconds` and `train_memory_mb`, as in metrics.json.

    Returns:
        `train_power_watts`, `train_power_source` (where the watts come from, in words) and `train_energy_kwh`;
        nothing for a device that cannot be asked.
    """
    device, processes = torch.device(machine["device"]), machine["processes"]
    if device.type == "cpu":
        threads, gigabytes = processes * machine["threads"], processes * speed["train_memory_mb"] / 1e3
        watts = threads * WATTS_A_CORE + gigabytes * WATTS_A_GB
        source = (
            f"{threads} {'thread' if threads == 1 else 'threads'} at {WATTS_A_CORE:g} W and {gigabytes:.1f} GB of "
            f"memory at {WATTS_A_GB} W, the figures of Green Algorithms (Lannelongue et al., 2021) for a processor "
            f"that it does not know"
        )
    elif device.type == "cuda" and (limit := power_limit(device)) is not None:
        watts = processes * limit
        source = (
            f"{processes} x {limit:g} W, the power limit that the driver of the {machine['accelerator']} reports: an "
            f"upper bound for the GPU, without the rest of the machine"
        )
    else:
        return {}
    return {
        "train_power_watts": watts,
        "train_power_source": source,
        "train_energy_kwh": watts * speed["train_seconds"] / 3.6e6,
    }


def power_limit(device: torch.device) -> float | None:
    """Watts above which its driver does not let an NVIDIA GPU go; None if the driver does not say."""
    # PyTorch and the driver number GPUs each in their own way.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    query = ("--query-gpu=enforced.power.limit", "--format=csv,noheader,nounits")
    try:
        return float(_answer("nvidia-smi", f"--id=GPU-{uuid}", *query) or "")
    except ValueError:
        return None


def _answer(*command):
    """What a program says; None if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
