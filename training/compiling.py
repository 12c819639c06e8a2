"""torch.compile: the encoder blocks of a run, compiled."""

import contextlib
from collections.abc import Iterator

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.fx.experimental._config
from torch import nn

from d2l_bert.messages import explained


# Programs that the compiler may make for the encoder block: one for training, one for evaluation, for the last block,
# for rows with and without padding, and wherever a size is 1. PyTorch would make 8, and run the rest uncompiled.
RECOMPILE_LIMIT = 64


@contextlib.contextmanager
def compiled_blocks(model: nn.Module, is_compiled: bool) -> Iterator[None]:
    """
    Within the block, run the encoder blocks compiled, with one program for all blocks and dynamic shapes.

    This is regional compilation: one block is compiled, so that a deep model compiles as fast as a shallow one. Names
    of parameters and the content of checkpoints do not change. Programs are compiled when they are first needed.

    Args:
        model: a d2l-bert model with an MLM head, without a DDP or FSDP2 wrapper.
        is_compiled: whether to compile; nothing is done if not.

    Raises:
        UserError: a program cannot be compiled.
    """
    if not is_compiled:
        yield
        return
    blocks = model.base_model.encoder.layer
    model.mlm.compiles_gradient = True  # read by the loss, see `MaskLM`
    for block in blocks:
        # The method of the class, bound to this block: all blocks share its code, and so its programs. The compiled
        # one is an attribute of the block itself, which hides the method until it is deleted below.
        method = type(block).compute.__get__(block)
        block.compute = torch.compile(method, dynamic=True)
    try:
        with (
            explained("torch_compile", "give --torch_compile false", torch._dynamo.exc.TorchDynamoException),
            # DDP's optimizer would cut the program of a block in two, to send the gradients of one part earlier. DDP
            # sends those of other blocks meanwhile.
            torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, optimize_ddp=False),
            # Recomputing activations is cheaper than writing and reading them. `aggressive_recomputation` is wrong
            # here: it would also recompute dropout masks, with other random numbers.
            torch._functorch.config.patch(
                ban_recompute_used_far_apart=False,
                ban_recompute_long_fusible_chains=False,
                ban_recompute_materialized_backward=False,
            ),
            # Duck shapes would compile a separate program for a sequence length of 128 beside a hidden size of 128.
            torch.fx.experimental._config.patch(use_duck_shape=False),
        ):
            yield
    finally:
        model.mlm.compiles_gradient = False
        for block in blocks:
            vars(block).pop("compute", None)  # the method of the class is back
