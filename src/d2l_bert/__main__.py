"""The command `d2l-bert`: parses arguments, runs a command, turns errors into messages and exit codes."""

import argparse
import contextlib
import difflib
import functools
import inspect
import os
import pkgutil
import re
import select
import sys
import traceback

import psutil

from d2l_bert import __version__, commands, messages, options, registration


EXAMPLES = """\
examples:
  d2l-bert prepare --corpus books/ --output_dir tokens
  d2l-bert pretrain                                    a small BERT of Python's documentation, in a few minutes
  d2l-bert pretrain --corpus books/ --output_dir out   a BERT of your own text files; or --corpus tokens
  d2l-bert finetune out --task text-classification --train_file train.csv --test_file test.csv
  d2l-bert evaluate out --corpus test.txt --blimp hub
  d2l-bert predict out-text-classification new.csv --output predicted.csv
  d2l-bert fill-mask out "The [MASK] is on the table."
  d2l-bert next-sentence out "A crane is flying." "It spreads its wings."
  d2l-bert embed out texts.txt --output vectors.npy    or --nearest "a text"
  d2l-bert attention out "A crane is flying."
  d2l-bert demo out
  d2l-bert convert google-bert/bert-base-uncased from-bert --from bert
  d2l-bert export out stock
  d2l-bert publish out my-bert                         private, unless with --public

The help of one command: d2l-bert pretrain --help; all of its options: d2l-bert pretrain --help_all
"""

# The flags that show help, as `with_underscores` writes them.
HELP = {"-h", "--help", "--help_all"}


# The exit code that a shell gives for a program that SIGPIPE has ended: the reader of its output has left.
READER_IS_GONE = 141


def main(argv: list[str] | None = None) -> int:
    """
    Run one command of `d2l-bert`.

    Args:
        argv: the arguments of the command; None for the arguments of this process.

    Returns:
        The exit code: 0; 2 for an error that the user can fix, with one line on stderr; 1 for a bug, with a
        traceback; 130 after Ctrl-C; 141, without a message, if the reader of stdout has left (`| head`). argparse ends
        the process by `SystemExit` instead (2), and so does a training that was stopped (143 after SIGTERM).
    """
    _open_closed_streams()
    try:
        with registration.postponed():  # until the command runs: help does not wait for it
            code = _run(with_underscores(sys.argv[1:] if argv is None else argv))
    finally:  # also if `SystemExit` ends the process
        failed = _flush_stdout()
    return failed or code


def _run(argv):
    """Parse the arguments and run the command; returns the exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show becomes "?", not an error
    if argv[:1] and argv[0] in commands.COMMANDS:
        try:
            _check_working_folder()  # first: importing Transformers, as the options of `pretrain` do, asks for it
        except messages.UserError as error:
            return _show_error(argv[0], error)
        if HELP.isdisjoint(argv):
            spare_busy_cores()
            # What an Apple GPU cannot compute, the CPU does. PyTorch reads the variable when it is loaded.
            os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    arguments, unknown = make_parser(argv).parse_known_args(argv)
    if unknown:
        flags = arguments.parser._option_string_actions
        similar = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        before = argv[argv.index(unknown[0]) - 1]
        if before in flags and options.may_stand_bare(flags[before]):
            hint = f"; {before} takes true or false"
        arguments.parser.error(f"unknown argument {unknown[0]!r}{hint}")
    try:
        with messages.messages_shown():
            registration.register()
            from transformers.utils import logging

            logging.disable_progress_bar()  # Transformers shows a bar for each file of a model
            arguments.command(arguments)
            return 0
    except KeyboardInterrupt:
        if not messages.launched_rank():  # rank 0 speaks for all
            _say(f"d2l-bert {arguments.name}: interrupted")
        return 130
    except BrokenPipeError as error:  # of stdout, or of a connection
        code = READER_IS_GONE if _is_reader_gone() else _show_error(arguments.name, error)
    except Exception as error:
        code = _show_error(arguments.name, error)
    except SystemExit as leaving:
        if leaving.code != 2:
            raise
        code = 2  # another rank has shown the error
    except BaseException as error:
        # What the library tokenizers raises where its code in Rust gives up, as on a pattern without an end.
        if type(error).__name__ != "PanicException":
            raise
        code = _show_error(arguments.name, messages.UserError(f"the tokenizer gave up ({error!s:.200}); give another"))
    if _is_connected():  # gloo's threads may still wait for other ranks, and would abort an ordinary exit of Python
        _flush_stdout()  # stderr is flushed at the end of every line
        os._exit(code)
    return code


def _open_closed_streams():
    """
    Open the null device in place of a standard stream that is closed, as by `<&-`. The next file would take its number
    otherwise, and get what a library writes to the stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def _check_working_folder():
    """Raise `UserError` if the working folder was deleted: relative paths then name nothing."""
    try:
        os.getcwd()
    except OSError as error:
        raise messages.UserError(
            f"the working folder cannot be used ({error.strerror}); change to another one"
        ) from None


