"""A page without a server: static files with a model in int8, which transformers.js runs in the visitor's browser."""

import shutil
from pathlib import Path

from d2l_bert import folders, messages
from d2l_bert.modeling.export import INT8
from d2l_bert.records import read_record


# The version of transformers.js that the page was tried with. It brings the ONNX Runtime that it was built with.
TRANSFORMERS_JS = "4.3.1"
RUNTIME = (
    "@huggingface/transformers/dist/transformers.min.js",
    "@huggingface/transformers/LICENSE",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.wasm",
)
PAGE_TASKS = ("fill-mask", "text-classification")


def copy_runtime(folder: Path, runtime: str) -> None:
    """
    Put the page, transformers.js and ONNX Runtime into an empty folder.

    Args:
        runtime: a folder in which npm has installed @huggingface/transformers.

    Raises:
        UserError: the runtime is not there.
    """
    shutil.copytree(Path(__file__).with_name("page_files"), folder, dirs_exist_ok=True)
    way_out = f"npm install --ignore-scripts @huggingface/transformers@{TRANSFORMERS_JS} there"
    with messages.explained(f"runtime {runtime}: lacks files", way_out, OSError):
        for name in RUNTIME:
            shutil.copyfile(Path(runtime, "node_modules", name), folder / "runtime" / Path(name).name)


def write_page(exported: Path, name: str, folder: Path) -> None:
    """
    Put the model into a folder that `copy_runtime` has filled.

    Args:
        exported: what `d2l-bert export` has written.
        name: the model's name on the page.

    Raises:
        UserError: the model is for another task than those of `PAGE_TASKS`, or has more than one class for a text.
    """
    metrics = read_record(exported / "metrics.json", allow_nan=True)
    task = metrics["export"]["task"]
    if task not in PAGE_TASKS:
        raise messages.UserError(f"a page shows {' or '.join(PAGE_TASKS)}, not {task}; leave --page out")
    if read_record(exported / "config.json").get("problem_type") in ("regression", "multi_label_classification"):
        raise messages.UserError("a page shows one class of several, not numbers or several labels; leave --page out")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", INT8):
        (folder / "model" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(exported / file, folder / "model" / file)
    examples = [example["text"] for example in metrics.get("predictions", [])] or ["Paris is the [MASK] of France."]
    text = min(examples, key=len) if task == "fill-mask" else ""
    folders.write_json(folder / "page.json", {"name": name, "task": task, "text": text})
