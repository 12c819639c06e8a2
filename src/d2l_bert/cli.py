"""The command `d2l-bert`: parses arguments, runs a command, turns errors into messages and exit codes."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import itertools
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable
from importlib.metadata import version

from d2l_bert import D2lBertConfig, commands
from d2l_bert.errors import ENVIRONMENT_ERRNOS, UserError, is_out_of_memory, launched_rank
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.options import Options, is_written, members_of
from d2l_bert.progress import messages_shown
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.training.evaluation.config import EvaluateConfig, ExportConfig
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.recipes import RECIPES, architecture_options
from d2l_bert.training.vectors.config import AttentionConfig, EmbedConfig


def main(argv: list[str] | None = None) -> int:
    """
    Run one command of `d2l-bert`.

    Args:
        argv: the arguments of the command; None for the arguments of this process.

    Returns:
        The exit code: 0; 2 for an error that the user can fix, with one line on stderr; 1 for a bug, with a
        traceback; 130 after Ctrl-C. argparse ends the process by `SystemExit` instead (2), and so
        does a training that was stopped (143 after SIGTERM).
    """
    argv = with_underscores(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal cannot show becomes "?", not an error
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")
    arguments, unknown = make_parser(argv).parse_known_args(argv)
    if unknown:
        arguments.parser.refuse(unknown[0].partition("=")[0])
    try:
        with messages_shown():
            arguments.command(arguments)
    except KeyboardInterrupt:
        print(f"d2l-bert {arguments.name}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _exit_if_distributed(_show_error(arguments.name, error))
    except SystemExit as leaving:
        if leaving.code == 2:  # another rank has shown the error
            _exit_if_distributed(2)
        raise
    return 0


def _exit_if_distributed(code):
    """End this process at once if it is one of several ranks; else return the exit code.

    gloo's threads may still wait for other ranks, and an ordinary exit of the interpreter would abort them.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _show_error(command, error):
    """Print why a command failed; return the exit code, 2 for an error that the user can fix and 1 for a bug."""
    line = " ".join(str(error).split())
    if is_out_of_memory(error):
        line = f"out of memory ({line:.200}); ask for less at once, or take a machine with more"
    elif not isinstance(error, UserError) and getattr(error, "errno", None) not in ENVIRONMENT_ERRNOS:
        traceback.print_exception(error)
        print(
            f"d2l-bert {command}: this is a bug of d2l-bert {version('d2l-bert')}, not an error in your input: please "
            f"report it with the lines above (CONTRIBUTING.md says where, under Bugs)",
            file=sys.stderr,
        )
        return 1
    process = f"process {launched_rank()}: " if launched_rank() else ""
    print(f"d2l-bert {command}: error: {process}{line}", file=sys.stderr)
    return 2


# ---------------------------------------------------------------------------------------------------------------------
# The parser


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
  d2l-bert export out stock                           stock BERT and ONNX, for browsers and servers
  d2l-bert demo out                                   a page on this machine to try it on
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

FILE has a text in each line, also packed as .gz, .zst or .bz2, or - for the standard input. In a .jsonl, .csv,
.tsv or .parquet file each row counts as a line. Row i of the output belongs to line i, also if the line is empty.
Vectors are those of sentence-transformers with the same pooling. MODEL is a d2l-bert model or any other encoder."""

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

EXPORT = """

DIR then holds the model as stock BERT, which Transformers loads without code of d2l-bert, and in onnx/ the same in
float32 and in int8, with the names that transformers.js reads; the tokenizer and a card. Each file is compared with
the model, and what int8 costs is measured on a text. d2l-bert publish sends DIR.
Needs pip install 'd2l-bert[onnx]'."""

DEMO = """

