"""The model card's template."""
