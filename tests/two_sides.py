"""Makes the same call on a model of ours and on its conversion to stock BERT, and says how the results compare."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import transformers
from conftest import HEADS
from small_models import spread
from torch import nn

import d2l_bert
from d2l_bert.modeling.conversion import BERT_NAMES, renamed
from d2l_bert.modeling.convert import convert


VOCABULARY, WIDTH, LONGEST = 160, 32, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.3,  # of heads that are new
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

ALIKE, BETTER, BY_PAGE, WRONG = "alike", "better", "by page", "WRONG"

# By the dtype of a tensor: the largest difference, as a share of the tensor's largest value.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 8e-3}

# Modules with the same meaning whose names do not follow from those of their weights.
OTHER_NAMES = {"mlm": "cls.predictions", "mlm.LayerNorm": "cls.predictions.transform.LayerNorm"}


# ---------------------------------------------------------------------------------------------------------------------
# The two models


@dataclasses.dataclass(frozen=True)
class Side:
    """
    One of the two models, in all heads.

    Attributes:
        name: "ours" or "stock".
        folder: has a folder for each head, named as in `HEADS`: the model and its tokenizer.
        place: an empty folder for the files of one call.
    """

    name: str
    folder: Path
    place: Path

    def class_of(self, head: str):
        return getattr(d2l_bert, f"D2lBert{head}") if self.name == "ours" else getattr(transformers, f"Bert{head}")

    def model(self, head, mode="eval", dtype=torch.float32, attention="sdpa", **changes):
        """A model of this call's own, for "eval" or "train"; `changes` are fields of its configuration."""
        model = copy.deepcopy(loaded(self, head, dtype, attention, tuple(sorted(changes.items()))))
        return model.train(mode == "train")

    def tokenizer(self):
        return transformers.AutoTokenizer.from_pretrained(self.folder / "ForPreTraining")

    def module(self, model: nn.Module, our_name: str) -> nn.Module:
        """The module of a model that has this name in ours."""
        if self.name == "ours":
            return model.get_submodule(our_name)
        if our_name in OTHER_NAMES:
            return model.get_submodule(OTHER_NAMES[our_name])
        (name,) = renamed({f"{our_name}.": None}, BERT_NAMES)
        return model.get_submodule(name.removesuffix("."))

    def by_weight(self, values: Mapping[str, object]) -> dict[str, object]:
        """Values by the names of weights, with the names of stock BERT."""
        if self.name == "ours":
            values = renamed(values, (*BERT_NAMES, ("scorer.", "classifier.")))
        # The bias has two names, of which `named_parameters` lists one.
        return {name.replace("predictions.bias", "predictions.decoder.bias"): value for name, value in values.items()}


@functools.cache
def loaded(side, head, dtype, attention, changes):
    torch.manual_seed(0)
    return side.class_of(head).from_pretrained(
        side.folder / head, dtype=dtype, attn_implementation=attention, **dict(changes)
    )


def make_sides(texts: list[str], place: Path) -> tuple[Side, Side]:
    """
    Write a small model of ours with each head, and what `convert --to bert` makes of each, in an empty folder.

    All heads share the encoder and its random weights.
    """
    tokenizer = d2l_bert.train_wordpiece(texts, vocab_size=VOCABULARY, min_frequency=1, model_max_length=LONGEST)
    architecture = d2l_bert.D2lBertConfig(**SIZES, embedding_layer_norm=True, tie_word_embeddings=True)
    ours = Side("ours", place / "ours", place)
    stock = Side("stock", place / "stock", place)
    spread(d2l_bert.D2lBertForPreTraining(architecture)).save_pretrained(place / "made")
    for head in HEADS:
        options = {"num_labels": 3} if head in ("ForSequenceClassification", "ForTokenClassification") else {}
        torch.manual_seed(0)
        model = ours.class_of(head).from_pretrained(place / "made", **options)
        model.save_pretrained(ours.folder / head)
        tokenizer.save_pretrained(ours.folder / head)
        stock.folder.mkdir(exist_ok=True)
        convert(str(ours.folder / head), stock.folder / head, None, "bert")
    return ours, stock


# ---------------------------------------------------------------------------------------------------------------------
# The table of comparisons


@dataclasses.dataclass(frozen=True)
class Comparison:
    """
    A call of a row of the table.

    Attributes:
        area, row: the heading, and the name of the function.
        values: the arguments of the function, by name.
        make: calls the function on a side.
        right: what is right, None if that is not known but from stock BERT.
        is_slow: whether it compiles, exports or starts processes.
    """

    area: str
    row: str
    values: Mapping[str, object]
    make: Callable[[Side], object]
    right: object
    is_slow: bool

    @property
    def name(self) -> str:
        values = " ".join(str(value).removeprefix("torch.") for value in self.values.values())
        return f"{self.area}: {self.row.replace('_', ' ')} {values}".rstrip()


