"""What recurs in the lines of a text is described; prose has nothing to describe."""

import numpy as np
import pytest

from d2l_bert.tokenization import seen_lines
from d2l_bert.tokenization.seen_lines import SeenLines, describe_lines


def described(lines, are_joined=False):
    seen = SeenLines()
    seen.add(lines, are_joined)
    return describe_lines([seen])


WORDS = "mill river stone Anna went over under slowly lamp barrel winter morning and but when she he they".split()


def prose(count, seed=0):
    """Lines of words in random order: some begin or end alike by chance, none is as another."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        words = rng.choice(WORDS, 12)
        last = "abcdefghij"[number % 10] + "klmnopqrstuvwxyz"[number % 16]
        lines.append(f"{words[0].capitalize()} {' '.join(words[1:])} {last}.")
    return lines


@pytest.mark.parametrize("count", [3, 60, 3000])
def test_prose_is_quiet(count):
    assert described(prose(count)) == []


@pytest.mark.parametrize(
    "odd, said",
    [
        (lambda number: f'<doc id="{number}" url="https://example.org/{"abcdefgh"[number % 8]}">', '`<doc id="'),
        (lambda number: f"> {prose(1, number)[0]}", "begin with `>`"),
        (lambda number: f"{prose(30, number)[number][:-1]} -->", "end with `-->`"),
        (lambda number: f"<p>{prose(30, number)[number]}", "begin with `<p>`"),
        (lambda number: f"{prose(30, number)[number]}</p>", "end with `.</p>`"),
        (lambda number: f"{number}", "have no letter"),
        (lambda number: "THE MILL KEY", "are `THE MILL KEY`"),
        (lambda number: f"Page {number}", "are `Page 0`"),
        (lambda number: f"{number}\t{prose(1, number)[0]}", "begin with a number"),
    ],
)
def test_what_recurs_is_said_with_its_share(odd, said):
    lines = prose(180)
    for number in range(20):  # a tenth of all
        lines.insert(9 * number, odd(number))
    first = described(lines)[0]
    assert first.startswith("10% ")
    assert said in first


def test_the_share_is_of_the_lines_that_were_kept(monkeypatch):
    monkeypatch.setattr(seen_lines, "LINES_OF_A_FILE", 50)
    lines = [line for number, text in enumerate(prose(400)) for line in (text, f"| {number}")]
    seen = SeenLines()
    for _ in range(3):
        seen.add(lines[::-1] + [""], are_joined=False)
    assert len(seen.lines) <= 150
    monkeypatch.setattr(seen_lines, "LINES_OF_A_SOURCE", 10)
    few = SeenLines()
    few.add(lines, are_joined=False)
    few.add(lines, are_joined=False)
    assert len(few.lines) <= 10


def test_lines_in_one_description_are_in_no_other():
    lines = prose(100) + ["</doc>"] * 20
    assert len(described(lines)) == 1


def test_divided_words_are_said_where_lines_are_joined():
    lines = [text[:-1] if number % 10 else f"{text[:-4]}wor-" for number, text in enumerate(prose(200))]
    assert any("hyphen" in line for line in described(lines, are_joined=True))
    assert not any("hyphen" in line for line in described(lines, are_joined=False))


def test_controls_between_words_are_said():
    lines = [f"{text[:-1]}\x0b{text}" for text in prose(20)]
    assert r"\x0b" in described(lines)[0]
    assert described([f"\x0c{text}" for text in prose(20)]) == []  # a page that begins; no two words are joined


def test_long_lines_cost_little():
    seen = SeenLines()
    seen.add(["x" * 10_000_000], are_joined=True)
    assert len(seen.lines[0]) < 2000
