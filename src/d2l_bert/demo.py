"""`d2l-bert demo`: a page on this machine on which one tries models; the same page runs as a Space of the Hub."""

import base64
import functools
import html
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import AutoModelForMaskedLM, AutoModelForNextSentencePrediction

from d2l_bert import NextSentencePredictionPipeline
from d2l_bert.errors import UserError
from d2l_bert.training.load_models import load_encoder, load_pretrained
from d2l_bert.training.run_report import fill_mask
from d2l_bert.training.vectors.attention import compare_word, draw_attention
from d2l_bert.training.vectors.config import AttentionConfig


load = functools.lru_cache(maxsize=8)(load_pretrained)

BAR = '<div style="background:#1f4e9c;border-radius:3px;height:1em;width:{width:.2f}%"></div>'
ROW = (
    '<div style="display:grid;grid-template-columns:10em 1fr 4em;gap:.6em;align-items:center">'
    '<span class="token">{name}</span>{bar}<span class="share">{share:.1%}</span></div>'
)


def bars(shares: Sequence[tuple[str, float]]) -> str:
    """Names with bars of their shares, as HTML in which a name is text."""
    return "".join(
        ROW.format(name=html.escape(name), bar=BAR.format(width=100 * share), share=share) for name, share in shares
    )


def shown_masks(model: str, text: str) -> str:
    """The likeliest tokens for each [MASK]."""
    lists = fill_mask(*load(AutoModelForMaskedLM, model)[:2], [text])[0]
    titles = [f"<h4>mask {number}</h4>" if len(lists) > 1 else "" for number in range(1, len(lists) + 1)]
    return "".join(title + bars(best) for title, best in zip(titles, lists, strict=True))


def shown_order(model: str, first: str, second: str) -> str:
    """Whether the second text follows the first."""
    loaded, tokenizer, _ = load(AutoModelForNextSentencePrediction, model)
    predict = NextSentencePredictionPipeline(model=loaded, tokenizer=tokenizer)
    found = predict({"text": first, "text_pair": second})
    likeliest, share = found["label"], found["score"]
    return bars([(label, share if label == likeliest else 1 - share) for label in predict.labels])


def shown_attention(model: str, first: str, second: str, layer: float | None, head: float | None) -> str:
    """The picture of `d2l-bert attention`; a layer or a head of 0 stands for all."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, "attention.png")
        config = AttentionConfig(output=str(picture), layer=int(layer or 0) or None, head=int(head or 0) or None)
        draw_attention(model, first, second or None, config)
        content = base64.b64encode(picture.read_bytes()).decode()
    return f'<img alt="attention of each head" src="data:image/png;base64,{content}">'


def shown_word(model: str, word: str, first: str, second: str) -> str:
    """How far apart the vectors of a word are in two texts, layer by layer."""
    return f"<pre>{html.escape(compare_word(model, word, first, second))}</pre>"


def answer(show: Callable[..., str], *inputs) -> str:
    """What `show` returns; for input that it refuses, the reason in a sentence."""
    try:
        return show(*inputs)
    except UserError as error:
        return f'<p role="alert">{html.escape(str(error))}</p>'


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
        import gradio
    except ImportError:
        raise UserError("demo needs Gradio: pip install 'd2l-bert[demo]'") from None
    for model in models:
        load_encoder(model)
    tabs = {
        "Fill masks": (shown_masks, [("Text with [MASK]", "Open the [MASK] and return a file object.")]),
        "Does B follow A?": (shown_order, [("A", "A crane is flying."), ("B", "It spreads its wings.")]),
        "Attention": (
            shown_attention,
            [
                ("Text", "A crane is flying."),
                ("Second text, if any", ""),
                ("Layer, 0 for all", 0),
                ("Head, 0 for all", 0),
            ],
        ),
        "A word in two contexts": (
            shown_word,
            [("Word", "crane"), ("Text", "A crane is flying."), ("Another text", "A crane driver came.")],
        ),
    }
    with gradio.Blocks(title="d2l-bert") as page:
        model = gradio.Dropdown(list(models), value=models[0], label="Model", visible=len(models) > 1)
        for title, (show, fields) in tabs.items():
            with gradio.Tab(title):
                inputs = [
                    gradio.Number(value, label=label, minimum=0, precision=0)
                    if isinstance(value, int)
                    else gradio.Textbox(value, label=label)
                    for label, value in fields
                ]
                button, result = gradio.Button("Show"), gradio.HTML()
                button.click(functools.partial(answer, show), [model, *inputs], result, api_name=show.__name__)
    return page
