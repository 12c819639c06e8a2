"""What a model answers, as text; and a page on this machine on which one tries models."""

import functools
import html
import math
import os

from transformers import AutoModelForMaskedLM, AutoModelForNextSentencePrediction, pipeline

from d2l_bert import messages, pair_tasks
from d2l_bert.inference import attention
from d2l_bert.modeling import loading


load = functools.lru_cache(maxsize=8)(loading.load_pretrained)


def filled_masks(model: str, text: str, top_k: int = 5) -> str:
    """The likeliest tokens for each [MASK] of a text, with their probabilities, a line each."""
    loaded, tokenizer, _ = load(AutoModelForMaskedLM, model)
    encoded = attention.encoded_text(model, loaded, tokenizer, text)  # refuses a text that is too long
    mask = tokenizer.mask_token
    if mask not in text:
        raise messages.UserError(f"no {mask} in {text!r}; write {mask} in place of the word to predict")
    found = pipeline("fill-mask", model=loaded, tokenizer=tokenizer)(text, top_k=min(top_k, len(tokenizer)))
    masks = found if isinstance(found[0], list) else [found]
    lines = []
    for number, guesses in enumerate(masks, 1):
        if len(masks) > 1:
            lines.append(f"  mask {number}")
        lines.append(bars([(guess["token_str"], guess["score"]) for guess in guesses]))
    if tokenizer.unk_token_id in encoded["input_ids"][0].tolist():
        lines.append(f"  {tokenizer.unk_token} in place of words that the tokenizer does not know")
    return "\n".join(lines)


def next_sentence(model: str, first: str, second: str) -> str:
    """
    What the head for pairs of a model says of two texts: what it was trained to tell, and each label's probability.

    NSP tells texts that belong together from texts that do not: "IsNext" does not say which of them comes first. SOP,
    by the `run_config.json` of the model, tells their order.
    """
    loaded, tokenizer, _ = load(AutoModelForNextSentencePrediction, model)
    with messages.reading_model(model):
        objective = loading.read_run_record(model).get("run", {}).get("objective")
    task = pair_tasks.PAIR_TASKS["sop" if objective == "sop" else "nsp"]
    predict = pair_tasks.NextSentencePredictionPipeline(model=loaded, tokenizer=tokenizer)
    labels = dict(zip(loaded.config.id2label.values(), task.labels, strict=True))
    found = predict({"text": first, "text_pair": second}, top_k=None)
    lines = [f"  {task.question}"]
    if task.key == "nsp":
        lines.append("  Which of them comes first it does not tell.")
    lines.append(bars([(labels[each["label"]], each["score"]) for each in found]))
    return "\n".join(lines)


def bars(shares: list[tuple[str, float]]) -> str:
    """
    A line for each name: its share as a number and as a bar.

    Raises:
        UserError: a share is NaN.
    """
    if any(math.isnan(share) for _, share in shares):
        raise messages.UserError("what the model computes of this text is not finite; give another model")
    lines = []
    for name, share in shares:
        bar = "█" * round(30 * share)
        lines.append(f"  {share:6.1%}  {name:<20} {bar}".rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# The page


def make_demo(models: list[str]):
    """
    The page: a `gradio.Blocks`, to be launched.

    Args:
        models: folders or ids on the Hub, of which the page offers a choice.

    Raises:
        UserError: Gradio is not installed, or there is no such model.
    """
    for model in models:  # before Gradio, whose import takes seconds
        loading.load_encoder(model)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with messages.explained("demo needs Gradio", "pip install 'd2l-bert[demo]'", ImportError):
        import gradio

    def answer(show, *inputs):
        try:
            shown = show(*inputs)  # a figure with its message, or a text
        except messages.UserError as error:
            raise gradio.Error(html.escape(str(error)), duration=None, print_exception=False) from None
        return shown[0] if isinstance(shown, tuple) else f'<pre style="overflow-x: auto">{html.escape(shown)}</pre>'

    def tab(show, *fields):
        of_model = gradio.Dropdown(models, value=models[0], label="Model", visible=len(models) > 1)
        is_picture = show is attention.attention_figure
        return gradio.Interface(
            functools.partial(answer, show),
            [of_model, *fields],
            gradio.Plot(show_label=False) if is_picture else gradio.HTML(),
            api_name=show.__name__,
            submit_btn="Show",
            clear_btn=None,
            flagging_mode="never",
        )

    first = "A crane is flying."
    tabs = {
        "Fill masks": tab(
            filled_masks,
            gradio.Textbox("Open the [MASK] and return a file object.", label="Text with [MASK]"),
        ),
        "Two texts": tab(
            next_sentence,
            gradio.Textbox(first, label="A"),
            gradio.Textbox("It spreads its wings.", label="B"),
        ),
        "Attention": tab(
            attention.attention_figure,
            gradio.Textbox(first, label="Text"),
            gradio.Textbox("", label="Second text, if any"),
            gradio.Number(0, label="Layer, 0 for all", minimum=0, precision=0),
            gradio.Number(0, label="Head, 0 for all", minimum=0, precision=0),
        ),
        "A word in two contexts": tab(
            attention.compare_word,
            gradio.Textbox("crane", label="Word"),
            gradio.Textbox(first, label="Text"),
            gradio.Textbox("A crane driver came.", label="Another text"),
        ),
    }
    return gradio.TabbedInterface(list(tabs.values()), list(tabs), title="d2l-bert")
