"""The command makes OpenMP's threads spin shortly at barriers, unless the user says otherwise; programs do not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from d2l_bert import openmp
from d2l_bert.openmp import SPIN_COUNT, wait_settings


COMMAND = str(Path(sys.executable).with_name("d2l-bert"))
LAUNCHED = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "-m", "d2l_bert"]


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": ""}])
def test_a_users_own_choice_stays(chosen, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert wait_settings(chosen) == {}
    assert wait_settings({"OMP_NUM_THREADS": "4"}) == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def test_other_systems_have_another_openmp(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert openmp.wait_settings({}) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's OpenMP is GNU's on Linux alone")
@pytest.mark.parametrize(
    ("program", "variables", "spins"),
    [
        pytest.param(["-m", "d2l_bert", "--help"], {}, SPIN_COUNT, id="module"),
        pytest.param([COMMAND, "--help"], {}, SPIN_COUNT, id="script", marks=pytest.mark.slow),
        pytest.param([*LAUNCHED, "--help"], {}, SPIN_COUNT, id="launched", marks=pytest.mark.slow),
        pytest.param([COMMAND, "--help"], {"GOMP_SPINCOUNT": "77"}, 77, id="chosen", marks=pytest.mark.slow),
        pytest.param(
            [COMMAND, "--help"], {"OMP_WAIT_POLICY": "PASSIVE"}, 0, id="chosen policy", marks=pytest.mark.slow
        ),
        pytest.param(["-c", "import d2l_bert, torch"], {}, 300_000, id="program", marks=pytest.mark.slow),
    ],
)
def test_openmp_reads_the_spin_count_of_the_command_when_it_is_loaded(program, variables, spins):
    environment = {name: value for name, value in os.environ.items() if name not in openmp.WAIT_VARIABLES}
    environment |= {**variables, "OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, check=True)
    read = [int(count) for count in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)]
    assert read and read[-1] == spins  # a launcher that loads PyTorch reads it first
