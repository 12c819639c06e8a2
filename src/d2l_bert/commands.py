"""The commands of `d2l-bert`: a function for each, with its arguments; its docstring is the command's help.

Each function imports what it needs, so that a command waits for no library that only other commands use.
"""

import ctypes
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from d2l_bert import folders, messages, options


# By the names of the commands, in the order of `d2l-bert --help`: what `command` was given, and the function.
COMMANDS: dict[str, SimpleNamespace] = {}


# The groups of commands, as `d2l-bert --help` lists them.
TRAIN, MEASURE, USE, SHARE = "train", "measure", "use", "share"


def command(
    group: str, usage: str, *arguments: tuple, one_of: tuple = (), options_class: str = "", other_class: str = ""
) -> Callable:
    """
    Make a function a command. It is called with the parsed arguments. Its docstring is the command's help, and the
    first sentence stands in the list of commands.

    Args:
        group: one of the groups above.
        usage: what follows the command's name.
        arguments: from `argument`.
        one_of: arguments of which exactly one must be given.
        options_class: the dataclass whose fields become flags, by its name in `d2l_bert`, by which `__main__` imports
            it: `inference.config.EmbedConfig`. `pretrain` has none: its flags are those of a recipe.
        other_class: a dataclass whose further fields become flags, too, of a command that does two things.
    """

    def add(function):
        COMMANDS[function.__name__.removesuffix("_command").replace("_", "-")] = SimpleNamespace(
            function=function,
            group=group,
            usage=usage,
            arguments=arguments,
            one_of=one_of,
            options_class=options_class,
            other_class=other_class,
        )
        return function

    return add


def argument(name: str, metavar: str | None, help: str, kind: type = str, **how) -> tuple[str, dict]:
    """The name and the other arguments of `add_argument`, for an argument that is no field of a dataclass."""
    return name, {
        "type": functools.partial(options.value_of, kind, within="[1, inf)" if kind is int else None),
        "metavar": metavar,
        "help": help,
        **how,
    }


MODEL_HELP = "a model folder, or an id on the Hub"
MODEL = argument("model", "MODEL", MODEL_HELP)
MODELS = argument("model", "MODEL", MODEL_HELP, nargs="+")


def given_options(arguments, config=None) -> dict:
    """
    The options of the command that were given, by name.

    The parser leaves a flag that is not given out of the arguments (`argparse.SUPPRESS`). An argument without dashes,
    such as MODEL, is given, and fills the field of its name.

    Args:
        config: the object whose fields they are; None for `arguments.config`.
    """
    given = {}
    for field in dataclasses.fields(config or arguments.config):
        if field.name in arguments:
            given[field.name] = getattr(arguments, field.name)
    return given


def config_of(arguments):
    """The object of the command's dataclass of options, with the values of the flags that were given."""
    return dataclasses.replace(arguments.config, **given_options(arguments))


# ---------------------------------------------------------------------------------------------------------------------
# Training


@command(
    TRAIN,
    "--output_dir DIR [OPTIONS] | --check DIR...",
    one_of=(
        argument("--output_dir", "DIR", "a new folder to write into"),
        argument("--check", "DIR", "read every byte of prepared folders instead", nargs="+", action="extend"),
    ),
    options_class="tokenization.config.TextConfig",
)
def prepare_command(arguments) -> None:
    """Tokenize a text once for many runs.

    The output folder DIR then holds a tokenizer and the token ids in memory-mapped files. Any number of runs can train
    on DIR, also on a copy on another machine: d2l-bert pretrain --corpus DIR. Several machines can prepare a corpus in
    parts, each with --tokenizer of the first: d2l-bert pretrain --corpus DIR DIR2 ... trains on all of them.
    """
    from d2l_bert import functions
    from d2l_bert.tokenization.prepared_folder import check_prepared_folders

    given = given_options(arguments)
    if arguments.check:
        for name in given:
            raise messages.UserError(
                f"{name} is for preparing a text, and check reads folders that are prepared; leave it out"
            )
        messages.show(check_prepared_folders([Path(folder) for folder in arguments.check]))
        return
    messages.show(functions.prepare(output_dir=arguments.output_dir, **given).report)


