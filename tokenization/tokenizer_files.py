"""The files of a tokenizer, a stranger's too: what is checked before any library reads them."""

import base64
import binascii
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypedDict

from tokenizers import Tokenizer

from d2l_bert.messages import UserError, explained
from d2l_bert.records import read_record, values_in
from d2l_bert.tokenization.model_files import find_file, walk
from d2l_bert.tokenization.patterns import LONGEST_PATTERN, is_endless


class TokenizerSettings(TypedDict, total=False):
    """The entries of tokenizer_config.json that decide what is loaded, and how long an input may be."""

    tokenizer_class: str | None
    model_max_length: float | None
    do_lower_case: bool | None
    strip_accents: bool | None
    tokenize_chinese_chars: bool | None
    padding_side: str
    truncation_side: str
    model_input_names: list[str]
    added_tokens_decoder: dict[str, dict]


# The entries that name a token by its role: those of BERT, and those of others.
BERT_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
ROLES = (*BERT_ROLES, "bos_token", "eos_token")

# Arguments of a tokenizer's class that name files, or come before all others: no saved tokenizer has them.
FOREIGN_ARGUMENTS = ("vocab", "merges", "init_inputs", "tokenizer_object", "gguf_file")


def check_tokenizer_settings(name: str | Path) -> TokenizerSettings:
    """
    The content of a model's tokenizer_config.json; an empty one if there is none.

    Raises:
        UserError: it is no JSON object, an entry has another type or is out of its range, or names other files; or
            it, or a file beside it that names tokens, has too many or too long ones.
    """
    for beside in ("special_tokens_map.json", "added_tokens.json"):  # of older versions, which are still read
        if file := find_file(name, beside):
            content = read_record(file)
            check_added_tokens(file, [*content, *_texts_in(content)])
    file = find_file(name, "tokenizer_config.json")
    if file is None:
        return {}
    settings = read_record(file, TokenizerSettings)
    check_added_tokens(file, _texts_in(settings))
    for entry in FOREIGN_ARGUMENTS:
        if settings.get(entry):
            raise UserError(f"{file}: has the entry {entry!r}, which no saved tokenizer has; take it out")
    longest = settings.get("model_max_length")
    if longest is not None and not 3 <= longest < math.inf:  # nor NaN
        raise UserError(f"{file}: model_max_length {longest} is no length of a text; write 512, or leave it out")
    if (settings.get("tokenizer_class") or "").startswith("Auto"):  # which would look for its own class, and so on
        raise UserError(
            f"{file}: tokenizer_class {settings['tokenizer_class']!r:.100} is no class of a tokenizer; write that of "
            f"the model's tokenizer, such as BertTokenizer"
        )
    for role in ROLES:
        token = settings.get(role)
        if token == "" or (isinstance(token, dict) and token.get("content") == ""):
            raise UserError(f"{file}: {role} is empty, which is no token; put back the model's own, or leave it out")
    if settings.get("split_special_tokens"):
        raise UserError(f"{file}: split_special_tokens would take a mask for text; take the entry out")
    names = settings.get("model_input_names", ["input_ids", "attention_mask"])
    if names[:1] != ["input_ids"] or "attention_mask" not in names:
        raise UserError(f"{file}: model_input_names must begin with input_ids, and have attention_mask; correct it")
    for entry in ("padding_side", "truncation_side"):
        if settings.get(entry, "right") not in ("left", "right"):
            raise UserError(f"{file}: {entry} {settings[entry]!r:.100}; write left or right")
    return settings


def _texts_in(settings):
    """The texts in the settings of a tokenizer, each of which may be a token, but for its templates of a chat."""
    others = {entry: value for entry, value in settings.items() if entry != "chat_template"}
    return [value for value in values_in(others) if isinstance(value, str)]


# ---------------------------------------------------------------------------------------------------------------------
# tokenizer.json and vocab.txt


# In a word: BERT has 100, and d2l-bert's tokenizers, too. The time for a word grows with the cube of its characters.
MOST_CHARACTERS = 1000

# Of ids and lengths: the largest vocabularies have a million entries.
LARGEST_NUMBER = 2**24

# In bytes, of tokenizer.json and of vocab.txt: a vocabulary of a million entries has about 60 MB.
LARGEST_TOKENIZER = 80 << 20

# Characters of an entry of a vocabulary, or of any other text in tokenizer.json that is put between words.
LONGEST_TOKEN = 1000

# Tokens beside the vocabulary, and their characters together: the libraries search each text for all of them.
MOST_ADDED = 2**15
MOST_ADDED_CHARACTERS = 2**20

# Tokens that a text is padded to, however short it is. The longest inputs of encoders have 2**15.
LONGEST_PADDING = 2**16

# What is put around a text: [CLS] and [SEP] are two. Other tokenizers have a handful, too.
MOST_IN_TEMPLATE = 32

# Steps of a tokenizer and their arguments, and the characters of these, together: each step is taken for each text.
MOST_VALUES = 2**12
MOST_WRITTEN = 2**18

