"""A validation text: its figures, what is in the training text too, the run's records and card, and refusals."""

import json
import os
import shutil

import pytest
from conftest import SMALL, write_books

from d2l_bert import D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.folders import read_json
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.batching import make_held_out
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.held_out import held_out_counts, held_out_metrics


RUN = [*SMALL, "--max_steps=4", "--save_steps=2", "--mixed_precision=no", "--license=mit"]

BOOKS, BOOKS_IN_BOTH = 20, 3


@pytest.fixture(scope="module")
def check_books(books, tmp_path_factory):
    """A folder of 20 books to evaluate on: 17 of their own, and 3 of the training text under other names."""
    folder = write_books(tmp_path_factory.mktemp("validation") / "check", count=17, seed=7)
    for number, book in enumerate(sorted(books.iterdir())[:BOOKS_IN_BOTH]):
        shutil.copyfile(book, folder / f"same-{number}.txt")
    return folder


@pytest.fixture(scope="module")
def prepared(books, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "tokens"
    assert main(["prepare", f"--corpus={books}", f"--output_dir={folder}", "--vocab_size=400"]) == 0
    return folder


@pytest.fixture(scope="module")
def evaluated(books, check_books, tmp_path_factory):
    """The folder of a run with a validation text."""
    folder = tmp_path_factory.mktemp("evaluated") / "model"
    assert pretrain(folder, f"--corpus={books}", f"--validation_corpus={check_books}") == 0
    return folder


def pretrain(folder, *options):
    return main(["pretrain", f"--output_dir={folder}", *RUN, *options])


def without_vocabulary(options):
    """The options beside a prepared folder, which fixes the vocabulary."""
    return [option for option in options if not option.startswith("--vocab_size")]


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    *_, last = said.splitlines()
    assert ": error: " in last
    return last


def jsonl(path, texts, column="text"):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Figures and records


def test_the_figures_are_those_of_every_pair_of_the_validation_text(evaluated, books, check_books):
    metrics, record = read_json(evaluated / "metrics.json"), read_json(evaluated / "run_config.json")
    run = PretrainConfig(**record["run"])
    text = prepare(run)
    model = D2lBertForPreTraining.from_pretrained(evaluated)
    # One pair in a micro-batch, and no limit on their number: neither may change a figure.
    run.micro_batch_size, run.max_eval_pairs = 1, 10**6
    counts = held_out_counts(model, make_held_out(run, text), "cpu")
    for name, value in held_out_metrics(counts, PAIR_TASKS["nsp"]).items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    # Every token of the text is in some pair, and no token of the training text: the corpus has other documents.
    held_out = make_held_out(run, text)
    (pairs,) = [pairs for pairs, _ in held_out.parts()]
    spans = [(pair["a_start"], pair["a_end"]) for pair in pairs] + [(pair["b_start"], pair["b_end"]) for pair in pairs]
    sentences = text.validation.tokens.sentence_ends
    met = {int(sentences.find(start)) for start, end in spans if end > start}
    assert len(text.validation.tokens) == BOOKS
    assert len(text.validation.tokens.ids) == sum(
        len(text.tokenizer(path.read_text(), add_special_tokens=False)["input_ids"]) for path in check_books.iterdir()
    )
    assert max(end for _, end in spans) <= len(text.validation.tokens.ids) and len(met) > len(sentences) / 4


# ---------------------------------------------------------------------------------------------------------------------
# Texts in both


LINES = [f"Line number {number} says one thing or another." for number in range(200)]
ROWS = [f"Row {number} begins here.\n\nAnd row {number} ends there." for number in range(40)]


@pytest.mark.parametrize(
    ("training", "validation", "texts", "in_both"),
    [
        # Rows that are single lines: 64 make a document, and each is a text.
        (LINES[:150], [*LINES[140:200], "A line of its own.", LINES[3]], 62, 11),
        # Rows of several paragraphs.
        (ROWS[:30], [*ROWS[25:40], ROWS[0] + "\n\nAnd more."], 16, 5),
        # White space and the number of blank lines are no difference.
        (ROWS[:30], [ROWS[0].replace(" ", "  "), ROWS[1].replace("\n\n", "\n \n\n"), ROWS[2].lower()], 3, 2),
    ],
    ids=["single lines", "rows of paragraphs", "white space"],
)
def test_rows_in_both_texts_are_counted(training, validation, texts, in_both, tmp_path):
    corpus = jsonl(tmp_path / "corpus.jsonl", training)
    to_check = jsonl(tmp_path / "check.jsonl", validation)
    assert overlap(corpus, validation_corpus=[str(to_check)]) == (texts, in_both)
    (tmp_path / "set").mkdir()
    shutil.copyfile(to_check, tmp_path / "set" / "validation.jsonl")
    assert overlap(corpus, validation_dataset=[str(tmp_path / "set")]) == (texts, in_both)


def overlap(corpus, **options):
    """Texts of the validation text, and how many of them the training text has."""
    text = prepare(PretrainConfig(corpus=[str(corpus)], max_steps=1, vocab_size=300, **options))
    return text.validation.texts, text.validation.texts_in_training


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.fixture
def world(tmp_path, books, check_books, prepared, monkeypatch):
    """A working directory with the texts that the rows below name."""
    shutil.copytree(books, tmp_path / "books")
    shutil.copytree(check_books, tmp_path / "check")
    shutil.copytree(prepared, tmp_path / "tokens")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "blank.txt").write_text("\n \n")
    (tmp_path / "short.txt").write_text("One sentence.")
    for folder, last in (("symbols", "\x01"), ("few", "A word.")):
        (tmp_path / folder).mkdir()
        for number in range(20):  # control characters, which BERT's normaliser drops
            (tmp_path / folder / f"{number:02d}.txt").write_text(last if number == 19 else "\x01\x02")
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    jsonl(tmp_path / "set" / "validation.jsonl", ROWS)
    jsonl(tmp_path / "titles.jsonl", ROWS, column="title")
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = [  # options, then words of the error line: the value, its place, the way out
    ("--validation_corpus empty", "empty: no text file in this folder; give a folder with files"),
    ("--validation_corpus nowhere", "nowhere: no text file or folder"),
    ("--validation_corpus blank", "validation text blank: cache ", "no token in the text"),
    ("--validation_corpus short.txt", "validation text short.txt: too few documents", "give more text"),
    (
        "--validation_corpus symbols",
        "validation text symbols: cache ",
        "no token in the text; give text in the tokenizer's language",
    ),
    ("--validation_corpus few", "validation text few: too few documents hold a token that the tokenizer knows"),
    ("--validation_corpus latin.txt", "latin.txt: cannot be read as UTF-8 text"),
    ("--validation_corpus titles.jsonl", "titles.jsonl: cannot be read", "'text'"),
    ("--validation_corpus tokens", "tokens: a prepared folder, not text"),
    ("--validation_corpus check check", "validation_corpus: check is given twice"),
    ("--validation_dataset nowhere", "dataset nowhere: cannot be read"),
    ("--validation_dataset set --validation_split test", "dataset set: cannot be read", "--validation_split"),
    ("--validation_dataset set set", "set is given twice"),
    ("--validation_dataset set:en", "dataset set: cannot be read", "ID:CONFIG"),
    ("--validation_dataset check/book-00.txt", "dataset check/book-00.txt: cannot be read", "--validation_corpus"),
    ("--validation_split test", "validation_split is for validation_dataset"),
    (
        "--validation_corpus check --validation_fraction 0.1",
        "validation_fraction is for a held-out part of the corpus, and a validation text is given; leave",
    ),
    (
        "--validation_corpus check --max_validation_characters 10",
        "max_validation_characters is for a held-out part of the corpus, and a validation text is given; leave",
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=[options for options, *_ in REFUSED])
@pytest.mark.parametrize("corpus", ["books", "tokens"])
def test_a_wrong_validation_text_is_refused_in_one_line(world, row, corpus, capsys):
    options, *words = row
    before = sorted(os.listdir(world))
    beside = RUN if corpus == "books" else without_vocabulary(RUN)
    if corpus == "tokens" and ("fraction" in options or "characters" in options):
        words = ["is fixed by the prepared folder tokens; leave"]
    said = refused(capsys, "pretrain", f"--corpus={corpus}", "--output_dir=out", *beside, *options.split())
    for word in words:
        assert word in said
    assert sorted(os.listdir(world)) == before
