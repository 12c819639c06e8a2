"""Text files, folders, datasets and python-docs as a source: what is read, skipped and counted, and its identity."""

import dataclasses
import errno
import gzip
import io
import itertools
import multiprocessing
import os
import sysconfig
from pathlib import Path
from pydoc_data import topics

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from text_sources import lines_of, packed_by_zstd, texts, write_files, write_table

from d2l_bert.folders import short_hash
from d2l_bert.messages import UserError
from d2l_bert.tokenization import python_docs as python_docs_module
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.documents import Document
from d2l_bert.tokenization.files import lines_of_text_file
from d2l_bert.tokenization.python_docs import docstrings, prose, python_docs, required_distributions
from d2l_bert.tokenization.sources import HowToRead, WhatToRead, all_documents, dataset_source, file_source
from d2l_bert.training.config import PretrainConfig


def test_files_and_folders_are_read_in_order_with_a_paragraph_a_line(tmp_path):
    contents = {
        "b.txt": "One line.\nAnd the next.\n \nThird   paragraph.\n",
        "sub/a.md": "\ufeff# Title\r\n\r\nText.\r\n",
        "c.txt.gz": gzip.compress("Gezippt – naïve.".encode()),
        "d.gz": gzip.compress(b"No name for what it holds."),
        ".hidden.txt": "Not this.",
        "picture.png": "nor this",
    }
    assert texts(file_source(write_files(tmp_path, contents))) == [
        ["One line.", "And the next.", "Third paragraph."],
        ["Gezippt – naïve."],
        ["No name for what it holds."],
        ["# Title", "Text."],
    ]


def test_the_identity_of_a_source_depends_on_its_content_and_not_on_its_path(tmp_path):
    write_files(tmp_path, {"here/a.txt": "Same.", "there/a.txt": "Same.", "other/a.txt": "Other."})
    here, there, other = (file_source(tmp_path / place).identity for place in ("here", "there", "other"))
    assert here == there != other
    assert here != file_source(tmp_path / "here", HowToRead(max_documents=2)).identity


def test_links_are_followed_and_what_a_folder_leaves_out_is_said(tmp_path):
    folder = tmp_path / "texts"
    unread = {"notes.rst": "Not read.", "more.RST": "Nor this.", "page.html.gz": "a", "program": "\0"}
    write_files(folder, {"sub/a.txt": "Here.", "../elsewhere/linked.txt": "Behind a link.", **unread})
    for name, target in {"a.txt": "sub/a.txt", "link": tmp_path / "elsewhere", "sub/loop": folder}.items():
        (folder / name).symlink_to(target)
    source = file_source(folder)
    assert sorted(texts(source)) == [["Behind a link."], ["Here."]]
    said = {".rst: 2 files, 18 bytes", ".html: 1 file, 1 bytes", "binary without a suffix: 1 file, 1 bytes"}
    assert set(source.remarks.partition("left out: ")[2].split("; ")) == said


def test_a_file_without_a_suffix_is_read_unless_it_is_binary(tmp_path):
    contents = {"LICENSE": "No suffix.", "app.log": "A line.", "wide": "Wide.".encode("utf-16")}
    contents |= {"wide.gz": gzip.compress("Wide and packed.".encode("utf-16")), "rows.tar.gz": "a"}
    contents |= {"program": "\x7fELF\0", "packed.gz": gzip.compress(b"a\0")}
    read = [["No suffix."], ["A line."], ["Wide."], ["Wide and packed."]]
    assert texts(file_source(write_files(tmp_path, contents))) == read


def test_file_names_of_any_bytes_are_read(tmp_path):
    """Upper case in the suffix, and a name that is not UTF-8, packed or not."""
    folder = os.fsencode(tmp_path)
    pack = {b"": bytes, b".gz": gzip.compress, b".ZST": packed_by_zstd}
    for end, packed in pack.items():
        for name, content in {b"TXT": b"In a file.", b"Jsonl": b'{"text": "In a row."}\n'}.items():
            Path(os.fsdecode(folder + b"/caf\xe9." + name + end)).write_bytes(packed(content))
    pq.write_table(pa.table({"text": ["In a row."]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / os.fsdecode(b"\xe9.parquet"))
    source = file_source(tmp_path)
    assert sorted(texts(source)) == [["In a file."]] * 3 + [["In a row."]] * 4
    assert len(short_hash(source.identity)) == 16
    assert len(texts(file_source(tmp_path / os.fsdecode(b"caf\xe9.TXT.gz")))) == 1


LINES = ["One is a line.", "Two – naïve – is next.", "", "Three 😀."]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "be-16", "be-32"])
@pytest.mark.parametrize("ends", [["\n"], ["\r"], ["\r\n"], ["\r\n", "\n", "\r", "\n"]])
@pytest.mark.parametrize("times", [1, 5001])
def test_every_line_end_and_every_marked_encoding_is_read(encoding, ends, times, tmp_path):
    lines = LINES * times  # the pieces of a stream then end within characters and line ends
    text = "".join(f"{line}{ends[n % len(ends)]}" for n, line in enumerate(lines))
    if encoding.startswith("be"):
        text = f"\ufeff{text}"
        encoding = f"utf-{encoding[3:]}-be"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert lines_of(str(tmp_path / "a.txt")) == lines
    with io.BytesIO(text.encode(encoding)) as stdin:
        assert list(lines_of_text_file(Path("stdin"), stdin)) == lines