TABLE: list[Comparison] = []


def compared(area: str, right: object = None, is_slow: bool = False, **axes):
    """Enter a function of a side into the table, once for each combination of the values of its other arguments."""

    def enter(function):
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            make = functools.partial(function, **values)
            TABLE.append(Comparison(area, function.__name__, values, make, right, is_slow))
        return function

    return enter


@dataclasses.dataclass(frozen=True)
class Known:
    """
    A difference that is known.

    Attributes:
        pattern: of the names of comparisons.
        difference: what the comparison finds, a pattern, too.
        verdict: `BY_PAGE` or `BETTER`.
        reason: the page on which it stands, or why it is better.
    """

    pattern: str
    difference: str
    verdict: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Refused:
    """What a call raised."""

    error: str


@dataclasses.dataclass(frozen=True)
class Result:
    comparison: Comparison
    verdict: str
    remark: str


def outcome(comparison: Comparison, side: Side) -> object:
    torch.manual_seed(0)
    try:
        return comparison.make(side)
    except Exception as error:  # of any library: what the one refuses, the other should refuse, too
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first_line = lines[0] if lines else ""
        return Refused(f"{type(error).__name__}: {first_line:.150}")


def compare(comparison: Comparison, ours: Side, stock: Side, known: tuple[Known, ...]) -> Result:
    """Make a call on both sides. A difference is WRONG unless ours alone is right, or it is known."""
    found = outcome(comparison, ours)
    expected = outcome(comparison, stock)
    difference = difference_of(found, expected)
    matching = [entry for entry in known if fnmatchcase(comparison.name, entry.pattern)]
    if not difference:
        if matching:
            return Result(comparison, WRONG, f"alike, but listed as a difference: {matching[0].pattern}")
        return Result(comparison, ALIKE, f"both refuse: {found.error}" if isinstance(found, Refused) else "")
    if comparison.right is not None and not difference_of(found, comparison.right):
        return Result(comparison, BETTER, difference)
    for entry in matching:
        if fnmatchcase(difference, entry.difference):
            return Result(comparison, entry.verdict, f"{entry.reason}: {difference}")
    return Result(comparison, WRONG, difference)


def difference_of(found, expected, place: str = "") -> str:
    """The first difference between two values, in words; empty if there is none."""
    where = f"{place}: " if place else ""
    if isinstance(found, Refused) and isinstance(expected, Refused):
        return ""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return where + text if (text := difference_of_tensors(found, expected)) else ""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        if found.keys() != expected.keys():
            only = [sorted(map(str, a.keys() - b.keys())) for a, b in ((found, expected), (expected, found))]
            return f"{where}ours alone has {only[0][:4]}, stock alone {only[1][:4]}"
        parts = [(f"{place}.{name}".lstrip("."), found[name], expected[name]) for name in found]
    elif isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return f"{where}{len(found)} entries for {len(expected)}"
        parts = [(f"{place}[{number}]", *pair) for number, pair in enumerate(zip(found, expected, strict=True))]
    elif isinstance(found, float) and isinstance(expected, float):
        numbers = torch.tensor([found, expected])
        return where + text if (text := difference_of_tensors(numbers[0], numbers[1])) else ""
    else:
        return "" if found == expected else f"{where}{shown(found)} for {shown(expected)}"
    for part in parts:
        difference = difference_of(part[1], part[2], part[0])
        if difference:
            return difference
    return ""


def shown(value) -> str:
    if isinstance(value, Refused):
        return f"refused ({value.error})"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (list, tuple, Mapping)):
        return f"{type(value).__name__} of {len(value)}"
    return f"{value!r:.100}"


def difference_of_tensors(found, expected) -> str:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{shown(found)} for {shown(expected)}"
    if not found.numel():
        return ""
    if not found.is_floating_point():
        return "" if torch.equal(found, expected) else f"other values of {shown(found)}"
    tolerance = TOLERANCES[found.dtype]
    found = found.detach().double()
    expected = expected.detach().double()
    if not torch.equal(found.isnan(), expected.isnan()):
        return f"NaN in {int(found.isnan().sum())} places for {int(expected.isnan().sum())}"
    found = found.nan_to_num(posinf=1e30, neginf=-1e30)
    expected = expected.nan_to_num(posinf=1e30, neginf=-1e30)
    finite = expected[expected.abs() < 1e30]
    largest = max(1e-6, float(finite.abs().max())) if len(finite) else 1.0
    apart = float((found - expected).abs().max()) / largest
    return f"apart by {apart:.1e} of the largest" if apart > tolerance else ""
