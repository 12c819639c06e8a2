"""`predict`: a fine-tuned model on new rows; predictions and probabilities beside the rows' own columns."""

import contextlib
import dataclasses
import logging
import tempfile
from pathlib import Path
from typing import Any

import transformers

from d2l_bert import folders
from d2l_bert.messages import UserError, counted, explained, one_line, standard_input
from d2l_bert.modeling import conversion, loading
from d2l_bert.modeling.records import RunRecord
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.files import STDIN
from d2l_bert.tokenization.in_memory import is_in_memory
from d2l_bert.training import processes
from d2l_bert.training.finetuning import account
from d2l_bert.training.finetuning.all_tasks import CLASSES
from d2l_bert.training.finetuning.cells import EmptyText
from d2l_bert.training.finetuning.config import TASKS, FinetuneConfig, PredictConfig, ScoreConfig
from d2l_bert.training.finetuning.outputs import outputs_of
from d2l_bert.training.finetuning.rows import (
    Row,
    Split,
    check_writable,
    read_file,
    rows_in_memory,
    write_predictions,
)
from d2l_bert.training.finetuning.tasks import Task


logger = logging.getLogger(__name__)


# The options of `predict` that name columns.
COLUMN_OPTIONS = [field.name for field in dataclasses.fields(PredictConfig) if field.name.endswith("_column")]


@dataclasses.dataclass(frozen=True)
class PredictResult:
    """
    What a model predicts for rows.

    Args:
        predictions: by the names of columns, such as `prediction` and `probability`, a value for each row, in the
            order of the rows; None for a row without a text.
        row_count: how many rows have a text.
        rows_without_text: how many rows have none.
        output: the file with the rows and the predictions; None if none was asked for.
    """

    predictions: dict[str, list] = dataclasses.field(repr=False)
    row_count: int
    rows_without_text: int
    output: Path | None

    @property
    def report(self) -> str:
        """What the command prints."""
        note = ""
        if self.rows_without_text:
            note = f"; {counted(self.rows_without_text, 'row')} without a text: no prediction there"
        return f"{self.output}: predictions for {counted(self.row_count, 'row')}{note}"


def predict(name: str, data: Any, config: PredictConfig) -> PredictResult:
    """
    Predict the labels of rows by a model that `finetune` has left; write them beside the rows if there is an output.

    A row with an empty text is kept, and has nothing in the columns of predictions.

    Args:
        name: the model, a folder or an id on the Hub.
        data: a table as in `rows.read_file`; a text file with a text in each line; `-` for the standard input, which
            holds a text or an object of JSON in each line; or data in memory, as in `in_memory.as_dataset`. Labels are
            not read.

    Raises:
        UserError: the model was not fine-tuned by this package, an option is not for its task, the data or one of the
            rows cannot be read, or the output cannot be written. No file is left.
    """
    config.check()
    processes.start_processes()
    record = loading.read_run_record(name)
    task = restored_task(name, record, config)
    with contextlib.ExitStack() as stack:
        partial = None
        if config.output is not None:
            # Entered before any work, so that an output that cannot be written is refused at once.
            partial = processes.on_main(stack.enter_context, folders.new_file(Path(config.output)))
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        given = read_rows(data, task, config, Path(scratch))
        if partial is not None:
            check_writable(partial.suffix, given)
        with_text = dataclasses.replace(given, rows=rows_with_text(given, task))
        for line in account.lines_about_new_rows(task, with_text):
            logger.info(line)
        model, tokenizer, _ = loading.load_pretrained(getattr(transformers, task.auto_class), name)
        check_model(name, record, task, model, tokenizer)
        features = task.features(with_text, tokenizer, record["max_seq_length"])
        logits = outputs_of(task, model, tokenizer, features.inputs, config.per_device_eval_batch_size).logits
        row_results = task.row_results(with_text, features, logits, is_finished=True)
        predicted = task.predictions(with_text, row_results)
        if len(with_text.rows) < len(given.rows):
            predicted = for_all_rows(predicted, with_text, given)
        if partial is not None:
            in_file = task.in_csv(predicted) if partial.suffix == ".csv" else predicted
            processes.on_main(write_predictions, partial, given, in_file, config.excel)
    return PredictResult(
        predictions=predicted,
        row_count=len(with_text.rows),
        rows_without_text=len(given.rows) - len(with_text.rows),
        output=None if config.output is None else Path(config.output),
    )


