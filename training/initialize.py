"""Where the weights of a run start, beyond the normal distribution that the model itself draws (BERT's)."""

import torch
from torch import nn


# Wavelengths of the position table run from 2 pi to 2 pi times this. Neighbours, not distant positions, are what a
# fresh model has to tell apart; 10,000, the Transformer's own, would leave most of the table's columns constant.
LONGEST_WAVE = 100


@torch.no_grad()
def look_at_neighbours(model, generator: torch.Generator | None = None) -> None:
    """
    Let the heads of the first block look at the token before (even heads) and the token after (odd heads).

    A fresh BERT attends to every token alike, and predicts a masked token from its frequency alone for a good part of
    a short run, until some head has found out what stands beside it. Here positions start as sinusoids (Vaswani et
    al., 2017; d2l, section 11.6), for which "one further" is a rotation, and a head's keys as its queries, rotated by
    one position. Values and outputs of every block start large enough for what is found to be heard. All of it is only
    a start: every weight is trained.

    Args:
        model: a `D2lBertForPreTraining` or `D2lBertForMaskedLM` just initialised.
        generator: source of randomness; the global one by default.

    Raises:
        ValueError: an odd `hidden_size`, which has no room for sines and cosines in pairs.
    """
    config, bert = model.config, model.bert
    if config.hidden_size % 2:
        raise ValueError(f"attention_init neighbours needs an even hidden_size, got {config.hidden_size}")
    hidden_size, positions = config.hidden_size, bert.embeddings.position_embeddings.weight
    waves = LONGEST_WAVE ** (-torch.arange(0, hidden_size, 2) / hidden_size)  # (H / 2,)
    angles = torch.arange(len(positions))[:, None] * waves
    # A sine's standard deviation is 1 / sqrt(2); the table gets twice that of the other embeddings.
    positions.copy_(interleave(angles.sin(), angles.cos()) * 2 * config.initializer_range * 2**0.5)

    first = bert.encoder.layer[0].attention
    for head, rows in enumerate(torch.arange(hidden_size).split(first.head_size)):
        nn.init.normal_(query := torch.empty(len(rows), hidden_size), std=hidden_size**-0.5, generator=generator)
        shift = waves if head % 2 else -waves
        sines, cosines = query[:, 0::2], query[:, 1::2]
        first.query.weight[rows] = query
        first.key.weight[rows] = interleave(
            sines * shift.cos() + cosines * shift.sin(), cosines * shift.cos() - sines * shift.sin()
        )
    for block in bert.encoder.layer:
        for linear in (block.attention.value, block.attention.output):
            nn.init.normal_(linear.weight, std=0.7 * hidden_size**-0.5, generator=generator)


def interleave(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """Two matrices (R, C) as the even and odd columns of one (R, 2C)."""
    return torch.stack((even, odd), dim=-1).flatten(1)
