"""Train, extend, save and load a WordPiece tokenizer (Wu et al., 2016; BERT, section 3)."""

import copy
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import transformers
from accelerate.utils import patch_environment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from d2l_bert.folders import short_hash, write_json
from d2l_bert.messages import UserError, shortened
from d2l_bert.records import read_record
from d2l_bert.tokenization.model_files import check_folder, find_file, without_log_messages
from d2l_bert.tokenization.rules import (
    LONGEST_WORD,
    Rules,
    choose_rules,
    contents_of,
    count_characters,
    count_words,
    split_words,
)
from d2l_bert.tokenization.tokenizer_files import (
    MOST_CHARACTERS,
    check_steps,
    check_tokenizer_rules,
    check_tokenizer_settings,
    panics_explained,
    read_vocabulary,
)


logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
CONTINUATION = "##"
VOCABULARY_FILE = "vocab.txt"


# `choose_alphabet` weighs two shares. The first is that of the vocabulary's entries that the alphabet takes.
CHEAP_ALPHABET = 1 / 4  # which every text may take, however rare its characters are
LARGE_ALPHABET = 1 / 2
LARGEST_ALPHABET = 3 / 4

# The second is the share of the text's words that become [UNK], as they have a character outside of the alphabet.
FEW_UNKNOWN = 0.001
MANY_UNKNOWN = 0.008  # held-out text, which has characters of its own, then stays below 1 %
MOST_UNKNOWN = 0.05


# Words in a text for the trainer: in longer ones it becomes slow.
REPEATED_AT_ONCE = 500


def train_wordpiece(
    texts: Iterable[str | Sequence[str]],
    vocab_size: int = 8192,
    lowercase: bool = True,
    strip_accents: bool | Literal["auto"] = "auto",
    min_frequency: int = 2,
    limit_alphabet: int | None = None,
    model_max_length: int = 512,
    pre_tokenizer: str = "bert",
    individual_digits: bool = False,
) -> BertTokenizer | PreTrainedTokenizerFast:
    """
    Train a tokenizer. The same texts and options give the same files, byte for byte.

    Args:
        texts: strings, or batches of strings as lists, read once. The memory for training grows with the number of
            distinct words.
        vocab_size: most entries of the vocabulary, the five special tokens included. A small text gives fewer.
        lowercase: convert text to lower case, as `bert-base-uncased` does.
        strip_accents: remove accents and all other nonspacing marks; `auto` follows the text (`choose_rules`).
        min_frequency: how often two pieces must occur side by side to be merged.
        limit_alphabet: most characters in the vocabulary; words with others become `[UNK]`. None follows the text
            (`choose_alphabet`).
        model_max_length: number of tokens that the tokenizer truncates to with `truncation=True`.
        pre_tokenizer: `bert`, `characters`, or `kmers:6` for pieces of six characters (`Rules`).
        individual_digits: make every digit a word.

    Returns:
        A tokenizer with `[PAD] [UNK] [CLS] [SEP] [MASK]` at ids 0 to 4: a `BertTokenizer`, or, where the text or the
        options need more than BERT's rules, a `PreTrainedTokenizerFast`.

    Raises:
        UserError: the texts are empty, are one string or other values, or `vocab_size` is below the size of the
            alphabet.
    """
    if isinstance(texts, str):  # whose characters would be the texts
        raise UserError("texts is one string; give a list of texts: [text]")
    words = count_words(_each_text(texts))
    rules = choose_rules(contents_of(words), lowercase, strip_accents, pre_tokenizer, individual_digits)
    return train_on_words(words, rules, vocab_size, min_frequency, limit_alphabet, model_max_length)


def _each_text(texts):
    """The strings among texts and in batches of texts."""
    for entry in texts:
        for text in [entry] if isinstance(entry, str) else entry:
            if not isinstance(text, str):
                raise UserError(f"texts: holds a {type(text).__name__}; give strings, or batches of strings as lists")
            yield text


