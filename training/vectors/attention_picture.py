"""Draws attention weights: a grid with a panel for each head of each layer, tokens at the axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


SEGMENT_COLOURS = ("#1f4e9c", "#b8550a")  # of the tokens of segments A and B
SPECIAL_COLOUR = "0.45"

KEYS, QUERIES = "key: the token that is attended to", "query: the token that attends"

# With more columns of panels than this, a panel is small; with more tokens than this, too small for all of its tokens.
FEW_COLUMNS = 4
MOST_TOKENS_IN_A_SMALL_PANEL = 40

# Tokens are written at no more than this many rows or columns of a picture, all panels together.
MOST_TOKENS_ACROSS = 240

# The most pixels of a side.
MOST_PIXELS = 8000

# Weights are written into the cells of a single panel with at most this many tokens.
MOST_TOKENS_WITH_NUMBERS = 20

# Of a character, as a share of the font size.
WIDTH, HEIGHT = 0.6, 1.25


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

    def places(self) -> list[tuple[int, int]]:
        """The layer and the head of each panel, in the order of reading."""
        return [(layer, head) for layer in self.layers for head in self.heads]

    def columns(self) -> int:
        """Panels in a row: a head each; if there is only one layer or head, as many as make a compact picture."""
        count = len(self.places())
        if min(len(self.layers), len(self.heads)) > 1 or count <= 2:
            return len(self.heads) if len(self.heads) > 1 else count
        return math.ceil(math.sqrt(count))

    def rows(self) -> int:
        """Rows of panels."""
        return math.ceil(len(self.places()) / self.columns())

    def are_tokens_left_out(self) -> bool:
        """
        Whether the panels are too small to write all tokens at each, or the picture would be too large: then only
        special tokens are written.
        """
        count, columns = len(self.tokens), self.columns()
        is_small = count > MOST_TOKENS_IN_A_SMALL_PANEL and columns > FEW_COLUMNS
        return is_small or count * max(columns, self.rows()) > MOST_TOKENS_ACROSS


def draw(panels: Panels, path: Path) -> None:
    """
    Draw the panels into a PNG file.

    A row of a panel is a query, a column is a key; the colour is the attention weight. Tokens have the colour of their
    segment, special tokens are grey, and a line separates the segments.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    places, columns, count = panels.places(), panels.columns(), len(panels.tokens)
    rows, is_single = panels.rows(), len(places) == 1
    font, least = (11, 5.0) if is_single else (9, 2.6) if columns <= FEW_COLUMNS else (7, 1.7)
    font = font if count <= 24 else max(6.5, font - 2)
    # All lengths are in inches.
    small_side = max(1.9, 14 / max(columns, rows))
    side = small_side if panels.are_tokens_left_out() else max(least, HEIGHT * font / 72 * count)
    labels = max(map(len, panels.tokens)) * WIDTH * font / 72 + 0.12
    scale = min(3.0, max(1.0, max(columns, rows) * side / 7))  # of all words but the tokens: larger in larger pictures
    panel_font = 0 if is_single else max(7, min(11 * scale, side * 72 / 11))
    gap_x, gap_y = 0.04 * side + 0.1, 0.02 * side + 0.1 + 1.6 * panel_font / 72
    left = labels + 0.5 * scale
    right = 1.3 * scale
    top, bottom = 1.05 * scale + 1.6 * panel_font / 72, labels + 0.5 * scale
    width = left + columns * (side + gap_x) - gap_x + right
    height = top + rows * (side + gap_y) - gap_y + bottom
    figure = Figure(figsize=(width, height))
    shown = panels.weights[np.ix_(panels.layers, panels.heads)].reshape(len(places), count, count)
    most = float(shown.max())
    for number, (layer, head) in enumerate(places):
        row, column = divmod(number, columns)
        x, y = left + column * (side + gap_x), height - top - row * (side + gap_y) - side
        panel = figure.add_axes((x / width, y / height, side / width, side / height))
        image = panel.imshow(shown[number], cmap="Blues", vmin=0, vmax=most, aspect="auto")
        if not is_single:
            panel.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=panel_font, pad=3)
        _write_tokens(panel, panels, font, at_left=column == 0, at_bottom=number + columns >= len(places))
        if is_single and count <= MOST_TOKENS_WITH_NUMBERS:
            _write_weights(panel, shown[number], most, font)
    title = _title(panels)
    title_font = min(14 * scale, (width - 0.4) * 72 / WIDTH / max(map(len, title.splitlines())))
    figure.suptitle(title, x=0.5, y=1 - 0.12 * scale / height, va="top", fontsize=title_font)
    middle = left + (width - left - right) / 2, bottom + (height - top - bottom) / 2
    figure.text(middle[0] / width, 0.12 * scale / height, KEYS, ha="center", va="bottom", fontsize=11 * scale)
    across = {"ha": "left", "va": "center", "rotation": 90}
    figure.text(0.12 * scale / width, middle[1] / height, QUERIES, fontsize=11 * scale, **across)
    long = min(height - top - bottom, 5 * scale)
    place = (width - right + 0.25 * scale, middle[1] - long / 2, 0.16 * scale, long)
    bar = figure.colorbar(image, cax=figure.add_axes(np.divide(place, (width, height, width, height))))
    has_numbers = is_single and count <= MOST_TOKENS_WITH_NUMBERS
    whole = "100 %; numbers in percent" if has_numbers else "100 %"
    bar.set_label(f"attention weight (each row sums to {whole})", fontsize=9 * scale)
    bar.ax.yaxis.set_major_formatter("{x:.0%}" if most >= 0.1 else "{x:.1%}")
    bar.ax.tick_params(labelsize=8 * scale)
    legend = [Patch(color=colour, label=f"segment {name}") for colour, name in zip(SEGMENT_COLOURS, "AB", strict=True)]
    legend = legend[: 1 + any(panels.segments)] + [Patch(color=SPECIAL_COLOUR, label="special tokens")]
    anchor = (middle[0] / width, 1 - 0.62 * scale / height)
    options = {"ncols": 3, "fontsize": 9.5 * scale, "frameon": False, "borderpad": 0.1}
    figure.legend(handles=legend, loc="upper center", bbox_to_anchor=anchor, **options)
    longest = max(width, height)
    figure.savefig(path, dpi=min(160, max(100, 3000 / longest), MOST_PIXELS / longest), format="png")


