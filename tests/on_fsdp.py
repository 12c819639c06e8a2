"""The `d2l-bert` command with FSDP2 on CPUs. Accelerate itself runs DDP on CPUs even if FSDP2 is requested.

    accelerate launch --config_file docs/accelerate/fsdp2.yaml --num_processes 2 tests/on_fsdp.py pretrain ...
    torchrun --standalone --nproc-per-node 2 tests/on_fsdp.py pretrain ...

Fails if an optimizer steps on a parameter that is not sharded, or if the run succeeds without an optimizer step.
"""

import os
import sys


os.environ.update(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")  # before torch looks for devices
for name, value in {  # the variables that `accelerate launch` sets from docs/accelerate/fsdp2.yaml
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "D2lBertEncoderBlock",
}.items():
    os.environ.setdefault(name, value)

from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

from d2l_bert.__main__ import main  # noqa: E402


class Fsdp2:
    """Switches FSDP2 on, and checks at every optimizer step that it is on."""

    def __init__(self):
        self.steps = 0
        self.original_init = AcceleratorState.__init__
        AcceleratorState.__init__ = lambda *args, **kwargs: self.start(*args, **kwargs)
        register_optimizer_step_pre_hook(self.watch)

    def start(self, state, *args, fsdp_plugin=None, **kwargs):
        """Set up Accelerate's state on CPUs the way Accelerate does on GPUs."""
        is_new = AcceleratorState._shared_state == {}
        self.original_init(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if is_new:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if state.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state.mixed_precision)

    def watch(self, optimizer, *_):
        """Fail if an optimizer steps on a parameter that is not sharded."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert all(isinstance(parameter, DTensor) for parameter in parameters), "FSDP2 is not in force"
        self.steps += 1


if __name__ == "__main__":
    fsdp2 = Fsdp2()
    code = main(sys.argv[1:])
    assert code or fsdp2.steps, "nothing was trained"
    sys.exit(code)
