"""What int8 costs and gains beside float32: loss, classes or vectors on a text, size and speed of the ONNX files."""

import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

from d2l_bert.modeling.export import FLOAT, INT8, OnnxModel, example_inputs
from d2l_bert.tokenization.account import unknown_share
from d2l_bert.tokenization.sources import PYTHON_DOCS
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.distributed import make_accelerator
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel, check_lengths
from d2l_bert.training.evaluation.text import evaluate_text, read_text


SEGMENTS, CHARACTERS = 500, 100_000  # of the text, for a loss and for other figures
DEFAULT_LENGTH = 128  # tokens in a row, unless the model has fewer positions


@torch.no_grad()
def cost_of_int8(folder: Path, config, task: str, corpus: list[str]) -> dict:
    """
    Compare the two ONNX files of a folder on a text.

    Args:
        config: the configuration of the model.
        task: one of `modeling.export.TASKS`.
        corpus: files and folders of text, or `python-docs`, of which the part is taken that `pretrain` holds out.

    Returns:
        `text`, its name; `unknown_share`, the share of its characters in `[UNK]`; `figure`, what is compared, and its
        values `float32` and `int8`; `speed`, the seconds of float32 divided by those of int8, the median of paired
        runs.

    Raises:
        UserError: the text cannot be read, or there is too little of it.
    """
    files = [OnnxModel(folder / name, config) for name in (FLOAT, INT8)]
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    options = EvaluateConfig(corpus=corpus, held_out=corpus == [PYTHON_DOCS], max_eval_pairs=SEGMENTS)
    text = read_text(options, PretrainConfig())
    if task == "fill-mask":
        models = [MaskedModel(folder.name, file, tokenizer, False, {}) for file in files]
        length, accelerator = check_lengths(models, None, DEFAULT_LENGTH), make_accelerator("no")
        losses = [evaluate_text(model, text, options, length, accelerator)["mlm_loss"] for model in models]
        figure = {"figure": "MLM loss", "float32": losses[0], "int8": losses[1]}
    else:
        figure = _agreement(files, _batches(text, tokenizer, config, task), task, config.problem_type)
    share = unknown_share(tokenizer, text.sample())
    return {"text": text.name, "unknown_share": share, **figure, "speed": _speed(*files)}


def _batches(text, tokenizer, config, task):
    """Rows of sentences of a text; for a task on pairs, of one sentence and the next."""
    length = min(DEFAULT_LENGTH, config.max_position_embeddings)
    sentences = list(text.sample(CHARACTERS))
    is_paired = task in ("next-sentence-prediction", "question-answering")
    columns = [sentences[:-1], sentences[1:]] if is_paired else [sentences]
    for first in range(0, len(columns[0]), 32):
        rows = [column[first : first + 32] for column in columns]
        yield tokenizer(*rows, truncation=True, max_length=length, padding=True, return_tensors="pt")


def _agreement(files, batches, task, problem_type):
    """How often both files give the same class, labels, tag or span; of vectors and numbers how far apart they are."""
    values = []
    for batch in batches:
        one, other = (file(**batch) for file in files)
        is_real = batch["attention_mask"].bool()
        if task == "feature-extraction":
            means = [
                (states * is_real[..., None]).sum(1) / is_real.sum(1, keepdim=True)
                for states in (one.last_hidden_state, other.last_hidden_state)
            ]
            values.append(F.cosine_similarity(*means))
        elif problem_type == "regression":
            values.append((one.logits - other.logits).abs().flatten())
        else:
            is_multi_label = problem_type == "multi_label_classification"
            chosen = [
                [logits > 0 if is_multi_label else logits.argmax(-1) for logits in of.values()] for of in (one, other)
            ]
            same = torch.stack([first == second for first, second in zip(*chosen, strict=True)]).all(0)
            values.append((same[is_real] if task == "token-classification" else same.flatten()).double())
    values = torch.cat(values)
    if task == "feature-extraction":
        return {"figure": "smallest cosine with float32", "float32": 1.0, "int8": float(values.min())}
    if problem_type == "regression":
        return {"figure": "mean difference from float32", "float32": 0.0, "int8": float(values.mean())}
    return {"figure": "share of answers as in float32", "float32": 1.0, "int8": float(values.mean())}


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
