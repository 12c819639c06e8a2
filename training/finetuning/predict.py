"""`predict`: a fine-tuned model on new rows; predictions and probabilities beside the rows' own columns."""

import dataclasses
import tempfile
from pathlib import Path

import transformers

from d2l_bert import folders, messages
from d2l_bert.modeling import loading
from d2l_bert.tokenization.sources import STDIN
from d2l_bert.training import devices
from d2l_bert.training.finetuning import output, splits, trainer
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
    record, target = loading.read_run_record(name), Path(config.output)
    messages.refuse_first(
        {
            f"{name}: there is no such model, or no run_config.json of d2l-bert finetune says what it predicts; give "
            f"a model that was fine-tuned with it": "columns" not in record.get("learnt", {})
        }
    )
    unknown = f"{name}: its run_config.json has options that this version of d2l-bert does not know"
    with messages.explained(unknown, "use the version that wrote it, which its entry versions names", TypeError):
        known = FinetuneConfig(**record["finetune"])
    given = {option: value for option, value in vars(config).items() if value and hasattr(known, option)}
    task = trainer.CLASSES[known.task_type](dataclasses.replace(known, model=name, **given))
    vars(task).update(record["learnt"])
    task.columns |= {
        option: names if isinstance(names, list) else [names]
        for option, names in given.items()
        if option in task.usual_columns
    }
    # Entered before any work: what stands in the way of the output is said at once.
    with folders.new_file(target) as partial, tempfile.TemporaryDirectory() as scratch:
        if file == STDIN:
            file = str(Path(scratch, "standard input"))
            Path(file).write_bytes(messages.standard_input().read())
        split = splits.read_file(file, "FILE", config.separator, task.columns.get("text_column", ["text"])[0])
        task.check_columns(split, has_labels=False)
        task.columns["label_column"], task.label = [None], None  # no row has such a column: labels are not read
        split.rows = splits.usable(split, task.read)
        model, tokenizer, _ = loading.load_pretrained(getattr(transformers, task.auto_class), name)
        task.features(split, tokenizer, record["max_seq_length"])
        with devices.restore_host_settings():
            arguments = trainer.make_arguments(task, Path(scratch), rate=1.0, seed=0, processes=1)
            # As they are: a finished model predicts in the units of the labels.
            outputs = trainer.predict(task, model, arguments, tokenizer, split).predictions
        output.write_table(partial, split, task.predictions(split, outputs), config.excel)
    return f"{target}: predictions for {messages.counted(len(split.rows), 'row')}"
