"""Train, extend, measure and save a WordPiece tokenizer (Wu et al., 2016; BERT, section 3)."""

import copy
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

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


def general_tokenizer(backend: Tokenizer, model_max_length: int = 512) -> PreTrainedTokenizerFast:
    """
    A tokenizer with the rules of `backend`, whose vocabulary has BERT's special tokens.

    Transformers 5 makes the rules of a `BertTokenizer` anew; those of this class it reads from tokenizer.json.
    """
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=model_max_length, **names)
    give_bert_inputs(tokenizer)
    return tokenizer


def give_bert_inputs(tokenizer: PreTrainedTokenizerFast) -> None:
    """Set how a tokenizer joins pieces to text, and puts special tokens and segments around texts: as BERT does."""
    cls, sep, backend = tokenizer.cls_token, tokenizer.sep_token, tokenizer.backend_tokenizer
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION)
    backend.post_processor = processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, "$B:1", f"{sep}:1"],
        special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names  # the latter is saved


def extend_wordpiece(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], count: int, min_frequency: int = 2
) -> PreTrainedTokenizerBase:
    """
    Add words of a text to the vocabulary of a tokenizer: the words that save the most tokens.

    Candidates are the words of `count_words` that `tokenizer` splits into two or more pieces, or that are `[UNK]`.
    Adding a word saves occurrences * (pieces - 1) tokens; a word that is `[UNK]` counts as if it were split into its
    characters, and one of a single character as if into two. The words that save most become ordinary entries of the
    WordPiece vocabulary, with the ids after the old ones; of equal savings the first word in sorted order wins.

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
    if beside := sorted(backend.get_vocab().keys() - vocabulary.keys(), key=backend.token_to_id):
        more = f" and {len(beside) - 5:,} others" if len(beside) > 5 else ""
        raise UserError(
            f"the tokenizer cannot be extended, as it has tokens beside its WordPiece vocabulary: "
            f"{', '.join(beside[:5])}{more}; give a tokenizer without them"
        )
    savings = {}
    for word, occurrences in count_words(tokenizer, texts).items():
        # A longer word would still be [UNK].
        if occurrences >= min_frequency and len(word) <= backend.model.max_input_chars_per_word:
            pieces = backend.model.tokenize(word)
            is_unknown = pieces[0].value == backend.model.unk_token
            savings[word] = occurrences * max(len(word) - 1, 1) if is_unknown else occurrences * (len(pieces) - 1)
    best = sorted((word for word in savings if savings[word]), key=lambda word: (-savings[word], word))[:count]
    extended = copy.deepcopy(tokenizer)
    extended.backend_tokenizer.model = models.WordPiece(
        vocabulary | {word: index for index, word in enumerate(best, len(tokenizer))},
        unk_token=backend.model.unk_token,
        max_input_chars_per_word=backend.model.max_input_chars_per_word,
        continuing_subword_prefix=backend.model.continuing_subword_prefix,
    )
    return extended


def added_entries(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> list[str]:
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


def count_words(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Counter:
    """
    How often each word occurs in the texts.

    The tokenizer's normaliser and pre-tokenizer define words. In BERT's, a word is one punctuation mark, one Chinese
    character, or a run of other characters without white space: "[MASK]" in a text is three words.
    """
    backend = tokenizer.backend_tokenizer
    normalize = backend.normalizer.normalize_str if backend.normalizer else str
    split = backend.pre_tokenizer.pre_tokenize_str if backend.pre_tokenizer else lambda text: [(text, None)]
    words = Counter()
    for text in texts:
        words.update(word for word, _ in split(normalize(text)))
    return words


def describe(tokenizer: PreTrainedTokenizerBase, sentences: Iterable[str]) -> dict:
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

    Transformers 5 does not write `vocab.txt`, which the slow tokenizer of version 4 and many tools need.
    """
    tokenizer.save_pretrained(folder)
    config = Path(folder) / "tokenizer_config.json"
    settings = settings_of_both_versions(json.loads(config.read_text(encoding="utf-8")))
    config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with open(f"{folder}/vocab.txt", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(piece + "\n" for piece in pieces(tokenizer))


def settings_of_both_versions(settings: dict) -> dict:
    """
    The content of a tokenizer_config.json of Transformers 5 with two names that version 4 knows: the class of a
    tokenizer without one of its own, and the list of special tokens beside the usual ones.
    """
    settings = dict(settings)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    return settings


def pieces(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The entries of the vocabulary in the order of ids."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.get)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    A hash of the tokenizer's entries and ids, the class of its normaliser, and the settings `lowercase` and
    `strip_accents`. A `BertTokenizer` has no other rules; of other tokenizers the hash covers `rules_of`.

    For a `BertTokenizer`, the hash does not depend on a library's file format, so an upgrade does not change it.
    """
    normalizer = tokenizer.backend_tokenizer.normalizer
    settings = {name: getattr(normalizer, name, None) for name in ("lowercase", "strip_accents")}
    content = [sorted(tokenizer.get_vocab().items()), type(normalizer).__name__, settings]
    if not isinstance(tokenizer, BertTokenizer):
        content.append(rules_of(tokenizer.backend_tokenizer))
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def rules_of(backend: Tokenizer) -> dict:
    """What a tokenizer does with a text, but for its vocabulary: normalizer, pre-tokenizer, settings of WordPiece."""
    parts = json.loads(backend.to_str())
    model = {name: value for name, value in parts["model"].items() if name != "vocab"}
    return {"normalizer": parts["normalizer"], "pre_tokenizer": parts["pre_tokenizer"], "model": model}