def test_rows_have_every_line_end(tmp_path):
    write_table(tmp_path / "a.jsonl", [{"text": "One.\rTwo.\r\nThree.\nFour."}])
    assert texts(file_source(tmp_path)) == [["One.", "Two.", "Three.", "Four."]]
    assert texts(file_source(tmp_path, HowToRead(documents="line"))) == [["One."], ["Two."], ["Three."], ["Four."]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('Fine.\r\n\n\rDort „so" – 5 €.'.encode("cp1252"), ["line 4:", "0x84", "iconv -f CP1252 -t UTF-8"]),
        (("Fine.\n" * 300_000 + "Zürich").encode("latin-1"), ["line 300,001:", "0xfc"]),
        (b"\x89PNG\r\n\0", ["binary"]),
        ("Zürich".encode("utf-16-be"), ["binary"]),
        ("Fine.\nZürich 😀".encode("utf-16")[:-1], ["line 2:", "UTF-16"]),
    ],
)
def test_a_text_in_no_known_encoding_is_refused_with_its_line(content, words, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError) as refused:
        texts(file_source(tmp_path / "a.txt"))
    assert all(word in str(refused.value) for word in ["a.txt", *words]), refused.value
    assert ("iconv" in str(refused.value)) == any(word.startswith("0x") for word in words)


@pytest.mark.parametrize("damage", [gzip.compress(b"Fine. " * 1000, mtime=0)[:-9], b"Fine."])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.gz", "a.csv.gz"])
def test_a_damaged_packed_file_is_refused_without_the_advice_to_convert_it(name, damage, tmp_path):
    (tmp_path / name).write_bytes(damage)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=name) as refused:
            list(all_documents([file_source(path)]))
        assert "iconv" not in str(refused.value)


@pytest.mark.parametrize("call", ["listdir", "stat"])
def test_a_folder_that_cannot_be_read_is_named(call, tmp_path, monkeypatch, fails):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Text.")
    original = getattr(os, call)

    def refuse(path, *arguments, **options):
        if "texts" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, call, refuse)
    said = fails("prepare", f"--corpus={tmp_path / 'texts'}", f"--output_dir={tmp_path / 'out'}")
    assert f"{tmp_path / 'texts'}: cannot be read" in said


# ---------------------------------------------------------------------------------------------------------------------
# Datasets


either_way = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])


ROWS = [{"n": n, "text": f"Row {n}.\n\nIts end." if n % 3 else None} for n in range(3000)]


@pytest.mark.slow
@either_way
@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.csv"])
def test_a_streamed_dataset_is_read_like_a_downloaded_one(name, streaming, tmp_path):
    write_table(tmp_path / name, ROWS)
    how = HowToRead(streaming=streaming)
    source = dataset_source(str(tmp_path), how=how)
    assert texts(source) == [[f"Row {n}.", "Its end."] for n in range(3000) if n % 3]
    assert source.counts["rows without text"] == 1000 and source.name == tmp_path.name and not source.is_on_hub
    assert dataset_source(str(tmp_path), how=HowToRead(streaming=not streaming)).identity == source.identity
    with pytest.raises(UserError, match="'body'"):
        texts(dataset_source(str(tmp_path), how=dataclasses.replace(how, text_column="body")))
    few = dataset_source(str(tmp_path), how=dataclasses.replace(how, max_documents=5))
    assert len(texts(few)) == 5 and few.identity != source.identity


