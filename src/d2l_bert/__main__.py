"""The command `d2l-bert`: parses arguments, runs a command, turns errors into messages and exit codes."""

import argparse
import contextlib
import dataclasses
import difflib
import errno
import functools
import importlib
import inspect
import itertools
import os
import re
import sys
import traceback
import types
import typing

import psutil

import d2l_bert
from d2l_bert.commands import COMMANDS
from d2l_bert.messages import ENVIRONMENT_ERRORS, UserError, is_out_of_memory, launched_rank, messages_shown
from d2l_bert.options import cores, members_of, value_of


# Cores are busy if other programs take more than this share of one, measured for some seconds.
BUSY_PERCENT, BUSY_SECONDS = 30, 0.3

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
    if argv[:1] and argv[0] in COMMANDS:
        spare_busy_cores()
    arguments, unknown = make_parser(argv).parse_known_args(argv)
    if unknown:
        arguments.parser.refuse(unknown[0].partition("=")[0])
    try:
        with messages_shown():
            d2l_bert.register_with_transformers()
            from transformers.utils import logging

            logging.disable_progress_bar()  # Transformers shows a bar for each file of a model
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


def spare_busy_cores() -> None:
    """
    Let OpenMP's threads sleep early at barriers if other programs use the cores now, unless the user has chosen.

    By default a thread that waits spins for some milliseconds. Beside another program it keeps a core from the very
    thread that it waits for: on two cores, beside one busy program, the recipe tiny keeps 2 % of its speed, and 50 %
    if its threads sleep early; on free cores that would cost up to a third (benchmarks/LOG.md). GNU's OpenMP reads
    the variable when PyTorch is loaded.
    """
    is_chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if "torch" not in sys.modules and not is_chosen and psutil.cpu_percent(BUSY_SECONDS) * cores() > BUSY_PERCENT:
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _exit_if_distributed(code):
    """End this process at once if it is one of several ranks; else return the exit code.

    gloo's threads may still wait for other ranks, and an ordinary exit of the interpreter would abort them.
    """
    if _is_connected():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _is_connected():
    """Whether this process is one of several that can reach each other."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _show_error(command, error):
    """Print why a command failed; return the exit code, 2 for an error that the user can fix and 1 for a bug."""
    if launched_rank() and not _is_connected():  # before that, rank 0 has the same error
        return 2
    line, cause = " ".join(str(error).split()), errno.errorcode.get(getattr(error, "errno", None))
    if is_out_of_memory(error):
        line = f"out of memory ({line:.200}); ask for less at once, or take a machine with more"
    elif not isinstance(error, UserError) and cause not in ENVIRONMENT_ERRORS:
        traceback.print_exception(error)
        print(
            f"d2l-bert {command}: this is a bug of d2l-bert {d2l_bert.__version__}, not an error in your input: "
            f"please report it with the lines above (CONTRIBUTING.md says where, under Bugs)",
            file=sys.stderr,
        )
        return 1
    process = f"process {launched_rank()}: " if launched_rank() else ""
    print(f"d2l-bert {command}: error: {process}{line}", file=sys.stderr)
    return 2


# ---------------------------------------------------------------------------------------------------------------------
# The parser


class Parser(argparse.ArgumentParser):
    """argparse with a one-line error message instead of the whole usage; with several ranks, rank 0 prints it."""

    def error(self, message):
        self.exit(2, None if launched_rank() else f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def refuse(self, argument):
        """Exit with an error for an argument that the command does not have; suggests a flag with a similar name."""
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        close = difflib.get_close_matches(argument, self._option_string_actions, n=1)
        self.error(f"unknown option {argument}" + (f"; did you mean {close[0]}?" if close else ""))


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    """
    The parser of all commands. Only the command that `argv` names has its arguments, as their defaults need imports.

    Args:
        argv: the arguments: `pretrain --help` shows the defaults of the recipe that they name, and `--help-all` the
            options that are not common.
    """
    look = {
        "formatter_class": functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=110),
        "allow_abbrev": False,
    }
    parser = Parser(prog="d2l-bert", description=DESCRIPTION, **look)
    parser.add_argument("--version", action="version", version=f"d2l-bert {d2l_bert.__version__}")
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        text = inspect.getdoc(command.function)
        help = text.partition(".\n")[0].removesuffix(".")
        usage = f"d2l-bert {name} {command.usage}"
        added = parsers.add_parser(name, help=f"{help[0].lower()}{help[1:]}", usage=usage, description=text, **look)
        if name in argv[:1]:
            _add_arguments(added, name, command, argv)
    return parser


def _add_arguments(parser, name, command, argv):
    """Add the arguments of a command, and a flag for each of its options."""
    shows_all = "--help_all" in argv
    parser.set_defaults(command=command.function, name=name, parser=parser)
    parser.add_argument("--help_all", action="help", help="show all options, not only the common ones")
    for argument, how in command.arguments:
        parser.add_argument(argument, **how)
    if command.one_of:
        group = parser.add_mutually_exclusive_group(required=True)
        for argument, how in command.one_of:
            group.add_argument(argument, **how)
    if name == "pretrain":
        _add_recipe(parser, argv, shows_all)
    elif command.options:
        module, _, class_name = command.options.rpartition(".")
        config_class = getattr(importlib.import_module(f"d2l_bert.{module}"), class_name)
        parser.set_defaults(config_class=config_class)
        _add_options(parser, config_class(model="") if class_name == "FinetuneConfig" else config_class(), shows_all)


def _add_recipe(parser, argv, shows_all):
    """Add `--recipe`, and the recipe's options and architecture with its values as defaults."""
    from d2l_bert.training.recipes import RECIPES, architecture_options

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", nargs="?")
    recipe = RECIPES.get(first.parse_known_args(argv)[0].recipe, RECIPES["tiny"])  # a wrong name is refused below
    architecture, run = recipe()
    group = parser.add_argument_group("recipe", "the options below show the recipe's values in brackets")
    lines = ", ".join(
        f"{name} ({recipe.__doc__.splitlines()[0].partition(':')[0].rstrip('.')})" for name, recipe in RECIPES.items()
    )
    help = f"{lines}; the default is tiny"
    group.add_argument("--recipe", choices=RECIPES, metavar="NAME", default="tiny", help=help)
    _add_options(parser, run, shows_all)
    group = parser.add_argument_group("architecture", "fields of D2lBertConfig")
    for name in architecture_options():
        help = "" if shows_all or name in ("hidden_size", "num_hidden_layers") else None
        _add_option(group, name, type(architecture).__annotations__[name], getattr(architecture, name), help)


