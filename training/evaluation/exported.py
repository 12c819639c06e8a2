"""`export`: writes a model as stock BERT and ONNX, compares the files with it, measures what int8 costs and gains."""

import time
from pathlib import Path

import torch
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from d2l_bert import folders, messages
from d2l_bert.model_cards.card import carry_card
from d2l_bert.modeling import conversion, loading
from d2l_bert.modeling.export import FLOAT, INT8, OnnxModel, read_for_task, write_onnx
from d2l_bert.tokenization import prepare, wordpiece
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.training.evaluation.config import ExportConfig


FIGURES = {"fill-mask": "MLM loss on single sentences", "text-classification": "share of answers as in float32"}
CHARACTERS, LENGTH, ROWS = 100_000, 128, 32  # of the text; most tokens of a sentence; sentences at once


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
    with messages.reading_model(source):
        model, kept, task = read_for_task(source, config.task)
        tokenizer = loading.read_tokenizer(source, model.config)
        messages.refuse_first({"it has no tokenizer; put its tokenizer.json beside it": tokenizer is None})
    with (
        folders.new_folder(target) as folder,
        messages.explained("export needs ONNX", "pip install 'd2l-bert[onnx]'", ImportError),
        messages.explained(f"{source}: not exported", "", ValueError),
    ):
        wordpiece.save_tokenizer(tokenizer, folder)
        pairs = {}
        if config.onnx_only:
            (folder / "config.json").write_text(model.config.to_json_string())
        else:
            pairs["model.safetensors"] = (kept, conversion.to_bert(kept))
            conversion.save_model(pairs["model.safetensors"][1], folder)
            conversion.copy_sentence_transformer(source, folder)
        write_onnx(model, folder)
        pairs |= {name: (model, OnnxModel(folder / name, model.config)) for name in (FLOAT, INT8)}
        files = {
            name: {"bytes": (folder / name).stat().st_size, "difference": conversion.largest_difference(*pair)}
            for name, pair in pairs.items()
        }
        cost = cost_of_int8(pairs[FLOAT][1], pairs[INT8][1], tokenizer, task, config.corpus)
        if not config.onnx_only:
            figures = {"task": task, "files": files, "int8": cost}
            carry_card(source, folder, target.resolve().name, kept is not model, figures)
    lines = [
        f"{target}: {type(model).__name__} of {model.num_parameters():,} parameters, for {task}",
        *(
            f"  {name:<26} {file['bytes']:>13,} bytes  outputs differ by at most {file['difference']:.1e}"
            for name, file in files.items()
        ),
        "  what int8 costs is not measured: that needs --corpus, and a head that fills masks or chooses one class"
        if cost is None
        else f"  int8 beside float32, on {cost['text']}: {cost['figure']} {cost['int8']:.4f} ({cost['float32']:.4f}), "
        f"{cost['speed']:.2f} times as fast",
    ]
    if type(tokenizer) is PreTrainedTokenizerFast and model.config.type_vocab_size > 1:
        lines.append(
            "transformers.js gives a pair its segments for a BertTokenizer alone: call this tokenizer with "
            "{ text_pair, return_token_type_ids: true }; the question-answering pipeline there cannot take it"
        )
    return "\n".join(lines)


def cost_of_int8(
    in_float: OnnxModel, in_int8: OnnxModel, tokenizer: PreTrainedTokenizerBase, task: str, corpus: list[str]
) -> dict | None:
    """
    Compare two ONNX files on the sentences of a text: by the MLM loss with 15 % of the tokens masked, or by the
    classes that they choose.

    Args:
        task: one of `modeling.export.TASKS`.
        corpus: files and folders of text; none to measure nothing.

    Returns:
        `text`, its name; `figure`, what is compared, and its values `float32` and `int8`; `speed`, the seconds of
        float32 divided by those of int8. None without a text, and for a task that neither fills masks nor chooses one
        class for a text.

    Raises:
        UserError: the text cannot be read, or there is too little of it.
    """
    config = in_float.config
    if not corpus or task not in FIGURES or config.problem_type in ("regression", "multi_label_classification"):
        return None
    name, store = prepare.read_sources(prepare.open_sources(corpus, [], "", TextConfig(), None), None)
    sentences = list(store.part().sample(CHARACTERS))
    messages.refuse_first({f"{name}: holds no sentence; give more text": not sentences})
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=task == "fill-mask", seed=0)
    settings = {"truncation": True, "max_length": min(LENGTH, config.max_position_embeddings)}
    found, seconds = ([], []), [0.0, 0.0]
    for first in range(0, len(sentences), ROWS):
        batch = collate([tokenizer(sentence, **settings) for sentence in sentences[first : first + ROWS]])
        for number, file in enumerate((in_float, in_int8)):  # in turns: other programs then slow both alike
            start = time.perf_counter()
            logits = file(**batch).logits
            seconds[number] += time.perf_counter() - start
            is_masked = batch["labels"] != -100
            found[number].append(
                torch.nn.functional.cross_entropy(logits[is_masked], batch["labels"][is_masked], reduction="none")
                if task == "fill-mask"
                else logits.argmax(-1)
            )
    scores = [torch.cat(of_file) for of_file in found]
    if task != "fill-mask":
        scores = [(of_file == scores[0]).float() for of_file in scores]
    return {
        "text": name,
        "figure": FIGURES[task],
        "float32": float(scores[0].mean()),
        "int8": float(scores[1].mean()),
        "speed": seconds[0] / seconds[1],
    }
