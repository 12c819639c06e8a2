"""The calling program's settings of PyTorch, Accelerate and Transformers, put back when a run is over."""

import contextlib
from collections.abc import Iterator

import torch._dynamo.config
import torch._functorch.config
import torch.fx.experimental._config
from accelerate.state import AcceleratorState, GradientState
from huggingface_hub.utils.tqdm import progress_bar_states
from transformers.utils import logging


# What keeps PyTorch's compiler from computing again in the backward pass.
RECOMPUTATION_LIMITS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)


@contextlib.contextmanager
def host_settings_kept() -> Iterator[None]:
    """
    Put back, after the block and after an error in it, what a run changes for the whole process.

    These are the compiler's settings (`compiling.compile_blocks`), the state that all `Accelerator` objects share,
    with its precision and its accumulation of gradients (`distributed.make_accelerator`), and the progress bars of
    Transformers and huggingface_hub. PyTorch's random state is not put back: a run seeds it.
    """
    recomputation = {name: getattr(torch._functorch.config, name) for name in RECOMPUTATION_LIMITS}
    recompile_limit = torch._dynamo.config.recompile_limit
    use_duck_shape = torch.fx.experimental._config.use_duck_shape
    shared_states = [(kind._shared_state, dict(kind._shared_state)) for kind in (AcceleratorState, GradientState)]
    bars, hub_bars = logging.is_progress_bar_enabled(), dict(progress_bar_states)
    try:
        yield
    finally:
        for name, limit in recomputation.items():
            setattr(torch._functorch.config, name, limit)
        torch._dynamo.config.recompile_limit = recompile_limit
        torch.fx.experimental._config.use_duck_shape = use_duck_shape
        if bars:
            logging.enable_progress_bar()  # huggingface_hub's too; they are put back next
        for state, before in (*shared_states, (progress_bar_states, hub_bars)):
            state.clear()
            state.update(before)