def _flush_stdout():
    """
    Write what is still to be written to stdout, and say why if that fails, unless only its reader has left.

    Returns:
        The exit code; 0 if all is written.
    """
    try:
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        code = READER_IS_GONE
    except OSError as error:
        _say(f"d2l-bert: error: standard output: cannot be written ({error.strerror}); give it another place")
        code = 2
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python, which flushes it once more
    return code


def _is_reader_gone():
    """Whether the reader of stdout has left. Windows has no `poll`: an error of a pipe is taken for one of stdout."""
    if not hasattr(select, "poll"):
        return True
    watched = select.poll()
    try:
        watched.register(sys.stdout.fileno(), 0)
    except OSError:  # stdout is no file
        return False
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in watched.poll(0))


def _say(line):
    """Print a line to stderr; nothing if stderr is closed."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


def spare_busy_cores() -> None:
    """
    Let OpenMP's threads sleep early at barriers if other programs use the cores now, unless the user has chosen: if
    they take more than 30 % of a core for 0.3 s.

    By default a thread that waits spins for some milliseconds. Beside another program it keeps a core from the very
    thread that it waits for: on two cores, beside one busy program, the recipe tiny keeps 2 % of its speed, and 50 %
    if its threads sleep early; on free cores that would cost up to a third (benchmarks/LOG.md). GNU's OpenMP reads
    the variable when PyTorch is loaded.
    """
    if "torch" in sys.modules or {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        return
    if psutil.cpu_percent(0.3) * options.cores() > 30:
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _is_connected():
    """Whether this process is one of several that can reach each other."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _show_error(command, error):
    """Print why a command failed; return the exit code, 2 for an error that the user can fix and 1 for a bug."""
    if isinstance(error, messages.ErrorElsewhere):
        return 2
    rank = messages.launched_rank()
    line = messages.one_line(error)
    if rank and not _is_connected():  # until processes are connected, rank 0 has the same error, and shows it
        return 2
    if messages.is_out_of_memory(error):
        line = f"out of memory ({line:.200}); ask for less at once, or take a machine with more"
    elif not isinstance(error, messages.UserError) and getattr(error, "errno", 0) not in messages.ENVIRONMENT_ERRORS:
        _say("".join(traceback.format_exception(error)).rstrip())
        _say(
            f"d2l-bert {command}: this is a bug of d2l-bert {__version__}, not an error in your input: "
            f"please report it with the lines above (CONTRIBUTING.md says where, under Bugs)"
        )
        return 1
    process = f"process {rank}: " if rank else ""
    _say(messages.printable(f"d2l-bert {command}: error: {process}{line}"))
    return 2


# ---------------------------------------------------------------------------------------------------------------------
# The parser