The page fills in masks, asks whether B follows A, draws attention, and compares a word in two contexts. It is served
on 127.0.0.1 alone, and asks no other machine for anything. Needs pip install 'd2l-bert[demo]'."""

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


def _string(text):
    """The type of an argument that is not a field of an option dataclass, with the same check."""
    if not is_written(text):
        raise argparse.ArgumentTypeError(
            f"{ascii(text)} is empty, holds a NUL character, or is not UTF-8; write a value"
        )
    return text


def _whole_number(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def _argument(name, metavar, help, **options):
    """The name and the other arguments of `add_argument`."""
    return name, {"type": _string, "metavar": metavar, "help": help, **options}


MODEL = _argument("model", "MODEL", "a model folder, or an id on the Hub")
KINDS = ("d2l", "bert")


@dataclasses.dataclass(frozen=True)
class Command:
    """
    A command.

    Args:
        function: carries the command out.
        help: the command's line in the list of commands.
        usage: what follows the command's name.
        options: the dataclass whose fields become flags, with their defaults.
        arguments: the other arguments, from `_argument`.
        alternatives: arguments of which exactly one must be given.
        description: what the command's own help says after `help`.
    """

    function: Callable
    help: str
    usage: str
    options: Options | None = None
    arguments: tuple = ()
    alternatives: tuple = ()
    description: str = ""


# In the order of the help. The options of `pretrain` are those of the recipe that the arguments name.
COMMANDS = {
    "prepare": Command(
        commands.prepare_command,
        "tokenize a text once for many runs",
        "--output_dir DIR [OPTIONS] | --check DIR...",
        TextConfig(),
        (
            _argument("--output_dir", "DIR", "a new folder to write into"),
            _argument("--check", "DIR", "read every byte of prepared folders instead", nargs="+", action="extend"),
        ),
        description=PREPARE,
    ),
    "pretrain": Command(commands.pretrain_command, "pretrain a BERT from text", "[OPTIONS]", description=PRETRAIN),
    "evaluate": Command(
        commands.evaluate_command,
        "measure models on a text and on minimal pairs",
        "MODEL... (--corpus PATH... | --dataset ID... | --blimp DIR) [OPTIONS]",
        EvaluateConfig(),
        ((MODEL[0], {**MODEL[1], "nargs": "+"}),),
        description=EVALUATE,
    ),
    "finetune": Command(
        commands.finetune_command,
        "train a pretrained model for a task",
        "MODEL --task KIND --train_file FILE [OPTIONS]",
        FinetuneConfig(model=""),
        (MODEL,),
        description=FINETUNE,
    ),
    "fill-mask": Command(
        commands.fill_mask_command,
        "predict the [MASK] in a text",
        "MODEL TEXT... [--top_k N]",
        arguments=(
            MODEL,
            _argument("text", "TEXT", 'such as "It was a [MASK] night."', nargs="+"),
            _argument("--top_k", "N", "tokens to show for each mask (5)", type=_whole_number, default=5),
        ),
    ),
    "next-sentence": Command(
        commands.next_sentence_command,
        "say whether one sentence follows another",
        "MODEL A B",
        arguments=(
            MODEL,
            _argument("first", "A", "a sentence"),
            _argument("second", "B", "the sentence that may follow it"),
        ),
    ),
    "embed": Command(
        commands.embed_command,
        "turn each line of a file into a vector",
        "MODEL FILE --output FILE | --nearest TEXT [OPTIONS]",
        EmbedConfig(),
        (MODEL, _argument("file", "FILE", "a file with a text in each line; - for stdin")),
        description=EMBED,
    ),
    "attention": Command(
        commands.attention_command,
        "draw the attention of each head, or compare a word's vectors",
        "MODEL TEXT [TEXT_B] [--output FILE.png] [--layer N] [--head N] | MODEL TEXT TEXT_B --word WORD",
        AttentionConfig(),
        (
            MODEL,
            _argument("first", "TEXT", "a text"),
            _argument("second", "TEXT_B", "a second text", nargs="?"),
        ),
        description=ATTENTION,
    ),
    "convert": Command(
        commands.convert_command,
        "convert checkpoints of d2l and of BERT",
        "SRC DST --from d2l --num_attention_heads N [--vocab FILE] | --from bert | --to bert | --to d2l",
        arguments=(
            _argument("source", "SRC", "the checkpoint: a file, a folder, or an id on the Hub"),
            _argument("target", "DST", "a new folder to write into"),
            _argument("--num_attention_heads", "N", "attention heads of the d2l model", type=_whole_number),
            _argument("--vocab", "FILE", "the d2l model's Vocab: idx_to_token as JSON, or one token on each line"),
        ),
        alternatives=(
            _argument("--from", None, "the kind of SRC; DST is a d2l-bert model", dest="source_kind", choices=KINDS),
            _argument(
                "--to", None, "the kind that DST becomes; SRC is a d2l-bert model", dest="target_kind", choices=KINDS
            ),
        ),
        description=CONVERT,
    ),
    "export": Command(
        commands.export_command,
        "write a model as stock BERT and ONNX, for browsers and servers",
        "MODEL DIR [--task NAME] [OPTIONS]",
        ExportConfig(),
        (
            _argument("source", "MODEL", MODEL[1]["help"]),
            _argument("target", "DIR", "a new folder to write into"),
        ),
        description=EXPORT,
    ),
    "demo": Command(
        commands.demo_command,
        "try models on a page on this machine",
        "MODEL... [--port N]",
        arguments=(
            (MODEL[0], {**MODEL[1], "nargs": "+"}),
            _argument("--port", "N", "port on 127.0.0.1 (7860)", type=_whole_number, default=7860),
        ),
        description=DEMO,
    ),
    "publish": Command(
        commands.publish_command,
        "send a model folder to the Hub",
        "DIR REPO_ID [OPTIONS]",
        PublishConfig(),
        (
            _argument("folder", "DIR", "the output folder of pretrain, or of save_pretrained"),
            _argument("repo_id", "REPO_ID", "owner/name, or a name under your account"),
        ),
        description=PUBLISH,
    ),
}


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    """
    The parser of all commands.

    Args:
        argv: the arguments: `pretrain --help` shows the defaults of the recipe that they name, and `--help-all` the
            options that are not common.
    """
    look = {
        "formatter_class": functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=110),
        "allow_abbrev": False,
    }
    parser = Parser(prog="d2l-bert", description=DESCRIPTION, **look)
    parser.add_argument("--version", action="version", version=f"d2l-bert {version('d2l-bert')}")
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description = f"{command.help[0].upper()}{command.help[1:]}.{command.description}"
        usage = f"d2l-bert {name} {command.usage}"
        added = parsers.add_parser(name, help=command.help, usage=usage, description=description, **look)
        added.add_argument("--help_all", action="help", help="show all options, not only the common ones")
        added.set_defaults(command=command.function, name=name, parser=added)
        for argument, options in command.arguments:
            added.add_argument(argument, **options)
        if command.alternatives:
            group = added.add_mutually_exclusive_group(required=True)
            for argument, options in command.alternatives:
                group.add_argument(argument, **options)
        shows_all = "--help_all" in argv
        if name == "pretrain":
            _add_recipe(added, argv, shows_all)
        elif command.options is not None:
            _add_options(added, command.options, shows_all)
    return parser


def _add_recipe(parser, argv, shows_all):
    """Add `--recipe`, and the recipe's options and architecture with its values as defaults."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", choices=RECIPES, default="tiny")
    first.error = lambda message: None  # the parser of all flags will show the same error
    recipe = first.parse_known_args(argv)[0].recipe
    architecture, run = RECIPES[recipe]()
    parser.set_defaults(recipe=recipe)
    group = parser.add_argument_group("recipe", "the options below show the recipe's values in brackets")
    lines = ", ".join(
        f"{name} ({recipe.__doc__.splitlines()[0].partition(':')[0].rstrip('.')})" for name, recipe in RECIPES.items()
    )
    group.add_argument("--recipe", choices=RECIPES, metavar="NAME", help=f"{lines}; the default is tiny")
    _add_options(parser, run, shows_all)
    group = parser.add_argument_group("architecture", "fields of D2lBertConfig")
    for name in architecture_options():
        help = "" if shows_all or name in ("hidden_size", "num_hidden_layers") else None
        _add_option(group, name, D2lBertConfig.__annotations__[name], getattr(architecture, name), help)


