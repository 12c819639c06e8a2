"""What only uses a model: vectors of texts, its attention, its answers, and pages on which one tries it."""
