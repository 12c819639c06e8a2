"""The model card's template, and the cards of released models."""
