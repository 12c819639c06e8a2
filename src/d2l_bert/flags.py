"""The argument parser of the command `d2l-bert`: each field of the option dataclasses becomes a flag with its help."""

import argparse
import dataclasses
import difflib
import functools
import itertools
import re
import types
import typing
from importlib.metadata import version

from d2l_bert.commands import (
    attention_command,
    convert_command,
    embed_command,
    evaluate_command,
    fill_mask_command,
    finetune_command,
    next_sentence_command,
    prepare_command,
    pretrain_command,
    publish_command,
)
from d2l_bert.errors import launched_rank


DESCRIPTION = """\
Raw text in, a BERT out.

  d2l-bert pretrain                                   train a small BERT on Python's documentation, in a few minutes
  d2l-bert pretrain --corpus books/ --output_dir out  train a BERT on your own text files
  d2l-bert prepare --corpus books/ --output_dir tokens   tokenize once for many runs of pretrain --corpus tokens
  d2l-bert evaluate out --corpus test.txt --blimp hub    losses and accuracies on a text and on minimal pairs
  d2l-bert finetune out --task classification --train_file train.csv --test_file test.csv
  d2l-bert fill-mask out "The [MASK] is on the table."
  d2l-bert next-sentence out "A crane is flying." "It spreads its wings."
  d2l-bert embed out texts.txt --output vectors.npy   a vector for each line; or --nearest "a text"
  d2l-bert attention out "A crane is flying."         a picture of each head's attention
  d2l-bert convert google-bert/bert-base-uncased out --from bert
  d2l-bert publish out my-bert                        to the Hugging Face Hub; private unless --public

The help of one command: d2l-bert pretrain --help; all of its options: d2l-bert pretrain --help-all
"""

PRETRAIN = """

Without any option, the recipe tiny is trained on the documentation that is installed with Python, in a few minutes.
The output folder then holds the model, the tokenizer, the model card and a record of the run."""

PREPARE = """

The output folder DIR then holds a tokenizer and the token ids in memory-mapped files. Any number of runs can train on
DIR, also on a copy on another machine: d2l-bert pretrain --corpus DIR. Several machines can prepare a corpus in parts,
each with --tokenizer of the first: d2l-bert pretrain --corpus DIR DIR2 ... trains on all of them."""

EMBED = """

FILE has a text in each line: UTF-8, packed as .gz or .zst or not, or - for the standard input. In a .jsonl, .csv, .tsv
or .parquet file each row counts as a line. Row i of the output belongs to line i, also if the line is empty. Vectors
are those of sentence-transformers with the same pooling. MODEL is a d2l-bert model or any other encoder."""

ATTENTION = """

The picture has a panel for each head of each layer: how much each token (a row) attends to every other token (a
column). TEXT_B becomes the second segment. --layer and --head, counted from 1, enlarge a part of the picture.

With --word the command draws nothing. It reads TEXT and TEXT_B apart from each other, and prints layer by layer how
near the word's vectors in the two are, by cosine:

  d2l-bert attention MODEL "A crane is flying." "A crane driver came." --word crane"""


EVALUATE = """

MODEL is any masked language model that AutoModelForMaskedLM loads, a folder or an id on the Hub: a d2l-bert model, a
stock BERT, a RoBERTa, ... A text gives the MLM loss, perplexity and accuracies, those of NSP or SOP for a model with
that head, and the pseudo-perplexity of a word; --blimp gives accuracies on minimal pairs. docs/evaluate.md defines
every figure."""

CONVERT = """

  --from d2l   the state dict of the book's BERTModel, a file or a folder with pretrained.params and vocab.json
  --from bert  any stock BERT, a folder or an id on the Hub
  --to bert    a d2l-bert model with embedding_layer_norm becomes a stock BERT
  --to d2l     a d2l-bert model becomes pretrained.params and vocab.json for the book's BERTModel

DST is a new folder. The weights keep their values. A model that the other side cannot express is refused."""