# Replacements that make a text longer, one after the other, by at most this factor.
MOST_GROWTH = 1000

# What a message about such a rule ends with.
WAY_OUT = "do not use this tokenizer"


class RulesFile(TypedDict):
    """The entries of tokenizer.json that every reader needs."""

    model: dict
    added_tokens: list[dict]


def check_tokenizer_rules(file: Path, most_tokens: int | None = None) -> None:
    """
    Refuse a tokenizer.json that is damaged, or whose rules can take the time or the memory of the machine for a short
    text.

    Args:
        most_tokens: the size of the model's vocabulary; None for no model.

    Raises:
        UserError: the file cannot be read, has such a rule, or more tokens than the model.
    """
    check_size(file)
    content = read_record(file, RulesFile)
    added = [str(token.get("content", "")) for token in content.get("added_tokens", ())]
    check_added_tokens(file, added)
    _check_vocabulary(file, content.get("model", {}), added, most_tokens)
    check_steps(file, content)
    damaged = f"{file}: is damaged, or is no file of a tokenizer"
    with panics_explained(), explained(damaged, "fetch it again, or save the tokenizer again", Exception):
        Tokenizer.from_file(str(file))


def check_size(file: Path) -> None:
    """Refuse a tokenizer's file that is larger than any is; raises `UserError`."""
    if file.is_file() and file.stat().st_size > LARGEST_TOKENIZER:
        raise UserError(f"{file}: has {file.stat().st_size:,} bytes, more than any tokenizer; {WAY_OUT}")


def check_added_tokens(file: Path, tokens: list[str]) -> None:
    """
    Refuse tokens beside a vocabulary that are too many or too long.

    Args:
        file: where they stand.

    Raises:
        UserError: they are.
    """
    if len(tokens) > MOST_ADDED:
        raise UserError(f"{file}: has {len(tokens):,} added tokens, and may have {MOST_ADDED:,}; {WAY_OUT}")
    for token in tokens:
        if len(token) > LONGEST_TOKEN:
            raise UserError(
                f"{file}: the token {token!r:.50} has {len(token):,} characters, and may have {LONGEST_TOKEN:,}; "
                f"{WAY_OUT}"
            )
    if sum(map(len, tokens)) > MOST_ADDED_CHARACTERS:
        raise UserError(f"{file}: its added tokens have more than {MOST_ADDED_CHARACTERS:,} characters; {WAY_OUT}")


def _check_vocabulary(file, model, added, most_tokens):
    """Check the entry `model` of tokenizer.json; `added` are the tokens beside its vocabulary."""
    longest = model.get("max_input_chars_per_word", 0)
    if type(longest) is not int or not 0 <= longest <= MOST_CHARACTERS:
        raise UserError(
            f"{file}: max_input_chars_per_word is {longest!r:.50}, and may be {MOST_CHARACTERS}; {WAY_OUT}"
        )
    for name, value in model.items():
        if isinstance(value, str) and len(value) > LONGEST_TOKEN:
            raise UserError(f"{file}: {name:.50} has {len(value):,} characters; {WAY_OUT}")
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict | list):
        return  # the library refuses it
    entries = _entries_of(vocabulary)
    most = max(map(len, entries), default=0)
    if most > LONGEST_TOKEN:
        raise UserError(f"{file}: an entry has {most:,} characters, and may have {LONGEST_TOKEN:,}; {WAY_OUT}")
    tokens = len(entries.union(added))
    if most_tokens is not None and tokens > most_tokens:
        raise UserError(f"its tokenizer has {tokens} tokens and the model {most_tokens}; put back the model's own")
    ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
    highest = max((number for number in ids if type(number) is int), default=0)
    if highest > LARGEST_NUMBER:  # the library counts up to it
        raise UserError(f"{file}: the id {highest:,} is that of no vocabulary; {WAY_OUT}")


def _entries_of(vocabulary):
    """The entries of a vocabulary: an object with their ids, or a list of pairs, an entry and its score."""
    if isinstance(vocabulary, dict):
        return set(vocabulary)
    entries = set()
    for pair in vocabulary:
        if isinstance(pair, list) and pair and isinstance(pair[0], str):
            entries.add(pair[0])
    return entries


def check_steps(file: Path, content: dict) -> None:
    """
    Check what a tokenizer does with a text before and after it looks into its vocabulary.

    Args:
        file: for the message.
        content: of tokenizer.json, or of a tokenizer that a library has made of other files.

    Raises:
        UserError: a step can take the time or the memory of the machine for a short text.
    """
    growth = 1
    values = 0
    written = 0
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "padding", "truncation"):
        for place, value in walk(content.get(part), part):
            _check_value(file, place, value)
            values += len(value) if isinstance(value, (dict, list)) else 0
            if isinstance(value, str) and not place.endswith(".precompiled_charsmap"):  # a table, a large one
                written += len(value)
            if values > MOST_VALUES or written > MOST_WRITTEN:
                raise UserError(f"{file}: {part} has more steps or longer ones than any tokenizer; {WAY_OUT}")
            growth *= _growth(place, value)
    if growth > MOST_GROWTH:
        raise UserError(f"{file}: its replacements make a text {growth:,} times as long; {WAY_OUT}")


