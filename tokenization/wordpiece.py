"""Train, extend, measure and save a WordPiece tokenizer (Wu et al., 2016; BERT, section 3): a `BertTokenizer`."""

import copy
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from d2l_bert.errors import UserError, reading_model


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
        texts: strings. They are read three times, so an iterator is first copied into memory; a list or another
            iterable is not. The memory for training grows with the number of distinct words.
        vocab_size: most entries of the vocabulary, the five special tokens included. A small text gives fewer.
        lowercase: convert text to lower case, as `bert-base-uncased` does.
        strip_accents: remove accents; None means the value of `lowercase`, as in BERT.
        min_frequency: how often two pieces must occur side by side to be merged.
        limit_alphabet: most characters in the vocabulary; the most frequent are kept, the others become `[UNK]`.
        model_max_length: number of tokens that the tokenizer truncates to with `truncation=True`.

    Returns:
        A `BertTokenizer` with `[PAD] [UNK] [CLS] [SEP] [MASK]` at ids 0 to 4.

    Raises:
        UserError: the texts are empty, or `vocab_size` is below the size of the alphabet.
    """
    if isinstance(texts, Iterator):
        texts = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    characters = Counter(itertools.chain.from_iterable(map(normalizer.normalize_str, texts)))
    ranked = sorted((-count, character) for character, count in characters.items() if not character.isspace())
    alphabet = sorted(character for _, character in ranked[:limit_alphabet])
    if not alphabet:
        raise UserError("no text to train a tokenizer on: the texts hold no character but white space")

    def train(size, known_pieces):
        trainer = trainers.WordPieceTrainer(
            vocab_size=size,
            min_frequency=min_frequency,
            # The trainer gives these pieces the first ids, in order, and breaks ties between merges by id. Otherwise
            # the ##-characters would get ids in the order of a randomly seeded hash map, and no two runs would agree.
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
    return make_tokenizer([*SPECIAL_TOKENS, *characters, *merges], lowercase, strip_accents, model_max_length)


def make_tokenizer(
    pieces: Sequence[str], lowercase: bool, strip_accents: bool | None = None, model_max_length: int = 512
) -> BertTokenizer:
    """A tokenizer with these pieces as vocabulary, in the order of ids; other arguments as in `train_wordpiece`."""
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
    Add words of a text to the vocabulary of a tokenizer: the words that save the most tokens.

    Candidates are the words of `count_words` that `tokenizer` splits into two or more pieces. Adding a word saves
    occurrences * (pieces - 1) tokens. The words that save most become ordinary entries of the WordPiece vocabulary,
    with the ids after the old ones; of equal savings the first word in sorted order wins.

    An added word becomes one token. Other words are split as before, unless they start with an added word: WordPiece
    takes the longest entry from the left and never goes back, so it takes the added word first. If the vocabulary has
    no pieces for the rest, the whole word becomes `[UNK]`.

    Args:
        tokenizer: not changed.
        texts: strings; only the counts of distinct words are kept in memory.
        count: most words to add. The text may have fewer candidates.
        min_frequency: how often a word must occur.

    Returns:
        A copy of the tokenizer with the larger vocabulary.

    Raises:
        UserError: the tokenizer has tokens outside of its WordPiece vocabulary; new words would get their ids.
    """
    backend = tokenizer.backend_tokenizer
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if sorted(vocabulary.values()) != list(range(len(tokenizer))):
        raise UserError(
            "the tokenizer has tokens beside its WordPiece vocabulary, so it cannot be extended; give a tokenizer "
            "without such tokens"
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
    The entries that the vocabulary of `new` has after those of `old`, in the order of ids.

    Raises:
        UserError: the vocabulary of `new` does not begin with all entries of `old`.
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
    """
    How often each word occurs in the texts.

    The tokenizer's normaliser and pre-tokenizer define words. In BERT's, a word is one punctuation mark, one Chinese
    character, or a run of other characters without white space: "[MASK]" in a text is three words.
    """
    normalize = tokenizer.backend_tokenizer.normalizer.normalize_str
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    words = Counter()
    for text in texts:
        words.update(word for word, _ in split(normalize(text)))
    return words


def describe(tokenizer: BertTokenizer, sentences: Iterable[str]) -> dict:
    """
    Statistics of a tokenizer on a text.

    Args:
        sentences: text that the tokenizer was not trained on.

    Returns:
        `words`: number of words in the sentences, as in `count_words`.
        `pieces_per_word`: mean number of tokens in a word; 0 without words.
        `unknown_share`: share of `[UNK]` among the tokens; 0 without words.
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
    }


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder) -> None:
    """
    Write `tokenizer.json`, `tokenizer_config.json` and `vocab.txt`, so that Transformers 4 and 5 can load them.

    Transformers 5 does not write `vocab.txt`, which the slow tokenizer of version 4 and many tools need. For a
    tokenizer without a class of its own, it writes a class name that version 4 does not know.
    """
    tokenizer.save_pretrained(folder)
    config = Path(folder) / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    with open(f"{folder}/vocab.txt", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(piece + "\n" for piece in pieces(tokenizer))


def pieces(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The entries of the vocabulary in the order of ids."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.get)


def fingerprint(tokenizer: BertTokenizer) -> str:
    """
    A hash of the tokenizer's entries and ids, the class of its normaliser, and the settings `lowercase` and
    `strip_accents`. Other settings, such as the pre-tokenizer, are not part of the hash.

    The hash does not depend on a library's file format, so an upgrade of a library does not change it.
    """
    normalizer = tokenizer.backend_tokenizer.normalizer
    settings = {name: getattr(normalizer, name, None) for name in ("lowercase", "strip_accents")}
    content = [sorted(tokenizer.get_vocab().items()), type(normalizer).__name__, settings]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Existing tokenizers, of a folder or the Hub; code that lies beside them is never run


def load_tokenizer(name: str) -> BertTokenizer:
    """
    Load an existing WordPiece tokenizer to train with.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: there is no tokenizer, it cannot be loaded, it is not a BertTokenizer with BERT's special tokens, or
            these have ids near the end of the vocabulary.
    """
    with reading_model(name, "tokenizer "):
        tokenizer = stock_tokenizer(name)
    missing = [
        token for token in ("pad", "unk", "cls", "sep", "mask") if getattr(tokenizer, f"{token}_token_id") is None
    ]
    # Masking draws random tokens after the special ones.
    has_late = not missing and 2 * max(tokenizer.all_special_ids) > len(tokenizer)
    if not isinstance(tokenizer, BertTokenizer) or missing or has_late:
        raise UserError(
            f"tokenizer {name}: it is a {type(tokenizer).__name__}, and must be a BertTokenizer with BERT's five "
            f"special tokens, before the others{f' (it has no {missing[0]} token)' if missing else ''}; give another"
        )
    return tokenizer


# The files of a tokenizer's vocabulary, of which each model has one or the other.
VOCABULARY_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json"),
    *("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model"),
)


def has_tokenizer(name: str) -> bool:
    """
    Whether a model's folder or repository on the Hub also holds a tokenizer.

    For a model without one, Transformers may silently make a tokenizer that knows special tokens alone.
    """
    return any(cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in VOCABULARY_FILES)


def stock_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    Load a tokenizer of one of Transformers' own classes. Code in its folder or repository is never run.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: the tokenizer's class is defined by such code.
        Exception: any exception of `AutoTokenizer`, for a tokenizer that cannot be loaded.
    """
    settings = get_tokenizer_config(name)
    # Refused here: if Transformers knows the model type, it would silently load the tokenizer in another class.
    if settings.get("auto_map") and not hasattr(transformers, settings.get("tokenizer_class") or ""):
        raise UserError(
            "auto_map in its tokenizer_config.json asks for code of its own, which is never run; give a stock "
            "BertTokenizer"
        )
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    tokenizer.init_kwargs.pop("auto_map", None)  # `save_pretrained` would write auto_map, but not the code it names
    return tokenizer


def read_tokenizer(name: str, config):
    """
    The tokenizer in a model's folder or repository; None if there is none.

    Args:
        name: a folder or an id on the Hub.
        config: the model's configuration.

    Raises:
        UserError: the tokenizer cannot be loaded, or has more tokens than the model.
    """
    if not has_tokenizer(name):
        return None
    tokenizer = stock_tokenizer(name)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"its tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}; put back the model's own, "
            f"or take it out"
        )
    return tokenizer
