"""Prepared folders and their parts, which are one corpus or are refused; validation texts; copies in two texts."""

import dataclasses
import itertools
import shutil

import pytest
from conftest import SMALL, write_books
from huggingface_hub import constants
from stores import tokens_of
from text_sources import write_files, write_table

from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.tokenization import prepare as preparing
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.existing_tokenizers import load_tokenizer
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.prepared_folder import write_prepared_folder
from d2l_bert.tokenization.text_store import held_out_documents
from d2l_bert.training.config import PretrainConfig


# Each part holds out 5 % of its text; together they hold out 5 %, and that is less than a part's own documents.
PARTS = 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Four folders of 24 books each."""
    folder = tmp_path_factory.mktemp("texts")
    return [write_books(folder / f"text-{number}", seed=100 + number) for number in range(PARTS)]


def prepare_parts(folder, texts, *options):
    """Prepare each text by a command of its own; the parts have the tokenizer of the first. Returns their folders."""
    parts = [str(folder / f"part-{number}") for number in range(len(texts))]
    for text, part in zip(texts, parts, strict=True):
        tokenizer = "--vocab_size=300" if part == parts[0] else f"--tokenizer={parts[0]}"
        assert main(["prepare", f"--corpus={text}", f"--output_dir={part}", tokenizer, *options]) == 0
    return parts


@pytest.fixture(scope="module")
def parts(texts, tmp_path_factory):
    """The four texts, each prepared by a command of its own."""
    return prepare_parts(tmp_path_factory.mktemp("parts"), texts)


def documents_in(corpus):
    """The token ids of each document."""
    return [tokens_of(corpus, number) for number in range(len(corpus))]


def documents(text):
    """The token ids of each document, those to train on and those that are held out."""
    return documents_in(text.train), documents_in(text.held_out)


def prepared(*corpus, **options):
    """What is prepared of files and folders."""
    return prepare(TextConfig(corpus=list(map(str, corpus)), **options))


# ---------------------------------------------------------------------------------------------------------------------
# One corpus of several parts


@pytest.mark.slow
def test_parts_hold_the_documents_and_tokens_of_their_texts_in_order(parts, texts):
    together = prepared(*parts)
    each = [prepared(part) for part in parts]
    whole = prepare(TextConfig(corpus=list(map(str, texts))), load_tokenizer(parts[0]))
    train, held_out = documents(together)
    assert sorted(train + held_out) == sorted(itertools.chain(*documents(whole)))
    assert len(train + held_out) == PARTS * 24
    # Each part holds out some of its own documents, and the order within each is that of the text.
    assert train == list(itertools.chain.from_iterable(documents_in(part.train) for part in each))
    assert together.train.source_ends == list(itertools.accumulate(len(part.train) for part in each))
    assert (together.text_fingerprint, together.reading) == (whole.text_fingerprint, whole.reading)
    for name in ("characters", "unknown_characters", "dropped_marks"):
        assert together.coverage[name] == sum(part.coverage[name] for part in each)
    assert together.corpus_name == "text-0, text-1, text-2, text-3"


@pytest.mark.slow
def test_parts_are_joined_in_their_order_with_their_languages_and_datasets(texts, parts, tmp_path):
    folders = []
    for name, text in (("de", texts[0]), ("en", texts[1])):
        part = prepare(TextConfig(corpus=[str(text)], language=name), load_tokenizer(parts[0]))
        part = dataclasses.replace(part, hub_datasets=[name, "both"])
        folders.append(str(tmp_path / name))
        (tmp_path / name).mkdir()
        write_prepared_folder(part, tmp_path / name)
    one = prepared(*folders)
    other = prepared(*reversed(folders))
    assert one.token_options["language"] == "de, en" and one.hub_datasets == ["de", "both", "en"]
    of_the_first = one.train.source_ends[0]
    of_the_second = other.train.source_ends[0]
    assert of_the_first + of_the_second == len(one.train) == len(other.train)
    assert documents_in(one.train)[:of_the_first] == documents_in(other.train)[of_the_second:]


@pytest.mark.slow
def test_the_lines_of_a_log_beside_books_are_not_all_that_is_held_out(tmp_path):
    files = {"notes.log": "\n".join(f"note {number} of a day" for number in range(100))}
    for first in (1000, 2000, 3000):
        files[f"book-{first}.txt"] = "\n\n".join(rows_of(first, first + 400))
    text = prepared(write_files(tmp_path, files), vocab_size=300)
    trained_on = len(text.train.ids)
    held_out = len(text.held_out.ids)
    assert 0.04 < held_out / (held_out + trained_on) < 0.1


# ---------------------------------------------------------------------------------------------------------------------
# Copies


def rows_of(first, count):
    """Rows of several sentences; no two are equal."""
    return [
        f"Row {number} is about the {number}th thing. It has {number * 7} parts." for number in range(first, count)
    ]


def write_rows(path, rows):
    return write_table(path, [{"text": row} for row in rows])


def as_lines(folder, rows):
    write_files(folder, {"lines.txt": "".join(f"{row}\n" for row in rows * 3)})
    return {"corpus": [str(folder / "lines.txt")], "documents": "line"}


def as_rows(folder, rows):
    """Each row three times, one after the other."""
    thrice = list(itertools.chain.from_iterable([row] * 3 for row in rows))
    return {"corpus": [str(write_rows(folder / "rows.jsonl", thrice))]}


def as_files(folder, rows):
    files = {f"{number}.txt": row for number, row in enumerate(rows * 3)}
    return {"corpus": [str(write_files(folder, files))]}


def as_parts(folder, rows):
    """Each part has all rows, in an order of its own and beside rows that it alone has."""
    texts = []
    for number in range(3):
        first = 1000 * (number + 1)
        others = rows_of(first, first + 40)
        begin = 10 * number
        mixed = [*rows[begin:], *others, *rows[:begin]]
        texts.append(write_rows(folder / f"{number}.jsonl", mixed))
    return {"corpus": prepare_parts(folder, texts)}


def as_parts_with_split_copies(folder, rows):
    """The first part is so small that its held-out rows are others than those of the second, which has them, too."""
    texts = [write_rows(folder / "0.jsonl", rows[: len(rows) // 2])]
    texts.append(write_rows(folder / "1.jsonl", [*rows, *rows_of(1000, 1400)]))
    return {"corpus": prepare_parts(folder, texts, "--validation_fraction=0.3")}


@pytest.mark.parametrize(
    ("write", "count"),
    [*itertools.product([as_lines, as_rows, as_files, as_parts], [6, 60]), (as_parts_with_split_copies, 60)],
)
def test_no_copy_of_a_held_out_document_is_trained_on(write, count, tmp_path):
    """Judged by the decoded tokens; six rows, three times each, are so few that blocks count as documents."""
    text = prepare(TextConfig(**write(tmp_path, rows_of(0, count)), vocab_size=300))
    train, held_out = (set(map(text.tokenizer.decode, found)) for found in documents(text))
    assert len(train) >= 2
    assert len(held_out) >= 2
    assert not train & held_out


def test_copies_are_counted_and_said(tmp_path, caplog):
    caplog.set_level("INFO", "d2l_bert")
    text = prepare(TextConfig(**as_rows(tmp_path, rows_of(0, 60)), vocab_size=300))
    assert 120 in text.reading.values()
    assert "120 documents that are copies of others" in caplog.text


def test_held_out_documents_of_a_part_that_another_trains_on_are_left_out_and_said(tmp_path, caplog, capsys):
    caplog.set_level("INFO", "d2l_bert")
    parts = as_parts_with_split_copies(tmp_path, rows_of(0, 60))["corpus"]
    one, other = (prepared(part) for part in parts)
    all_held_out = documents_in(one.held_out) + documents_in(other.held_out)
    caplog.clear()
    train, held_out = documents(prepared(*parts))
    assert train == documents_in(one.train) + documents_in(other.train)  # nothing moves
    left_out = [ids for ids in all_held_out if ids in train]
    assert left_out
    assert held_out == [ids for ids in all_held_out if ids not in train]
    assert f"{len(left_out)} of {len(all_held_out)} held-out documents are left out" in caplog.text


def test_parts_that_train_on_all_held_out_documents_of_each_other_are_refused(tmp_path, monkeypatch):
    """The second part has the rows of the first, and holds out what the first trains on."""
    text = write_rows(tmp_path / "rows.jsonl", rows_of(0, 40))
    first = tmp_path / "first"
    second = tmp_path / "second"
    assert main(["prepare", f"--corpus={text}", f"--output_dir={first}", "--vocab_size=300"]) == 0
    monkeypatch.setattr(preparing, "held_out_documents", lambda *given: ~held_out_documents(*given))
    assert main(["prepare", f"--corpus={text}", f"--output_dir={second}", f"--tokenizer={first}"]) == 0
    with pytest.raises(UserError, match="fewer than two held-out documents"):
        prepare(TextConfig(corpus=[str(first), str(second)]))


@pytest.mark.slow
def test_a_part_that_is_damaged_is_not_joined_and_leaves_nothing_in_the_cache(parts, tmp_path, monkeypatch):
    """Its size is as it was: a run of this part alone would not see it."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    damaged = shutil.copytree(parts[1], tmp_path / "damaged")
    ids = bytearray((damaged / "train/ids.bin").read_bytes())
    ids[100] ^= 1
    (damaged / "train/ids.bin").write_bytes(ids)
    with pytest.raises(UserError, match="damaged: .*ids.bin has changed since it was written"):
        prepared(parts[0], damaged)
    assert not list((tmp_path / "home").rglob("joined-*/*"))
    together = documents_in(prepared(parts[0], parts[1]).train)
    one = documents_in(prepared(parts[0]).train)
    other = documents_in(prepared(parts[1]).train)
    assert together == one + other