@either_way
@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("train.jsonl", b"no JSON\n", "row 3000"),
        ("train.jsonl", b'{"n": 1, "text": "a \\ud83d b"}\n', "row 3000"),
        ("train.csv", b'1,"not closed', "ParserError"),
    ],
)
def test_a_damaged_row_of_a_dataset_is_refused_in_one_line(name, damage, words, streaming, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr("logging.Logger.callHandlers", lambda logger, record: logged.append((logger.name, record)))
    write_table(tmp_path / name, ROWS)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + damage)
    with pytest.raises(UserError, match=f"^dataset {tmp_path}.*{words}.*$"):  # no dot stands for the end of a line
        texts(dataset_source(str(tmp_path), how=HowToRead(streaming=streaming)))
    assert not [record for name, record in logged if name.startswith("datasets") and record.levelname == "ERROR"]


@either_way
def test_folders_of_save_to_disk_are_read_and_a_missing_split_is_refused(streaming, tmp_path):
    train, test = (datasets.Dataset.from_list([{"text": f"{name}.", "n": 1}]) for name in ("Train", "Test"))
    train.with_format("pandas").save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")

    def opened(name, split="train", text_column="text"):
        how = HowToRead(streaming=streaming, text_column=text_column)
        return dataset_source(str(tmp_path / name), WhatToRead(split=split), how)

    assert texts(opened("one")) == texts(opened("both")) == [["Train."]]
    assert texts(opened("both", split="test")) == [["Test."]]
    for name, options, words in (
        ("both", {"split": "dev"}, "both: cannot be read .*'dev'.*dataset_split"),
        ("one:a", {}, "has no configurations"),
        ("one", {"text_column": "body"}, "cannot be read .*'body'"),
    ):
        with pytest.raises(ValueError, match=words):
            opened(name, **options)
    assert opened("both").identity == opened("both").identity != opened("both", split="test").identity


def test_a_dataset_in_memory_is_read_like_its_folder_and_named_by_its_content(tmp_path):
    rows = [{"n": n, "text": f"Row {n}." if n % 3 else None} for n in range(2500)]
    dataset = datasets.Dataset.from_list(rows)
    config = TextConfig(dataset=dataset)
    config.check()
    (folder,) = config.dataset
    source = dataset_source(folder)
    assert texts(source) == [[f"Row {n}."] for n in range(2500) if n % 3]
    assert len(source.name) < 30
    assert not source.is_on_hub
    # The same rows in other pieces, in another order of memory, with another format and other columns.
    pieces = datasets.concatenate_datasets([dataset.select(range(700)), dataset.select(range(700, 2500))])
    shuffled = dataset.shuffle(seed=1).sort("n").remove_columns("n").with_format("numpy")
    saved = str(tmp_path / "saved")
    dataset.save_to_disk(saved)
    assert TextConfig(dataset=[pieces, shuffled, saved]).dataset == [folder, folder, saved]
    assert dataset_source(saved).identity[1:] == source.identity[1:]
    (other,) = TextConfig(dataset=[dataset.select(range(2499))]).dataset
    assert other != folder
    assert dataset_source(other).identity[1:] != source.identity[1:]
    assert dataclasses.replace(config, vocab_size=99).dataset == [folder]
    assert PretrainConfig(validation_dataset=dataset).validation_dataset == [folder]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (datasets.DatasetDict(dev=datasets.Dataset.from_dict({"text": ["a"]})), "several splits.*: dev"),
        (datasets.Dataset.from_dict({"text": []}), "no rows"),
        (datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset(), "IterableDataset"),
        (datasets.Dataset.from_dict({"body": ["a"]}), "body"),
        (datasets.Dataset.from_dict({"text": [1, 2]}), "row 1: column 'text' holds int"),
        ([b"a"], "bytes"),
    ],
)
def test_what_is_no_dataset_with_the_column_of_text_is_refused_in_one_line(dataset, words):
    with pytest.raises(UserError, match=words) as refused:
        texts(dataset_source(TextConfig(dataset=dataset).dataset[0]))
    assert len(str(refused.value)) < 250 and "\n" not in str(refused.value)


# ---------------------------------------------------------------------------------------------------------------------
# The corpus python-docs: documentation and docstrings of Python and its packages


DOCSTRING = """
    Return the :class:`~foo.Bar` of ``x``, a *fast* operation that never blocks.

    Args:
        x (`int`): The number that is doubled before it is returned.

    Notes
    -----
    The lines of this paragraph are wrapped, and they belong
    together. Here is some code that has to go::

        result = frobnicate(x, y, z); print(result)

    >>> frobnicate(1)
    2

    ====== ======
    Input  Output
    ====== ======

    ```python
    model = Model.from_pretrained("x")  # this is code. really.
    ```

    Too short.
"""


