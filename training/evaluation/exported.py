"""`export`: writes a model as stock BERT and ONNX, compares the files with it, measures what int8 costs and gains."""

import statistics
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from d2l_bert.folders import new_folder
from d2l_bert.messages import explained, reading_model, refuse_first
from d2l_bert.model_cards.card import carry_card
from d2l_bert.modeling import bert_checkpoints, conversion
from d2l_bert.modeling.export import (
    FLOAT,
    INT8,
    OnnxModel,
    example_inputs,
    largest_difference,
    read_for_task,
    task_of,
    write_onnx,
)
from d2l_bert.modeling.loading import read_tokenizer
from d2l_bert.tokenization.account import unknown_share
from d2l_bert.tokenization.sources import PYTHON_DOCS
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.evaluation.config import EvaluateConfig, ExportConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel, check_lengths
from d2l_bert.training.evaluation.text import evaluate_text, read_text


OWN_RULES = (
    "transformers.js gives a pair its segments for a BertTokenizer alone: call this tokenizer with "
    "{ text_pair, return_token_type_ids: true }; the question-answering pipeline there cannot take it"
)
SEGMENTS, CHARACTERS = 500, 100_000  # of the text, for a loss and for classes
ONE_CLASS = (None, "single_label_classification")  # values of `problem_type`
DEFAULT_LENGTH = 128  # tokens in a row, unless the model has fewer positions


def export(source: str, target: Path, config: ExportConfig) -> str:
    """
    Write a model as stock BERT, which loads without this package, and as ONNX in float32 and int8; with its tokenizer
    and a card.

    Args:
        source: the model, a folder or an id on the Hub.
        target: a new folder to write into.

    Returns:
        How the files compare with the model, and what int8 costs, to be printed.

    Raises:
        UserError: an option is refused, ONNX is not installed, the model cannot be read, has no tokenizer or no such
            head, stock BERT cannot express it, or the text to measure on cannot be read.
    """
    config.check()
    packages = ("onnx", "onnxruntime", "onnxscript")
    refuse_first({f"export needs {name}: pip install 'd2l-bert[onnx]'": find_spec(name) is None for name in packages})
    with reading_model(source):
        model, saved, task = read_for_task(source, config.task)
        tokenizer = read_tokenizer(source, model.config)
    is_whole = task_of(saved) == task
    with new_folder(target) as folder, explained(f"{source}: not exported", "", ValueError):
        if tokenizer is None:
            raise ValueError("the model has no tokenizer; put its tokenizer.json beside it")
        save_tokenizer(tokenizer, folder)
        differences = {}
        if config.onnx_only:
            (folder / "config.json").write_text(model.config.to_json_string())
        else:
            stock = bert_checkpoints.to_bert(saved if is_whole else model)
            conversion.save_model(stock, folder)
            bert_checkpoints.copy_sentence_transformer(source, folder)
            differences["model.safetensors"] = largest_difference(saved if is_whole else model, stock)
        write_onnx(model, task, folder)
        in_onnx = {name: OnnxModel(folder / name, model.config) for name in (FLOAT, INT8)}
        differences |= {name: largest_difference(model, file) for name, file in in_onnx.items()}
        files = {
            name: {"bytes": (folder / name).stat().st_size, "difference": difference}
            for name, difference in differences.items()
        }
        cost = cost_of_int8(list(in_onnx.values()), folder, task, config.corpus)
        if not config.onnx_only:
            carry_card(source, folder, target.resolve().name, is_whole, {"task": task, "files": files, "int8": cost})
    lines = [
        f"{target}: {type(model).__name__} of {model.num_parameters():,} parameters, for {task}",
        *(
            f"  {name:<26} {file['bytes']:>13,} bytes  outputs differ by at most {file['difference']:.1e}"
            for name, file in files.items()
        ),
    ]
    if cost:
        lines.append(
            f"  int8 beside float32, on {cost['text']} ({cost['unknown_share']:.1%} of its characters in [UNK]): "
            f"{cost['figure']} {cost['int8']:.4f} ({cost['float32']:.4f}), {cost['speed']:.2f} times as fast"
        )
    if type(tokenizer) is PreTrainedTokenizerFast and model.config.type_vocab_size > 1:
        lines.append(OWN_RULES)
    return "\n".join(lines)


@torch.no_grad()
def cost_of_int8(files: list[OnnxModel], folder: Path, task: str, corpus: list[str]) -> dict | None:
    """
    Compare two ONNX files, in float32 and in int8, on a text: by the MLM loss, or by the classes that they choose.

    Args:
        folder: where their tokenizer is.
        task: one of `modeling.export.TASKS`.
        corpus: files and folders of text, or `python-docs`, of which the part is taken that `pretrain` holds out.

    Returns:
        `text`, its name; `unknown_share`, the share of its characters in `[UNK]`; `figure`, what is compared, and its
        values `float32` and `int8`; `speed`, the seconds of float32 divided by those of int8, the median of paired
        runs. None for a task that neither fills masks nor chooses one class for a text.

    Raises:
        UserError: the text cannot be read, or there is too little of it.
    """
    config, is_paired = files[0].config, task == "next-sentence-prediction"
    is_one_class = is_paired or (task == "text-classification" and config.problem_type in ONE_CLASS)
    if task != "fill-mask" and not is_one_class:
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    options = EvaluateConfig(corpus=corpus, held_out=corpus == [PYTHON_DOCS], max_eval_pairs=SEGMENTS)
    text = read_text(options, PretrainConfig())
    if task == "fill-mask":
        models = [MaskedModel(folder.name, file, tokenizer, False, {}) for file in files]
        length, accelerator = check_lengths(models, None, DEFAULT_LENGTH), make_accelerator("no")
        losses = [evaluate_text(model, text, options, length, accelerator)["mlm_loss"] for model in models]
        figure = {"figure": "MLM loss", "float32": losses[0], "int8": losses[1]}
    else:
        same = _same_classes(files, _batches(text, tokenizer, config, is_paired))
        figure = {"figure": "share of answers as in float32", "float32": 1.0, "int8": same}
    share = unknown_share(tokenizer, text.sample())
    return {"text": text.name, "unknown_share": share, **figure, "speed": _speed(*files)}


def _batches(text, tokenizer, config, is_paired):
    """Rows of sentences of a text; for a task on pairs, of one sentence and the next."""
    length = min(DEFAULT_LENGTH, config.max_position_embeddings)
    sentences = list(text.sample(CHARACTERS))
    columns = [sentences[:-1], sentences[1:]] if is_paired else [sentences]
    for first in range(0, len(columns[0]), 32):
        rows = [column[first : first + 32] for column in columns]
        yield tokenizer(*rows, truncation=True, max_length=length, padding=True, return_tensors="pt")


def _same_classes(files, batches):
    """The share of rows for which both files choose the same class."""
    same = [torch.eq(*(file(**batch).logits.argmax(-1) for file in files)) for batch in batches]
    return float(torch.cat(same).double().mean())


def _speed(*files):
    inputs, ratios = example_inputs(files[0], rows=8, length=DEFAULT_LENGTH), []
    for _ in range(9):
        seconds = []
        for file in files:
            start = time.perf_counter()
            file(**inputs)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])
