"""Nothing of the package is on the wrong device on a GPU, and a step waits for the GPU once (gpu_cases.py)."""

import subprocess
import sys
from pathlib import Path

import pytest


CASES = Path(__file__).with_name("gpu_cases.py")


@pytest.mark.slow
def test_on_a_gpu_all_is_on_the_device_and_a_step_waits_once(tmp_path):
    """In a process of its own, as PyTorch keeps a device of Python's."""
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--basetemp={tmp_path / 'cases'}"]
    found = subprocess.run([sys.executable, "-m", "pytest", *options, CASES], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-6000:]
