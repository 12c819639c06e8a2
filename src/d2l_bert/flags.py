"""The flags of the command `d2l-bert`: the fields of its dataclasses of options, with help and types."""

import argparse
import dataclasses
import difflib
import functools
import itertools
import re
import types
import typing

from d2l_bert.commands import (
    convert_command,
    fill_mask_command,
    next_sentence_command,
    prepare_command,
    pretrain_command,
    publish_command,
)
from d2l_bert.errors import launched_rank


DESCRIPTION = """\
Raw text in, a BERT out.

  d2l-bert pretrain                                   a small BERT of Python's documentation, in some minutes
  d2l-bert pretrain --corpus books/ --output_dir out  one of your own text files
  d2l-bert prepare --corpus books/ --output_dir tokens   once for many runs: pretrain --corpus tokens
  d2l-bert fill-mask out "The [MASK] is on the table."
  d2l-bert next-sentence out "A crane is flying." "It spreads its wings."
  d2l-bert convert google-bert/bert-base-uncased out --from bert
  d2l-bert publish out my-bert                        to the Hugging Face Hub; private unless --public

Each command explains itself: d2l-bert pretrain --help
"""

PRETRAIN = """

With no option at all it trains the recipe tiny on the documentation that is installed with Python, in some minutes.
It leaves a folder with the model, its tokenizer, its card and the run's record."""

PREPARE = """

It leaves a folder with a tokenizer and the tokens in memory-mapped Arrow: the corpus of any number of runs,
d2l-bert pretrain --corpus DIR, wherever it is copied to."""

CONVERT = """

  --from d2l   the state dict of the book's BERTModel, a file or a folder with pretrained.params and vocab.json
  --from bert  any stock BERT, a folder or an id on the Hub
  --to bert    ours as a stock BERT; ours must normalise its embeddings (embedding_layer_norm)
  --to d2l     ours as pretrained.params and vocab.json for the book's BERTModel

DST is a new folder. Weights stay the same numbers, and what the other model cannot express is refused."""


