"""The `d2l-bert` command. Options live in the dataclasses of the commands; this file turns them into flags."""

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import functools
import itertools
import os
import re
import signal
import socket
import sys
import threading
import traceback
import types
import typing
from importlib.metadata import version
from pathlib import Path

from d2l_bert import early_signals
from d2l_bert.errors import (
    ENVIRONMENT,
    UserError,
    another_kind,
    is_out_of_memory,
    launched_rank,
    reading_model,
    reading_tokenizer,
    refusals_are_the_users,
)


# From a signal to the end of a process that does not come to answer it.
SECONDS_TO_ANSWER = 5

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


def main(argv: list[str] | None = None) -> int:
    """Run a command; what the user can mend is one line on stderr and exit code 2."""
    argv = _with_underscores(sys.argv[1:] if argv is None else argv)
    try:
        launched_rank()
    except UserError as error:
        print(f"d2l-bert: error: {error}", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows another, and no error
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")
    if bare := next((option for option in argv if re.fullmatch(r"--[^=]+=--", option)), None):
        print(f"d2l-bert: error: {bare} gives no value; write one behind the =", file=sys.stderr)
        return 2
    arguments, unknown = make_parser(argv).parse_known_args(argv)
    if unknown:
        arguments.parser.refuse(unknown[0].partition("=")[0])
    try:
        with _terminated_cleanly():
            arguments.command(arguments)
    except KeyboardInterrupt:
        print(f"d2l-bert {arguments.name}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _ended(_failed(arguments.name, error))
    except SystemExit as leaving:
        if leaving.code == 2:  # another process has said why
            _ended(2)
        raise
    return 0


def _ended(code):
    """Leave a failed run of several processes at once, else return the exit code."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        # gloo's threads may still be waiting for the others; the interpreter, on its way out, would abort them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _failed(command, error):
    """Show why a command failed; returns its exit code, 2 for what the user can mend and 1 for a bug."""
    line = " ".join(str(error).split())
    if is_out_of_memory(error):
        line = f"out of memory ({line:.200}); ask for less at once, or take a machine with more"
    elif not isinstance(error, UserError) and getattr(error, "errno", None) not in ENVIRONMENT:
        traceback.print_exception(error)
        print(
            f"d2l-bert {command}: this is a bug of d2l-bert {version('d2l-bert')}, not of what you gave it: please "
            f"report it with the lines above, as its CONTRIBUTING.md says under Bugs",
            file=sys.stderr,
        )
        return 1
    process = f"process {launched_rank()}: " if launched_rank() else ""
    print(f"d2l-bert {command}: error: {process}{line}", file=sys.stderr)
    return 2


def _terminate(number, frame):
    print("d2l-bert: terminated", file=sys.stderr)
    sys.exit(128 + number)


@contextlib.contextmanager
def _terminated_cleanly():
    """
    Have a command that gets a SIGTERM clean up as one that fails does, and leave with 143. An ignored signal stays
    ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python has no handlers elsewhere
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {}
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is early_signals.leave:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    told_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_if_unanswered, args=(ours,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(told_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        theirs.shutdown(socket.SHUT_RDWR)  # closing would not end it while a forked process has a copy
        theirs.close()


def _end_if_unanswered(told):
    """
    End the process some seconds after a signal, if it is still there.

    Python answers a signal when its main thread comes back from whatever library it is in, and that may be waiting
    for a process that never comes. `told` gets the number of each signal, and ends with the command.
    """
    with told:
        while number := told.recv(1):
            # In training signals have handlers of their own, which wait for the end of a step.
            if signal.getsignal(number[0]) not in (_terminate, signal.default_int_handler):
                continue
            told.settimeout(SECONDS_TO_ANSWER)
            try:
                while told.recv(1):
                    pass
            except TimeoutError:
                os.write(2, b"d2l-bert: terminated\n")
                os._exit(128 + number[0])
            return


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def pretrain_command(arguments) -> None:
    """Start from a recipe, change what was given, and train."""
    from d2l_bert.training.distributed import said_once
    from d2l_bert.training.pretrain import pretrain

    with said_once():
        architecture, run = resolve_pretrain(arguments)
    keep_freed_memory()  # before the text is read: what that frees is one large piece, in which steps find room
    pretrain(architecture, run)


def keep_freed_memory() -> None:
    """
    Have glibc keep what a step frees for the next one.

    It would give every large tensor back to the system, which clears each page of it before it comes again: on two
    cores that is a tenth of a step. What reading the text has freed is kept too, until the process ends. So it is for
    the command, whose process ends with the run, and not for `pretrain` called from a program.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD of malloc.h: never
        libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; older ones take 32 MiB at most


def resolve_pretrain(arguments) -> tuple:
    """The architecture and the run that the arguments of `pretrain` ask for."""
    from d2l_bert.training.config import TextConfig, check_texts
    from d2l_bert.training.prepare import is_prepared
    from d2l_bert.training.recipes import RECIPES, architecture_options, changed

    given = vars(arguments)
    architecture, run = RECIPES[arguments.recipe]()
    _refuse_what_a_tokenizer_settles(given)
    run = changed(run, {field.name: given[field.name] for field in dataclasses.fields(run) if field.name in given})
    check_texts(run)  # an empty path would be looked up as the working directory
    if "init_from" in given:
        architecture = _start_architecture(given)
    for field in dataclasses.fields(TextConfig):
        if field.name in given and field.name != "corpus" and is_prepared(run):
            raise UserError(
                f"{field.name} is settled in the prepared folder {run.text_paths()[0]}; leave it out, or prepare anew"
            )
    changes = {name: given[name] for name in architecture_options() if name in given}
    with refusals_are_the_users():
        return type(architecture)(**{**architecture.to_dict(), **changes}), run


def prepare_command(arguments) -> None:
    """Train a tokenizer and tokenize a text, once for many runs."""
    from d2l_bert.training.config import TextConfig
    from d2l_bert.training.folders import new_folder
    from d2l_bert.training.prepare import write_prepared

    given = vars(arguments)
    _refuse_what_a_tokenizer_settles(given)
    run = TextConfig(
        **{field.name: given[field.name] for field in dataclasses.fields(TextConfig) if field.name in given}
    )
    run.check()
    with new_folder(Path(arguments.output_dir)) as folder:
        text = write_prepared(run, folder)
    print(text.summary())
    print(f"train on it: d2l-bert pretrain --corpus {arguments.output_dir}")


def _refuse_what_a_tokenizer_settles(given):
    from d2l_bert.training.config import TOKENIZER_TRAINING_OPTIONS

    existing = next((name for name in ("tokenizer", "init_from") if name in given), None)
    for name in TOKENIZER_TRAINING_OPTIONS:
        # Words are added from a frequency on.
        if existing and name in given and not (name == "min_frequency" and given.get("extend_vocab")):
            raise UserError(
                f"{name} is for training a tokenizer, and {existing} gives one that exists ({given[existing]}); "
                f"leave {name} out"
            )


def _start_architecture(given):
    """That of the model in `init_from`; the recipe's makes way, the user's is refused."""
    from d2l_bert.training.config import FREE_FIELDS
    from d2l_bert.training.initialize import read_architecture
    from d2l_bert.training.recipes import architecture_options

    for name in architecture_options():
        if name in given and name not in FREE_FIELDS:
            raise UserError(f"{name} is settled by the model in init_from ({given['init_from']}); leave {name} out")
    return read_architecture(given["init_from"])


def fill_mask_command(arguments) -> None:
    """Print the likeliest tokens for each mask of each text."""
    from d2l_bert import D2lBertForMaskedLM
    from d2l_bert.training.evaluate import fill_mask

    model, tokenizer = _load(D2lBertForMaskedLM, arguments.model)
    for text, predictions in zip(
        arguments.text, fill_mask(model, tokenizer, arguments.text, arguments.top_k), strict=True
    ):
        print(text)
        for number, best in enumerate(predictions, 1):
            if len(predictions) > 1:
                print(f"  mask {number}")
            for token, probability in best:
                print(f"  {probability:6.1%}  {token:<20} {_bar(probability)}".rstrip())


def next_sentence_command(arguments) -> None:
    """Print whether the second sentence follows the first."""
    from d2l_bert import D2lBertForNextSentencePrediction, NextSentencePredictionPipeline

    model, tokenizer = _load(D2lBertForNextSentencePrediction, arguments.model)
    predict = NextSentencePredictionPipeline(model=model, tokenizer=tokenizer)
    answer = predict({"text": arguments.first, "text_pair": arguments.second})
    for label in predict.labels:
        share = answer["score"] if label == answer["label"] else 1 - answer["score"]
        print(f"  {share:6.1%}  {label:<20} {_bar(share)}".rstrip())


def convert_command(arguments) -> None:
    """Turn a checkpoint of the book's or of stock BERT's into ours, or ours into one of theirs."""
    from transformers.utils import logging

    from d2l_bert.training import folders

    logging.disable_progress_bar()
    from_d2l = arguments.source_kind == "d2l"
    if not from_d2l and (arguments.num_attention_heads or arguments.vocab):
        raise UserError("num_attention_heads and vocab are for --from d2l; leave them out")
    if from_d2l and not arguments.num_attention_heads:
        raise UserError("a d2l state dict does not tell its heads; give --num_attention_heads")
    source, target = arguments.source, Path(arguments.target)
    with folders.new_folder(target) as folder:
        if from_d2l:
            made, tokenizer = _convert_from_d2l(source, arguments.num_attention_heads, arguments.vocab, folder)
        elif arguments.source_kind == "bert":
            made, tokenizer = _convert_from_bert(source, folder)
        else:
            made, tokenizer = _convert_ours(source, arguments.target_kind, folder)
    print(f"{target}: {made}")
    if tokenizer is None:
        mend = "; its vocabulary makes one: --vocab FILE" if from_d2l else ""
        print(f"{source} brings no tokenizer, so {target} has none{mend}")


def _convert_from_d2l(source, num_attention_heads, vocabulary, folder):
    from d2l_bert.modeling import conversion
    from d2l_bert.training import folders

    beside = Path(source) / "vocab.json"
    vocabulary = vocabulary or (beside if beside.exists() else None)
    with refusals_are_the_users():
        tokens = vocabulary and conversion.read_vocabulary(vocabulary)
    with reading_model(source):
        model = conversion.from_d2l(conversion.read_d2l(source), num_attention_heads, tokens)
    with refusals_are_the_users():
        tokenizer = tokens and conversion.d2l_tokenizer(tokens, model.config.max_position_embeddings)
    folders.export_model(model, tokenizer, folder)
    return _what(model), tokenizer


def _convert_from_bert(source, folder):
    from d2l_bert.modeling import conversion
    from d2l_bert.training import folders

    with reading_model(source):
        bert, unplaced = conversion.read_bert(source)
        tokenizer = conversion.read_tokenizer(source, bert.config)
    with refusals_are_the_users(f"{source}: cannot be converted: "):
        model = conversion.from_bert(bert)
    folders.export_model(model, tokenizer, folder)
    with reading_model(source):
        conversion.copy_sentence_transformer(source, folder)
    if unplaced:
        print(f"left behind, having no place in a {type(model).__name__}: {', '.join(unplaced)}")
    return _what(model), tokenizer


def _convert_ours(source, target_kind, folder):
    from d2l_bert.modeling import conversion
    from d2l_bert.training import folders

    with reading_model(source):
        model = conversion.read_ours(source)
        tokenizer = conversion.read_tokenizer(source, model.config)
    if target_kind == "d2l":
        with refusals_are_the_users():
            conversion.write_d2l(model, tokenizer, folder)
        return _what(model, "d2l BERTModel"), tokenizer
    with refusals_are_the_users():
        model = conversion.to_bert(model)
    folders.save_model(model, tokenizer, folder)
    with reading_model(source):
        conversion.copy_sentence_transformer(source, folder)
    return _what(model), tokenizer


def publish_command(arguments) -> None:
    """Check a model folder and send it to the Hub."""
    from transformers.utils import logging

    from d2l_bert.training.config import PublishConfig
    from d2l_bert.training.publish import publish

    logging.disable_progress_bar()
    given = vars(arguments)
    config = PublishConfig(**{f.name: given[f.name] for f in dataclasses.fields(PublishConfig) if f.name in given})
    print(publish(Path(arguments.folder), arguments.repo_id, config))


def _what(model, name=None):
    return f"a {name or type(model).__name__} of {model.num_parameters():,} parameters"


def _load(model_class, name):
    from transformers import AutoConfig
    from transformers.utils import logging

    from d2l_bert.modeling import conversion

    logging.disable_progress_bar()
    with reading_model(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if not isinstance(config, model_class.config_class):
            raise UserError(another_kind(name, config.model_type))
        model, missing, _ = conversion.load_and_compare(model_class, name)
        if missing:
            raise UserError(_without(name, missing, config))
        with reading_tokenizer(name):
            tokenizer = conversion.stock_tokenizer(name)
        if len(tokenizer) != config.vocab_size:
            raise UserError(
                f"its tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}; put back the tokenizer "
                f"that it was trained with"
            )
    return model, tokenizer


def _without(name, missing, config):
    """Why a model whose weights lack `missing` cannot do what was asked for, and what to do about it."""
    lacking, saved_as = f"it has no weights for {min(missing)}", (config.architectures or ["D2lBertForPreTraining"])[0]
    heads = {"mlm.": "MLM", "nsp.": "NSP"}  # both belong to D2lBertForPreTraining
    head = next((heads[part] for part in heads if any(weight.startswith(part) for weight in missing)), None)
    has_head = {"MLM": "ForMaskedLM", "NSP": "ForNextSentencePrediction"}
    if head is None or saved_as.endswith(("ForPreTraining", has_head[head])):
        return f"{lacking}, which its config.json asks for; save the model there again with save_pretrained"
    if head == "NSP" and saved_as.endswith("ForMaskedLM"):
        return (
            f"{lacking}: it was trained without an NSP head (--objective none) and does fill-mask alone; "
            f"d2l-bert pretrain --init_from {name} --objective nsp trains one"
        )
    return f"{lacking}: it was saved as {saved_as}, without an {head} head; give what d2l-bert pretrain has left"


def _bar(share):
    return "█" * round(30 * share)


# ---------------------------------------------------------------------------------------------------------------------
# Flags


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

    from d2l_bert.training.config import PublishConfig, TextConfig

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
    fill.add_argument("text", type=_text, metavar="TEXT", nargs="+", help='such as "Paris is the [MASK] of France."')
    fill.add_argument("--top_k", type=_whole_number, default=5, metavar="N", help="tokens to show for a mask (5)")
    follow = command("next-sentence", next_sentence_command, "say whether one sentence follows another", "MODEL A B")
    follow.add_argument("model", type=_text, metavar="MODEL", help="a model folder, or an id on the Hub")
    follow.add_argument("first", type=_text, metavar="A", help="a sentence")
    follow.add_argument("second", type=_text, metavar="B", help="the sentence that may follow it")
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


def _whole_number(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1, not {text!r}")
    return int(text)


def _with_underscores(argv):
    """`--max-steps` is `--max_steps`; what stands behind a bare `--` is no option."""
    options = itertools.takewhile(lambda argument: argument != "--", argv)
    written = [re.sub(r"^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), option) for option in options]
    return [*written, *argv[len(written) :]]
