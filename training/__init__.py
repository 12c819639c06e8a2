"""Text to batch, the training loop, and what a run leaves behind."""
