"""The training loop, and what a run leaves behind."""