@pytest.mark.slow
def test_the_unknown_share_of_joined_parts_is_that_of_all_held_out_text(tmp_path):
    """The second part is written in letters that the tokenizer of the first lacks."""
    rows = rows_of(0, 60)
    greek = [row.translate(str.maketrans("aeinorstw", "αεινορστω")) for row in rows]
    texts = [write_rows(tmp_path / "english.jsonl", rows), write_rows(tmp_path / "greek.jsonl", greek)]
    folders = prepare_parts(tmp_path, texts, "--max_unknown_share=1")
    one = prepared(folders[0], max_unknown_share=1)
    other = prepared(folders[1], max_unknown_share=1)
    together = prepared(*folders, max_unknown_share=1)
    share_of_other = other.tokenizer_report["unknown_share"]
    expected = share_of_other * len(other.held_out.ids) / len(together.held_out.ids)
    assert one.tokenizer_report["unknown_share"] == 0
    assert share_of_other > 0.3
    assert together.tokenizer_report["unknown_share"] == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------------------
# Parts that do not go together


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--vocab_size=150"], "its tokenizer is not that of .*prepare it again with tokenizer "),
        (
            ["--documents=blank_line"],
            "was prepared with documents 'blank_line', and .* with 'auto'; prepare both alike",
        ),
        (["--validation_fraction=0.1"], "was prepared with validation_fraction 0.1, and .* with 0.05; prepare both"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_by_name(options, words, parts, texts, tmp_path):
    if options != ["--vocab_size=150"]:
        options = [*options, f"--tokenizer={parts[0]}"]
    assert main(["prepare", f"--corpus={texts[0]}", f"--output_dir={tmp_path / 'other'}", *options]) == 0
    with pytest.raises(UserError, match=f"corpus {tmp_path / 'other'}: {words}"):
        prepared(parts[1], tmp_path / "other")


# ---------------------------------------------------------------------------------------------------------------------
# The files of a folder


@pytest.mark.slow
def test_a_run_notices_files_of_another_size_and_changed_small_files(parts, tmp_path, fails):
    folder = shutil.copytree(parts[0], tmp_path / "tokens")
    out = tmp_path / "out"
    options = [option for option in SMALL if not option.startswith("--vocab_size")]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 15
    for file in files:
        whole = file.read_bytes()
        middle = len(whole) // 2
        is_large = file.suffix == ".bin"
        file.write_bytes(whole + b"x" if is_large else whole[:middle] + b"\1" + whole[middle + 1 :])
        said = fails("pretrain", f"--corpus={folder}", f"--output_dir={out}", "--max_steps=1", *options)
        assert str(folder) in said and "prepare the text again" in said, file
        file.write_bytes(whole)
    assert not out.exists()


# ---------------------------------------------------------------------------------------------------------------------
# A validation text: which of its texts are in the training text too, and how it is divided


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
    paragraphs = []
    for first in range(0, 400, 10):
        paragraphs.append(" ".join(f"It is {hour} o'clock." for hour in range(first, first + 10)))
    few = {str(number): f"Text {number}. " + "\n\n".join(paragraphs) for number in range(3)}
    many = {str(number): f"Another, {number}. And its end." for number in range(30)} | {"copy": few["1"]}
    write_files(tmp_path, {f"corpus/{name}.txt": text for name, text in few.items()})
    write_files(tmp_path, {f"check/{name}.txt": text for name, text in many.items()})
    assert overlap(tmp_path / "corpus", validation_corpus=[str(tmp_path / "corpus")]) == (3, 3)
    assert overlap(tmp_path / "check", validation_corpus=[str(tmp_path / "corpus")]) == (3, 1)


def test_a_validation_text_is_divided_as_the_prepared_corpus_was(tmp_path):
    lines = tmp_path / "lines.txt"
    tokens = tmp_path / "tokens"
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
