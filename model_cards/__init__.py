"""The model card, and publishing on the Hub."""
