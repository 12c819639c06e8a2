"""What a model attends to, as a picture; and how far apart the vectors of one word are in two texts.

The words are the book's (*Dive into Deep Learning*, chapter 11 and section 15.10): a query attends to keys by
attention weights, which sum to 1 over the keys.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from d2l_bert import folders
from d2l_bert.messages import UserError, counted, refuse_first, shortened
from d2l_bert.modeling.conversion import longest_input
from d2l_bert.modeling.loading import load_encoder
from d2l_bert.training.vectors.config import DEFAULT_PICTURE, AttentionConfig


@dataclass
class Panels:
    """
    What to draw.

    Args:
        model: the model's name.
        tokens: the tokens of the input (T).
        segments: the segment of each token, 0 or 1 (T).
        weights: attention weights (layers, heads, T, T), of query q on key k.
        layers, heads: the numbers of the layers (rows of panels) and heads (columns) to draw, from 0.
    """

    model: str
    tokens: list[str]
    segments: list[int]
    weights: np.ndarray
    layers: Sequence[int]
    heads: Sequence[int]

    def columns(self) -> int:
        """Panels in a row: a head each; if there is only one layer or head, as many as make a compact picture."""
        if min(len(self.layers), len(self.heads)) > 1:
            return len(self.heads)
        return math.ceil(math.sqrt(len(self.layers) * len(self.heads)))

    def are_tokens_left_out(self) -> bool:
        """Whether the picture would be too large with all tokens; then only special tokens are written."""
        return len(self.tokens) * max(self.columns(), len(self.layers)) > MOST_TOKENS_ACROSS


def draw_attention(name: str, first: str, second: str | None, config: AttentionConfig) -> str:
    """
    Draw the attention weights of a model for a text, or for a pair of texts, into a new PNG file.

    Args:
        name: the model, a folder or an id on the Hub; any encoder of Transformers whose attention can be read.
        first, second: the text of segment A and, for a pair, that of segment B.

    Returns:
        A message: what was drawn, and where the picture is.

    Raises:
        UserError: an option, the model or the output is refused; the model has no such layer or head; a text has more
            tokens than the model reads.
    """
    config.check()
    output = Path(config.output or DEFAULT_PICTURE)
    folders.check_new_file(output.absolute())
    model, tokenizer = load_encoder(name, attn_implementation="eager")
    panels = attention_of(name, model, tokenizer, first, second)
    layers, heads = panels.weights.shape[:2]
    cases = {
        f"layer {config.layer}: {name} has {counted(layers, 'layer')}; give one from 1 to {layers}": (
            config.layer or 0
        )
        > layers,
        f"head {config.head}: {name} has {counted(heads, 'head')}; give one from 1 to {heads}": (config.head or 0)
        > heads,
    }
    refuse_first(cases)
    if config.layer is not None:
        panels.layers = [config.layer - 1]
    if config.head is not None:
        panels.heads = [config.head - 1]
    with folders.new_file(output) as partial:
        draw(panels, partial)
    shown = len(panels.layers) * len(panels.heads)
    line = f"{output}: attention of {shown} of {counted(layers * heads, 'head')} over {len(panels.tokens)} tokens"
    if panels.are_tokens_left_out():
        way_out = ": --layer and --head enlarge a part" if shown > 1 else ""
        line += f"; there are too many tokens to write them all{way_out}"
    return line


def attention_of(name: str, model, tokenizer, first: str, second: str | None = None) -> Panels:
    """
    The attention weights of an encoder for [CLS] A [SEP], or for [CLS] A [SEP] B [SEP], of all layers and heads.

    Args:
        name: the model's name, for messages.
        model: loaded with `attn_implementation="eager"`.

    Raises:
        UserError: too many tokens for the model, or the model gives no attention weights.
    """
    encoded = _encoded(name, model, tokenizer, first, second)
    with torch.inference_mode():
        outputs = model(**encoded, output_attentions=True)
    weights = [layer for layer in outputs.get("attentions") or () if layer is not None]
    if not weights or len({layer.shape for layer in weights}) > 1:
        kind = model.config.model_type
        raise UserError(f"{name}: a {kind} model gives no attention weights of all tokens; give another encoder")
    segments = encoded.get("token_type_ids", torch.zeros_like(encoded["input_ids"]))[0].tolist()
    if second is not None and not any(segments):  # RoBERTa and others number no segments
        is_second = [number == 1 for number in encoded.sequence_ids(0)]
        segments = [int(any(is_second[: place + 1])) for place in range(len(is_second))]
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
    shown = folders.base_name(name) if Path(name).exists() else name
    weights = torch.cat(weights).numpy()
    return Panels(shown, tokens, segments, weights, *map(range, weights.shape[:2]))


def _encoded(name, model, tokenizer, first, second=None):
    encoded = tokenizer(first, second, return_tensors="pt", verbose=False)  # the tokenizer would warn of a long text
    count, limit = encoded["input_ids"].shape[1], longest_input(model, tokenizer)
    kinds = encoded.get("token_type_ids")
    if kinds is not None and int(kinds.max()) >= getattr(model.config, "type_vocab_size", 2):
        kinds.zero_()  # the model has one segment embedding, and its tokenizer numbers two segments
    if limit is not None and count > limit:
        what = "the text has" if second is None else "the two texts have"
        over = f"{count - limit} more than the model reads ({limit})"
        raise UserError(f"{name}: {what} {count} tokens, {over}; give less text")
    return encoded


# ---------------------------------------------------------------------------------------------------------------------
# A word in two texts


@dataclass
class WordInText:
    """
    The vectors of a word in a text.

    Args:
        pieces: the tokens that the word is cut into.
        vectors: the mean of the pieces' vectors, after the embeddings and after each layer (layers + 1, H).
        shown: the text with the word in brackets.
    """

    pieces: list[str]
    vectors: torch.Tensor
    shown: str


def word_in_text(name: str, model, tokenizer, word: str, text: str) -> WordInText:
    """
    The contextual vectors of a word, at its first place in a text; upper and lower case are the same.

    Args:
        name: the model's name, for messages.

    Raises:
        UserError: the word is not in the text, the tokenizer gives it no token, or the text is too long.
    """
    # A word of letters is not found inside a longer word; a full stop may stand behind a letter.
    before, after = (r"(?<!\w)" if re.match(r"\w", word) else "", r"(?!\w)" if re.search(r"\w$", word) else "")
    found = re.search(f"{before}{re.escape(word)}{after}", text, re.IGNORECASE)
    if found is None:
        raise UserError(
            f"word {word!r}: is not in {shortened(text, 60)!r}; give a word of both texts, as it stands there"
        )
    encoded = _encoded(name, model, tokenizer, text)
    of_characters = {encoded.char_to_token(place) for place in range(*found.span())} - {None}
    if not of_characters:
        raise UserError(f"word {word!r}: the tokenizer of {name} makes no token of it; give another word")
    places = sorted(of_characters)
    with torch.inference_mode():
        hidden = model(**encoded, output_hidden_states=True).hidden_states
    vectors = torch.stack([layer[0, places].mean(0) for layer in hidden])
    pieces = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0, places].tolist())
    return WordInText(pieces, vectors, f"{text[: found.start()]}[{found.group()}]{text[found.end() :]}")


def compare_word(name: str, word: str, first: str, second: str | None) -> str:
    """
    How far apart the vectors of a word are in two texts, layer by layer (the book's "crane", section 15.10).

    Args:
        name: the model, a folder or an id on the Hub; any encoder of Transformers.

    Returns:
        A table: for each layer the cosine similarity, and the cosine distance, which is 1 minus the similarity.

    Raises:
        UserError: there is no second text, the model is refused, the word is not in both texts, or a text is too long.
    """
    refuse_first({f"word {word!r} is compared in two texts; give TEXT_B too": second is None})
    model, tokenizer = load_encoder(name)
    words = [word_in_text(name, model, tokenizer, word, text) for text in (first, second)]
    lines = [f"{word!r} in two texts, by its vectors in {name}"]
    for letter, found in zip("AB", words, strict=True):
        lines.append(f"  {letter}  {' '.join(found.shown.split())}    tokens: {' '.join(found.pieces)}")
        if tokenizer.unk_token in found.pieces:
            lines.append(f"     {tokenizer.unk_token} stands for any word that the tokenizer does not know")
    cosines = F.cosine_similarity(words[0].vectors.double(), words[1].vectors.double(), dim=-1)  # (layers + 1,)
    lines.append(f"  {'':12}{'cosine similarity':>18}{'cosine distance':>18}")
    for number, cosine in enumerate(cosines.tolist()):
        row = f"layer {number}" if number else "embeddings"
        lines.append(f"  {row:12}{cosine:18.3f}{max(0.0, 1 - cosine):18.3f}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# The picture


SEGMENT_COLOURS = ("#1f4e9c", "#b8550a")  # of the tokens of segments A and B
SPECIAL_COLOUR = "0.45"

# With more tokens than this along a side of the picture, only special tokens are written.
MOST_TOKENS_ACROSS = 240

# The sides of a panel, in inches: a token needs its font's height.
LEAST_SIDE, INCHES_A_TOKEN, MOST_SIDE = 2.2, 0.16, 12

MOST_PIXELS = 8000


def draw(panels: Panels, path: Path) -> None:
    """
    Draw the panels into a PNG file.

    A row of a panel is a query, a column is a key; the colour is the attention weight. Tokens have the colour of their
    segment, special tokens are grey.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    places = [(layer, head) for layer in panels.layers for head in panels.heads]
    columns, count = panels.columns(), len(panels.tokens)
    rows = math.ceil(len(places) / columns)
    side = min(MOST_SIDE, max(LEAST_SIDE, 4.5 / columns, INCHES_A_TOKEN * count))
    figure = Figure(figsize=(columns * side + 2, rows * side + 1.8), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    most = max(float(panels.weights[place].max()) for place in places)
    for panel, place in zip(grid, places, strict=False):
        image = panel.imshow(panels.weights[place], cmap="Blues", vmin=0, vmax=most)
        panel.set_title(f"layer {place[0] + 1}, head {place[1] + 1}", fontsize=9)
        _write_tokens(panel, panels)
    for panel in grid[len(places) :]:
        panel.set_axis_off()
    figure.suptitle(f"Attention of {panels.model}: how much a\nquery (row) attends to a key (column)", fontsize=10)
    bar = figure.colorbar(image, ax=grid, shrink=0.7, label="attention weight (a row sums to 100 %)")
    bar.ax.yaxis.set_major_formatter("{x:.0%}")
    legend = [Patch(color=colour, label=f"segment {name}") for colour, name in zip(SEGMENT_COLOURS, "AB", strict=True)]
    legend = legend[: 1 + any(panels.segments)] + [Patch(color=SPECIAL_COLOUR, label="special tokens")]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=min(120, MOST_PIXELS / max(figure.get_size_inches())), format="png")


def _is_special(token):
    """Whether a token is one such as [CLS], <s> or </s>."""
    return len(token) > 2 and (token[0], token[-1]) in (("[", "]"), ("<", ">"))


def _write_tokens(panel, panels):
    """Write the tokens at the left and the bottom side of a panel, if it stands at the side of the picture."""
    few = panels.are_tokens_left_out()
    places = [place for place, token in enumerate(panels.tokens) if not few or _is_special(token)]
    tokens = [panels.tokens[place] for place in places]
    panel.set_xticks(places, tokens, rotation=90, fontsize=8)
    panel.set_yticks(places, tokens, fontsize=8)
    for labels in (panel.get_xticklabels(), panel.get_yticklabels()):
        for place, label in zip(places, labels, strict=True):
            is_special = _is_special(panels.tokens[place])
            label.set_color(SPECIAL_COLOUR if is_special else SEGMENT_COLOURS[panels.segments[place]])
    panel.set_xlabel("key")
    panel.set_ylabel("query")
    panel.label_outer()