def train_on_words(
    words: Counter,
    rules: Rules,
    vocab_size: int = 8192,
    min_frequency: int = 2,
    limit_alphabet: int | None = None,
    model_max_length: int = 512,
) -> BertTokenizer | PreTrainedTokenizerFast:
    """As `train_wordpiece`, on words that are separated by white space (`count_words`), with given rules."""
    split = split_words(words, rules.normalizer(), rules.splitter())
    words = {word: count for word, count in split.items() if len(word) <= LONGEST_WORD}  # a longer one is [UNK]
    alphabet = choose_alphabet(words, vocab_size, limit_alphabet)
    # A word with another character will be [UNK]: what it is made of teaches nothing.
    words = {word: count for word, count in words.items() if alphabet.issuperset(word)}
    # WordPiece can divide every word if the vocabulary has each character, and ##character for each that stands behind
    # the first of a word.
    continuations = sorted(CONTINUATION + character for character in _characters_inside(words))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        # The trainer gives its special tokens the first ids, in this order, and breaks ties between merges by id. As
        # plain pieces, the continuations would get ids in the order of a randomly seeded hash map: no two runs would
        # agree.
        special_tokens=[*SPECIAL_TOKENS, *continuations],
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # One thread: handing words to several costs more than counting them.
    with patch_environment(TOKENIZERS_PARALLELISM="false"):
        trained.train_from_iterator(_repeated(words), trainer)
    # The trainer's order is [PAD] ... ##a ##b a b ab ..., that of our vocabulary [PAD] ... a b ##a ##b ab ...
    not_merged = [*SPECIAL_TOKENS, *sorted(alphabet), *continuations]
    merged = pieces(trained)[len(not_merged) :]
    return make_tokenizer([*not_merged, *merged], rules, model_max_length)


def _repeated(words):
    """Texts with each word as often as it occurs: the trainer takes texts, not counts."""
    for word, count in words.items():
        for done in range(0, count, REPEATED_AT_ONCE):
            yield f"{word} " * min(count - done, REPEATED_AT_ONCE)


def _characters_inside(words):
    """The characters that stand in a word behind its first."""
    return set().union(*(word[1:] for word in words))


def choose_alphabet(words: Counter, vocab_size: int, limit: int | None = None) -> set[str]:
    """
    The characters that the vocabulary spells all words with: the most frequent ones.

    A character takes one entry of the vocabulary, and a second one, with ##, if it stands in a word behind the first.

    The usual alphabet leaves at most `FEW_UNKNOWN` of the text in [UNK]. It takes at least `CHEAP_ALPHABET` of the
    entries, and at most `LARGE_ALPHABET`. Where it leaves more than `MANY_UNKNOWN`, the size is, with

        largest     the number of characters that `LARGEST_ALPHABET` has entries for
        wanted      the fewest characters that leave at most `MANY_UNKNOWN`
        accepted    the fewest characters that leave at most `MOST_UNKNOWN`,

    in the first case that holds:

        wanted <= largest       wanted
        accepted <= usual       usual: a larger one would take entries, and still leave more than `MANY_UNKNOWN`
        accepted <= largest     largest
        else                    wanted, although it is more than the largest

    Args:
        words: how often each word occurs.
        limit: most characters; None for no other limit.

    Raises:
        UserError: there is no word, or the vocabulary is too small for the characters.
    """
    counts = count_characters(words)
    inside = _characters_inside(words)
    if not counts:
        raise UserError("no text to train a tokenizer on: the texts hold no character that BERT keeps")
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    rank = {character: number for number, character in enumerate(ranked, 1)}
    # entries[n] and unknown[n] are of the n most frequent characters: the entries that they take, and the share of the
    # text that they leave in [UNK]. For the words "ab" twice and "abc" once, the characters are a, b and c:
    #
    #     entries             0  1  3    5      a; b and ##b; c and ##c
    #     rarest                    2    3      b is the 2nd character, c the 3rd
    #     sizes_by_rarest     0  0  4    3      "ab" twice has 4 characters, "abc" has 3
    #     unknown             1  1  3/7  0      a spells no word, a and b spell "ab"
    entries_of_each = [2 if character in inside else 1 for character in ranked]
    entries = np.cumsum([0, *entries_of_each])
    rarest = [max(map(rank.get, word)) for word in words]  # the rank of each word's rarest character
    sizes = [count * len(word) for word, count in words.items()]
    sizes_by_rarest = np.bincount(rarest, sizes, len(ranked) + 1)
    unknown = 1 - np.cumsum(sizes_by_rarest) / sizes_by_rarest.sum()

    def most_in(share_of_entries):
        return int(np.searchsorted(entries, share_of_entries * vocab_size, side="right")) - 1

    def fewest_that_leave(share_of_text):
        # Rounding must not decide: 1 - 992/1000 is 0.008 + 7e-18, which is not more than 0.008.
        return int((unknown > share_of_text + 1e-12).sum())

    usual = max(most_in(CHEAP_ALPHABET), fewest_that_leave(FEW_UNKNOWN))
    usual = min(usual, most_in(LARGE_ALPHABET))
    largest = most_in(LARGEST_ALPHABET)
    wanted = fewest_that_leave(MANY_UNKNOWN)
    accepted = fewest_that_leave(MOST_UNKNOWN)
    if wanted <= usual:
        size = usual
    elif wanted <= largest:
        size = wanted
    elif accepted <= usual:
        size = usual
    elif accepted <= largest:
        size = largest
    else:
        size = wanted
    size = min(size, limit or len(ranked))
    needed = len(SPECIAL_TOKENS) + entries[size]
    if needed > vocab_size:
        raise UserError(
            f"vocab_size {vocab_size} is below the alphabet: the special tokens and the {size:,} characters that this "
            f"text is written in need {needed} entries; raise vocab_size, or give a lower limit_alphabet"
        )
    return set(ranked[:size])


