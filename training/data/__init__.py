"""Pairs, their order, masks, rows and micro-batches: from token ids to the arguments of the model."""