@command(TRAIN, "[OPTIONS]")
def pretrain_command(arguments) -> None:
    """Pretrain a BERT from text.

    Without any option, the recipe tiny is trained on the documentation that is installed with Python, in a few
    minutes. The output folder then holds the model, the tokenizer, the model card and a record of the run.
    """
    from d2l_bert import functions

    keep_freed_memory()  # before the text is read: reading frees one large piece of memory, which the steps then use
    functions.pretrain(**options_of_pretrain(arguments))


def options_of_pretrain(arguments) -> dict:
    """The recipe, the options and the fields of the architecture that were given to `pretrain`, by name."""
    from d2l_bert.training.recipes import architecture_options

    given = given_options(arguments)
    for name in architecture_options():
        if name in arguments:
            given[name] = getattr(arguments, name)
    return given


def keep_freed_memory() -> None:
    """
    Make glibc keep the memory that one step frees for the next step.

    By default, glibc returns the memory of every large tensor to the system, which clears each page before the next
    use. When it keeps the memory, steps of the book's small BERT are 8 % faster on two cores, and the process takes
    0.7 GB more (benchmarks/LOG.md). Memory that was freed after reading the text stays in the process, too, until the
    process ends. The command accepts that, as its process ends with the run; `pretrain`, called from a program, leaves
    the allocator alone.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD (malloc.h): never return memory to the system
        has_set = libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: 1 GiB
        if not has_set:
            libc.mallopt(-3, 2**25)  # an older glibc allows 32 MiB


@command(
    MEASURE,
    "MODEL... (--corpus PATH... | --dataset ID... | --blimp DIR | --test_file FILE) [OPTIONS]",
    MODELS,
    options_class="training.evaluation.config.EvaluateConfig",
    other_class="training.finetuning.config.ScoreConfig",
)
def evaluate_command(arguments) -> None:
    """Measure models on a text, on minimal pairs, or on labelled rows.

    MODEL is any masked language model that AutoModelForMaskedLM loads, a folder or an id on the Hub: a d2l-bert model,
    a stock BERT, a RoBERTa, ... A text gives the MLM loss, perplexity and accuracies, those of NSP or SOP for a model
    with that head, and the pseudo-perplexity of a word; --blimp gives accuracies on minimal pairs. docs/evaluate.md
    defines every figure.

    A model that d2l-bert finetune has left is measured on labelled rows, a table as for finetune, by --test_file: its
    figures with their standard errors, the confusion of classes, and the rows that are wrong.
    """
    if "test_file" in arguments:
        _score_command(arguments)
        return
    for name in given_options(arguments, arguments.other_config):
        if not hasattr(arguments.config, name):
            raise messages.UserError(f"{name} is for labelled rows; give them with --test_file, or leave {name} out")
    from d2l_bert import functions

    functions.evaluate(arguments.model, config=config_of(arguments), on_line=print)


def _score_command(arguments):
    """`evaluate --test_file`."""
    from d2l_bert import functions

    for name in given_options(arguments, arguments.config):
        if not hasattr(arguments.other_config, name):
            raise messages.UserError(f"{name} is not for labelled rows, and test_file gives some; leave {name} out")
    if len(arguments.model) > 1:
        raise messages.UserError("test_file is for one model; name one")
    config = dataclasses.replace(arguments.other_config, **given_options(arguments, arguments.other_config))
    messages.report.info(functions.score(arguments.model[0], config=config).report)


@command(
    TRAIN,
    "MODEL --task TASK --train_file FILE [OPTIONS]",
    MODEL,
    options_class="training.finetuning.config.FinetuneConfig",
)
def finetune_command(arguments) -> None:
    """Train a pretrained model for a task.

    MODEL is a folder or an id on the Hub: a d2l-bert model or any stock encoder. The files are tables (.csv, .tsv,
    .jsonl, .parquet, .json, .conll). Their columns by --task, unless options name others:

      text-classification         text, and text_pair if it is there; label
      multi_label_classification  text, and text_pair if it is there; label, or several columns of 0 and 1
      regression                  text, and text_pair if it is there; label, a number
      token-classification        tokens or words; ner_tags, tags, labels or label, with a tag for each word
      question-answering          question; context; answers
      multiple-choice             context, question or both; choices; label

    The output folder then holds the model, the figures of every seed, the predictions for the test rows, pictures and
    a model card. docs/finetune.md has a command for each task.
    Needs pip install 'd2l-bert[finetune]'.
    """
    from d2l_bert import functions

    keep_freed_memory()
    functions.finetune(arguments.model, config=config_of(arguments))


@command(
    USE,
    "MODEL FILE --output FILE [OPTIONS]",
    MODEL,
    argument("file", "FILE", "rows to predict: a table, or a text in each line; - for stdin"),
    options_class="training.finetuning.config.PredictConfig",
)
def predict_command(arguments) -> None:
    """Predict new rows by a fine-tuned model.

    MODEL is what d2l-bert finetune has left, for any of its tasks. FILE is a table as for finetune, whose columns of
    texts have the names of the training, or a text file with a text in each line. The output has the columns of FILE,
    the predictions and their probabilities. Labels in FILE are not read.
    """
    from d2l_bert import functions

    config = config_of(arguments)
    if config.output is None:
        raise messages.UserError("output is missing: give --output a name that ends in .csv, .jsonl or .parquet")
    messages.show(functions.predict(arguments.model, arguments.file, config).report)


# ---------------------------------------------------------------------------------------------------------------------
# Use of a model


@command(
    USE,
    "MODEL TEXT... [--top_k N]",
    MODEL,
    argument("text", "TEXT", 'such as "It was a [MASK] night."', nargs="+"),
    argument("--top_k", "N", "tokens to show for each mask (5)", kind=int, default=5),
)
def fill_mask_command(arguments) -> None:
    """Predict the [MASK] in a text."""
    from d2l_bert.inference.demo import filled_masks

    for text in arguments.text:
        messages.show(text, filled_masks(arguments.model, text, arguments.top_k))


@command(
    USE,
    "MODEL A B",
    MODEL,
    argument("first", "A", "a text"),
    argument("second", "B", "the text that may belong behind it"),
)
def next_sentence_command(arguments) -> None:
    """Say whether two texts belong together.

    A model of NSP was trained to tell what followed A in a text from the B of another pair. It says nothing of the
    order: most pairs get the same answer if A and B change places. A model of SOP, by its run_config.json, was trained
    to tell whether A comes before B.
    """
    from d2l_bert.inference.demo import next_sentence

    messages.show(next_sentence(arguments.model, arguments.first, arguments.second))


@command(
    USE,
    "MODEL FILE --output FILE | --nearest TEXT [OPTIONS]",
    MODEL,
    argument("file", "FILE", "a file with a text in each line; - for stdin"),
    options_class="inference.config.EmbedConfig",
)
def embed_command(arguments) -> None:
    """Turn each line of a file into a vector.

    FILE has a text in each line, also packed as .gz, .zst or .bz2, or - for the standard input. In a .jsonl, .csv,
    .tsv or .parquet file each row counts as a line. Row i of the output belongs to line i, also if the line is empty.
    Vectors are those of sentence-transformers with the same pooling. MODEL is a d2l-bert model or any other encoder.
    """
    from d2l_bert import functions

    config = config_of(arguments)
    if config.output is None and not config.nearest:
        raise messages.UserError("nothing to do: give --output FILE for the vectors, or --nearest TEXT, or both")
    messages.show(functions.embed(arguments.model, arguments.file, config).report)


@command(
    USE,
    "MODEL TEXT [TEXT_B] [--output FILE.png] [--layer N] [--head N] | MODEL TEXT TEXT_B --word WORD",
    MODEL,
    argument("first", "TEXT", "a text"),
    argument("second", "TEXT_B", "a second text", nargs="?"),
    options_class="inference.config.AttentionConfig",
)
def attention_command(arguments) -> None:
    """Draw the attention of each head, or compare a word's vectors.

    The picture has a panel for each head of each layer: how much each token (a row) attends to every other token (a
    column). TEXT_B becomes the second segment. --layer and --head, counted from 1, enlarge a part of the picture.

    With --word the command draws nothing. It reads TEXT and TEXT_B apart from each other, and prints layer by layer
    how near the word's vectors in the two are, by cosine:

      d2l-bert attention MODEL "A crane is flying." "A crane driver came." --word crane
    """
    from d2l_bert.inference.attention import attention_figure, compare_word

    config = config_of(arguments)
    config.check()
    if config.word is not None:
        messages.show(compare_word(arguments.model, config.word, arguments.first, arguments.second))
        return
    with folders.new_file(Path(config.output)) as partial:
        figure, said = attention_figure(arguments.model, arguments.first, arguments.second, config.layer, config.head)
        figure.savefig(partial, format="png")
    messages.show(f"{config.output}: {said}")


# ---------------------------------------------------------------------------------------------------------------------
# Other formats, pages and the Hub


@command(
    SHARE,
    "SRC DST --from d2l --num_attention_heads N [--vocab FILE] | --from bert | --to bert | --to d2l",
    argument("source", "SRC", "the checkpoint: a file, a folder, or an id on the Hub"),
    argument("target", "DST", "a new folder to write into"),
    argument("--num_attention_heads", "N", "attention heads of the d2l model", kind=int),
    argument("--vocab", "FILE", "the d2l model's Vocab: idx_to_token as JSON, or one token on each line"),
    one_of=(
        argument(
            *("--from", None, "the kind of SRC; DST is a d2l-bert model"), dest="source_kind", choices=("d2l", "bert")
        ),
        argument(
            *("--to", None, "the kind that DST becomes; SRC is a d2l-bert model"),
            dest="target_kind",
            choices=("d2l", "bert"),
        ),
    ),
)
def convert_command(arguments) -> None:
    """Convert checkpoints of d2l and of BERT.

      --from d2l   the state dict of the book's BERTModel, a file or a folder with pretrained.params and vocab.json
      --from bert  any stock BERT, a folder or an id on the Hub
      --to bert    a d2l-bert model with embedding_layer_norm becomes a stock BERT
      --to d2l     a d2l-bert model becomes pretrained.params and vocab.json for the book's BERTModel

    DST is a new folder. The weights keep their values. A model that the other side cannot express is refused.
    """
    from d2l_bert.model_cards.card import carry_card
    from d2l_bert.modeling.convert import convert

    source = arguments.source
    target = Path(arguments.target)
    with folders.new_folder(target) as folder:
        said = convert(
            source,
            folder,
            arguments.source_kind,
            arguments.target_kind,
            arguments.num_attention_heads,
            arguments.vocab,
        )
        if arguments.target_kind == "bert":
            carry_card(source, folder, target.resolve().name)
    messages.show(f"{target}: {said}")


@command(
    SHARE,
    "MODEL DIR [--task NAME] [OPTIONS]",
    argument("source", "MODEL", MODEL_HELP),
    argument("target", "DIR", "a new folder to write into"),
    options_class="modeling.config.ExportConfig",
)
def export_command(arguments) -> None:
    """Write a model as stock BERT and ONNX, for browsers and servers.

    DIR then holds the model as stock BERT, which Transformers loads without code of d2l-bert, and in onnx/ the same in
    float32 and in int8, with the names that transformers.js reads; the tokenizer and a card. Each file is compared
    with the model. d2l-bert publish sends DIR.
    Needs pip install 'd2l-bert[onnx]'.
    """
    from d2l_bert import functions

    messages.show(functions.export(arguments.source, arguments.target, config_of(arguments)).report)


@command(
    USE,
    "MODEL... [--port N]",
    MODELS,
    argument("--port", "N", "port on 127.0.0.1 (7860)", kind=int, default=7860),
)
def demo_command(arguments) -> None:
    """Try models on a page on this machine.

    The page fills in masks, asks whether two texts belong together, draws attention, and compares a word in two
    contexts. It is served on 127.0.0.1 alone, and asks no other machine for anything. Needs pip install
    'd2l-bert[demo]'.
    """
    from d2l_bert.inference.demo import make_demo

    page = make_demo(arguments.model)
    with messages.explained(f"port {arguments.port}: cannot be used", "give another --port", OSError, OverflowError):
        page.launch(server_name="127.0.0.1", server_port=arguments.port, share=False)


@command(
    SHARE,
    "DIR REPO_ID [OPTIONS]",
    argument("folder", "DIR", "the output folder of pretrain, finetune, convert or export"),
    argument("repo_id", "REPO_ID", "owner/name, or a name under your account"),
    options_class="model_cards.config.PublishConfig",
)
def publish_command(arguments) -> None:
    """Send a model folder to the Hub.

    The folder is checked first: code, weights, tokenizer and card must exist and agree. Then all files go in one
    commit, with a tag that is made from their content. Checkpoints, logs and paths of this machine are not sent. The
    Hub's token is the one of `hf auth login`, or HF_TOKEN. If sending was interrupted, the same command completes it.
    """
    from d2l_bert import functions

    messages.show(functions.publish(arguments.folder, arguments.repo_id, config_of(arguments)).report)