def make_tokenizer(
    pieces: Sequence[str], rules: Rules, model_max_length: int = 512
) -> BertTokenizer | PreTrainedTokenizerFast:
    """
    A tokenizer with these pieces as vocabulary, in the order of ids.

    Transformers' `BertTokenizer` makes its rules anew from the vocabulary and two settings, so that other rules need
    the general class, which reads them from tokenizer.json.
    """
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    rules_of_bert = Rules(lowercase=rules.lowercase, strip_accents=rules.strip_accents)  # all else as in BERT
    if rules == rules_of_bert:
        return BertTokenizer(
            vocab=vocabulary,
            do_lower_case=rules.lowercase,
            strip_accents=rules.strip_accents,
            model_max_length=model_max_length,
        )
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
    backend.normalizer = rules.normalizer()
    backend.pre_tokenizer = rules.splitter()
    return general_tokenizer(backend, model_max_length)


def general_tokenizer(backend: Tokenizer, model_max_length: int = 512) -> PreTrainedTokenizerFast:
    """
    A tokenizer with the rules of `backend`, whose vocabulary has BERT's special tokens.

    Transformers 5 makes the rules of a `BertTokenizer` anew; those of this class it reads from tokenizer.json.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model_max_length,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    give_bert_inputs(tokenizer)
    return tokenizer


def give_bert_inputs(tokenizer: PreTrainedTokenizerFast) -> None:
    """Set how a tokenizer joins pieces to text, and puts special tokens and segments around texts: as BERT does."""
    cls = tokenizer.cls_token
    sep = tokenizer.sep_token
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION)
    backend.post_processor = processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, "$B:1", f"{sep}:1"],
        special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_input_names = names
    # `save_pretrained` writes the arguments that a tokenizer was made with, not its attributes.
    tokenizer.init_kwargs["model_input_names"] = names


def extend_wordpiece(
    tokenizer: PreTrainedTokenizerBase, words: Counter, count: int, min_frequency: int = 2
) -> PreTrainedTokenizerBase:
    """
    Add words of a text to the vocabulary of a tokenizer: the words that save the most tokens.

    Candidates are the words of `split_words` that `tokenizer` splits into two or more pieces, or that are `[UNK]`.
    Adding a word saves occurrences * (pieces - 1) tokens; a word that is `[UNK]` counts as if it were split into its
    characters, and one of a single character as if into two. The words that save most become ordinary entries of the
    WordPiece vocabulary, with the ids after the old ones; of equal savings the first word in sorted order wins.

    An added word becomes one token. Other words are split as before, unless they start with an added word: WordPiece
    takes the longest entry from the left and never goes back, so it takes the added word first. If the vocabulary has
    no pieces for the rest, the whole word becomes `[UNK]`.

    Args:
        tokenizer: not changed.
        words: those of the text (`count_words`).
        count: most words to add. The text may have fewer candidates.
        min_frequency: how often a word must occur.

    Returns:
        A copy of the tokenizer with the larger vocabulary.

    Raises:
        UserError: the tokenizer has tokens outside of its WordPiece vocabulary; new words would get their ids.
    """
    backend = tokenizer.backend_tokenizer
    model = backend.model
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if beside := [piece for piece in pieces(backend) if piece not in vocabulary]:
        raise UserError(
            f"the tokenizer cannot be extended, as it has tokens beside its WordPiece vocabulary: "
            f"{shortened(', '.join(beside), 100)}; give a tokenizer without them"
        )
    savings = {}
    for word, occurrences in split_words(words, backend.normalizer, backend.pre_tokenizer).items():
        # A longer word would still be [UNK].
        is_candidate = word not in vocabulary and 0 < len(word) <= model.max_input_chars_per_word
        if is_candidate and occurrences >= min_frequency:
            split = model.tokenize(word)
            is_unknown = split[0].value == model.unk_token
            tokens = max(len(word), 2) if is_unknown else len(split)
            savings[word] = occurrences * (tokens - 1)
    best = sorted(savings, key=lambda word: (-savings[word], word))[:count]
    added = {word: index for index, word in enumerate(best, len(tokenizer))}
    extended = copy.deepcopy(tokenizer)
    extended.backend_tokenizer.model = models.WordPiece(
        vocabulary | added,
        unk_token=model.unk_token,
        max_input_chars_per_word=model.max_input_chars_per_word,
        continuing_subword_prefix=model.continuing_subword_prefix,
    )
    return extended


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder) -> None:
    """
    Write `tokenizer.json`, `tokenizer_config.json` and `vocab.txt`, so that Transformers 4 and 5 can load them.

    Two entries of `tokenizer_config.json` get the names that version 4 knows: the class of a tokenizer without one of
    its own, and the list of special tokens beside the usual ones. Transformers 5 does not write `vocab.txt`, which the
    slow tokenizer of version 4 and many tools need. There the number of an entry is the number of its line: if an
    entry holds a line end, or a number has no entry, the file is left out, since others would read other numbers.
    """
    tokenizer.save_pretrained(folder)
    settings_file = Path(folder) / "tokenizer_config.json"
    settings = read_record(settings_file)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    write_json(settings_file, settings)
    vocabulary_file = settings_file.with_name(VOCABULARY_FILE)
    entries = pieces(tokenizer)
    cannot_be_a_line = [entry for entry in entries if re.search(r"[\r\n]", entry)]
    has_each_number = sorted(tokenizer.get_vocab().values()) == list(range(len(entries)))
    if cannot_be_a_line or not has_each_number:
        vocabulary_file.unlink(missing_ok=True)
        why = f"the entry {cannot_be_a_line[0]!r:.50} holds a line end" if cannot_be_a_line else "numbers are left out"
        logger.warning(f"no {VOCABULARY_FILE} is written, as {why}; tokenizer.json has the whole vocabulary")
        return
    vocabulary_file.write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8", newline="\n")


def pieces(tokenizer: PreTrainedTokenizerBase | Tokenizer) -> list[str]:
    """The entries of the vocabulary in the order of ids."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.get)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the tokenizer's entries and ids, and of its rules (`rules_of`)."""
    return short_hash(sorted(tokenizer.get_vocab().items()), rules_of(tokenizer.backend_tokenizer))


