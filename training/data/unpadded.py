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

    Args:
        batch: the model's arguments for padded or packed rows (B, T), on the CPU.
            `attention_mask` may be left out where there is no padding.
        max_length: the most tokens of a sequence in the run: a constant, for which nothing is compiled anew.

    Returns:
        The model's arguments for the one row (1, T'), and the keyword arguments of `varlen_attention`.
    """
    ids = batch["input_ids"]
    numbers = batch.get("sequence_ids", batch.get("attention_mask", torch.ones_like(ids)))
    is_real = numbers != 0
    places = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))[is_real]
    starts = (places == 0).nonzero().squeeze(1)  # (S,), the place of each sequence's [CLS] in the one row
    is_slot = batch["labels"] != -100
    is_slot[0, 0] |= not is_slot.any()  # attention fails without a query
    place_of = is_real.flatten().cumsum(0).view_as(ids) - 1
    masked = place_of.gather(1, batch["masked_positions"])[is_slot]
    row = {name: batch[name][is_real][None] for name in ("input_ids", "token_type_ids")}
    row |= {"position_ids": places[None], "masked_positions": masked[None], "labels": batch["labels"][is_slot][None]}
    read = masked
    if "next_sentence_label" in batch:
        read, labels = torch.cat([starts, masked]), batch["next_sentence_label"]
        if "sequence_ids" in batch:  # a row has fewer sequences than slots
            labels = labels[torch.arange(labels.shape[1]) < numbers.max(dim=1, keepdim=True).values]
        row |= {"cls_positions": starts[None], "next_sentence_label": labels[None]}
    reads = torch.bucketize(read, starts, right=True).bincount(minlength=len(starts) + 1)  # of no sequence: 0
    order = read.argsort()
    return {
        **row,
        "cu_seq_lens_k": F.pad(starts, (0, 1), value=len(places)).int(),  # (S + 1,)
        "cu_seq_lens_q": reads.cumsum(0).int(),  # (S + 1,)
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
    is_of_all = query.shape[2] == key.shape[2]  # heads read fewer tokens: none reads a [SEP]
    ends = cu_seq_lens_k if is_of_all else cu_seq_lens_q
    query = query if is_of_all else query[:, :, query_order]
    if query.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        states = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # (tokens, N, D)
        output = varlen_attn(*states, ends, cu_seq_lens_k, max_length, max_length).unsqueeze(0)
    else:
        of_query, of_key = (
            torch.bucketize(torch.arange(tensor.shape[2], device=ends.device), starts[1:], right=True)
            for tensor, starts in ((query, ends), (key, cu_seq_lens_k))
        )
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=of_query[:, None] == of_key)
        output = output.transpose(1, 2)
    return output if is_of_all else output[:, query_places], None


ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)
