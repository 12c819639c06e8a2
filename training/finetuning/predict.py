"""`predict`: a fine-tuned model on new rows; predictions and probabilities beside the rows' own columns."""

import dataclasses
import shutil
import sys
import tempfile
from pathlib import Path

import transformers

from d2l_bert import folders, messages
from d2l_bert.modeling import loading
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.sources import STDIN
from d2l_bert.training import devices
from d2l_bert.training.finetuning import output, splits, tasks, trainer
from d2l_bert.training.finetuning.config import FinetuneConfig, PredictConfig


def predict(name: str, file: str, config: PredictConfig) -> str:
    """
    Predict the labels of rows by a model that `finetune` has left, and write them beside the rows.

    Args:
        name: the model, a folder or an id on the Hub.
        file: a table as in `splits.read_file`; a text file with a text in each line; or `-` for the standard input,
            which holds a text or an object of JSON in each line. Labels that it has are not read.

    Returns:
        A message: how many rows, and where they are.

    Raises:
        UserError: the model was not fine-tuned by this package, the file or one of its rows cannot be read, or the
            output cannot be written. No file is left.
    """
    config.check()
    record, target = loading.read_record(name), Path(config.output)
    if "learnt" not in record:
        raise messages.UserError(
            f"{name}: no run_config.json of d2l-bert finetune says what it predicts; give a model that was fine-tuned "
            f"with it"
        )
    known = FinetuneConfig(**record["finetune"])
    columns = {option: value for option, value in vars(config).items() if value and option.endswith("_column")}
    task = trainer.CLASSES[known.task_type](dataclasses.replace(known, model=name, **columns))
    vars(task).update(record["learnt"])
    if "mean" in record["learnt"]:  # the finished model predicts in the units of the labels
        task.mean, task.deviation = 0.0, 1.0
    given = read_rows(file, config.separator, task)
    task.find_columns(given, has_labels=False)
    labels = task.columns["label_column"]
    unlabelled = [
        row._replace(cells={column: cell for column, cell in row.cells.items() if column not in labels})
        for row in given.rows
    ]
    split = dataclasses.replace(given, rows=unlabelled)
    split.rows = splits.usable(split, task.read)
    model, tokenizer, _ = loading.load_pretrained(getattr(transformers, task.auto_class), name)
    task.features(split, tokenizer, record["max_seq_length"])
    with folders.new_file(target) as partial, tempfile.TemporaryDirectory() as scratch:
        with devices.restore_host_settings():
            arguments = trainer.make_arguments(task.config, task, Path(scratch), rate=1.0, seed=0, processes=1)
            arguments.per_device_eval_batch_size = config.per_device_eval_batch_size
            outputs = task.rescaled(trainer.predict(task, model, arguments, tokenizer, split).predictions)
        predicted = task.predictions(split, outputs)
        output.write_table(partial, given, predicted, target.suffix, config.excel)
    return f"{target}: predictions for {messages.counted(len(given.rows), 'row')}"


def read_rows(file: str, separator: str, task: tasks.Task) -> splits.Split:
    """The rows of a file, as `predict` says; a text in a line is the task's text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(file)
        if file == STDIN:
            path = Path(folder, "standard input")
            with path.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        if not path.is_file() or tables.file_kind(path) != "text" or tables.suffix_unpacked(path) == ".conll":
            return splits.read_file(str(path), "FILE", separator)
        column = task.config.text_column or task.usual_columns.get("text_column", ("text",))[0]
        lines = [line.rstrip("\r\n") for line in tables.lines_of(path)]
        rows = [tasks.Row(f"line {number:,}", {column: line}) for number, line in enumerate(lines, 1) if line.strip()]
        messages.refuse_first({f"{file}: has no rows; give a file with rows": not rows})
        return splits.Split(label=f"FILE {path.name}", name=path.name, rows=rows, fingerprint="")
