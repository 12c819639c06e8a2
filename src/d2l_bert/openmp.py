"""How long OpenMP's threads wait at barriers: variables that the command sets before PyTorch loads OpenMP."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


# Variables by which users decide for themselves how long threads wait.
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

# A thread of GNU's OpenMP looks 300,000 times at a barrier before it goes to sleep, and 100 times if OpenMP has more
# threads than cores. With ACTIVE, both counts are larger: 30 billion and 1,000. 300,000 takes the first back. The
# second matters beside other programs (`training/openmp.py`): beside two, recipe tiny keeps 32 % of its speed instead
# of 29 %, and compiled 43 % instead of 29 % (benchmarks/LOG.md).
COMMAND_WAITS = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}


def wait_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """
    The environment variables that the command adds to an environment.

    The result is empty if the user has set a variable of `WAIT_VARIABLES`, or if PyTorch does not bring GNU's OpenMP:
    with ACTIVE, threads of other kinds of OpenMP would never sleep.
    """
    if user_has_chosen(environment) or not torch_brings_gnu_openmp():
        return {}
    return COMMAND_WAITS


def user_has_chosen(environment: Mapping[str, str]) -> bool:
    """Whether an environment says how long threads wait, otherwise than the command does."""
    chosen = {name: environment[name] for name in WAIT_VARIABLES if environment.get(name)}
    return bool(chosen) and chosen != COMMAND_WAITS


def torch_brings_gnu_openmp() -> bool:
    """Whether PyTorch comes with its own copy of GNU's OpenMP, as its wheels do; found without importing PyTorch."""
    spec = find_spec("torch") if sys.platform == "linux" else None
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent
    return any(next(path.glob("libgomp*"), None) for path in (folder / "lib", folder.with_name("torch.libs")))
