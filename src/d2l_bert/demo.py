"""What a model answers, as text, and pages on which one tries it: on this machine, or static files.

The page of `d2l-bert demo` also runs as a Space of the Hub. The static page computes in the visitor's browser, by
transformers.js.
"""

import base64
import functools
import html
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import AutoModelForMaskedLM, AutoModelForNextSentencePrediction, pipeline

from d2l_bert import folders, messages, pair_tasks
from d2l_bert.modeling import loading
from d2l_bert.modeling.conversion import longest_input
from d2l_bert.modeling.export import INT8
from d2l_bert.training.vectors import attention, config


load = functools.lru_cache(maxsize=8)(loading.load_pretrained)


def filled_masks(model: str, text: str, top_k: int = 5) -> str:
    """The likeliest tokens for each [MASK] of a text, with their probabilities, a line each."""
    loaded, tokenizer, _ = load(AutoModelForMaskedLM, model)
    mask, length, limit = tokenizer.mask_token, len(tokenizer(text)["input_ids"]), longest_input(loaded, tokenizer)
    cases = {
        f"{text[:40]!r}...: {length} tokens, and the model has {limit} positions; shorten the text": (
            limit is not None and length > limit
        ),
        f"no {mask} in {text!r}: write {mask} in the place of the word to predict": mask not in text,
    }
    messages.refuse_first(cases)
    found = pipeline("fill-mask", model=loaded, tokenizer=tokenizer)(text, top_k=min(top_k, len(tokenizer)))
    masks = found if isinstance(found[0], list) else [found]
    titles = [f"  mask {number}\n" if len(masks) > 1 else "" for number in range(1, len(masks) + 1)]
    return "\n".join(
        title + bars([(entry["token_str"], entry["score"]) for entry in best])
        for title, best in zip(titles, masks, strict=True)
    )


def next_sentence(model: str, first: str, second: str) -> str:
    """The probability of each label for two texts: whether the second follows the first."""
    loaded, tokenizer, _ = load(AutoModelForNextSentencePrediction, model)
    predict = pair_tasks.NextSentencePredictionPipeline(model=loaded, tokenizer=tokenizer)
    pair = {"text": first, "text_pair": second}
    return bars([(found["label"], found["score"]) for found in predict(pair, top_k=None)])


def bars(shares: Sequence[tuple[str, float]]) -> str:
    """A line for each name: its share as a number and as a bar."""
    return "\n".join(f"  {share:6.1%}  {name:<20} {'█' * round(30 * share)}".rstrip() for name, share in shares)


# ---------------------------------------------------------------------------------------------------------------------
# On this machine


def attention_picture(model: str, first: str, second: str, layer: float | None, head: float | None) -> str:
    """The picture of `d2l-bert attention`, as HTML; a layer or a head of 0 stands for all."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, "attention.png")
        attention.draw_attention(
            model,
            first,
            second or None,
            config.AttentionConfig(output=str(picture), layer=int(layer or 0) or None, head=int(head or 0) or None),
        )
        content = base64.b64encode(picture.read_bytes()).decode()
    return f'<img alt="attention of each head" src="data:image/png;base64,{content}">'


def answer(show: Callable[..., str], *inputs) -> str:
    """What `show` returns, as HTML; for input that it refuses, the reason in a sentence."""
    try:
        shown = show(*inputs)
    except messages.UserError as error:
        return f'<p role="alert">{html.escape(str(error))}</p>'
    return shown if show is attention_picture else f"<pre>{html.escape(shown)}</pre>"


def make_demo(models: Sequence[str]):
    """
    The page: a `gradio.Blocks`, to be launched.

    Args:
        models: folders or ids on the Hub, of which the page offers a choice.

    Raises:
        UserError: Gradio is not installed, or there is no such model.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        from gradio import HTML, Dropdown, Interface, Number, TabbedInterface, Textbox
    except ImportError:
        raise messages.UserError("demo needs Gradio: pip install 'd2l-bert[demo]'") from None
    for model in models:
        loading.load_encoder(model)
    first, second = ("A crane is flying.", "It spreads its wings.")
    tabs = {
        "Fill masks": (filled_masks, Textbox("Open the [MASK] and return a file object.", label="Text with [MASK]")),
        "Does B follow A?": (next_sentence, Textbox(first, label="A"), Textbox(second, label="B")),
        "Attention": (
            attention_picture,
            Textbox(first, label="Text"),
            Textbox("", label="Second text, if any"),
            Number(0, label="Layer, 0 for all", minimum=0, precision=0),
            Number(0, label="Head, 0 for all", minimum=0, precision=0),
        ),
        "A word in two contexts": (
            attention.compare_word,
            Textbox("crane", label="Word"),
            Textbox(first, label="Text"),
            Textbox("A crane driver came.", label="Another text"),
        ),
    }
    pages = []
    for show, *fields in tabs.values():
        choice = Dropdown(list(models), value=models[0], label="Model", visible=len(models) > 1)
        pages.append(
            Interface(
                functools.partial(answer, show),
                [choice, *fields],
                HTML(),
                api_name=show.__name__,
                submit_btn="Show",
                clear_btn=None,
                flagging_mode="never",
            )
        )
    return TabbedInterface(pages, list(tabs), title="d2l-bert")


# ---------------------------------------------------------------------------------------------------------------------
# Without a server


# The version of transformers.js that the page was tried with. It brings the ONNX Runtime that it was built with.
TRANSFORMERS_JS = "4.3.1"
RUNTIME = (
    "@huggingface/transformers/dist/transformers.min.js",
    "@huggingface/transformers/LICENSE",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.wasm",
)
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", INT8)
PAGE_TASKS = ("fill-mask", "text-classification")


def copy_runtime(folder: Path, runtime: str) -> None:
    """
    Put transformers.js and ONNX Runtime into the empty folder of a page.

    Args:
        runtime: a folder in which npm has installed @huggingface/transformers.

    Raises:
        UserError: the runtime is not there.
    """
    (folder / "runtime").mkdir()
    way_out = f"npm install --ignore-scripts @huggingface/transformers@{TRANSFORMERS_JS} there"
    with messages.explained(f"runtime {runtime}: lacks files", way_out, OSError):
        for name in RUNTIME:
            shutil.copyfile(Path(runtime, "node_modules", name), folder / "runtime" / Path(name).name)


def write_page(exported: Path, folder: Path) -> None:
    """
    Write the page and the model into a folder that has the runtime.

    Args:
        exported: what `d2l-bert export` has written.

    Raises:
        UserError: the model is for another task than those of `PAGE_TASKS`, or has more than one class for a text.
    """
    metrics, name = folders.read_json(exported / "metrics.json"), exported.resolve().name
    task, problem = metrics["export"]["task"], folders.read_json(exported / "config.json").get("problem_type")
    messages.refuse_first(
        {
            f"a page shows {' or '.join(PAGE_TASKS)}, not {task}; leave --page out": task not in PAGE_TASKS,
            "a page shows one class of several, not numbers or several labels; leave --page out": (
                problem in ("regression", "multi_label_classification")
            ),
        }
    )
    for file in ("index.html", "runtime/LICENSE-onnxruntime-web"):
        shutil.copyfile(Path(__file__).with_name("page_files") / file, folder / file)
    for file in MODEL_FILES:
        (folder / "model" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(exported / file, folder / "model" / file)
    examples = [example["text"] for example in metrics.get("predictions", [])] or ["Paris is the [MASK] of France."]
    text = min(examples, key=len) if task == "fill-mask" else ""
    folders.write_json(folder / "page.json", {"name": name, "task": task, "text": text})
