"""The functions for programs: each does what the command of its name does, with data in memory as well as files.

A function takes the options of its command as keyword arguments, or as an object of their dataclass, and returns a
frozen dataclass. It prints nothing, but in a notebook the messages of the command are shown. Like the commands, each
imports what it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2l_bert import folders, options
from d2l_bert.messages import UserError, messages_shown_to_person


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from d2l_bert.inference.config import EmbedConfig
    from d2l_bert.inference.embed import EmbedResult
    from d2l_bert.model_cards.config import PublishConfig
    from d2l_bert.model_cards.publish import PublishResult
    from d2l_bert.modeling.config import ExportConfig
    from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
    from d2l_bert.modeling.export import ExportResult
    from d2l_bert.tokenization.config import TextConfig
    from d2l_bert.training.config import PretrainConfig
    from d2l_bert.training.evaluation.config import EvaluateConfig
    from d2l_bert.training.evaluation.evaluate import EvaluateResult
    from d2l_bert.training.evaluation.pseudo_likelihood import LineScore
    from d2l_bert.training.finetuning.config import FinetuneConfig, PredictConfig, ScoreConfig
    from d2l_bert.training.finetuning.predict import PredictResult
    from d2l_bert.training.finetuning.score import Score
    from d2l_bert.training.finetuning.train import FinetuneResult
    from d2l_bert.training.initialize import PrepareResult
    from d2l_bert.training.pretrain import PretrainResult

    Model = str | Path | PreTrainedModel


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def _as_a_function() -> Iterator[None]:
    """The block of each function: without bars of Transformers, and with messages in a notebook alone."""
    from d2l_bert.tokenization.model_files import without_bars

    with without_bars(), messages_shown_to_person():
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Training


@_as_a_function()
def prepare(
    data: Any = None, *, output_dir: str | Path, config: TextConfig | None = None, **given: Any
) -> PrepareResult:
    """
    Tokenize a text once for many runs: `pretrain(corpus=[output_dir])` trains on it.

    Args:
        data: a file or a folder, or data in memory: a list of texts, a pandas frame or Series, a `datasets.Dataset`;
            or several splits, a `DatasetDict` or a dict, of which `dataset_split` is read. None if an option such as
            `corpus` names the text.
        output_dir: a new folder.
        config, given: the options.

    Raises:
        UserError: an option, the text or the folder cannot be used; no folder is left.
    """
    from d2l_bert.tokenization.config import TextConfig
    from d2l_bert.training import processes
    from d2l_bert.training.initialize import prepare_folder

    run = options.made(TextConfig, config, _with_text(given, data, config))
    processes.start_processes()
    return processes.on_main(prepare_folder, run, str(output_dir), {*given, *run.given()})


@_as_a_function()
def pretrain(
    architecture: D2lBertConfig | None = None,
    run: PretrainConfig | None = None,
    *,
    data: Any = None,
    recipe: str = "tiny",
    callbacks: Sequence[Callable[[dict], object]] = (),
    **given: Any,
) -> PretrainResult:
    """
    Pretrain a BERT from text, on all processes of a launched program.

    The settings of the allocator, which the command makes for its whole process (`commands.keep_freed_memory`), are
    left to the calling program. Processes of a launched program stay connected when the run ends.

    Args:
        architecture: the model's configuration; `vocab_size` is replaced by the size of the tokenizer. With
            `init_from` it must be `D2lBertConfig.from_pretrained(run.init_from)`, with any dropout. None for that of
            the recipe, or of the model to go on from.
        run: the options; None for those of the recipe.
        data: as in `prepare`.
        recipe: a name in `RECIPES`, where `run` is None.
        callbacks: functions that get each row of the training log as it is written, in the main process. What one
            raises ends the run.
        given: options, which replace those of `run`; without `run` also fields of the architecture.

    Raises:
        UserError: something that the user can fix, in one line; of several processes in each.
        KeyboardInterrupt: Ctrl-C stopped the run; a checkpoint is saved if the run had done a step.
        SystemExit: so did SIGTERM; or another process has raised an error of another kind, and shows it.
    """
    from d2l_bert.training import pretrain as training
    from d2l_bert.training import processes, recipes

    for callback in callbacks if isinstance(callbacks, (list, tuple)) else [None]:
        if not callable(callback):
            raise UserError(f"callbacks takes a list of functions that get a row of the log, got {callbacks!r:.100}")
    processes.start_processes()
    with processes.together():
        given = _with_text(given, data, run)
        if run is None:
            resolved, run = recipes.resolve(recipe, given)
        else:
            resolved = recipes.RECIPES[recipe]()[0]
            run = options.made(type(run), run, given)
    return training.pretrain(resolved if architecture is None else architecture, run, callbacks)


@_as_a_function()
def finetune(
    model: Model,
    data: Any = None,
    config: FinetuneConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **given: Any,
) -> FinetuneResult:
    """
    Train a pretrained model for a task, on all processes of a launched program.

    Args:
        model: a folder, an id on the Hub, or a model in memory.
        data: the training rows: a file, or data in memory: a list of dicts, a pandas frame or a `datasets.Dataset`; or
            a `DatasetDict` or a dict of such with `train` and, if there are, `validation` and `test`. None if an
            option such as `train_file` names them.
        tokenizer: of a model in memory; without it the one that lies where the model was loaded from.
        config, given: the options; `task` is needed.

    Raises:
        UserError: an option, the data, the model or the output folder is wrong, or a file cannot be written.
    """
    from d2l_bert.modeling import loading
    from d2l_bert.tokenization.in_memory import is_in_memory
    from d2l_bert.training.finetuning import train
    from d2l_bert.training.finetuning.config import FinetuneConfig

    if data is not None:
        option = "dataset" if is_in_memory(data) else "train_file"
        given = {**given, option: data}
    with loading.as_folder(model, tokenizer) as name:
        made = options.made(FinetuneConfig, config, {**given, "model": name})
        if isinstance(data, Mapping):
            read = {"train", "validation", "test", made.train_split, made.validation_split, made.test_split}
            unread = ", ".join(str(split) for split in data if split not in read)
            if unread:
                logger.warning(f"splits that are not read: {unread}; validation_split and test_split name others")
        return train.finetune(made)


# ---------------------------------------------------------------------------------------------------------------------
# Use of a model


@_as_a_function()
def evaluate(
    models: Model | Sequence[Model],
    data: Any = None,
    config: EvaluateConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_line: Callable[[LineScore], object] | None = None,
    **given: Any,
) -> EvaluateResult:
    """
    Measure models on a text and on minimal pairs, or score lines, on all processes of a launched program.

    Args:
        models: a folder, an id on the Hub or a model in memory, or a list of them.
        data: the text, as in `prepare`. None if an option such as `corpus` or `blimp` names what to measure on.
        tokenizer: as in `finetune`.
        on_line: takes each line of `line_scores` as soon as it is scored, where all would be too many to keep.
        config, given: the options.

    Raises:
        UserError: something that the user can fix, in one line; of several processes in each.
        SystemExit: another process has raised an error of another kind, and shows it.
    """
    from d2l_bert.modeling import loading
    from d2l_bert.training.evaluation import evaluate as evaluation
    from d2l_bert.training.evaluation.config import EvaluateConfig

    config = options.made(EvaluateConfig, config, _with_text(given, data, config))
    all_models = list(models) if isinstance(models, (list, tuple)) else [models]
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(loading.as_folder(model, tokenizer)) for model in all_models]
        titles = [loading.title_of(model) for model in all_models]
        if config.update_card and titles != names:
            raise UserError(
                "update_card is for models in folders, and one is in memory; leave it out, or save the model"
            )
        return evaluation.evaluate(names, config, on_line, titles)


@_as_a_function()
def predict(
    model: Model,
    data: Any,
    config: PredictConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **given: Any,
) -> PredictResult:
    """
    Predict new rows by a fine-tuned model; in a launched program all processes call it with the same rows.

    Args:
        model: what `finetune` has left, a folder or an id on the Hub; or such a model in memory.
        data: a file, or data in memory: a list of texts or of dicts, a pandas frame or Series, or a
            `datasets.Dataset`. Labels in it are not read.
        tokenizer: as in `finetune`.
        config, given: the options; with `output` the rows and the predictions are also written to a file.

    Raises:
        UserError: the model was not fine-tuned by this package, an option is not for its task, the data or one of the
            rows cannot be read, or the output cannot be written. No file is left.
    """
    from d2l_bert.modeling import loading
    from d2l_bert.training.finetuning import predict as prediction
    from d2l_bert.training.finetuning.config import PredictConfig

    config = options.made(PredictConfig, config, given)
    with loading.as_folder(model, tokenizer) as name:
        return prediction.predict(name, data, config)


@_as_a_function()
def score(
    model: Model,
    data: Any = None,
    config: ScoreConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **given: Any,
) -> Score:
    """
    Measure a fine-tuned model on labelled rows, as `d2l-bert evaluate --test_file` does; in a launched program all
    processes call it with the same rows.

    Args:
        model: as in `predict`.
        data: as in `predict`, with labels. None if the option `test_file` names a file.
        tokenizer: as in `finetune`.
        config, given: the options; with `output_dir` the figures and the rows that are wrong are also written.

    Raises:
        UserError: the model was not fine-tuned by this package, an option is not for its task, a label is missing or
            unknown to the model, the data cannot be read, or the output cannot be written. No folder is left.
    """
    from d2l_bert.modeling import loading
    from d2l_bert.training.finetuning import score as scoring
    from d2l_bert.training.finetuning.config import ScoreConfig

    config = options.made(ScoreConfig, config, given)
    if data is not None and config.test_file is not None:
        raise UserError("data and test_file both give the rows; give one")
    rows = config.test_file if data is None else data
    if rows is None:
        raise UserError("there are no rows to measure the model on; give data, or test_file")
    with loading.as_folder(model, tokenizer) as name:
        found = scoring.score(name, rows, config)
    return dataclasses.replace(found, model=loading.title_of(model))


@_as_a_function()
def embed(
    model: Model,
    data: Any,
    config: EmbedConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **given: Any,
) -> EmbedResult:
    """
    Turn texts into vectors, or find those that are nearest to given texts.

    Args:
        model: a folder, an id on the Hub or a model in memory; any encoder of Transformers.
        data: a file with a text in each line, or a table; or data in memory: a list of texts, a pandas frame or
            Series, or a `datasets.Dataset`.
        tokenizer: as in `finetune`.
        config, given: the options; with neither `output` nor `nearest` the vectors are in the result.

    Raises:
        UserError: an option, the model, the data or the output is refused; no line has a text. No file is left.
    """
    from d2l_bert.inference import embed as embedding
    from d2l_bert.inference.config import EmbedConfig
    from d2l_bert.modeling import loading
    from d2l_bert.training import processes

    config = options.made(EmbedConfig, config, given)
    processes.start_processes()
    with loading.as_folder(model, tokenizer) as name:
        return processes.on_main(embedding.embed, name, data, config)


# ---------------------------------------------------------------------------------------------------------------------
# Other formats, and the Hub


@_as_a_function()
def export(
    model: Model,
    output_dir: str | Path,
    config: ExportConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **given: Any,
) -> ExportResult:
    """
    Write a model as stock BERT and ONNX, for browsers and servers.

    Args:
        model: a folder, an id on the Hub or a model in memory.
        output_dir: a new folder.
        tokenizer: as in `finetune`.
        config, given: the options.

    Raises:
        UserError: ONNX is not installed, the model cannot be read or has no such head, stock BERT cannot express it,
            or a folder cannot be written. No folder is left.
    """
    from d2l_bert.modeling import loading
    from d2l_bert.modeling.config import ExportConfig
    from d2l_bert.training import processes

    config = options.made(ExportConfig, config, given)
    processes.start_processes()
    with loading.as_folder(model, tokenizer) as name:
        return processes.on_main(_export, name, Path(output_dir), config)


def _export(source, target, config):
    from d2l_bert.inference.page import copy_runtime, write_page
    from d2l_bert.model_cards.card import carry_card
    from d2l_bert.modeling.export import ExportResult
    from d2l_bert.modeling.export import export as export_files

    config.check()
    with folders.new_folder(Path(config.page)) if config.page else contextlib.nullcontext() as page:
        if page:  # first, as it may not be there
            copy_runtime(page, config.runtime)
        with folders.new_folder(target) as folder:
            said, figures, has_its_head = export_files(source, folder, config)
            if not config.onnx_only:
                carry_card(source, folder, target.resolve().name, has_its_head, figures)
            if page:
                write_page(folder, target.resolve().name, page)
    report = f"{target}: {said}"
    if page:
        report += f"\nthe page: python -m http.server --bind 127.0.0.1 --directory {config.page}"
    return ExportResult(
        output_dir=target,
        page=Path(config.page) if config.page else None,
        task=figures["task"],
        files=figures["files"],
        report=report,
    )


@_as_a_function()
def publish(folder: str | Path, repo_id: str, config: PublishConfig | None = None, **given: Any) -> PublishResult:
    """
    Send a model folder to the Hub.

    Args:
        folder: what `pretrain`, `finetune` or `export` have left.
        repo_id: `owner/name`, or `name` for a repository of the token's account.
        config, given: the options.

    Raises:
        UserError: the folder fails a check, or the options contradict each other: then nothing was sent. Or the Hub
            cannot be reached, or refuses a request: then the same call can be repeated, and completes the upload.
    """
    from d2l_bert.model_cards import publish as publishing
    from d2l_bert.model_cards.config import PublishConfig
    from d2l_bert.training import processes

    config = options.made(PublishConfig, config, given)
    processes.start_processes()
    return processes.on_main(publishing.publish, Path(folder), repo_id, config)


# ---------------------------------------------------------------------------------------------------------------------


def _with_text(given: dict[str, Any], data: Any, config: Any) -> dict[str, Any]:
    """
    The options with the text that `data` is: a path as `corpus`, data in memory as `dataset`.

    Args:
        config: the object that has the other options, or None.

    Raises:
        UserError: an option names a text, too; or as in `in_memory.as_dataset`.
    """
    if data is None:
        return given
    for name in ("corpus", "dataset"):
        if given.get(name, getattr(config, name, None)):
            raise UserError(f"data and {name} both give the text; give one")
    from d2l_bert.tokenization.in_memory import as_dataset, is_in_memory

    if not is_in_memory(data):
        return {**given, "corpus": [str(data)]}
    if isinstance(data, (list, tuple)):  # a list in the option would be one of names
        data = as_dataset(data, given.get("text_column") or getattr(config, "text_column", "text"))
    return {**given, "dataset": data}
