"""The tokenizer recipe: text in, a stock `BertTokenizer` out."""