def _title(panels):
    layers, heads = len(panels.layers), len(panels.heads)
    if layers == heads == 1:
        what = f"Attention of layer {panels.layers[0] + 1}, head {panels.heads[0] + 1}"
    elif layers == 1:
        what = f"Attention of layer {panels.layers[0] + 1}: its {heads} heads"
    elif heads == 1:
        what = f"Attention of head {panels.heads[0] + 1} in each of {layers} layers"
    else:
        what = f"Attention of {layers} layers with {heads} heads each"
    return f"{what}\nhow much each token attends to each other token, in {panels.model}"


def _is_special(token):
    """Whether a token is one such as [CLS], <s> or </s>."""
    return len(token) > 2 and (token[0], token[-1]) in (("[", "]"), ("<", ">"))


def _write_tokens(panel, panels, font, at_left, at_bottom):
    """Write the tokens at a panel's left and bottom side, and draw a line between the segments."""
    tokens, border = panels.tokens, sum(segment == 0 for segment in panels.segments)
    places = range(len(tokens))
    if panels.are_tokens_left_out():
        places = [place for place in places if _is_special(tokens[place])]
    labels = [tokens[place] for place in places]
    panel.set_xticks(places, labels if at_bottom else [""] * len(labels), rotation=90, fontsize=font)
    panel.set_yticks(places, labels if at_left else [""] * len(labels), fontsize=font)
    panel.tick_params(length=2, pad=1.5)
    for written in (panel.get_xticklabels(), panel.get_yticklabels()):
        for place, label in zip(places, written, strict=True):
            is_special = _is_special(tokens[place])
            label.set_color(SPECIAL_COLOUR if is_special else SEGMENT_COLOURS[panels.segments[place]])
            label.set_fontweight("bold" if is_special else "normal")
    if 0 < border < len(tokens):
        panel.axhline(border - 0.5, color=SEGMENT_COLOURS[1], linewidth=0.8)
        panel.axvline(border - 0.5, color=SEGMENT_COLOURS[1], linewidth=0.8)
    panel.spines[:].set_color("0.7")


def _write_weights(panel, weights, most, font):
    """Write each attention weight (T, T) into its cell, in percent."""
    for query, row in enumerate(weights):
        for key, weight in enumerate(row):
            colour = "white" if weight > 0.6 * most else "0.25"
            panel.text(key, query, f"{100 * weight:.0f}", ha="center", va="center", fontsize=font - 3, color=colour)
