"""A validation text: its figures, and which of its texts are in the training text too."""

import json
import shutil

import pytest
from conftest import SMALL, write_books

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.folders import read_json
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.token_store import find
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.held_out import HeldOutPairs, held_out_counts, held_out_metrics


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
def evaluated(books, check_books, tmp_path_factory):
    """The folder of a run with a validation text."""
    folder = tmp_path_factory.mktemp("evaluated") / "model"
    assert pretrain(folder, f"--corpus={books}", f"--validation_corpus={check_books}") == 0
    return folder


def pretrain(folder, *options):
    return main(["pretrain", f"--output_dir={folder}", *RUN, *options])


def jsonl(path, texts, column="text"):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Figures and records


def test_the_figures_are_those_of_every_pair_of_the_validation_text(evaluated, books, check_books):
    metrics, record = read_json(evaluated / "metrics.json"), read_json(evaluated / "run_config.json")
    run = PretrainConfig(**{**record["run"], "corpus": [str(books)], "validation_corpus": [str(check_books)]})
    text = prepare(run)
    model = D2lBertForPreTraining.from_pretrained(evaluated)
    # One pair in a micro-batch, and no limit on their number: neither may change a figure.
    run.max_eval_pairs = 10**6
    held_out = HeldOutPairs(text.held_out, text.tokenizer, run, 1, "the text")
    counts = held_out_counts(model, held_out, "cpu")
    for name, value in held_out_metrics(counts, PAIR_TASKS["nsp"]).items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    # Every token of the text is in some pair, and no token of the training text: the corpus has other documents.
    (pairs,) = held_out.parts()
    spans = [(pair["a_start"], pair["a_end"]) for pair in pairs] + [(pair["b_start"], pair["b_end"]) for pair in pairs]
    starts = text.held_out.sentence_starts
    met = {int(find(starts, start)) for start, end in spans if end > start}
    assert len(text.held_out) == BOOKS
    assert len(text.held_out.ids) == sum(
        len(text.tokenizer(path.read_text(), add_special_tokens=False)["input_ids"]) for path in check_books.iterdir()
    )
    assert max(end for _, end in spans) <= len(text.held_out.ids) and len(met) > len(starts) / 4


# ---------------------------------------------------------------------------------------------------------------------
# Texts in both


LINES = [f"Line number {number} says one thing or another." for number in range(200)]
ROWS = [f"Row {number} begins here.\n\nAnd row {number} ends there." for number in range(40)]


@pytest.mark.parametrize(
    ("training", "validation", "texts", "in_both"),
    [
        # Rows that are single lines.
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


def test_a_document_of_a_corpus_of_few_is_found_in_a_validation_text(tmp_path):
    """In the corpus each block of some 64 sentences counts as a document, in the other text each file does."""
    sentences = [" ".join(f"It is {10 * n + k} o'clock." for k in range(10)) for n in range(40)]
    for number in range(3):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"Text {number}. " + "\n\n".join(sentences))
    (tmp_path / "check").mkdir()
    for number in range(30):
        (tmp_path / "check" / f"{number}.txt").write_text(f"Another, {number}. And its end.")
    (tmp_path / "check" / "copy.txt").write_text((tmp_path / "corpus" / "1.txt").read_text())
    assert overlap(tmp_path / "corpus", validation_corpus=[str(tmp_path / "corpus")]) == (3, 3)
    assert overlap(tmp_path / "check", validation_corpus=[str(tmp_path / "corpus")]) == (3, 1)


def test_a_validation_text_is_divided_as_the_prepared_corpus_was(tmp_path):
    lines = [f"Line {number} is a document. It has two sentences.\n" for number in range(60)]
    for name in ("corpus.txt", "check.txt"):
        (tmp_path / name).write_text("".join(lines))
    tokens, found = tmp_path / "tokens", []
    assert (
        main(["prepare", "--corpus", str(tmp_path / "corpus.txt"), "--documents=line", f"--output_dir={tokens}"]) == 0
    )
    for corpus, options in ((tokens, {}), (tmp_path / "corpus.txt", {"documents": "line"})):
        run = PretrainConfig(
            corpus=[str(corpus)], validation_corpus=[str(tmp_path / "check.txt")], max_steps=1, **options
        )
        text = prepare(run)
        report = text.counts()["tokenizer"]
        assert report["pieces_per_word"] == len(text.held_out.ids) / report["words"]
        found.append((len(text.held_out), report["words"]))
    assert found == [(60, 60 * 9)] * 2


def overlap(corpus, **options):
    """Texts of the validation text, and how many of them the training text has."""
    text = prepare(PretrainConfig(corpus=[str(corpus)], max_steps=1, vocab_size=300, **options))
    return text.validation["texts"], text.validation["texts_in_training"]
