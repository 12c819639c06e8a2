"""Draws attention weights: a grid with a panel for each head of each layer, tokens at the axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


SEGMENT_COLOURS = ("#1f4e9c", "#b8550a")  # of the tokens of segments A and B
SPECIAL_COLOUR = "0.45"

# With more tokens than this along a side of the picture, only special tokens are written.
MOST_TOKENS_ACROSS = 240

# Weights are written into the cells of a single panel with at most this many tokens.
MOST_TOKENS_WITH_NUMBERS = 20

# The sides of a panel, in inches: a token needs its font's height.
LEAST_SIDE, INCHES_A_TOKEN, MOST_SIDE = 2.2, 0.16, 12

MOST_PIXELS = 8000


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
        if len(places) == 1 and count <= MOST_TOKENS_WITH_NUMBERS:
            for (query, key), weight in np.ndenumerate(panels.weights[place]):
                colour = "white" if weight > 0.6 * most else "0.25"
                panel.text(key, query, f"{100 * weight:.0f}", ha="center", va="center", fontsize=8, color=colour)
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
