"""`predict`: a fine-tuned model on new rows; predictions and probabilities beside the rows' own columns."""

import dataclasses
import sys
import tempfile
from pathlib import Path

import transformers

from d2l_bert import folders, messages
from d2l_bert.modeling import loading
from d2l_bert.modeling.records import RunRecord
from d2l_bert.tokenization.sources import STDIN
from d2l_bert.training import devices
from d2l_bert.training.finetuning import output, splits, tasks, trainer
from d2l_bert.training.finetuning.config import FinetuneConfig, PredictConfig


def recorded_options(name: str, record: RunRecord) -> FinetuneConfig:
    """
    The options of the run that made a model.

    Raises:
        UserError: its run_config.json has an option that is none, or a value that its option cannot have.
    """
    way_out = "put back the run_config.json that finetune wrote"
    with messages.explained(f"{name}: run_config.json holds other options", way_out, TypeError, messages.UserError):
        options = FinetuneConfig(**record["finetune"])
        options.check_values()
        if options.task_type not in trainer.CLASSES:
            raise messages.UserError(f"task {options.task!r:.100}")
    return options


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
    record, target = loading.read_run_record(name), Path(config.output)
    if "columns" not in record.get("learnt", {}) or "finetune" not in record or "max_seq_length" not in record:
        raise messages.UserError(
            f"{name}: there is no such model, or no run_config.json of d2l-bert finetune says what it predicts; give "
            f"a model that was fine-tuned with it"
        )
    known = recorded_options(name, record)
    given = {option: value for option, value in vars(config).items() if value and hasattr(known, option)}
    task = trainer.CLASSES[known.task_type](dataclasses.replace(known, model=name, **given))
    vars(task).update({entry: value for entry, value in record["learnt"].items() if entry in tasks.LEARNT})
    task.columns |= {
        option: names if isinstance(names, list) else [names]
        for option, names in given.items()
        if option in task.usual_columns
    }
    with tempfile.TemporaryDirectory() as scratch:
        if file == STDIN:
            file = str(Path(scratch, "standard input"))
            Path(file).write_bytes(sys.stdin.buffer.read())
        split = splits.read_file(file, "FILE", config.separator, task.columns.get("text_column", ["text"])[0])
        task.check_columns(split, has_labels=False)
        task.columns["label_column"], task.label = [None], None  # no row has such a column: labels are not read
        split.rows = splits.usable(split, task.read)
        model, tokenizer, _ = loading.load_pretrained(getattr(transformers, task.auto_class), name)
        task.features(split, tokenizer, record["max_seq_length"])
        with folders.new_file(target) as partial:
            with devices.restore_host_settings():
                arguments = trainer.make_arguments(task, Path(scratch), rate=1.0, seed=0, processes=1)
                # As they are: a finished model predicts in the units of the labels.
                outputs = trainer.predict(task, model, arguments, tokenizer, split).predictions
            output.write_table(partial, split, task.predictions(split, outputs), config.excel)
    return f"{target}: predictions for {messages.counted(len(split.rows), 'row')}"
