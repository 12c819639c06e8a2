"""The command with FSDP2 on CPUs, where Accelerate itself runs DDP: `python on_fsdp.py pretrain ...` on each rank.

Fails if an optimizer steps on a parameter that is not sharded, or if nothing was trained.
"""

import os
import sys
from importlib.metadata import entry_points


os.environ.update(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
os.environ.update(FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_TRANSFORMER_CLS_TO_WRAP="D2lBertEncoderBlock")

from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402


steps, original = [], AcceleratorState.__init__


def start(state, *arguments, fsdp_plugin=None, **options):
    """Set up Accelerate's state on CPUs as Accelerate does on GPUs."""
    is_new = AcceleratorState._shared_state == {}
    original(state, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if is_new:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        if state.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(state.mixed_precision)


def watch(optimizer, *_):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(isinstance(parameter, DTensor) for parameter in parameters), "FSDP2 is not in force"
    steps.append(None)


if __name__ == "__main__":
    AcceleratorState.__init__ = start
    register_optimizer_step_pre_hook(watch)
    (entry,) = entry_points(group="console_scripts", name="d2l-bert")
    code = entry.load()(sys.argv[1:])
    assert code or steps, "nothing was trained"
    sys.exit(code)
