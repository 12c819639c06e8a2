"""What the Hub receives: the configuration and the model, one file each, in the book's order."""