def _add_options(parser, config, shows_all):
    """
    Add a flag for each field of `config` but `recipe` and `model`, in the field's group; its help shows the value.
    """
    types_of = typing.get_type_hints(type(config))
    fields = [field for field in dataclasses.fields(config) if field.name not in ("recipe", "model")]
    for title in dict.fromkeys(field.metadata["group"] for field in fields):
        group = parser.add_argument_group(title)
        for field in fields:
            if field.metadata["group"] == title:
                is_shown = field.metadata["common"] or shows_all
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
    options = {"default": argparse.SUPPRESS, "metavar": metavar}
    members = [member for member in members_of(kind) if member is not types.NoneType]
    if bool in members:  # perhaps a word, too
        words = typing.get_args(members[-1])
        options |= {"type": functools.partial(_true_or_false, words=words), "nargs": "?", "const": True}
        options["metavar"] = "|".join(["true", "false", *words])
    elif len(members) > 1:  # a number or a word: `PretrainConfig` tells them apart
        options["type"] = str
    elif typing.get_origin(members[0]) is list:
        options |= {"nargs": "+", "action": "extend"}
    elif choices := typing.get_args(members[0]):
        options |= {"choices": choices, "metavar": "|".join(choices)}
    else:
        options |= {"type": members[0], "metavar": metavar or {int: "N", float: "X", str: "NAME"}[members[0]]}
    shown = " ".join(default) if isinstance(default, list) else str(default).lower() if default is not None else ""
    line = f"{help} ({shown})".strip() if shown else help
    group.add_argument(f"--{name}", help=argparse.SUPPRESS if help is None else line.replace("%", "%%"), **options)


def _true_or_false(text, words):
    if text.lower() in words:
        return text.lower()
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{' or '.join(['true', 'false', *words])}, not {text!r}")
    return text.lower() == "true"


def with_underscores(argv):
    """The arguments with `--max-steps` written as `--max_steps`; those after a bare `--` are not flags and stay."""
    before = itertools.takewhile(lambda argument: argument != "--", argv)
    renamed = [re.sub(r"^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), argument) for argument in before]
    return [*renamed, *argv[len(renamed) :]]
