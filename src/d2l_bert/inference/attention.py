"""What a model attends to, as a picture; and how far apart the vectors of one word are in two texts.

The words are the book's (*Dive into Deep Learning*, chapter 11 and section 15.10): a query attends to keys by
attention weights, which sum to 1 over the keys.
"""

import itertools
import math
import re

import numpy as np
import torch

from d2l_bert import folders, messages
from d2l_bert.modeling import conversion, loading


# With more tokens than this along a side of the picture, none is written.
MOST_TOKENS_ACROSS = 240

# What is written in place of a character that no font has, the replacement character of Unicode.
UNSEEN = chr(0xFFFD)


def attention_figure(
    name: str, first: str, second: str | None = None, layer: int | None = None, head: int | None = None
):
    """
    Draw the attention weights of a model for a text, or for a pair of texts.

    A head is a panel, and several layers are rows of panels. A row of a panel is a query, a column is a key; the
    colour is the attention weight. Lines separate two texts.

    Args:
        name: the model, a folder or an id on the Hub; any encoder of Transformers whose attention can be read.
        first, second: the text of segment A and, for a pair, that of segment B; "" or None for a text alone.
        layer, head: the only layer and the only head to draw, counted from 1; None or 0 for all.

    Returns:
        A `matplotlib.figure.Figure`; and a message: what it shows, and what not, which is tokens that are too many to
        write, and characters that no font has.

    Raises:
        UserError: the model is refused, or has no such layer or head; a text has more tokens than the model reads.
    """
    from matplotlib.figure import Figure

    model, tokenizer = loading.load_encoder(name, attn_implementation="eager")
    tokens, border, weights = attention_of(name, model, tokenizer, first, second)
    layers = _chosen("layer", layer, weights.shape[0], name)
    heads = _chosen("head", head, weights.shape[1], name)
    # A panel for each head in a row; of one layer or one head alone as many as make a compact picture.
    panels = len(layers) * len(heads)
    columns = len(heads) if min(len(layers), len(heads)) > 1 else math.ceil(math.sqrt(panels))
    rows = math.ceil(panels / columns)
    # The side of a panel, and the picture's, in inches: a token needs its font's height.
    side = min(12, max(2.2, 4.5 / columns, 0.16 * len(tokens)))
    size = (columns * side + 2, rows * side + 1.8)
    figure = Figure(size, dpi=min(120, 8000 / max(size)), layout="constrained")  # of 8,000 pixels at most
    families, missing = _fonts_for("".join(tokens))
    are_too_many = len(tokens) * max(columns, rows) > MOST_TOKENS_ACROSS
    unseen = {ord(character): UNSEEN for character in missing}
    labels = [] if are_too_many else [token.translate(unseen) for token in tokens]
    most = weights[np.ix_(layers, heads)].max()
    for number, (of_layer, of_head) in enumerate(itertools.product(layers, heads), 1):
        panel = figure.add_subplot(rows, columns, number)
        image = panel.imshow(weights[of_layer, of_head], cmap="Blues", vmin=0, vmax=most)
        panel.set_title(f"layer {of_layer + 1}, head {of_head + 1}", fontsize=9)
        # parse_math: two "$" are not a formula.
        panel.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8, family=families, parse_math=False)
        panel.set_yticks(range(len(labels)), labels, fontsize=8, family=families, parse_math=False)
        panel.set(xlabel="key", ylabel="query")
        panel.label_outer()
        panel.axvline(border - 0.5, color="0.4", linewidth=0.8)
        panel.axhline(border - 0.5, color="0.4", linewidth=0.8)
    figure.suptitle(
        f"Attention of {folders.base_name(name)}: how much a\nquery (row) attends to a key (column)",
        fontsize=10,
        parse_math=False,
    )
    figure.colorbar(
        image, ax=figure.axes, shrink=0.7, format="{x:.0%}", label="attention weight (a row sums to 100 %)"
    )
    said = [f"attention of {messages.counted(panels, 'head')} over {len(tokens)} tokens"]
    if are_too_many:
        said.append("there are too many tokens to write them: --layer and --head enlarge a part")
    elif missing:
        said.append(f"no font here has {missing}, which the picture shows as {UNSEEN}")
    return figure, "; ".join(said)


def _chosen(what, number, count, name):
    """The places from 0 of the layers or heads to draw: the one of this number from 1, or all for None or 0."""
    if not number:
        return range(count)
    if number > count:
        raise messages.UserError(
            f"{what} {number}: {name} has {messages.counted(count, what)}; give one from 1 to {count}"
        )
    return [number - 1]


