"""`ExportConfig`: the options of `d2l-bert export`, and the tasks that a model is exported for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from d2l_bert.options import OUTPUT, Options, option


# For each task the class without the prefix D2lBert.
TASKS = {
    "fill-mask": "ForMaskedLM",
    "next-sentence-prediction": "ForNextSentencePrediction",
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
    "feature-extraction": "Model",
}


@dataclass(kw_only=True)
class ExportConfig(Options):
    """
    Which files `d2l-bert export` writes. Every field is an option of the command.

    Raises:
        UserError: from `check`, for a value out of its range or values that contradict each other.
    """

    task: Literal[*TASKS] | None = option(
        None, "the head to keep; the default is that of the class that was saved", OUTPUT, common=True
    )
    onnx_only: bool = option(
        False,
        "write the ONNX files and the tokenizer alone, for a model that stock BERT cannot express",
        OUTPUT,
        common=True,
    )
    page: str | None = option(
        None,
        "also write a page into this new folder that runs the model in a visitor's browser, for any static web server",
        OUTPUT,
        metavar="DIR",
        common=True,
    )
    runtime: str | None = option(
        None,
        "for the page: a folder in which npm install --ignore-scripts @huggingface/transformers was run",
        OUTPUT,
        metavar="DIR",
        common=True,
        needs="page",
    )

    def contradictions(self, given: set[str]) -> Iterator[str]:
        """As in `Options`."""
        if self.page and not self.runtime:
            yield (
                "page needs transformers.js; run npm install --ignore-scripts @huggingface/transformers in a folder, "
                "and give the folder with --runtime"
            )
        if self.page and self.onnx_only:
            yield "onnx_only writes no card and no page; leave it or page out"
