"""A validation text: its figures, and which of its texts are in the training text too."""

import shutil

import pytest
from conftest import write_books
from promises.driving import read_json
from runs import run
from text_sources import write_files, write_table

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.pair_tasks import PAIR_TASKS
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.token_store import find
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.held_out import HeldOutPairs, held_out_counts, held_out_metrics


def test_the_figures_are_those_of_every_pair_of_the_validation_text(books, tmp_path):
    """
    With an average of the weights, which is evaluated and published. The text has 17 books of its own, and 3 of the
    training text under other names.
    """
    folder, out = write_books(tmp_path / "check", count=17, seed=7), tmp_path / "out"
    for number, book in enumerate(sorted(books.iterdir())[:3]):
        shutil.copyfile(book, folder / f"same-{number}.txt")
    run(books, out, f"--validation_corpus={folder}", "--max_steps=4", "--mixed_precision=no", "--ema_decay=0.5")
    metrics, options = read_json(out / "metrics.json"), read_json(out / "run_config.json")["run"]
    # One pair in a micro-batch, and no limit on their number: neither may change a figure.
    options |= {"corpus": [str(books)], "validation_corpus": [str(folder)], "max_eval_pairs": 10**6}
    text = prepare(PretrainConfig(**options))
    held_out = HeldOutPairs(text.held_out, text.tokenizer, PretrainConfig(**options), 1, "the text")
    counts = held_out_counts(D2lBertForPreTraining.from_pretrained(out), held_out, "cpu")
    for name, value in held_out_metrics(counts, PAIR_TASKS["nsp"]).items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    # Every token of the text is in some pair, and no token of the training text: the corpus has other documents.
    (pairs,) = held_out.parts()
    spans = [(pair[f"{side}_start"], pair[f"{side}_end"]) for pair in pairs for side in "ab"]
    starts = text.held_out.sentence_starts
    met = {int(find(starts, start)) for start, end in spans if end > start}
    assert len(text.held_out) == 20
    assert len(text.held_out.ids) == sum(
        len(text.tokenizer(path.read_text(), add_special_tokens=False)["input_ids"]) for path in folder.iterdir()
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
    (tmp_path / "set").mkdir()
    corpus = write_table(tmp_path / "corpus.jsonl", [{"text": text} for text in training])
    to_check = write_table(tmp_path / "set" / "validation.jsonl", [{"text": text} for text in validation])
    assert overlap(corpus, validation_corpus=[str(to_check)]) == (texts, in_both)
    assert overlap(corpus, validation_dataset=[str(to_check.parent)]) == (texts, in_both)


def test_a_document_of_a_corpus_of_few_is_found_in_a_validation_text(tmp_path):
    """In the corpus each block of some 64 sentences counts as a document, in the other text each file does."""
    sentences = [" ".join(f"It is {10 * n + k} o'clock." for k in range(10)) for n in range(40)]
    few = {str(number): f"Text {number}. " + "\n\n".join(sentences) for number in range(3)}
    many = {str(number): f"Another, {number}. And its end." for number in range(30)} | {"copy": few["1"]}
    write_files(tmp_path, {f"corpus/{name}.txt": text for name, text in few.items()})
    write_files(tmp_path, {f"check/{name}.txt": text for name, text in many.items()})
    assert overlap(tmp_path / "corpus", validation_corpus=[str(tmp_path / "corpus")]) == (3, 3)
    assert overlap(tmp_path / "check", validation_corpus=[str(tmp_path / "corpus")]) == (3, 1)


def test_a_validation_text_is_divided_as_the_prepared_corpus_was(tmp_path):
    lines, tokens = tmp_path / "lines.txt", tmp_path / "tokens"
    lines.write_text("".join(f"Line {number} is a document. It has two sentences.\n" for number in range(60)))
    assert main(["prepare", "--corpus", str(lines), "--documents=line", f"--output_dir={tokens}"]) == 0
    for corpus, options in ((tokens, {}), (lines, {"documents": "line"})):
        text = prepare(PretrainConfig(corpus=[str(corpus)], validation_corpus=[str(lines)], max_steps=1, **options))
        report = text.counts()["tokenizer"]
        assert (len(text.held_out), report["words"]) == (60, 60 * 9)
        assert report["pieces_per_word"] == len(text.held_out.ids) / report["words"]


def overlap(corpus, **options):
    """Texts of the validation text, and how many of them the training text has."""
    text = prepare(PretrainConfig(corpus=[str(corpus)], max_steps=1, vocab_size=300, **options))
    return text.validation["texts"], text.validation["texts_in_training"]
