"""Draws attention weights: a grid with a panel for each head of each layer, tokens at the axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


SEGMENT_COLOURS = ("#1f4e9c", "#b8550a")  # of the tokens of segments A and B
SPECIAL_COLOUR = "0.45"

# With more panels than this in a row, and more tokens than this, a panel is too small for all of its tokens.
MOST_TOKENS_IN_A_GRID = 40
MANY_PANELS = 4

# Weights are written into the cells of a single panel with at most this many tokens.
MOST_TOKENS_WITH_NUMBERS = 16


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

    def are_tokens_left_out(self) -> bool:
        """Whether the panels are too many to write all tokens at each: then only special tokens are written."""
        return len(self.tokens) > MOST_TOKENS_IN_A_GRID and max(len(self.layers), len(self.heads)) > MANY_PANELS


def draw(panels: Panels, path: Path) -> None:
    """
    Draw the panels into a PNG file.

    A row of a panel is a query, a column is a key; the colour is the attention weight. Tokens have the colour of their
    segment, special tokens are grey, and a line separates the segments.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    count, rows, columns = len(panels.tokens), len(panels.layers), len(panels.heads)
    is_single = rows == columns == 1
    font = 11 if is_single and count <= 40 else 8 if max(rows, columns) <= MANY_PANELS else 6.5
    cell = 1.55 * font / 72  # inches: a line of text needs some 1.2 times its font size
    side = max(5.5 if is_single else 2.6 if max(rows, columns) <= MANY_PANELS else 1.3, cell * count)
    if panels.are_tokens_left_out():
        side = 1.9
    longest = max(map(len, panels.tokens)) * 0.62 * font / 72  # inches of the longest token
    size = (columns * (side + 0.25) + longest + 1.6, rows * (side + 0.45) + longest + 1.7)
    figure = Figure(figsize=(max(size[0], 7.5), size[1]), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    shown = panels.weights[np.ix_(panels.layers, panels.heads)]
    most = float(shown.max())
    for row, layer in enumerate(panels.layers):
        for column, head in enumerate(panels.heads):
            panel = grid[row, column]
            image = panel.imshow(shown[row, column], cmap="Blues", vmin=0, vmax=most, aspect="equal")
            if not is_single:
                panel.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=max(font, 8))
            _write_tokens(panel, panels, font, at_left=column == 0, at_bottom=row == rows - 1)
            if is_single and count <= MOST_TOKENS_WITH_NUMBERS:
                _write_weights(panel, shown[row, column], most, font)
    figure.suptitle(_title(panels), fontsize=13 if size[0] > 6 else 11)
    figure.supxlabel("key: the token that is attended to", fontsize=10)
    figure.supylabel("query: the token that attends", fontsize=10)
    bar = figure.colorbar(image, ax=grid, shrink=min(1.0, 4 / size[1]), aspect=25, pad=0.02)
    bar.set_label("attention weight (each row sums to 1)", fontsize=9)
    legend = [Patch(color=colour, label=f"segment {name}") for colour, name in zip(SEGMENT_COLOURS, "AB", strict=True)]
    legend = legend[: 1 + any(panels.segments)] + [Patch(color=SPECIAL_COLOUR, label="special tokens")]
    figure.legend(handles=legend, loc="outside right upper", fontsize=9, frameon=False)
    figure.savefig(path, dpi=150 if max(size) < 40 else 100, format="png")


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
