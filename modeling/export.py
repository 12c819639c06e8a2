"""Writes a model as ONNX, in float32 and in int8, with the names that transformers.js and optimum give; runs it.

optimum's own exporter (optimum-onnx 0.1.0) wants transformers below 4.58; this is `torch.onnx.export`.
"""

import contextlib
import logging
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, BertConfig
from transformers.modeling_outputs import ModelOutput

from . import modeling_d2l_bert
from .bert_checkpoints import from_bert, read_bert
from .conversion import read_ours
from .modeling_d2l_bert import D2lBertPreTrainedModel


# For each task the class without the prefix D2lBert, and the outputs of the ONNX file.
TASKS = {
    "fill-mask": ("ForMaskedLM", ["logits"]),
    "next-sentence-prediction": ("ForNextSentencePrediction", ["logits"]),
    "text-classification": ("ForSequenceClassification", ["logits"]),
    "token-classification": ("ForTokenClassification", ["logits"]),
    "question-answering": ("ForQuestionAnswering", ["start_logits", "end_logits"]),
    "feature-extraction": ("Model", ["last_hidden_state"]),
}
TASK_OF = {head: task for task, (head, _) in TASKS.items()} | {"ForPreTraining": "fill-mask"}

OUTPUTS = {name for _, names in TASKS.values() for name in names} | {"prediction_logits", "seq_relationship_logits"}

FLOAT, INT8 = "onnx/model.onnx", "onnx/model_quantized.onnx"  # where transformers.js looks for them


def read_for_task(name: str, task: str | None = None) -> tuple[D2lBertPreTrainedModel, D2lBertPreTrainedModel, str]:
    """
    A d2l-bert model, or a stock BERT as one, with the one head that a task needs.

    Args:
        name: a folder or an id on the Hub.
        task: one of `TASKS`; None for that of the class that was saved.

    Returns:
        The model with this one head, in float32 and in evaluation mode; the model as it was saved; and the task.

    Raises:
        ValueError: the model is no d2l-bert model and no BERT that d2l-bert can express, or has no such head.
        OSError: there is no such model.
    """
    is_stock = isinstance(AutoConfig.from_pretrained(name, trust_remote_code=False), BertConfig)
    saved = (from_bert(read_bert(name)[0]) if is_stock else read_ours(name)).float()
    head = type(saved).__name__.removeprefix("D2lBert")
    task = task or task_of(saved)
    if task is None:
        raise ValueError(f"there is no task for D2lBert{head} in ONNX; give --task {' or '.join(TASKS)}")
    if head == TASKS[task][0]:
        return saved.eval(), saved, task
    if task == "feature-extraction":
        return saved.base_model.eval(), saved, task
    model = getattr(modeling_d2l_bert, f"D2lBert{TASKS[task][0]}")(saved.config)
    missing = model.load_state_dict(saved.state_dict(), strict=False).missing_keys
    if missing:
        raise ValueError(
            f"it was saved as D2lBert{head}, without weights for {missing[-1]}, which {task} needs; give a model that "
            f"was trained for this task, or another --task"
        )
    return model.eval(), saved, task


def task_of(model: D2lBertPreTrainedModel) -> str | None:
    """The task that the head of a model is for; of both pretraining heads, fill-mask. None for multiple choice."""
    return TASK_OF.get(type(model).__name__.removeprefix("D2lBert"))


def write_onnx(model: D2lBertPreTrainedModel, task: str, folder: Path) -> None:
    """
    Write `FLOAT` and `INT8` into a folder.

    The inputs are `input_ids`, `attention_mask` and `token_type_ids`, int64 (batch_size, sequence_length). In int8 are
    the matrices and the embeddings; activations are quantized when they are known (dynamic).
    """
    (folder / FLOAT).parent.mkdir(exist_ok=True)
    inputs = example_inputs(model, rows=2)
    axes = {0: torch.export.Dim("batch_size"), 1: torch.export.Dim("sequence_length")}
    with _without_messages():
        torch.onnx.export(
            _WithOutputs(model, TASKS[task][1]),
            kwargs=inputs,
            f=str(folder / FLOAT),
            input_names=list(inputs),
            output_names=TASKS[task][1],
            dynamic_shapes=dict.fromkeys(inputs, axes),
            external_data=False,
            verbose=False,
        )
    _quantize(folder / FLOAT, folder / INT8, model.config)


class _WithOutputs(nn.Module):
    """A model that returns some of its outputs, by name; the encoder also returns what its pooler gives."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, input_ids, attention_mask, token_type_ids):
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        return tuple(outputs[name] for name in self.names)


def _quantize(source, target, config):
    """
    Write an ONNX file in int8.

    Activations are quantized as they come, with one scale for a tensor (dynamic quantization). In the feed-forward
    layers a few of them are far larger than the others, and that scale costs most of what is lost: there activations
    stay float32, and 128 weights share a scale. Smallest cosine of the vectors of 400 sentences with those of float32,
    all-MiniLM-L6-v2: 0.996 so, 0.977 without; in as many bytes, 1.2 instead of 1.9 times as fast as float32.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _without_messages():
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        graph = onnx.load(source)
        sizes = {tensor.name: sorted(tensor.dims) for tensor in graph.graph.initializer}
        of_ffn = sorted((config.hidden_size, config.intermediate_size))
        others = [node.name for node in graph.graph.node if of_ffn not in map(sizes.get, node.input)]
        quantizer = MatMulNBitsQuantizer(graph, bits=8, block_size=128, is_symmetric=True, nodes_to_exclude=others)
        quantizer.process()
        del graph.graph.value_info[:]  # shapes in between, some of them wrong: the next step infers them itself
        quantize_dynamic(quantizer.model.model, target, weight_type=QuantType.QInt8, per_channel=True)


@contextlib.contextmanager
def _without_messages():
    """Within the block nothing is logged or warned of; undoes the `logging.basicConfig` of the quantizer's module."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:], root.level = handlers, level


class OnnxModel(nn.Module):
    """
    An ONNX file on the CPU, called as the model that it was made from.

    Args:
        file: the file.
        config: the model's configuration.
    """

    def __init__(self, file: Path, config):
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.config = config

    @property
    def base_model(self):
        """As a Transformers model with a head has it: what tells how long an input may be."""
        return self

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, **_) -> ModelOutput:
        """The outputs of the file, by their names; arguments (B, T) as in `D2lBertModel`."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        inputs = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": segments}
        names = [output.name for output in self.session.get_outputs()]
        values = self.session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
        return ModelOutput(zip(names, map(torch.from_numpy, values), strict=True))


def example_inputs(model: nn.Module, rows: int = 8, length: int = 48) -> dict[str, torch.Tensor]:
    """Random token ids in two segments (rows, at most `length`), always the same; each row ends in some padding."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    length = min(length, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (rows, length), generator=generator)
    places, ends = torch.arange(length), torch.randint(1, length + 1, (rows, 1), generator=generator)
    segments = (places >= ends // 2).long() * (config.type_vocab_size > 1)
    return {"input_ids": ids, "attention_mask": (places < ends).long(), "token_type_ids": segments}


@torch.no_grad()
def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models' outputs for `example_inputs`, padding left out."""
    inputs, differences = example_inputs(model), []
    is_real = inputs["attention_mask"].bool()
    ours, theirs = model(**inputs), other(**inputs)
    for name in theirs:
        if name in OUTPUTS:
            difference = (ours[name] - theirs[name]).abs()
            is_of_tokens = difference.shape[:2] == is_real.shape
            differences.append(float((difference[is_real] if is_of_tokens else difference).max()))
    return max(differences)