FINETUNE = """

MODEL is a folder or an id on the Hub: a d2l-bert model or any stock encoder. The files are tables (.csv, .tsv, .jsonl,
.parquet, .json, .conll) with columns of texts and labels. The output folder then holds the model, the figures of every
seed, the predictions for the test rows, pictures and a model card. docs/finetune.md has a command for each kind of
task."""

PUBLISH = """

The folder is checked first: code, weights, tokenizer and card must exist and agree. Then all files go in one commit,
with a tag that is made from their content. Checkpoints, logs and paths of this machine are not sent. The Hub's token
is the one of `hf auth login`, or HF_TOKEN. If sending was interrupted, the same command completes it."""


class Parser(argparse.ArgumentParser):
    """argparse with a one-line error message instead of the whole usage; with several ranks, rank 0 prints it."""

    def error(self, message):
        self.exit(2, None if launched_rank() else f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def refuse(self, argument):
        """Exit with an error for an argument that the command does not have; suggests a flag with a similar name."""
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        known = [option for action in self._actions for option in action.option_strings]
        close = difflib.get_close_matches(argument, known, n=1)
        self.error(f"unknown option {argument}" + (f"; did you mean {close[0]}?" if close else ""))


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with a column for flags that is wide enough for most of them."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=34, width=110)


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    """
    The parser of all commands.

    Args:
        argv: the arguments: `pretrain --help` shows the defaults of the recipe that they name, and `--help-all` the
            options that are not common.
    """
    parser = Parser(prog="d2l-bert", description=DESCRIPTION, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"d2l-bert {version('d2l-bert')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.shows_all = "--help_all" in argv
    _add_prepare(commands)
    _add_pretrain(commands, argv)
    _add_evaluate(commands)
    _add_finetune(commands)
    _add_fill_mask(commands)
    _add_next_sentence(commands)
    _add_embed(commands)
    _add_attention(commands)
    _add_convert(commands)
    _add_publish(commands)
    return parser


# ---------------------------------------------------------------------------------------------------------------------
# The commands, in the order of the help


def _add_prepare(commands):
    from d2l_bert.tokenization.config import TextConfig

    usage = "--output_dir DIR [OPTIONS] | --check DIR..."
    parser = _command(
        commands, "prepare", prepare_command, "tokenize a text once for many runs", usage, description=PREPARE
    )
    parser.add_argument("--output_dir", type=_string, metavar="DIR", help="a new folder to write into")
    parser.add_argument(
        "--check", nargs="+", type=_string, metavar="DIR", help="read every byte of prepared folders instead"
    )
    _add_options(parser, TextConfig())


def _add_pretrain(commands, argv):
    from d2l_bert import D2lBertConfig
    from d2l_bert.training.recipes import RECIPES, architecture_options

    # --recipe is parsed first: the recipe's values are shown as the defaults of the other flags.
    recipe_parser = Parser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--recipe", choices=RECIPES, default="tiny")
    recipe_parser.error = lambda message: None  # the parser of all flags will show the same error
    parsed, _ = recipe_parser.parse_known_args(argv)
    architecture, run = RECIPES[parsed.recipe]()

    parser = _command(
        commands, "pretrain", pretrain_command, "pretrain a BERT from text", "[OPTIONS]", description=PRETRAIN
    )
    parser.set_defaults(recipe=parsed.recipe)
    recipes = parser.add_argument_group("recipe", "the options below show the recipe's values in brackets")
    lines = ", ".join(
        f"{name} ({recipe.__doc__.splitlines()[0].partition(':')[0].rstrip('.')})" for name, recipe in RECIPES.items()
    )
    recipes.add_argument("--recipe", choices=RECIPES, metavar="NAME", help=f"{lines}; the default is tiny")
    _add_options(parser, run)
    group = parser.add_argument_group("architecture", "fields of D2lBertConfig")
    for name in architecture_options():
        help = "" if parser.shows_all or name in ("hidden_size", "num_hidden_layers") else None
        _add_option(group, name, D2lBertConfig.__annotations__[name], getattr(architecture, name), help)


def _add_evaluate(commands):
    from d2l_bert.training.evaluation.config import EvaluateConfig

    usage = "MODEL... (--corpus PATH... | --dataset ID... | --blimp DIR) [OPTIONS]"
    help = "measure models on a text and on minimal pairs"
    parser = _command(commands, "evaluate", evaluate_command, help, usage, description=EVALUATE)
    _add_model(parser, nargs="+")
    _add_options(parser, EvaluateConfig())


def _add_finetune(commands):
    from d2l_bert.training.finetuning.config import FinetuneConfig

    usage = "MODEL --task KIND --train_file FILE [OPTIONS]"
    help = "train a pretrained model for a task"
    parser = _command(commands, "finetune", finetune_command, help, usage, description=FINETUNE)
    _add_model(parser)
    _add_options(parser, FinetuneConfig(model=""))


def _add_fill_mask(commands):
    usage = "MODEL TEXT... [--top_k N]"
    parser = _command(commands, "fill-mask", fill_mask_command, "predict the [MASK] in a text", usage)
    _add_model(parser)
    parser.add_argument("text", type=_sentence, metavar="TEXT", nargs="+", help='such as "It was a [MASK] night."')
    parser.add_argument("--top_k", type=_whole_number, default=5, metavar="N", help="tokens to show for each mask (5)")


def _add_next_sentence(commands):
    help = "say whether one sentence follows another"
    parser = _command(commands, "next-sentence", next_sentence_command, help, "MODEL A B")
    _add_model(parser)
    parser.add_argument("first", type=_sentence, metavar="A", help="a sentence")
    parser.add_argument("second", type=_sentence, metavar="B", help="the sentence that may follow it")


def _add_embed(commands):
    from d2l_bert.training.vectors.config import EmbedConfig

    usage = "MODEL FILE --output FILE | --nearest TEXT [OPTIONS]"
    help = "turn each line of a file into a vector"
    parser = _command(commands, "embed", embed_command, help, usage, description=EMBED)
    _add_model(parser)
    parser.add_argument("file", type=_string, metavar="FILE", help="a file with a text in each line; - for stdin")
    _add_options(parser, EmbedConfig())


def _add_attention(commands):
    from d2l_bert.training.vectors.config import AttentionConfig

    usage = "MODEL TEXT [TEXT_B] [--output FILE.png] [--layer N] [--head N] | MODEL TEXT TEXT_B --word WORD"
    help = "draw the attention of each head, or compare a word's vectors"
    parser = _command(commands, "attention", attention_command, help, usage, description=ATTENTION)
    _add_model(parser)
    parser.add_argument("first", type=_sentence, metavar="TEXT", help="a text")
    parser.add_argument("second", type=_sentence, metavar="TEXT_B", nargs="?", help="a second text")
    _add_options(parser, AttentionConfig())


def _add_convert(commands):
    usage = "SRC DST --from d2l --num_attention_heads N [--vocab FILE] | --from bert | --to bert | --to d2l"
    help = "convert checkpoints of d2l and of BERT"
    parser = _command(commands, "convert", convert_command, help, usage, description=CONVERT)
    parser.add_argument(
        "source", type=_string, metavar="SRC", help="the checkpoint: a file, a folder, or an id on the Hub"
    )
    parser.add_argument("target", type=_string, metavar="DST", help="a new folder to write into")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--from", dest="source_kind", choices=("d2l", "bert"), help="the kind of SRC; DST becomes a d2l-bert model"
    )
    kind.add_argument(
        "--to", dest="target_kind", choices=("d2l", "bert"), help="the kind that DST becomes; SRC is a d2l-bert model"
    )
    parser.add_argument(
        "--num_attention_heads", type=_whole_number, metavar="N", help="attention heads of the d2l model"
    )
    parser.add_argument(
        "--vocab",
        type=_string,
        metavar="FILE",
        help="the d2l model's Vocab: idx_to_token as JSON, or one token on each line",
    )


def _add_publish(commands):
    from d2l_bert.model_cards.config import PublishConfig

    usage = "DIR REPO_ID [OPTIONS]"
    parser = _command(
        commands, "publish", publish_command, "send a model folder to the Hub", usage, description=PUBLISH
    )
    parser.add_argument(
        "folder", type=_string, metavar="DIR", help="the output folder of pretrain, or of save_pretrained"
    )
    parser.add_argument("repo_id", type=_string, metavar="REPO_ID", help="owner/name, or a name under your account")
    _add_options(parser, PublishConfig())


# ---------------------------------------------------------------------------------------------------------------------
# What commands have in common


def _command(commands, name, function, help, usage, description=""):
    """
    Add a command; returns its parser.

    Args:
        function: carries the command out.
        help: the command's line in the list of commands.
        description: what its own help says after this line.
    """
    parser = commands.add_parser(
        name,
        help=help,
        usage=f"d2l-bert {name} {usage}",
        description=f"{help[0].upper()}{help[1:]}.{description}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--help_all", action="help", help="show all options, not only the common ones")
    parser.set_defaults(command=function, name=name, parser=parser)
    parser.shows_all = commands.shows_all
    return parser


def _add_model(parser, **options):
    parser.add_argument("model", type=_string, metavar="MODEL", help="a model folder, or an id on the Hub", **options)


def _add_options(parser, config):
    """
    Add a flag for each field of `config` but `recipe` and `model`, in the field's group; its help shows the value.
    """
    types_of = typing.get_type_hints(type(config))
    fields = [field for field in dataclasses.fields(config) if field.name not in ("recipe", "model")]
    for title in dict.fromkeys(field.metadata["group"] for field in fields):
        group = parser.add_argument_group(title)
        for field in fields:
            if field.metadata["group"] == title:
                is_shown = field.metadata["common"] or parser.shows_all
                help, metavar = field.metadata["help"] if is_shown else None, field.metadata["metavar"]
                _add_option(group, field.name, types_of[field.name], getattr(config, field.name), help, metavar)


def _add_option(group, name, kind, default, help="", metavar=None):
    """
    Add the flag `--name` to an argument group.

    Args:
        kind: the type of the field, such as `int | None`.
        default: the field's value, shown in the help. A flag that is not given is left out of the parsed arguments.
        help: what the option does; None to leave it out of the help.
    """
    options = {"default": argparse.SUPPRESS}
    parse = None
    if number := next((number for number in (int, float) if number in typing.get_args(kind)), None):
        if any(member is str or typing.get_origin(member) is typing.Literal for member in typing.get_args(kind)):
            parse = functools.partial(_number_or_string, number)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(member for member in typing.get_args(kind) if member is not types.NoneType)
    if typing.get_origin(kind) is list:
        options |= {"nargs": "+", "metavar": metavar}
    elif typing.get_origin(kind) is typing.Literal:
        options |= {"choices": typing.get_args(kind), "metavar": "|".join(typing.get_args(kind))}
    elif kind is bool:
        options |= {"type": _true_or_false, "nargs": "?", "const": True, "metavar": "true|false"}
    else:
        options |= {"type": parse or kind, "metavar": metavar or {int: "N", float: "X", str: "NAME"}[kind]}
    if isinstance(default, list):
        default = " ".join(default)
    elif isinstance(default, bool):
        default = str(default).lower()
    shown = "" if default in (None, "") else f"({default})"
    line = argparse.SUPPRESS if help is None else f"{help} {shown}".strip().replace("%", "%%")
    group.add_argument(f"--{name}", help=line, **options)


def _true_or_false(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"true or false, not {text!r}")
    return text.lower() == "true"


def _number_or_string(number, text):
    try:
        return number(text)
    except ValueError:
        return text


def _string(text):
    """The type of an argument that is not a field of an option dataclass: the same checks as `check_strings`."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"it is empty (got {text!r}); give a value")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} holds a NUL character, which no name may have; take it out")
    return text


def _sentence(text):
    """The type of an argument that goes to a tokenizer: a string in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{ascii(text)} is not UTF-8; write it in UTF-8") from None
    return _string(text)


def _whole_number(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def with_underscores(argv):
    """The arguments with `--max-steps` written as `--max_steps`; those after a bare `--` are not flags and stay."""
    before = itertools.takewhile(lambda argument: argument != "--", argv)
    renamed = [re.sub(r"^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), argument) for argument in before]
    return [*renamed, *argv[len(renamed) :]]
