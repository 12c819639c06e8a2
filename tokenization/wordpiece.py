"""Train a WordPiece vocabulary (Wu et al., 2016; BERT, section 3) and wrap it in a stock `BertTokenizer`."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, PreTrainedTokenizerBase


SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
CONTINUATION = "##"


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int = 8192,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    min_frequency: int = 2,
    limit_alphabet: int = 1000,
    model_max_length: int = 512,
) -> BertTokenizer:
    """
    Train a tokenizer. The same texts and options give the same files, byte for byte.

    Args:
        texts: strings, from any iterator; they are held in memory while it trains, so give a sample of a big corpus.
        vocab_size: most entries the vocabulary may have, the five special tokens included. Little text makes fewer.
        lowercase: fold case, as `bert-base-uncased` does.
        strip_accents: drop accents; `None` does it where `lowercase` does, as in BERT.
        min_frequency: how often a pair of pieces must occur to be merged.
        limit_alphabet: most characters to keep, the commonest first; the others become `[UNK]`.
        model_max_length: longest sequence, in tokens, that the tokenizer truncates to when asked.

    Returns:
        A `BertTokenizer` with `[PAD] [UNK] [CLS] [SEP] [MASK]` at ids 0 to 4.

    Raises:
        ValueError: no text, or a `vocab_size` that the alphabet alone fills.
    """
    texts = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    alphabet = _commonest_characters(texts, normalizer, limit_alphabet)
    if not alphabet:
        raise ValueError("no text to train a tokenizer on: the texts hold no character but white space")

    def train(size, known_pieces):
        trainer = trainers.WordPieceTrainer(
            vocab_size=size,
            min_frequency=min_frequency,
            # The trainer numbers these first and in order, and breaks ties between merges by number. Left to itself
            # it meets the ##-characters in the order of a randomly seeded hash map, and no two runs agree.
            special_tokens=[*SPECIAL_TOKENS, *known_pieces],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            continuing_subword_prefix=CONTINUATION,
            show_progress=False,
        )
        trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        trained.normalizer = normalizer
        trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trained.train_from_iterator(texts, trainer)
        vocabulary = trained.get_vocab()
        return sorted(vocabulary, key=vocabulary.get)

    characters = sorted(set(train(0, ())) - set(SPECIAL_TOKENS), key=lambda piece: (len(piece), piece))
    least = len(SPECIAL_TOKENS) + len(characters)
    if vocab_size < least:
        raise ValueError(
            f"vocab_size {vocab_size} is below the alphabet: the special tokens and the single characters of this "
            f"text need {least} entries; raise vocab_size or lower limit_alphabet ({limit_alphabet})"
        )
    continuations = [piece for piece in characters if piece.startswith(CONTINUATION)]
    merged = set(SPECIAL_TOKENS) | set(characters)
    merges = [piece for piece in train(vocab_size, continuations) if piece not in merged]
    pieces = [*SPECIAL_TOKENS, *characters, *merges]
    return BertTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        do_lower_case=lowercase,
        strip_accents=strip_accents,
        model_max_length=model_max_length,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `vocab.txt`, which transformers 4 and 5 both load.

    Transformers 5 no longer writes `vocab.txt`, which version 4's slow class and many tools cannot do without, and
    calls a tokenizer without a class of its own by a name that version 4 does not know.
    """
    tokenizer.save_pretrained(folder)
    config = Path(folder) / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    vocabulary = tokenizer.get_vocab()
    with open(f"{folder}/vocab.txt", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(piece + "\n" for piece in sorted(vocabulary, key=vocabulary.get))


def _commonest_characters(texts, normalizer, limit):
    counts = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    ranked = sorted((-count, character) for character, count in counts.items() if not character.isspace())
    return sorted(character for _, character in ranked[:limit])
