"""Restores settings of PyTorch, Accelerate and Transformers that the calling program had before a run."""

import contextlib
from collections.abc import Iterator

from accelerate.state import AcceleratorState, GradientState
from huggingface_hub.utils.tqdm import progress_bar_states
from transformers.utils import logging


@contextlib.contextmanager
def restore_host_settings() -> Iterator[None]:
    """
    Restore, when the block ends or fails, the settings of the whole process that a run changes.

    These are the state that all `Accelerator` objects share, such as mixed precision and gradient accumulation
    (changed by `distributed.make_accelerator`), and the progress bars of Transformers and huggingface_hub. PyTorch's
    global RNG is not restored: a run seeds it.
    """
    shared_states = [(kind._shared_state, dict(kind._shared_state)) for kind in (AcceleratorState, GradientState)]
    bars, hub_bars = logging.is_progress_bar_enabled(), dict(progress_bar_states)
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()  # also enables huggingface_hub's bars, which are restored below
        for state, before in (*shared_states, (progress_bar_states, hub_bars)):
            state.clear()
            state.update(before)
