"""Train, extend and describe a WordPiece vocabulary (Wu et al., 2016; BERT, section 3) in a stock `BertTokenizer`."""

import copy
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, PreTrainedTokenizerBase

from d2l_bert.errors import UserError


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
        texts: strings, gone through three times. An iterator, which gives them only once, is copied into memory;
            anything else (a list) is not. What training counts grows with the distinct words.
        vocab_size: most entries the vocabulary may have, the five special tokens included. Little text makes fewer.
        lowercase: fold case, as `bert-base-uncased` does.
        strip_accents: drop accents; `None` does it where `lowercase` does, as in BERT.
        min_frequency: how often a pair of pieces must occur to be merged.
        limit_alphabet: most characters to keep, the commonest first; the others become `[UNK]`.
        model_max_length: longest sequence, in tokens, that the tokenizer truncates to when asked.

    Returns:
        A `BertTokenizer` with `[PAD] [UNK] [CLS] [SEP] [MASK]` at ids 0 to 4.

    Raises:
        UserError: no text, or a `vocab_size` that the alphabet alone fills.
    """
    if isinstance(texts, Iterator):
        texts = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    alphabet = _commonest_characters(texts, normalizer, limit_alphabet)
    if not alphabet:
        raise UserError("no text to train a tokenizer on: the texts hold no character but white space")

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
        raise UserError(
            f"vocab_size {vocab_size} is below the alphabet: the special tokens and the single characters of this "
            f"text need {least} entries; raise vocab_size or lower limit_alphabet ({limit_alphabet})"
        )
    continuations = [piece for piece in characters if piece.startswith(CONTINUATION)]
    merged = set(SPECIAL_TOKENS) | set(characters)
    merges = [piece for piece in train(vocab_size, continuations) if piece not in merged]
    pieces = [*SPECIAL_TOKENS, *characters, *merges]
    return make_tokenizer(pieces, lowercase, strip_accents, model_max_length)


def make_tokenizer(
    pieces: Sequence[str], lowercase: bool, strip_accents: bool | None = None, model_max_length: int = 512
) -> BertTokenizer:
    """The tokenizer of a vocabulary in the order of its ids; the other arguments are as in `train_wordpiece`."""
    return BertTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        do_lower_case=lowercase,
        strip_accents=strip_accents,
        model_max_length=model_max_length,
    )


def extend_wordpiece(
    tokenizer: BertTokenizer, texts: Iterable[str], count: int, min_frequency: int = 2
) -> BertTokenizer:
    """
    Add whole words of a text to the vocabulary of an existing tokenizer, those that save the most tokens.

    Words are those of `count_words`. A candidate is split into two or more pieces by `tokenizer`, and saves its
    occurrences times one less than its pieces. The best, ties in the order of the words, become ordinary entries of
    the WordPiece vocabulary behind the old ones, whose ids stay.

    An added word is one token from then on. Another word keeps its pieces unless it starts with an added one:
    WordPiece takes the longest entry from the left and never goes back, so it takes the added word, then what is left
    of it; where the vocabulary has no pieces for the rest, the whole word becomes `[UNK]`.

    Args:
        tokenizer: left as it is.
        texts: strings; only the counts of their distinct words are held.
        count: most words to add. The text may hold fewer candidates.
        min_frequency: how often a word must occur.

    Raises:
        UserError: a tokenizer with tokens outside of its WordPiece vocabulary, whose ids the new entries would take.
    """
    backend = tokenizer.backend_tokenizer
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if sorted(vocabulary.values()) != list(range(len(tokenizer))):
        raise UserError(
            "the tokenizer has tokens beside its WordPiece vocabulary, so that it cannot be extended; give one without"
        )
    savings = {
        word: occurrences * (len(backend.model.tokenize(word)) - 1)
        for word, occurrences in count_words(tokenizer, texts).items()
        if occurrences >= min_frequency
    }
    best = sorted((word for word in savings if savings[word]), key=lambda word: (-savings[word], word))[:count]
    extended = copy.deepcopy(tokenizer)
    extended.backend_tokenizer.model = models.WordPiece(
        vocabulary | {word: index for index, word in enumerate(best, len(tokenizer))},
        unk_token=backend.model.unk_token,
        max_input_chars_per_word=backend.model.max_input_chars_per_word,
        continuing_subword_prefix=backend.model.continuing_subword_prefix,
    )
    return extended


def added_entries(old: BertTokenizer, new: BertTokenizer) -> list[str]:
    """
    The entries of `new` behind those of `old`, in the order of their ids.

    Raises:
        UserError: `new` does not begin with the entries of `old`.
    """
    before, after = old.convert_ids_to_tokens(range(len(old))), new.convert_ids_to_tokens(range(len(new)))
    for index, (was, piece) in enumerate(itertools.zip_longest(before, after[: len(before)])):
        if was != piece:
            has = "none" if piece is None else repr(piece)
            raise UserError(
                f"the tokenizer must begin with the model's vocabulary, and has {has} for {was!r} ({index})"
            )
    return after[len(before) :]


def count_words(tokenizer: BertTokenizer, texts: Iterable[str]) -> Counter:
    """How often each word occurs in the texts, normalised and split by the tokenizer's own normaliser and
    pre-tokenizer: for BERT's a run of characters between white space, or one mark of punctuation, or one Chinese
    character. A "[MASK]" in a text is three of them."""
    normalize = tokenizer.backend_tokenizer.normalizer.normalize_str
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    words = Counter()
    for text in texts:
        words.update(word for word, _ in split(normalize(text)))
    return words


def describe(tokenizer: BertTokenizer, sentences: Iterable[str], longest: int = 10) -> dict:
    """
    What a tokenizer makes of a text.

    Args:
        sentences: text that it was not trained on.
        longest: how many pieces to name.

    Returns:
        `words` in the sentences, as in `count_words`; `pieces_per_word`, the mean number of tokens in one;
        `unknown_share`, the share of `[UNK]` among the tokens (both 0 for no words); `longest_pieces`, the entries of
        the vocabulary with the most characters, `##` not counted, ties by id, special and unused entries left out.
    """
    model = tokenizer.backend_tokenizer.model
    words = tokens = unknown = 0
    for word, occurrences in count_words(tokenizer, sentences).items():
        pieces = model.tokenize(word)
        words += occurrences
        tokens += occurrences * len(pieces)
        unknown += occurrences * (pieces[0].id == tokenizer.unk_token_id)
    return {
        "words": words,
        "pieces_per_word": tokens / words if words else 0.0,
        "unknown_share": unknown / tokens if words else 0.0,
        "longest_pieces": list(itertools.islice(_merged_pieces(tokenizer), longest)),
    }


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `vocab.txt`, which transformers 4 and 5 both load.

    Transformers 5 no longer writes `vocab.txt`, which version 4's slow class and many tools cannot do without, and
    calls a tokenizer without a class of its own by a name that version 4 does not know.
    """
    tokenizer.save_pretrained(folder)
    config = Path(folder) / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    with open(f"{folder}/vocab.txt", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(piece + "\n" for piece in pieces(tokenizer))


def pieces(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The vocabulary in the order of its numbers."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.get)


def fingerprint(tokenizer: BertTokenizer) -> str:
    """
    A short name for a tokenizer's vocabulary: the entries with their ids, the class of its normaliser, and whether
    that folds case and strips accents. Other settings, such as the pre-tokenizer, are not in it.

    It depends on no library's file format, so an upgrade that leaves these as they are leaves it too.
    """
    normalizer = tokenizer.backend_tokenizer.normalizer
    settings = {name: getattr(normalizer, name, None) for name in ("lowercase", "strip_accents")}
    content = [sorted(tokenizer.get_vocab().items()), type(normalizer).__name__, settings]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _merged_pieces(tokenizer):
    """Entries of several characters, longest first. What the pre-tokenizer splits is no piece: [MASK], [unused7]."""
    vocabulary, split = tokenizer.get_vocab(), tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    characters = {piece: piece.removeprefix(CONTINUATION) for piece in vocabulary}
    for piece in sorted(vocabulary, key=lambda piece: (-len(characters[piece]), vocabulary[piece])):
        if len(characters[piece]) > 1 and len(split(characters[piece])) == 1:
            yield piece


def _commonest_characters(texts, normalizer, limit):
    counts = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    ranked = sorted((-count, character) for character, count in counts.items() if not character.isspace())
    return sorted(character for _, character in ranked[:limit])
