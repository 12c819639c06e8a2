"""How long OpenMP's threads spin at a barrier: a setting of the command, made before PyTorch is imported."""

import os
import sys
from collections.abc import Mapping

from d2l_bert.early_signals import is_the_command


# How often a thread of GNU's OpenMP looks at a barrier before it goes to sleep. With the default, 300,000, a thread
# spins for milliseconds. Beside another program it then keeps the core from the thread that it waits for. On two
# cores, beside one busy program, recipe tiny keeps 2 % of its speed with the default, and 28 % with 10,000, which cost
# 2 to 3 % on a quiet machine. With 1,000 it keeps 54 %, but loses 30 % on a quiet machine (benchmarks/LOG.md).
SPIN_COUNT = 10_000

# Variables by which users decide for themselves how long threads wait.
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that the command adds to an environment: none if a variable of `WAIT_VARIABLES` is
    set, and none on systems where PyTorch does not use GNU's OpenMP."""
    if sys.platform != "linux" or any(variable in environment for variable in WAIT_VARIABLES):
        return {}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


# OpenMP reads the variables once, when PyTorch loads it. A program that imports this package keeps its own settings.
if is_the_command():
    os.environ.update(wait_settings(os.environ))
