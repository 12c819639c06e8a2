"""Restores settings of PyTorch, Accelerate and Transformers that the calling program had before a run."""

import contextlib
from collections.abc import Iterator

import torch._dynamo.config
import torch._functorch.config
import torch.fx.experimental._config
from accelerate.state import AcceleratorState, GradientState
from huggingface_hub.utils.tqdm import progress_bar_states
from transformers.utils import logging


# While these are True, PyTorch's compiler recomputes few activations in the backward pass.
RECOMPUTATION_LIMITS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)


@contextlib.contextmanager
def restore_host_settings() -> Iterator[None]:
    """
    Restore, when the block ends or fails, the settings of the whole process that a run changes.

    These are the compiler's settings (changed by `compilation.compile_blocks`), the state that all `Accelerator`
    objects share, such as mixed precision and gradient accumulation (changed by `distributed.make_accelerator`), and
    the progress bars of Transformers and huggingface_hub. PyTorch's global RNG is not restored: a run seeds it.
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
            logging.enable_progress_bar()  # also enables huggingface_hub's bars, which are restored below
        for state, before in (*shared_states, (progress_bar_states, hub_bars)):
            state.clear()
            state.update(before)
