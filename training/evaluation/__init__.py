"""`d2l-bert evaluate`: what masked language models are worth on a text and on minimal pairs."""
