"""Rows without padding: a micro-batch as one row with all its sequences, and an attention within each of them.

Importing this module makes the attention known to Transformers, which makes no mask for it.
"""

import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


VARLEN = "varlen"  # the attention's name as an `attn_implementation`


def without_padding(batch: dict[str, torch.Tensor], max_length: int) -> dict:
    """
    A micro-batch as one row with all its sequences, for a model whose attention is `VARLEN`.

    Two rows, the first packed with two sequences (C is a [CLS], - is padding), and the one row that they become:

        two rows                            C a a C b -    C d d d - -
        one row                             C a a C b C d d d
        the place of each token in it       0 1 2 3 4 5 6 7 8
        `starts`, the places of the [CLS]   0 3 5

    Args:
        batch: the model's arguments for padded or packed rows (B, T), on the CPU.
            `attention_mask` may be left out where there is no padding, or `sequence_ids` mark it.
        max_length: the most tokens of a sequence in the run: a constant, for which nothing is compiled anew.

    Returns:
        The model's arguments for the one row (1, T'), and the keyword arguments of `varlen_attention`.
    """
    ids = batch["input_ids"]
    if "sequence_ids" in batch:
        is_real = batch["sequence_ids"] != 0  # the sequences of a packed row are numbered from 1
    elif "attention_mask" in batch:
        is_real = batch["attention_mask"] != 0
    else:
        is_real = torch.ones_like(ids, dtype=torch.bool)
    column = torch.arange(ids.shape[1]).expand_as(ids)
    position = batch.get("position_ids", column)[is_real]  # of each token in its sequence (T',)
    starts = (position == 0).nonzero().squeeze(1)  # (S,)
    is_slot = batch["labels"] != -100
    if not is_slot.any():
        is_slot[0, 0] = True  # attention fails without a query
    place = is_real.flatten().cumsum(0).view_as(ids) - 1  # of each token in the one row (B, T); not read of padding
    masked_positions = place.gather(1, batch["masked_positions"])[is_slot]
    arguments = {
        "input_ids": batch["input_ids"][is_real][None],
        "token_type_ids": batch["token_type_ids"][is_real][None],
        "position_ids": position[None],
        "masked_positions": masked_positions[None],
        "labels": batch["labels"][is_slot][None],
    }
    read_by_heads = masked_positions
    if "next_sentence_label" in batch:
        labels = batch["next_sentence_label"]
        if "sequence_ids" in batch:  # a row may have fewer sequences than there are slots for labels
            sequences_in_row = batch["sequence_ids"].max(dim=1, keepdim=True).values
            labels = labels[torch.arange(labels.shape[1]) < sequences_in_row]
        arguments |= {"cls_positions": starts[None], "next_sentence_label": labels[None]}
        read_by_heads = torch.cat([starts, masked_positions])
    return arguments | _arguments_of_attention(starts, len(position), read_by_heads, max_length)


def _arguments_of_attention(starts, tokens, read_by_heads, max_length):
    """
    The keyword arguments of `varlen_attention`.

    With two sequences of 4 and 3 tokens, of which heads read the [CLS] of both and the masked tokens 2, 3 and 5:

        read_by_heads     0 4 2 3 5
        query_order       0 2 3 1 4      in the order of the text: 0 2 3, then 4 5 of the second sequence
        query_places      0 3 1 2 4      the place, in that order, of each of `read_by_heads`
        cu_seq_lens_q     0 3 5          of the queries in that order
        cu_seq_lens_k     0 4 7          of all tokens

    Args:
        starts: the place of each sequence's first token (S,).
        tokens: the number of tokens in the one row.
        read_by_heads: the places of the tokens that a head reads (Q,).
    """
    sequence = torch.bucketize(read_by_heads, starts, right=True)  # of each token, counted from 1: 1 2 1 1 2 above
    # How many are read in each sequence, 0 3 2 above: none in a sequence 0, so that their sums begin with 0.
    reads_in_sequence = sequence.bincount(minlength=len(starts) + 1)  # (S + 1,)
    order = read_by_heads.argsort()
    return {
        "cu_seq_lens_k": F.pad(starts, (0, 1), value=tokens).int(),  # (S + 1,)
        "cu_seq_lens_q": reads_in_sequence.cumsum(0).int(),  # (S + 1,)
        "max_length": max_length,
        "query_order": order,
        "query_places": order.argsort(),
    }


def varlen_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    cu_seq_lens_k,
    cu_seq_lens_q,
    max_length,
    query_order,
    query_places,
    **kwargs,
):
    """
    Attention within each sequence of one row: PyTorch's kernel on an NVIDIA GPU, else SDPA with a mask, which is slow.

    Args:
        query: (1, N, Q, D), of all tokens, or in the last block of the tokens that a head reads.
        key, value: (1, N, T, D).
        cu_seq_lens_k: where each sequence begins, and the end of the last one, int32 (S + 1,).
        cu_seq_lens_q: the same among the tokens that a head reads, in the order of the text.
        query_order, query_places: that order (Q,), and its inverse.

    Returns:
        The output (1, Q, N, D), and None for the attention probabilities.

    Raises:
        ValueError: attention has dropout, which the kernel does not have.
    """
    if kwargs.get("dropout"):
        raise ValueError("attention without padding has no dropout; set attention_probs_dropout_prob to 0")
    # The last block of the model computes queries for the tokens that a head reads, the others for all tokens. It is
    # recognized by its fewer queries: no head reads a [SEP], so that they are always fewer.
    has_all_queries = query.shape[2] == key.shape[2]
    if has_all_queries:
        query_ends = cu_seq_lens_k
    else:
        query_ends = cu_seq_lens_q
        # In memory (1, Q, N, D), as FlashAttention 3 gives its output. PyTorch tells the compiler that outputs lie in
        # memory as queries do, and a compiled program stops where they do not.
        query = query.transpose(1, 2)[:, query_order].transpose(1, 2)
    if query.device.type == "cuda":
        output = _nvidia_kernel(query, key, value, query_ends, cu_seq_lens_k, max_length)
    else:
        query_sequence = _sequence_of_each(query, query_ends)
        key_sequence = _sequence_of_each(key, cu_seq_lens_k)
        is_same = query_sequence[:, None] == key_sequence  # (Q, T)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=is_same).transpose(1, 2)
    return output if has_all_queries else output[:, query_places], None


def _nvidia_kernel(query, key, value, query_ends, key_ends, max_length):
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))  # (tokens, N, D)
    return varlen_attn(query, key, value, query_ends, key_ends, max_length, max_length).unsqueeze(0)


def _sequence_of_each(states, borders):
    """The number of the sequence of each token (tokens,), from their states (1, N, tokens, D) and `cu_seq_lens`."""
    places = torch.arange(states.shape[2], device=borders.device)
    return torch.bucketize(places, borders[1:], right=True)


ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)