def _add_options(parser, config, shows_all):
    """
    Add a flag for each option but `recipe`, in the option's group; its help shows the value.

    Args:
        config: an object of a dataclass of options.
    """
    types_of = typing.get_type_hints(type(config))
    fields = [field for field in dataclasses.fields(config) if field.name not in ("recipe", "model")]
    for title in dict.fromkeys(field.metadata["group"] for field in fields):
        group = parser.add_argument_group(title)
        for field in fields:
            if field.metadata["group"] == title:
                help = field.metadata["help"] if field.metadata["common"] or shows_all else None
                kind, value, metavar = types_of[field.name], getattr(config, field.name), field.metadata["metavar"]
                _add_option(group, field.name, kind, value, help, metavar)


def _add_option(group, name, kind, default, help, metavar=None):
    """
    Add the flag `--name` to an argument group.

    Args:
        kind: the type of the field, such as `int | None`.
        default: the field's value, shown in the help. A flag that is not given is left out of the parsed arguments.
        help: what the option does; None to leave it out of the help.
    """
    members = [member for member in members_of(kind) if member is not types.NoneType]
    names = {bool: "true|false", int: "N", float: "X", str: "NAME"}
    how = {
        "metavar": metavar or "|".join(names.get(member) or "|".join(typing.get_args(member)) for member in members),
        "type": functools.partial(value_of, str if list[str] in members else kind, is_path=metavar == "PATH"),
    }
    if bool in members:
        how |= {"nargs": "?", "const": True}
    elif list[str] in members:
        how |= {"nargs": "+", "action": "extend"}
    shown = " ".join(default) if isinstance(default, list) else str(default).lower() if default is not None else ""
    line = f"{help} ({shown})".strip() if shown else help
    help = argparse.SUPPRESS if help is None else line.replace("%", "%%")
    group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help, **how)


def with_underscores(argv):
    """The arguments with `--max-steps` written as `--max_steps`; those after a bare `--` are not flags and stay."""
    before = itertools.takewhile(lambda argument: argument != "--", argv)
    renamed = [re.sub(r"^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), argument) for argument in before]
    return [*renamed, *argv[len(renamed) :]]


if __name__ == "__main__":
    sys.exit(main())
