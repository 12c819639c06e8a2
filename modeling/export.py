"""`export`: writes a model as stock BERT and ONNX, float32 and int8; compares the files with it.

The ONNX files have the names that transformers.js and optimum give. optimum's own exporter (optimum-onnx 0.1.0) wants
transformers below 4.58; this is `torch.onnx.export`.
"""

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.modeling_outputs import ModelOutput

from d2l_bert import messages
from d2l_bert.tokenization import existing_tokenizers, wordpiece

from . import conversion, modeling_d2l_bert
from .config import TASKS, ExportConfig
from .modeling_d2l_bert import D2lBertPreTrainedModel


logger = logging.getLogger(__name__)

# Where transformers.js looks for the two files.
FLOAT = "onnx/model.onnx"
INT8 = "onnx/model_quantized.onnx"


@dataclass(frozen=True)
class ExportResult:
    """
    What `d2l-bert export` has written.

    Args:
        output_dir: the folder with the files.
        page: the folder with the page; None if none was asked for.
        task: what the model was exported for.
        files: of each file with weights its `bytes`, and `difference`, the largest difference of its outputs from the
            model's.
        report: what the command prints.
    """

    output_dir: Path
    page: Path | None
    task: str
    files: dict[str, dict]
    report: str


def export(source: str, folder: Path, config: ExportConfig) -> tuple[str, dict, bool]:
    """
    Write a model as stock BERT, which loads without this package, and as ONNX in float32 and int8; with its tokenizer.

    Args:
        source: the model, a folder or an id on the Hub.
        folder: an empty folder.
        config: checked options.

    Returns:
        How the files compare with the model, for people; the same for metrics.json: `task` and `files`; and whether
        the model was saved for this task.

    Raises:
        UserError: ONNX is not installed, the model cannot be read, has no tokenizer or no such head, or stock BERT
            cannot express it.
    """
    model, saved, task = read_for_task(source, config.task)
    with messages.reading_model(source):
        tokenizer = existing_tokenizers.read_tokenizer(source, model.config)
    pairs = {}  # of each file the model that it was made from, and the file as a model
    with (
        messages.explained("export needs ONNX", "pip install 'd2l-bert[onnx]'", ImportError),
        messages.explained(f"{source}: not exported", "", ValueError),
    ):
        wordpiece.save_tokenizer(tokenizer, folder)
        if config.onnx_only:
            (folder / "config.json").write_text(model.config.to_json_string())
        else:
            pairs["model.safetensors"] = (saved, conversion.to_bert(saved))
            conversion.save_model(pairs["model.safetensors"][1], folder)
            conversion.copy_sentence_transformer(source, folder)
        write_onnx(model, folder)
        for name in (FLOAT, INT8):
            pairs[name] = (model, OnnxModel(folder / name, model.config))
        files = {}
        said = [f"{type(model).__name__} of {model.num_parameters():,} parameters, for {task}"]
        for name, (original, written) in pairs.items():
            size = (folder / name).stat().st_size
            difference = conversion.largest_difference(original, written)
            files[name] = {"bytes": size, "difference": difference}
            said.append(f"  {name:<26} {size:>13,} bytes  outputs differ by at most {difference:.1e}")
    return "\n".join(said), {"task": task, "files": files}, saved is not model


def read_for_task(name: str, task: str | None = None) -> tuple[D2lBertPreTrainedModel, D2lBertPreTrainedModel, str]:
    """
    A d2l-bert model, or a stock BERT as one, with the one head that a task needs.

    Args:
        name: a folder or an id on the Hub.
        task: one of `TASKS`; None for that of the class that was saved.

    Returns:
        The model with this one head, in float32 and in evaluation mode; the model as it was saved if that is for the
        same task, else this one again; and the task.

    Raises:
        UserError: there is no such model, it is no d2l-bert model and no BERT that d2l-bert can express, or it has no
            such head.
    """
    with messages.reading_model(name):
        saved, _ = conversion.read_model(name)
    kind = type(saved).__name__
    task_of_class = {f"D2lBert{head}": task_of_head for task_of_head, head in TASKS.items()}
    task_of_class["D2lBertForPreTraining"] = "fill-mask"
    saved_task = task_of_class.get(kind)
    if task is None:
        task = saved_task
    if task is None:
        raise messages.UserError(f"{name}: a {kind} has no task in ONNX; give --task feature-extraction")
    options = {}
    if task == "feature-extraction":  # the encoder alone, with the layer for [CLS] if it was saved
        options["add_pooling_layer"] = saved.base_model.pooler is not None
    model, missing, _ = conversion.load_and_compare(
        getattr(modeling_d2l_bert, f"D2lBert{TASKS[task]}"),
        None,
        config=saved.config,
        state_dict=saved.state_dict(),
        dtype=torch.float32,
        **options,
    )
    if missing:
        raise messages.UserError(
            f"{name}: is a {kind}, without {min(missing)}, which {task} needs; give --task "
            f"{saved_task or 'feature-extraction'}"
        )
    return model, saved.float() if saved_task == task else model, task


