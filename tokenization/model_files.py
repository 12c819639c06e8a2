"""The files of a model, a stranger's too: where they lie, and what is checked before any library reads them."""

import base64
import binascii
import contextlib
import dataclasses
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypedDict

from tokenizers import Tokenizer
from transformers.utils import cached_file, logging

from d2l_bert.messages import READ_ERRORS, UserError, explained
from d2l_bert.records import read_record, refuse_link_outwards


# The names of all files that Transformers may read in a model's folder.
READ_BY_LIBRARIES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model", "*.jinja", "*/*.jinja")


def find_file(name: str | Path, file: str) -> Path | None:
    """
    The path of a model's file, in its folder or in the cache of the Hub's client; None if the model has no such file.

    Args:
        name: a folder or an id on the Hub.
        file: the file's name.

    Raises:
        UserError: the file is a link that leads out of the folder, or no regular file.
        Exception: one of the Hub's client, if it cannot be reached or has no such model.
    """
    folder = Path(name)
    if not folder.is_dir():
        found = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False)
        return Path(found) if found else None
    path = folder / file
    check_within(path, folder)
    return path if path.is_file() else None


def check_within(path: Path, folder: Path) -> None:
    """
    Refuse a path in a model's folder that is a link out of it, a pipe or a device; nothing may be there.

    Raises:
        UserError: the path is one of these.
    """
    refuse_link_outwards(path, folder)
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no regular file; take it out")


def check_folder(name: str | Path) -> None:
    """
    Refuse a model whose files lead out of its folder, or whose config.json a library should not be given at all.

    Everything that loads a model or a tokenizer calls this first, as Transformers reads config.json for either: what
    the libraries read lies in the folder itself, and no entry makes them read other places or fill the memory.

    Args:
        name: a folder or an id on the Hub.

    Raises:
        UserError: a file or an entry is refused.
        Exception: one of the Hub's client, if there is no such model.
    """
    folder = Path(name)
    if folder.is_dir():
        for pattern in READ_BY_LIBRARIES:
            for path in folder.glob(pattern):
                if path.is_symlink() or not path.is_dir():
                    check_within(path, folder)
    if find_file(name, "adapter_config.json"):
        raise UserError(
            "it holds an adapter (adapter_config.json), which names another model to load; merge the adapter into its "
            "model, and save that"
        )
    read_config_file(name)


@contextlib.contextmanager
def without_log_messages() -> Iterator[None]:
    """
    Within the block, Transformers logs nothing.

    It logs what a checkpoint lacks, which is told here in other words, and entries of a stranger's files as they stand
    there, which may hold what a terminal obeys.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(logging.CRITICAL)
        yield


# ---------------------------------------------------------------------------------------------------------------------
# config.json


class ConfigFile(TypedDict, total=False):
    """The entries of config.json that are read before Transformers makes a configuration of it."""

    model_type: str
    architectures: list[str] | None
    id2label: dict[str, str] | None
    label2id: dict[str, int] | None
    num_labels: int | None
    problem_type: str | None
    quantization_config: dict | None


# Transformers writes a name for each label when it reads config.json.
MOST_LABELS = 2**20

# Layers, groups or blocks. Transformers lists them when it reads config.json.
MOST_PARTS = 2**16


def read_config_file(name: str | Path) -> ConfigFile:
    """
    The content of a model's config.json; an empty one if there is none.

    Raises:
        UserError: it is no JSON object, an entry has another type, a number is not finite, there are too many labels
            or layers, or the weights are quantized.
    """
    file = find_file(name, "config.json")
    if file is None:
        return {}
    content = read_record(file, ConfigFile)
    if (content.get("num_labels") or 0) > MOST_LABELS:
        raise UserError(f"{file}: num_labels {content['num_labels']:,} is more than {MOST_LABELS:,}; correct it")
    for place, value in _walk(content):
        if _counts_parts(place) and type(value) is int and value > MOST_PARTS:
            raise UserError(f"{file}: {place:.100} is {value:,}, which no model has; put back the model's own")
    if "transformers_weights" in content:
        raise UserError(f"{file}: transformers_weights names another file of weights; take the entry out")
    if content.get("quantization_config"):
        raise UserError("its weights are quantized (quantization_config); give the model that it was made of")
    return content


def _counts_parts(place):
    """Whether the entry of config.json at a place counts layers, groups or blocks."""
    return re.search(r"layers?\b|groups?\b|blocks?\b|repeat|depth|experts", place.replace("_", " ")) is not None


def _walk(value, place=""):
    """Each value inside of a value of JSON, with its place. Depth is bounded, as `json` has read the value."""
    waiting = [(place, value)]
    while waiting:
        place, value = waiting.pop()
        yield place, value
        if isinstance(value, dict):
            waiting += [(f"{place}.{name}".lstrip("."), entry) for name, entry in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}[{number}]", entry) for number, entry in enumerate(value)]


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer


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
    places = _walk({entry: value for entry, value in settings.items() if entry != "chat_template"})
    return [value for _, value in places if isinstance(value, str)]


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

# Characters of a pattern. Those of usual tokenizers have some 300.
LONGEST_PATTERN = 2**12

# Parts of a pattern that repeat, one behind the other. GPT-4's and o200k's tokenizers have 2. Of 4, a text of 200
# characters can take half a minute.
MOST_REPETITIONS = 2

# Ways in which the choices of a pattern, one behind the other, can be taken. o200k's tokenizer has 16.
MOST_WAYS = 1000

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
    if isinstance(vocabulary, dict):
        entries = set(vocabulary)
    elif isinstance(vocabulary, list):  # of pairs, an entry and its score
        entries = {pair[0] for pair in vocabulary if isinstance(pair, list) and pair and isinstance(pair[0], str)}
    else:
        return  # the library refuses it
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


def check_steps(file: Path, content: dict) -> None:
    """
    Check what a tokenizer does with a text before and after it looks into its vocabulary.

    Args:
        file: for the message.
        content: of tokenizer.json, or of a tokenizer that a library has made of other files.

    Raises:
        UserError: a step can take the time or the memory of the machine for a short text.
    """
    growth, values, written = 1, 0, 0
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "padding", "truncation"):
        for place, value in _walk(content.get(part), part):
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


# The parts of a pattern: the beginning of a group, a choice, or a group's end or a character with its quantifier.
QUANTIFIER = r"[*+?]|\{\d*,?\d*\}"
PARTS_OF_PATTERN = re.compile(
    rf"(?P<opened>\((?:\?(?:[=!>:]|<[=!]|<\w+>|[a-z-]+:?))?)|(?P<choice>\|)|(?P<quantified>{QUANTIFIER})"
    rf"|(?P<sign>.)(?P<quantifier>[*+][?+]?|\?[?+]?|\{{\d*,?\d*\}}\??)?",
    re.DOTALL,
)


@dataclasses.dataclass
class _Group:
    """
    What has been read of a group of a pattern, or of the whole.

    Args:
        ways: in how many ways the parts of this alternative can match by their choices alone.
        repetitions: how many of them repeat.
        ways_before, repetitions_before: of the alternatives before it, the sum and the largest.
    """

    ways: int = 1
    repetitions: int = 0
    ways_before: int = 0
    repetitions_before: int = 0

    def end_alternative(self):
        self.ways_before += self.ways
        self.repetitions_before = max(self.repetitions_before, self.repetitions)
        self.ways, self.repetitions = 1, 0


def is_endless(pattern: str) -> bool:
    """
    Whether the time to match a pattern may grow faster than the third power of the text's length, or with a large
    factor.

    That is so for a repeated group with a repetition or a choice inside, such as `(a+)+`, for a reference to another
    group, for several repetitions in a row, such as `a*a*a*`, and for many choices in a row, such as `a?` or `(a|b)`
    twenty times. A pattern that is none of these may be refused too, such as one with comments.
    """
    escape = re.compile(r"\\(?:[pPx]\{[^}]*\}|.)", re.DOTALL)  # such as \p{L}
    if any(escaped[1] in "123456789kgcCM" for escaped in escape.findall(pattern)):  # groups, and control characters
        return True
    plain = escape.sub("e", pattern)
    # Comments, which may hide what follows; a part that must be absent.
    if re.search(r"\(\?(#|~|[^():<>=!]*x)", plain):
        return True
    # An option after the beginning: it makes a group of what follows.
    if re.search(r".\(\?[\w-]+\)", plain, re.DOTALL):
        return True
    plain = re.sub(r"\[(?:\[[^\]]*\]|[^\]\[])+\]", "c", plain)  # a class of characters, which may hold others
    groups = [_Group()]
    for part in PARTS_OF_PATTERN.finditer(plain):
        if part["quantified"]:  # what has a quantifier already, or nothing
            return True
        if part["opened"]:
            groups.append(_Group())
            continue
        if part["choice"]:
            groups[-1].end_alternative()
            continue
        ways, repetitions = 1, 0
        if part["sign"] == ")" and len(groups) > 1:
            inner = groups.pop()
            inner.end_alternative()
            ways, repetitions = inner.ways_before, inner.repetitions_before
        quantifier = part["quantifier"] or ""
        if quantifier.startswith("?"):
            ways += 1
        elif quantifier:
            if ways > 1 or repetitions:
                return True
            repetitions = 1
        groups[-1].ways *= ways
        groups[-1].repetitions += repetitions
        if groups[-1].ways > MOST_WAYS or groups[-1].repetitions > MOST_REPETITIONS:
            return True
    return False


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
    with tempfile.TemporaryFile() as said:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        try:
            stderr = os.dup(2)
        except OSError:  # stderr is closed
            stderr = None
        else:
            os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if type(error).__name__ == "PanicException":
                said.truncate(0)
                reason = " ".join(str(error).split())
                raise UserError(f"its tokenizer is damaged ({reason:.200}); give another") from None
            raise
        finally:
            if stderr is not None:
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.flush()
                os.dup2(stderr, 2)
                os.close(stderr)
                said.seek(0)
                if kept := said.read():
                    os.write(2, kept)


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def weight_files(name: str | Path, pickles: bool = True) -> list[Path]:
    """
    The files that Transformers reads a model's weights from, in the order in which it looks for them.

    Args:
        name: a folder or an id on the Hub.
        pickles: whether it may read pytorch_model.bin.

    Raises:
        UserError: an index names a file outside of the folder, one that is missing, or none.
    """
    for single in ("model.safetensors", *(["pytorch_model.bin"] if pickles else [])):
        if file := find_file(name, single):
            return [file]
        if index := find_file(name, f"{single}.index.json"):
            shards = sorted(set(read_record(index, IndexFile)["weight_map"].values()))
            if not shards:
                raise UserError(f"{index}: names no file; save the model again")
            return [_shard(name, index, shard) for shard in shards]
    return []


class IndexFile(TypedDict):
    """The entries of model.safetensors.index.json that are read: any object, and the file of each weight."""

    metadata: dict
    weight_map: dict[str, str]


def _shard(name, index, shard):
    """A file of weights that an index names."""
    if not re.fullmatch(r"[\w-][\w.-]*", shard, re.ASCII):
        raise UserError(f"{index}: names {shard!r:.200}, which is no file of weights beside it; do not use this model")
    file = find_file(name, shard)
    if file is None:
        raise UserError(f"{index}: names {shard}, which is missing; save the model again, or fetch it whole")
    return file


class StoredWeight(NamedTuple):
    """
    What a file of weights says of one.

    Args:
        shape: its shape.
        kind: the type of its numbers, as PyTorch (`torch.float32`) or safetensors (`F32`) names it.
    """

    shape: tuple[int, ...]
    kind: str


# The kinds of numbers that a weight may have: the others cannot be trained, and would be turned into these unsaid.
KINDS_OF_WEIGHTS = ("F64", "F32", "F16", "BF16", "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16")


# Tensors in the files of weights: BERT-large has 400. The libraries take their time for each, an empty one, too.
MOST_WEIGHTS = 2**15

# In bytes, of the header of a file of weights, which has some 100 for each.
LARGEST_HEADER = 4 << 20


def stored_weights(name: str | Path, pickles: bool = True) -> dict[str, StoredWeight]:
    """
    What a model's files say of its weights, by their names, in the headers of the files: no weight is read.

    Args:
        name, pickles: as in `weight_files`.

    Raises:
        UserError: a file is damaged, is no file of weights, or holds pickled code.
    """
    stored = {}
    for file in weight_files(name, pickles):
        stored |= _stored_in_pickle(file) if file.suffix == ".bin" else _stored_in_safetensors(file)
        if len(stored) > MOST_WEIGHTS:
            raise UserError(f"{file}: names {len(stored):,} weights, more than any model has; do not use this model")
    return stored


def _stored_in_safetensors(file):
    from safetensors import SafetensorError, safe_open

    with explained(f"{file}: cannot be read", "save the model again, or fetch it again", OSError):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
        if LARGEST_HEADER < size <= file.stat().st_size:  # of a larger size, which is damage, the library says so
            raise UserError(f"{file}: its header has {size:,} bytes, more than any model's; do not use this model")
    with (
        explained(f"{file}: cannot be read", "save the model again, or fetch it again", SafetensorError, *READ_ERRORS),
        safe_open(file, "np") as opened,
    ):
        slices = {name: opened.get_slice(name) for name in opened.keys()}
        return {name: StoredWeight(tuple(of.get_shape()), str(of.get_dtype())) for name, of in slices.items()}


def _stored_in_pickle(file):
    """Of a file of `torch.save`, whose tensors are not read: they go to the device `meta`."""
    import torch

    with file.open("rb") as opened:
        is_zip = opened.read(2) == b"PK"
    try:
        state = torch.load(file, map_location="meta", weights_only=True, mmap=is_zip)
        stored = {str(name): StoredWeight(tuple(weight.shape), str(weight.dtype)) for name, weight in state.items()}
        held = {name: weight.untyped_storage().nbytes() for name, weight in state.items()}
        sizes = {name: weight.numel() * weight.element_size() for name, weight in state.items()}
    except Exception:  # each kind of damage raises another one; PyTorch advises to run the code in the file
        raise UserError(
            f"{file.name}: is damaged, or holds other objects than tensors; code in a pickle is never run; give a "
            f"model with model.safetensors"
        ) from None
    for name, size in sizes.items():
        if size > held[name]:
            raise UserError(f"{file.name}: the weight {name!r:.100} is larger than its data; do not use this model")
    return stored


def check_numbers(content: object, most: int) -> str:
    """
    The first place in config.json that counts layers, groups or blocks beyond what a model with so many weights has.

    Args:
        content: of config.json.
        most: the number of tensors in the file of weights.
    """
    for place, value in _walk({name: of for name, of in content.items() if name not in ("id2label", "label2id")}):
        if _counts_parts(place) and type(value) is int and value > max(most, 1024):
            return place
    return ""