def restored_task(name: str, record: RunRecord, config: PredictConfig | ScoreConfig) -> Task:
    """
    The task of a finished run, with what the run has learnt, and with the columns that the options name.

    Args:
        record: the content of the model's `run_config.json`, which may be a stranger's.

    Raises:
        UserError: the record is not that of a fine-tuning, or its options have other values; an option names a column
            that the model does not read.
    """
    learnt = record.get("learnt", {})
    if "columns" not in learnt or "finetune" not in record or "max_seq_length" not in record:
        if not record and not Path(name).exists():
            raise UserError(
                f"{name}: no folder here has this name, and the Hub gave no run_config.json of it; check the name, "
                f"and give what finetune has left"
            )
        raise UserError(
            f"{name}: no run_config.json of finetune says what it predicts; give a model that was fine-tuned with "
            f"d2l-bert, or use Transformers' pipeline for one that was not"
        )
    with explained(f"{name}: run_config.json", "put back that of d2l-bert finetune", ValueError, TypeError):
        # A newer version may have more options.
        known = {field.name for field in dataclasses.fields(FinetuneConfig)}
        given = {option: value for option, value in record["finetune"].items() if option in known}
        given["model"] = name
        given["per_device_eval_batch_size"] = config.per_device_eval_batch_size
        finetune = FinetuneConfig(**given)
        finetune.check_values()
        if finetune.task_type not in TASKS:
            raise ValueError(f"finetune.task must be one of {', '.join(TASKS)}, got {finetune.task!r:.100}")
        task = CLASSES[finetune.task_type](finetune)
        task.restore(learnt)
    for option in COLUMN_OPTIONS:
        column = getattr(config, option)
        if column and option not in task.columns:
            reads = [name for name in task.columns if name != "label_column"]
            raise UserError(
                f"{option}: {name} was trained without such a column, and reads {' and '.join(reads)} alone; leave "
                f"{option} out"
            )
        if column:
            task.columns[option] = column if isinstance(column, list) else [column]
    return task


def read_rows(data: Any, task: Task, config: PredictConfig | ScoreConfig, scratch: Path) -> Split:
    """
    The rows of a file, of the standard input or in memory, not yet read by the task.

    Args:
        data: as in `predict`.
        scratch: a folder in which the standard input is kept.

    Raises:
        UserError: the data cannot be read, or lack a column that the task reads; or the first line of a file of texts
            names columns.
    """
    of_texts = [task.columns[option][0] for option in task.options_of_texts()]
    if is_in_memory(data):
        split = rows_in_memory(data, of_texts[0])
        task.check_columns(split.title, split.columns, has_labels=False)
        return split
    title = file = str(data)
    if file == STDIN:
        title = "standard input"
        file = str(scratch / "standard input")
        Path(file).write_bytes(standard_input().read())
    split = read_file(file, "", config.separator, of_texts[0], title=title)
    tables.check_separator(config.separator, [Path(file)])
    first = split.rows[0].cells.get(of_texts[0])
    if tables.file_kind(Path(file)) == "text" and isinstance(first, str):
        tables.refuse_header(first, of_texts, split.title)
    task.check_columns(split.title, split.columns, has_labels=False)
    return split


def rows_with_text(split: Split, task: Task) -> list[Row]:
    """
    The rows as the task reads them, without those in which a text is empty.

    Raises:
        UserError: a row cannot be used, or every row is without a text.
    """
    filled = []
    for row in split.rows:
        try:
            read = task.read(row, split)
        except EmptyText:
            continue
        except ValueError as error:
            raise UserError(f"{split.title}, {row.place}: {one_line(error)}") from None
        if read.texts:  # a list of words may have none
            filled.append(read)
    if not filled:
        raise UserError(f"{split.title}: no row has a text; give texts, or name their column")
    return filled


def check_model(name: str, record: RunRecord, task: Task, model, tokenizer) -> None:
    """
    Refuse a record that is not that of the model beside it.

    Raises:
        UserError: the length of a row is not one of the model, or its head has other classes.
    """
    most = conversion.longest_input(model, tokenizer)
    if not min(8, most) <= record["max_seq_length"] <= most:
        raise UserError(
            f"{name}: run_config.json has max_seq_length {record['max_seq_length']}, and the model reads {most} "
            f"tokens at most; put back that of d2l-bert finetune"
        )
    of_model = [model.config.id2label[number] for number in range(model.config.num_labels)]
    if task.classes and task.classes != of_model:
        raise UserError(
            f"{name}: run_config.json has other classes than config.json, or another order of them; put back both as "
            f"d2l-bert finetune wrote them"
        )


def for_all_rows(predicted: dict[str, list], with_text: Split, given: Split) -> dict[str, list]:
    """
    Columns of predictions for all rows: None for rows without one.

    Args:
        predicted: the columns for the rows with a text.
        with_text: these rows.
        given: all rows.
    """
    number_of = {row.place: number for number, row in enumerate(with_text.rows)}
    numbers = [number_of.get(row.place) for row in given.rows]
    columns = {}
    for name, values in predicted.items():
        columns[name] = [None if number is None else values[number] for number in numbers]
    return columns