PUBLISH = """

The folder is checked first: code, weights, tokenizer and card must be there and agree. Then everything goes in one
commit, which is tagged by its content; checkpoints and logs stay here, and no path of this machine is sent. The token
is that of `hf auth login`, or HF_TOKEN. What was cut off is completed by the same command."""


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake instead of a page."""

    def error(self, message):
        self.exit(2, None if launched_rank() else f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def refuse(self, argument):
        """Stop at an argument that the command does not take."""
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        known = [option for action in self._actions for option in action.option_strings]
        close = difflib.get_close_matches(argument, known, n=1)
        self.error(f"unknown option {argument}" + (f"; did you mean {close[0]}?" if close else ""))


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Option names in a column wide enough for most of them."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=34, width=110)


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    """The parser of all commands. `argv` tells which recipe's defaults `pretrain --help` shows."""
    parser = Parser(prog="d2l-bert", description=DESCRIPTION, formatter_class=HelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name, function, help, usage, description=""):
        added = commands.add_parser(
            name,
            help=help,
            usage=f"d2l-bert {name} {usage}",
            description=f"{help[0].upper()}{help[1:]}.{description}",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        added.set_defaults(command=function, name=name, parser=added)
        return added

    from d2l_bert.model_cards.config import PublishConfig
    from d2l_bert.tokenization.config import TextConfig

    prepare = command(
        "prepare", prepare_command, "tokenize a text once for many runs", "--output_dir DIR [OPTIONS]", PREPARE
    )
    prepare.add_argument("--output_dir", required=True, type=_text, metavar="DIR", help="the folder to make")
    _add_options(prepare, TextConfig())
    _add_pretrain_options(
        command("pretrain", pretrain_command, "pretrain a BERT from text", "[OPTIONS]", PRETRAIN), argv
    )
    fill = command("fill-mask", fill_mask_command, "predict the [MASK] in a text", "MODEL TEXT... [--top_k N]")
    fill.add_argument("model", type=_text, metavar="MODEL", help="a model folder, or an id on the Hub")
    fill.add_argument("text", type=_sentence, metavar="TEXT", nargs="+", help='such as "It was a [MASK] night."')
    fill.add_argument("--top_k", type=_whole_number, default=5, metavar="N", help="tokens to show for a mask (5)")
    follow = command("next-sentence", next_sentence_command, "say whether one sentence follows another", "MODEL A B")
    follow.add_argument("model", type=_text, metavar="MODEL", help="a model folder, or an id on the Hub")
    follow.add_argument("first", type=_sentence, metavar="A", help="a sentence")
    follow.add_argument("second", type=_sentence, metavar="B", help="the sentence that may follow it")
    usage = "SRC DST --from d2l --num_attention_heads N [--vocab FILE] | --from bert | --to bert | --to d2l"
    convert = command("convert", convert_command, "convert checkpoints of d2l and of BERT", usage, CONVERT)
    convert.add_argument(
        "source", type=_text, metavar="SRC", help="the checkpoint: a file, a folder, an id on the Hub"
    )
    convert.add_argument("target", type=_text, metavar="DST", help="the folder to make")
    kind = convert.add_mutually_exclusive_group(required=True)
    kind.add_argument("--from", dest="source_kind", choices=("d2l", "bert"), help="what SRC is; DST will be ours")
    kind.add_argument("--to", dest="target_kind", choices=("d2l", "bert"), help="what DST shall be; SRC is ours")
    convert.add_argument("--num_attention_heads", type=_whole_number, metavar="N", help="heads of the d2l model")
    convert.add_argument(
        "--vocab", type=_text, metavar="FILE", help="its Vocab: idx_to_token as JSON, or a token a line"
    )
    publish = command("publish", publish_command, "send a model folder to the Hub", "DIR REPO_ID [OPTIONS]", PUBLISH)
    publish.add_argument(
        "folder", type=_text, metavar="DIR", help="what pretrain left, or a folder of save_pretrained"
    )
    publish.add_argument("repo_id", type=_text, metavar="REPO_ID", help="owner/name, or a name under your own account")
    _add_options(publish, PublishConfig())
    return parser


def _add_pretrain_options(parser, argv):
    from d2l_bert import D2lBertConfig
    from d2l_bert.training.recipes import RECIPES, architecture_options

    recipe_finder = Parser(add_help=False, allow_abbrev=False)
    recipe_finder.add_argument("--recipe", choices=RECIPES, default="tiny")
    recipe_finder.error = lambda message: None  # the real parser will say it
    found, _ = recipe_finder.parse_known_args(argv)
    architecture, run = RECIPES[found.recipe]()

    parser.set_defaults(recipe=found.recipe)
    recipes = parser.add_argument_group("recipe", "the options below show its numbers in brackets")
    lines = ", ".join(
        f"{name} ({recipe.__doc__.splitlines()[0].partition(':')[0].rstrip('.')})" for name, recipe in RECIPES.items()
    )
    recipes.add_argument("--recipe", choices=RECIPES, metavar="NAME", help=f"{lines}; the default is tiny")
    _add_options(parser, run)
    group = parser.add_argument_group("architecture", "fields of D2lBertConfig")
    for name in architecture_options():
        _add_option(group, name, D2lBertConfig.__annotations__[name], getattr(architecture, name))


def _add_options(parser, config):
    """A flag for every field of a configuration but `recipe`, with its value as the default, under its heading."""
    types_of = typing.get_type_hints(type(config))
    fields = [field for field in dataclasses.fields(config) if field.name != "recipe"]
    for title in dict.fromkeys(field.metadata["group"] for field in fields):
        group = parser.add_argument_group(title)
        for field in fields:
            if field.metadata["group"] == title:
                help, metavar = field.metadata["help"], field.metadata["metavar"]
                _add_option(group, field.name, types_of[field.name], getattr(config, field.name), help, metavar)


def _add_option(group, name, kind, default, help="", metavar=None):
    options = {"default": argparse.SUPPRESS}
    parse = None
    if number := next((number for number in (int, float) if number in typing.get_args(kind)), None):
        if any(part is str or typing.get_origin(part) is typing.Literal for part in typing.get_args(kind)):
            parse = functools.partial(_number_or_text, number)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
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
    group.add_argument(f"--{name}", help=f"{help} {shown}".strip().replace("%", "%%"), **options)


def _true_or_false(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"true or false, not {text!r}")
    return text.lower() == "true"


def _number_or_text(number, text):
    try:
        return number(text)
    except ValueError:
        return text


def _text(text):
    """The type of arguments that no configuration holds; `check_texts` refuses the same in those that one does."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"it is empty (got {text!r}); give a value")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} holds a NUL character, which no name has; take it out")
    return text


def _sentence(text):
    """The type of arguments that are given to a tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{ascii(text)} is not UTF-8; write it in that") from None
    return _text(text)


def _whole_number(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def with_underscores(argv):
    """`--max-steps` is `--max_steps`; what stands behind a bare `--` is no option."""
    options = itertools.takewhile(lambda argument: argument != "--", argv)
    written = [re.sub(r"^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), option) for option in options]
    return [*written, *argv[len(written) :]]