def _check_value(file, place, value):
    """Check a value in a step of tokenizer.json; raises `UserError`."""
    if type(value) is int and value > LARGEST_NUMBER:
        raise UserError(f"{file}: {place} is {value:,}; {WAY_OUT}")
    if place in ("padding.strategy.Fixed", "padding.pad_to_multiple_of") and type(value) is int:
        if value > LONGEST_PADDING:
            raise UserError(f"{file}: {place} is {value:,}, and may be {LONGEST_PADDING:,}; {WAY_OUT}")
    if place.startswith("post_processor") and isinstance(value, list) and len(value) > MOST_IN_TEMPLATE:
        raise UserError(f"{file}: {place:.100} has {len(value):,} entries, and may have {MOST_IN_TEMPLATE}; {WAY_OUT}")
    if not isinstance(value, str):
        return
    if place.endswith(".Regex") and (len(value) > LONGEST_PATTERN or is_endless(value)):
        raise UserError(f"{file}: the pattern {value!r:.100} of {place} may take for ever; {WAY_OUT}")
    if place.endswith(".String") and value == "":
        raise UserError(f"{file}: {place} replaces nothing; {WAY_OUT}")
    if not place.endswith((".Regex", ".precompiled_charsmap")) and len(value) > LONGEST_TOKEN:
        raise UserError(f"{file}: {place:.100} has {len(value):,} characters; {WAY_OUT}")


def _growth(place, value):
    """The factor by which a value in a step of tokenizer.json can make a text longer."""
    if place.endswith((".content", ".prepend")) and isinstance(value, str):
        return 1 + len(value)  # also where a pattern finds nothing, and the text is put in between
    if place.endswith("type") and value == "ByteLevel" and not place.startswith(("decoder", "post_processor")):
        return 2  # a letter that is not ASCII becomes two or more
    if place.endswith(".precompiled_charsmap") and isinstance(value, str):
        return _longest_in_table(value)
    if place.startswith("post_processor") and place.endswith((".single", ".pair")) and isinstance(value, list):
        pieces = [entry.get("Sequence") for entry in value if isinstance(entry, dict)]
        texts = [piece.get("id") for piece in pieces if isinstance(piece, dict)]
        return max(map(texts.count, texts), default=1)  # a template may name a text more than once
    return 1


def _longest_in_table(charsmap):
    """
    The length of the longest text that the table of a `Precompiled` normalizer puts in the place of a character.

    The table is SentencePiece's: the size of a trie in four bytes, the trie, and the texts, each with a NUL behind it.
    """
    try:
        table = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1  # the library refuses it
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))


def read_vocabulary(file: Path) -> list[str]:
    """
    The entries of a vocab.txt, a line each. White space at the end of a line is no part of its entry, as in BERT's own
    code and in the library tokenizers.

    Raises:
        UserError: the file or an entry is too large; or a line holds a carriage return: some readers take it for the
            end of a line, and some do not, so that all entries behind it have one id or another.
    """
    check_size(file)
    lines = file.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    entries = [line.rstrip() for line in lines]
    for number, entry in enumerate(entries, 1):
        if "\r" in entry:
            raise UserError(
                f"{file}: line {number:,} holds a carriage return, {entry!r:.50}; end lines with a line feed alone"
            )
        if len(entry) > LONGEST_TOKEN:
            raise UserError(f"{file}: line {number:,} has {len(entry):,} characters; {WAY_OUT}")
    return entries


@contextlib.contextmanager
def panics_explained() -> Iterator[None]:
    """
    Turn a panic of the library tokenizers, which is no `Exception` of Python, into a `UserError`.

    The library also writes the panic, with what led to it, to the process's stderr: within the block that is kept, and
    written afterwards unless there was a panic.
    """
    with _stderr_kept() as said:
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            said.truncate(0)
            reason = " ".join(str(error).split())
            raise UserError(f"its tokenizer is damaged ({reason:.200}); give another") from None


@contextlib.contextmanager
def _stderr_kept() -> Iterator[BinaryIO]:
    """Keep what the process writes to stderr within the block in a file, and write what is in it afterwards."""
    with tempfile.TemporaryFile() as said:
        _flush_stderr()
        stderr = _copy_of_stderr()
        if stderr is None:
            yield said
            return
        os.dup2(said.fileno(), 2)
        try:
            yield said
        finally:
            _flush_stderr()
            os.dup2(stderr, 2)
            os.close(stderr)
            said.seek(0)
            if kept := said.read():
                os.write(2, kept)


def _copy_of_stderr():
    """A second descriptor of stderr; None if it is closed."""
    try:
        return os.dup(2)
    except OSError:
        return None


def _flush_stderr():
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