def test_prose_is_a_docstring_without_code_tables_argument_lists_and_markup():
    assert prose(DOCSTRING) == [
        "Return the foo.Bar of x, a fast operation that never blocks.",
        "The lines of this paragraph are wrapped, and they belong together. Here is some code that has to go:",
    ]


def test_docstrings_are_found_in_order_and_a_file_that_does_not_parse_gives_none(tmp_path):
    (tmp_path / "good.py").write_text(
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\nif True:\n    def g():\n'
        '        """Function."""\n'
    )
    (tmp_path / "bad.py").write_text('"""Doc."""\ndef (:\n')
    assert docstrings(tmp_path / "good.py") == ["Module.", "Class.", "Method.", "Function."]
    assert docstrings(tmp_path / "bad.py") == []


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("    Indented, on one line only, it is read.\n", ["Indented, on one line only, it is read."]),
        ("It is read.\n\n    Indented, and read in the same way.", ["Indented, and read in the same way."]),
        ("Two words::\n\n    It is code, and left out.\n\nThis is text once more.", ["This is text once more."]),
        ("Two. Words::\n\n    All is text, indented as in code.", ["All is text, indented as in code."]),
        ("Is it kept? This is.\n    : This line goes.\nThe rest stays.", ["Is it kept? This is. The rest stays."]),
        ("x, y : int\n    The number of times that it is done.", ["The number of times that it is done."]),
        ("Time : money. This line of words goes away.", []),
        ("In [1]: print it. This is an example, not a sentence.", []),
        ("In the end, it is a sentence of words.", ["In the end, it is a sentence of words."]),
        ("It prints this line, which is no code:\n$ d2l-bert --help. ", []),
        ("It is cheap: $ 5 for all of it.\n$5 is the price.", ["It is cheap: $ 5 for all of it. $5 is the price."]),
        ("* An item, which is a whole sentence.", ["An item, which is a whole sentence."]),
        ("12. An item, which is a whole sentence.", ["An item, which is a whole sentence."]),
        (
            "A Heading of Some Words.\n~~~~~~~\nThe text below it is all that stays.",
            ["The text below it is all that stays."],
        ),
        ("Four words are few.", []),
        ("It has a word that is too long: " + 61 * "x" + ".", []),
        ("12 + 34 = 46, 56 + 78 = 134, and so on.", []),
        ("Ärger über süße Brötchen, über Öfen, über Häuser.", []),  # letters with accents count as symbols
    ],
)
def test_prose_looks_at_the_start_of_each_line(text, paragraphs):
    assert prose(text) == paragraphs


@pytest.mark.slow
def test_two_processes_read_the_embedded_corpus_as_one_does(tmp_path, monkeypatch):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[ab]*.py"))
    (tmp_path / "bad.py").write_text('"""This file has a docstring, and does not parse."""\ndef (:\n')
    files += [tmp_path / "bad.py", tmp_path / "gone.py", files[0]]
    monkeypatch.setattr(topics, "topics", {"ONE": "This is the text of a topic.", "TWO": "Too short."})
    monkeypatch.setattr(python_docs_module, "_source_files", lambda: files)
    monkeypatch.setattr(python_docs_module, "FILES_AT_ONCE", 3)
    two = python_docs(2)
    found = list(itertools.islice(two, 2))
    assert found[0] == Document(["This is the text of a topic."]) and len(multiprocessing.active_children()) == 2
    found += two
    assert found == list(python_docs(1)) and len(found) > 10
    # The documents by a plain loop over the files: the last three add none.
    of_files = [list(itertools.chain(*map(prose, docstrings(file)))) for file in files]
    assert len(found) == 1 + len(list(filter(None, of_files[:-3])))
    paragraphs = list(itertools.chain(*(document.paragraphs for document in found[1:])))
    assert paragraphs == list(dict.fromkeys(itertools.chain(*of_files)))


def test_the_embedded_corpus_covers_the_packages_direct_and_indirect_requirements():
    names = [found.metadata["Name"].lower().replace("_", "-") for found in required_distributions("d2l-bert")]
    assert {"torch", "transformers", "huggingface-hub", "numpy"} <= set(names)
    assert len(set(names)) == len(names) and "pytest" not in names
    # The metrics of `finetune` come from an extra, so that they do not change the corpus, installed or not.
    assert not {"scikit-learn", "scipy", "joblib", "threadpoolctl"} & set(names)
