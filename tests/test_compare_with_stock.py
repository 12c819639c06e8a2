"""The program that compares ours with stock BERT: how it judges, and what it finds."""

from pathlib import Path

import pytest
import torch
from compare_with_stock import results
from two_sides import ALIKE, BETTER, BY_PAGE, WRONG, Comparison, Known, Side, compare


def raises(text):
    raise ValueError(text)


@pytest.mark.parametrize(
    ("ours", "stock", "right", "verdict"),
    [
        (lambda: torch.ones(2), lambda: torch.ones(2) + 1e-6, None, ALIKE),
        (lambda: {"a": [1.0, None]}, lambda: {"a": (1.0, None)}, None, ALIKE),
        (lambda: raises("so"), lambda: raises("not so"), None, ALIKE),
        (lambda: torch.float32, lambda: torch.bfloat16, torch.float32, BETTER),
        (lambda: raises("known"), lambda: 1.0, None, BY_PAGE),
        (lambda: raises("other"), lambda: 1.0, None, WRONG),
        (lambda: 1.0, lambda: raises("so"), None, WRONG),
        (lambda: torch.ones(2), lambda: torch.ones(2) + 1e-2, None, WRONG),
        (lambda: torch.ones(2), lambda: torch.ones(2).double(), None, WRONG),
        (lambda: torch.tensor([1.0, torch.nan]), lambda: torch.ones(2), None, WRONG),
        (lambda: torch.tensor([1.0, torch.nan]), lambda: torch.tensor([2.0, torch.nan]), None, WRONG),
        (lambda: {"a": 1}, lambda: {"a": 1, "b": None}, None, WRONG),
        (lambda: (1, 2, 3), lambda: (1, 2), None, WRONG),
        (lambda: 1, lambda: 2, 3, WRONG),
    ],
)
def test_a_difference_is_wrong_unless_ours_is_right_or_it_is_known(ours, stock, right, verdict):
    values = {"ours": ours, "stock": stock}
    comparison = Comparison("area", "a_row", {}, lambda side: values[side.name](), right, is_slow=False)
    sides = [Side(name, Path("none"), Path("none")) for name in values]
    known = (Known("area: a row", "refused (ValueError: known)*", BY_PAGE, "a page"),) if verdict != ALIKE else ()
    found = compare(comparison, *sides, known)
    assert found.verdict == verdict


def test_a_known_difference_that_is_gone_is_told():
    comparison = Comparison("area", "row", {}, lambda side: 1, None, is_slow=False)
    sides = [Side(name, Path("none"), Path("none")) for name in ("ours", "stock")]
    assert compare(comparison, *sides, (Known("area: *", "*", BY_PAGE, "a page"),)).verdict == WRONG


# Some 500 calls; `python tests/compare_with_stock.py` makes all, which takes minutes.
TESTED = ("inputs: loss", "hooks", "configuration", "torch.func", "tracing", "encoder")


@pytest.mark.slow
def test_programs_for_stock_bert_get_the_same_or_what_a_page_says():
    found = list(results(TESTED, with_slow=False))
    assert found
    wrong = [f"{result.comparison.name}: {result.remark}" for result in found if result.verdict == WRONG]
    assert not wrong, "\n".join(wrong)