@contextlib.contextmanager
def logging_as_before() -> Iterator[None]:
    """
    Put back, at the end of the block, what it changes of the program's logging: the handlers and the level of the root
    logger, as ONNX Runtime's quantizer calls `logging.basicConfig`, and the level of `torch.onnx`.
    """
    root = logging.getLogger()
    of_torch = logging.getLogger("torch.onnx")
    handlers = root.handlers[:]
    level = root.level
    level_of_torch = of_torch.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        of_torch.setLevel(level_of_torch)


def write_onnx(model: D2lBertPreTrainedModel, folder: Path) -> None:
    """
    Write `FLOAT` and `INT8` into a folder, without the warnings of the libraries on stderr.

    The inputs are `input_ids`, `attention_mask` and `token_type_ids`, int64 (batch_size, sequence_length); the outputs
    are the model's. In int8 are the matrices and the embeddings; activations are quantized as they come, with one
    scale for a tensor (dynamic quantization). In the feed-forward layers a few activations are far larger than the
    others, and that scale costs most of what is lost: there activations stay float32, and 128 weights share a scale.
    Smallest cosine of the vectors of 400 sentences with those of float32, all-MiniLM-L6-v2: 0.996 so, 0.977 without;
    in as many bytes, 1.2 instead of 1.9 times as fast as float32.

    The other matrices use 7 of the 8 bits: processors without the VNNI instructions add two products in 16 bits, and
    sums of 8-bit ones were cut off there (mean error of the outputs, by their deviation, of models with large random
    weights: 0.50 on such a processor, 0.024 on others; 0.027 with 7 bits on both).
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    (folder / FLOAT).parent.mkdir(exist_ok=True)
    inputs = conversion.example_inputs(model, rows=2)
    names = list(model(**inputs))
    axes = {0: torch.export.Dim("batch_size"), 1: torch.export.Dim("sequence_length")}
    logger.info("writing ONNX files and comparing them with the model; this takes a minute or two")
    # The quantizer's module logs to the stderr of the moment in which it is imported.
    with logging_as_before(), contextlib.redirect_stderr(io.StringIO()):
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it would warn of operators that torchvision has
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        torch.onnx.export(
            model,
            kwargs=inputs,
            f=str(folder / FLOAT),
            input_names=list(inputs),
            output_names=names,
            dynamic_shapes=dict.fromkeys(inputs, axes),
            external_data=False,
            verbose=False,
        )
        graph = onnx.load(folder / FLOAT)
        sizes = {tensor.name: sorted(tensor.dims) for tensor in graph.graph.initializer}
        of_ffn = sorted((model.config.hidden_size, model.config.intermediate_size))
        others = [node.name for node in graph.graph.node if of_ffn not in map(sizes.get, node.input)]
        quantizer = MatMulNBitsQuantizer(graph, bits=8, block_size=128, is_symmetric=True, nodes_to_exclude=others)
        quantizer.process()
        del graph.graph.value_info[:]  # shapes in between, some of them wrong: the next step infers them itself
        quantize_dynamic(
            quantizer.model.model,
            folder / INT8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,  # 7 bits
        )


class OnnxModel:
    """
    An ONNX file on the CPU, called as the model that it was made from.

    Args:
        file: the file.
        config: the model's configuration.
    """

    def __init__(self, file: Path, config):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.config = config

    def __call__(self, **inputs) -> ModelOutput:
        """The outputs of the file, by their names, for arguments (B, T) as in `D2lBertModel`, each given."""
        named = {each.name: inputs[each.name].numpy() for each in self.session.get_inputs()}
        names = [output.name for output in self.session.get_outputs()]
        return ModelOutput(zip(names, map(torch.from_numpy, self.session.run(names, named)), strict=True))