def rules_of(backend: Tokenizer) -> dict:
    """What a tokenizer does with a text, but for its vocabulary: normalizer, pre-tokenizer, settings of WordPiece."""
    parts = json.loads(backend.to_str())
    del parts["model"]["vocab"]
    return {name: parts[name] for name in ("normalizer", "pre_tokenizer", "model")}


# ---------------------------------------------------------------------------------------------------------------------
# Load


def stock_tokenizer(name: str, most_tokens: int | None = None) -> PreTrainedTokenizerBase:
    """
    Load a tokenizer of one of Transformers' own classes. Code in its folder or repository is never run.

    Args:
        name: a folder or an id on the Hub.
        most_tokens: the size of the model's vocabulary, held against the file before the tokenizer is made of it.

    Raises:
        UserError: the tokenizer's class is defined by such code; or Transformers would not follow its tokenizer.json;
            or a file is refused (`check_tokenizer_rules`).
        Exception: any exception of `AutoTokenizer`, for a tokenizer that cannot be loaded.
    """
    check_folder(name)
    settings = check_tokenizer_settings(name)  # of tokenizer_config.json
    # Refused here: if Transformers knows the model type, it would silently load the tokenizer in another class.
    if settings.get("auto_map") and not hasattr(transformers, settings.get("tokenizer_class") or ""):
        raise UserError(
            "auto_map in its tokenizer_config.json asks for code of its own, which is never run; give a stock "
            "BertTokenizer"
        )
    rules_file = find_file(name, "tokenizer.json")
    if rules_file:
        check_tokenizer_rules(rules_file, most_tokens)
    elif vocabulary_file := find_file(name, VOCABULARY_FILE):
        read_vocabulary(vocabulary_file)  # which refuses a file that is no vocabulary
    left_out = {}
    with panics_explained(), without_log_messages():
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if isinstance(tokenizer, BertTokenizer):
            left_out = _options_left_out(tokenizer, settings, rules_file)
        if left_out:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **left_out)
        tokenizer.init_kwargs.pop("auto_map", None)  # `save_pretrained` would write it, but not the code it names
        # Transformers 5 makes the rules of a BertTokenizer anew, where version 4 reads them from tokenizer.json.
        if isinstance(tokenizer, BertTokenizer) and rules_file:
            of_file = Tokenizer.from_file(str(rules_file))
            if _rules_without_options(of_file) != _rules_without_options(tokenizer.backend_tokenizer):
                raise UserError(
                    "its tokenizer.json has rules that BertTokenizer does not follow in Transformers 5; write "
                    '"tokenizer_class": "PreTrainedTokenizerFast" into its tokenizer_config.json'
                )
        if tokenizer.is_fast and not rules_file:  # the library has made the rules, such as of a spiece.model
            check_steps(Path(name), json.loads(tokenizer.backend_tokenizer.to_str()))
        if tokenizer.is_fast:
            _try_out(tokenizer)
    for option, value in left_out.items():
        by = "tokenizer.json says" if rules_file else "the capital letters in its vocabulary say"
        logger.info(f"{name}: its tokenizer_config.json lacks {option}; read with {option} {value}, as {by}")
    return tokenizer


