"""The floating-point operations that training needs: divided by a device's peak, they give the MFU."""

from .configuration_d2l_bert import D2lBertConfig


def training_arithmetic(config: D2lBertConfig, counts, pair_task: bool) -> float:
    """
    Floating-point operations that training needs; a multiplication and an addition count as two operations.

    Only matrix products for real tokens and for tokens to predict count. Work on padding or unused slots, recomputing
    to save memory, and the last block's work on tokens that no head reads do not count. So dividing by the device's
    peak gives the "model FLOPs utilization" (MFU) of PaLM (Chowdhery et al., 2022, appendix B). The backward pass has
    two matrix products for each product of the forward pass, one for the gradient of each factor.

    In the last block, the cost of attention is an estimate: every token of a sequence is assumed to be equally often
    one of those that a head reads.

    Args:
        counts: of the examples trained on, over any number of steps: `tokens`, `squared_lengths` (the sum of the
            squared lengths of the sequences), `masked_tokens` and `examples` (pairs, or sequences if there is no pair
            task).
        pair_task: whether the model has a pooler and a head for pairs.
    """
    hidden, tokens = config.hidden_size, counts.tokens
    tokens_read = counts.masked_tokens + (counts.examples if pair_task else 0)  # by a head: masked tokens, and [CLS]
    # Over all blocks. In the last one only the tokens that a head reads have a query.
    keys, queries = config.num_hidden_layers * tokens, (config.num_hidden_layers - 1) * tokens + tokens_read
    # Multiplications: of keys and values; of queries, attention's output and the feed-forward network; and
    # Q K^T and the probabilities times V, over all heads.
    products = 2 * hidden**2 * keys + (2 * hidden**2 + 2 * hidden * config.intermediate_size) * queries
    attention = 2 * hidden * counts.squared_lengths * queries / max(1, tokens)
    mlm = (hidden**2 + hidden * config.vocab_size) * counts.masked_tokens
    pairs = (hidden**2 + 2 * hidden) * counts.examples if pair_task else 0
    return 3.0 * 2 * (products + attention + mlm + pairs)
