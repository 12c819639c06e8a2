"""`predict`: a fine-tuned model on new rows; predictions and probabilities beside the rows' own columns."""

import dataclasses
import logging
import tempfile
from pathlib import Path

import transformers

from d2l_bert import folders
from d2l_bert.messages import UserError, counted, explained, standard_input
from d2l_bert.modeling import conversion, loading
from d2l_bert.modeling.records import RunRecord
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.files import STDIN
from d2l_bert.training.finetuning import account
from d2l_bert.training.finetuning.all_tasks import CLASSES
from d2l_bert.training.finetuning.cells import EmptyText
from d2l_bert.training.finetuning.config import TASKS, FinetuneConfig, PredictConfig, ScoreConfig
from d2l_bert.training.finetuning.outputs import outputs_of
from d2l_bert.training.finetuning.rows import Row, Split, check_writable, read_file, write_predictions
from d2l_bert.training.finetuning.tasks import Task


logger = logging.getLogger(__name__)


# The options of `predict` that name columns.
COLUMN_OPTIONS = [field.name for field in dataclasses.fields(PredictConfig) if field.name.endswith("_column")]


def predict(name: str, file: str, config: PredictConfig) -> str:
    """
    Predict the labels of rows by a model that `finetune` has left, and write them beside the rows.

    A row with an empty text is kept, and has nothing in the columns of predictions.

    Args:
        name: the model, a folder or an id on the Hub.
        file: a table as in `rows.read_file`; a text file with a text in each line; or `-` for the standard input,
            which holds a text or an object of JSON in each line. Labels that it has are not read.

    Returns:
        A message: how many rows, and where they are.

    Raises:
        UserError: the model was not fine-tuned by this package, an option is not for its task, the file or one of its
            rows cannot be read, or the output cannot be written. No file is left.
    """
    config.check()
    record = loading.read_run_record(name)
    target = Path(config.output)
    task = restored_task(name, record, config)
    # Entered before any work, so that an output that cannot be written is refused at once.
    with folders.new_file(target) as partial, tempfile.TemporaryDirectory() as scratch:
        given = read_rows(file, task, config, Path(scratch))
        check_writable(target.suffix, given)
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
        if target.suffix == ".csv":
            predicted = task.in_csv(predicted)
        write_predictions(partial, given, predicted, config.excel)
    without = len(given.rows) - len(with_text.rows)
    note = f"; {counted(without, 'row')} without a text: no prediction there" if without else ""
    return f"{target}: predictions for {counted(len(with_text.rows), 'row')}{note}"


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
        raise UserError(
            f"{name}: there is no such model, or no run_config.json of d2l-bert finetune says what it predicts; give "
            f"a model that was fine-tuned with it"
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


def read_rows(file: str, task: Task, config: PredictConfig | ScoreConfig, scratch: Path) -> Split:
    """
    The rows of a file or of the standard input, not yet read by the task.

    Args:
        file: as in `predict`.
        scratch: a folder in which the standard input is kept.

    Raises:
        UserError: the file cannot be read, or lacks a column that the task reads; or the first of its lines of text
            names columns.
    """
    title = file
    if file == STDIN:
        title = "standard input"
        file = str(scratch / "standard input")
        Path(file).write_bytes(standard_input().read())
    of_texts = [task.columns[option][0] for option in task.options_of_texts()]
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
            raise UserError(f"{split.title}, {row.place}: {error}") from None
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