# The options of a `BertTokenizer` by their names in the normalizer of a tokenizer.json.
BERT_OPTIONS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def _options_left_out(tokenizer, settings, rules_file) -> dict:
    """
    The options of a `BertTokenizer` that its tokenizer_config.json leaves out and that are not the defaults: those of
    its tokenizer.json; without one, no lower case if its vocabulary has capital letters.

    Args:
        tokenizer: as it was loaded, with the defaults.
        settings: of tokenizer_config.json.
        rules_file: the path of tokenizer.json, or None.
    """
    loaded = tokenizer.backend_tokenizer.normalizer
    if rules_file:
        saved = Tokenizer.from_file(str(rules_file)).normalizer
        found = {option: getattr(saved, name) for option, name in BERT_OPTIONS.items() if hasattr(saved, name)}
    else:
        found = {"do_lower_case": False} if has_capitals(tokenizer.get_vocab()) else {}
    left_out = {}
    for option, value in found.items():
        default = getattr(loaded, BERT_OPTIONS[option], value)
        if option not in settings and value != default:
            left_out[option] = value
    return left_out


def has_capitals(entries: Iterable[str]) -> bool:
    """Whether an entry of a vocabulary, other than one such as [CLS], has a capital letter."""
    for entry in entries:
        is_special = entry.startswith("[") and entry.endswith("]")
        if not is_special and entry != entry.lower():
            return True
    return False


# Words, no word, a rune that few vocabularies have, and a word that is too long for any.
TRIED_OUT = ("word and word", "", "\u16a0", "x" * (MOST_CHARACTERS + 1))


def _try_out(tokenizer):
    """Refuse a tokenizer that fails on short texts, or gives ids that it has no token for, such as by its template."""
    known = set(tokenizer.get_vocab().values())
    for text in TRIED_OUT:
        for second in (None, TRIED_OUT[0]):
            ids = tokenizer.backend_tokenizer.encode(text, second).ids
            if strange := set(ids) - known:
                raise UserError(f"its tokenizer gives the id {min(strange)}, which is no token of it; give another")
            tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
            tokenizer.backend_tokenizer.decode(ids[:1], skip_special_tokens=False)


def _rules_without_options(backend):
    """A tokenizer's rules, but for the options of a `BertTokenizer`, which are in tokenizer_config.json, too."""
    rules = rules_of(backend)
    normalizer = rules["normalizer"] or {}
    rules["normalizer"] = {key: value for key, value in normalizer.items() if key not in BERT_OPTIONS.values()}
    return rules


def literal_json(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    The JSON of the tokenizer that `literal_tokenizer` makes: a string, which the cache and other processes can take.

    The literal tokenizer reads the tokens that are special here as text. These are the tokens with a role, such as
    [MASK], the mask token. Other special tokens, such as [E1] of `add_special_tokens`, stay tokens, as in use.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens_with_role = set(map(str, tokenizer.special_tokens_map.values()))
    for token in parts["added_tokens"]:
        if token["content"] not in tokens_with_role:
            token["special"] = False
    return json.dumps(parts)


def literal_tokenizer(json_of_it: str) -> Tokenizer:
    """
    A tokenizer that takes texts whole and literally: a "[MASK]" in a text is the text "[MASK]", no mask.

    Args:
        json_of_it: of `literal_json`.
    """
    tokenizer = Tokenizer.from_str(json_of_it)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
