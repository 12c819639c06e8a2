"""The most tokens that a model of Transformers can read, ours or a stock one."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Transformers gives a tokenizer without a limit one of 1e30 tokens.
NO_LIMIT = 2**31


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """
    The most tokens of an input, special tokens included; None if there is no limit.

    Args:
        model: the encoder, with or without heads; its weights are not read, and may be on the device `meta`.
    """
    limits = [int(tokenizer.model_max_length)] if tokenizer.model_max_length < NO_LIMIT else []
    if (positions := getattr(model.config, "max_position_embeddings", None) or -1) > 0:
        tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
        # RoBERTa and its kin count positions from the id of the padding token on, plus 1; their tables know this id.
        unused = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
        limits.append(positions - max(unused, default=0))
    return min(limits, default=None)