def attention_of(
    name: str, model, tokenizer, first: str, second: str | None = None
) -> tuple[list[str], int, np.ndarray]:
    """
    The attention weights of an encoder for [CLS] A [SEP], or for [CLS] A [SEP] B [SEP], of all layers and heads.

    Args:
        name: the model's name, for messages.
        model: loaded with `attn_implementation="eager"`.

    Returns:
        The tokens (T); the place of the first token of the second text, 0 without one; and the weights of query q on
        key k (layers, heads, T, T).

    Raises:
        UserError: too many tokens for the model, or the model gives no attention weights.
    """
    encoded = encoded_text(name, model, tokenizer, first, second)
    with torch.inference_mode():
        outputs = model(**encoded, output_attentions=True)
    weights = [layer for layer in outputs.get("attentions") or () if layer is not None]
    if len({layer.shape for layer in weights}) != 1:
        raise messages.UserError(
            f"{name}: a {model.config.model_type} model gives no attention weights of all tokens; give another encoder"
        )
    of_second = (place for place, text in enumerate(encoded.sequence_ids(0)) if text == 1)
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
    return tokens, next(of_second, 0), torch.cat(weights).numpy()


def encoded_text(name: str, model, tokenizer, first: str, second: str | None = None):
    """
    The model's arguments (1, T) for a text, or for a pair.

    Raises:
        UserError: they are too long for the model.
    """
    encoded = tokenizer(first, second or None, return_tensors="pt", verbose=False)  # it would warn of a long text
    count = encoded["input_ids"].shape[1]
    limit = conversion.longest_input(model, tokenizer)
    if count > limit:
        raise messages.UserError(
            f"{name}: {count} tokens, {count - limit} more than the model reads ({limit}); give less text"
        )
    if getattr(model.config, "type_vocab_size", 2) < 2:
        encoded.pop("token_type_ids", None)  # the tokenizer may number two segments where the model knows one
    return encoded


# ---------------------------------------------------------------------------------------------------------------------
# A word in two texts


def compare_word(name: str, word: str, first: str, second: str | None) -> str:
    """
    How far apart the vectors of a word are in two texts, layer by layer (the book's "crane", section 15.10).

    The word counts at its first place in a text; upper and lower case are the same. Its vector is the mean of those of
    its tokens.

    Args:
        name: the model, a folder or an id on the Hub; any encoder of Transformers.

    Returns:
        A table: for each layer the cosine similarity, and the cosine distance, which is 1 minus the similarity.

    Raises:
        UserError: there is no second text, the model is refused, the word is not in both texts, the tokenizer makes no
            token of it, or a text is too long.
    """
    if second is None:
        raise messages.UserError(f"word {word!r} is compared in two texts; give TEXT_B too")
    model, tokenizer = loading.load_encoder(name)
    # A word of letters is not found inside a longer word; a full stop may stand behind a letter.
    pattern = re.compile(rf"(?!\B\w){re.escape(word)}(?<!\w\B)", re.IGNORECASE)
    lines = [f"{word!r} in two texts, by its vectors in {name}"]
    vectors = []
    for letter, text in zip("AB", (first, second), strict=True):
        found = pattern.search(text)
        encoded = encoded_text(name, model, tokenizer, text)
        places = _tokens_at(found, encoded)
        if not places:
            raise messages.UserError(
                f"word {word!r}: is not in {messages.shortened(text, 60)!r}, or the tokenizer makes no token of it; "
                f"give a word of both texts, as it stands there"
            )
        with torch.inference_mode():
            hidden = torch.cat(model(**encoded, output_hidden_states=True).hidden_states)  # (layers + 1, T, H)
        vectors.append(hidden[:, places].mean(1).double())
        pieces = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0, places].tolist())
        shown = " ".join(f"{text[: found.start()]}[{found.group()}]{text[found.end() :]}".split())
        lines.append(f"  {letter}  {shown}    tokens: {' '.join(pieces)}")
        if tokenizer.unk_token in pieces:
            lines.append(f"     {tokenizer.unk_token} stands for any word that the tokenizer does not know")
    lines.append(f"  {'':12}{'cosine similarity':>18}{'cosine distance':>18}")
    for number, cosine in enumerate(torch.cosine_similarity(*vectors, dim=-1).tolist()):
        row = f"layer {number}" if number else "embeddings"
        lines.append(f"  {row:12}{cosine:18.3f}{max(0.0, 1 - cosine):18.3f}")
    return "\n".join(lines)


def _tokens_at(found, encoded):
    """The places of the tokens in which a match in the text lies, in their order; none without a match."""
    if not found:
        return []
    places = {encoded.char_to_token(place) for place in range(*found.span())}
    return sorted(places - {None})


def _fonts_for(text: str) -> tuple[list[str], str]:
    """The families of fonts to draw a text in, the default first; and the characters that no font has."""
    from matplotlib import font_manager, rcParams

    default = font_manager.findfont(font_manager.FontProperties())
    unseen = {ord(character) for character in text} - font_manager.get_font(default).get_charmap().keys()
    families = set()
    missing = set(unseen)
    for font in font_manager.fontManager.ttflist if unseen else ():
        if font.name.startswith("Last Resort"):  # matplotlib's own, with a box for every character
            continue
        found = unseen & font_manager.get_font(font.fname).get_charmap().keys()
        missing -= found
        if found:
            families.add(font.name)
    return [*rcParams["font.family"], *sorted(families)], "".join(chr(number) for number in sorted(missing))