class Parser(argparse.ArgumentParser):
    """
    argparse with a one-line error message instead of the whole usage; with several ranks, rank 0 prints it. A flag of
    true or false takes no other word for its value.
    """

    def parse_known_args(self, args=None, namespace=None):
        if args is not None:
            args = options.with_true_at_bare_flags(args, self._option_string_actions)
        return super().parse_known_args(args, namespace)

    def error(self, message):
        self.exit(2, None if messages.launched_rank() else f"{self.prog}: error: {message}; see {self.prog} --help\n")


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    """
    The parser of all commands. Only the command that `argv` names has its arguments, as their defaults need imports.

    Args:
        argv: the arguments: `pretrain --help` shows the defaults of the recipe that they name, and `--help_all` the
            options that are not common.
    """
    look = {
        "formatter_class": functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=110),
        "allow_abbrev": False,
    }
    usage = "d2l-bert [-h] [--version] COMMAND ..."
    parser = Parser(prog="d2l-bert", usage=usage, description=_description(), epilog=EXAMPLES, **look)
    parser.add_argument("--version", action="version", version=f"d2l-bert {__version__}")
    parser.set_defaults(parser=parser)  # a command's own takes its place
    # `_description` lists the commands, which argparse cannot group.
    parsers = parser.add_subparsers(prog="d2l-bert", metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    for name, command in commands.COMMANDS.items():
        usage = f"d2l-bert {name} {command.usage}"
        added = parsers.add_parser(name, usage=usage, description=inspect.getdoc(command.function), **look)
        if name in argv[:1]:
            _add_arguments(added, name, command, argv)
    return parser


def _description():
    """What stands above the options in `d2l-bert --help`: the commands by group, each with its first sentence."""
    lines = ["Raw text in, a BERT out."]
    for group in (commands.TRAIN, commands.MEASURE, commands.USE, commands.SHARE):
        lines += ["", f"{group}:"]
        for name, command in commands.COMMANDS.items():
            if command.group == group:
                sentence = inspect.getdoc(command.function).partition(".\n")[0].removesuffix(".")
                lines.append(f"  {name:<15}{sentence}")
    return "\n".join(lines)


def _add_arguments(parser, name, command, argv):
    """Add the arguments of a command, and a flag for each of its options."""
    shows_all = "--help_all" in argv
    parser.set_defaults(command=command.function, name=name, parser=parser)
    parser.add_argument("--help_all", action="help", help="show all options, not only the common ones")
    one_of = parser.add_mutually_exclusive_group(required=bool(command.one_of))
    for group, arguments in ((parser, command.arguments), (one_of, command.one_of)):
        for argument, how in arguments:
            group.add_argument(argument, **how)
    if name == "pretrain":
        _add_recipe(parser, argv, shows_all)
    elif command.options_class:
        # Named by a string in `commands.py` and imported here: no command waits for the imports of another one.
        config_class = pkgutil.resolve_name(f"d2l_bert.{command.options_class}")
        config = config_class()
        parser.set_defaults(config=config)
        options.add_options(parser, config, shows_all)
        if command.other_class:
            other = pkgutil.resolve_name(f"d2l_bert.{command.other_class}")()
            parser.set_defaults(other_config=other)
            options.add_options(parser, other, shows_all, but=vars(config))


def _add_recipe(parser, argv, shows_all):
    """Add `--recipe`, and the recipe's options and architecture with its values as defaults."""
    from d2l_bert.training.recipes import RECIPES, architecture_options

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", nargs="?")
    recipe = RECIPES.get(first.parse_known_args(argv)[0].recipe, RECIPES["tiny"])  # a wrong name is refused below
    architecture, run = recipe()
    parser.set_defaults(architecture=architecture, config=run)
    names = []
    for name, make in RECIPES.items():
        title = make.__doc__.splitlines()[0].partition(":")[0].rstrip(".")
        names.append(f"{name} ({title})")
    group = parser.add_argument_group("recipe", "the options below show the recipe's values in brackets")
    help = f"{', '.join(names)}; the default is tiny"
    group.add_argument("--recipe", choices=RECIPES, metavar="NAME", default="tiny", help=help)
    options.add_options(parser, run, shows_all)
    group = parser.add_argument_group("architecture", "fields of D2lBertConfig")
    for name in architecture_options():
        help = "" if shows_all or name in ("hidden_size", "num_hidden_layers") else None
        options.add_option(group, name, type(architecture).__annotations__[name], getattr(architecture, name), help)


def with_underscores(argv):
    """The arguments with `--max-steps` written as `--max_steps`; those after a bare `--` are not flags and stay."""
    end = argv.index("--") if "--" in argv else len(argv)
    renamed = [re.sub(r"^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in argv[:end]]
    return [*renamed, *argv[end:]]


if __name__ == "__main__":
    sys.exit(main())
