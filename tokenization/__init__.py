"""From raw text to a stock `BertTokenizer` and token ids on disk."""
