"""What is made of a text is recorded: other content under the same format fails, and names follow from no source code.

If a change is meant to give other sentences, ids or entries, raise the constant that the failure names, then record:

    python tests/test_formats.py
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL
from huggingface_hub import constants

import d2l_bert
from d2l_bert import model_cards, modeling, tokenization, training
from d2l_bert.cli import main
from d2l_bert.tokenization import encoding, prepare, sentences, text_store, token_store, wordpiece
from d2l_bert.tokenization.cache import fingerprint
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.sentences import Cleaning
from d2l_bert.tokenization.sources import file_source
from d2l_bert.tokenization.text_store import SentenceSample, TextStore, prepare_text
from d2l_bert.tokenization.token_store import TokenizedCorpus
from d2l_bert.tokenization.wordpiece import make_tokenizer, train_wordpiece


RECORD = Path(__file__).with_name("recorded_formats.json")
RECORD_ANEW = "record anew with `python tests/test_formats.py`"

# What is recorded of each text, the constants that it is named by, and the versions that it follows from.
RECORDED = {
    "rows": (["TEXT_FORMAT"], ["sentencex", "unicode"]),
    "tables": (["TEXT_FORMAT"], ["sentencex", "unicode"]),
    "vocabulary": (["TOKENIZER_FORMAT"], ["sentencex", "unicode", "tokenizers"]),
    "tokens": (["ENCODING_FORMAT", "STORE_FORMAT"], ["sentencex", "unicode", "tokenizers"]),
}

# ---------------------------------------------------------------------------------------------------------------------
# The texts


def write_english(folder):
    """25 text files, a table of rows with paragraphs, a table of single lines, a long sentence, empty texts."""
    folder.mkdir()
    for number in range(25):
        paragraphs = [
            f"Dr. Smith met No. {number} at 3.30 p.m. on the {number}th. He said: “Is it {number}.5?” It was not!",
            "A short one.",
            f"The café at the ﬁrst corner (see fig. {number}) sells tea, e.g. green tea... and nothing else?  Yes.",
        ]
        (folder / f"{number:02d}.txt").write_text("\n\n".join(paragraphs[: number % 4]) + "\n", encoding="utf-8")
    (folder / "long.md").write_text("A sentence that " + "goes on and on, " * 200 + "ends here.\n\nAnd one more.\n")
    rows = [f"Row {number} has two paragraphs.\n\nThis is the second. It ends." for number in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in [*rows, "", " "]))
    lines = [f"Line {number} of a table; it has one line." for number in range(200)]
    (folder / "table.csv").write_text("\n".join(["text", *lines]) + "\n")


def write_chinese(folder):
    """Few documents: each block of sentences then counts as one."""
    folder.mkdir()
    for number in range(3):
        text = [f"第{place}章。老师说：“今天是{number}号！”学生问了{place}次？没有人回答。\n" for place in range(60)]
        (folder / f"{number}.txt").write_text("\n".join(text), encoding="utf-8")


TEXTS = {  # how each is written, its language, and how it is cleaned
    "english": (write_english, "en", Cleaning()),
    "cleaned": (write_english, "en", Cleaning("NFKC", 20, True)),
    "chinese": (write_chinese, "zh", Cleaning("NFC")),
}

# A fixed vocabulary, so that ids do not depend on how a vocabulary is trained.
PIECES = [*wordpiece.SPECIAL_TOKENS, *map(chr, range(33, 127)), *(f"##{chr(code)}" for code in range(97, 123))]
PIECES += [
    "smith",
    "the",
    "##es",
    "sentence",
    "table",
    "café",
    "cafe",
    "…",
    "“",
    "老",
    "师",
    "说",
    "号",
    "学",
    "生",
    "。",
]


def measured(name: str, folder: Path) -> dict[str, str]:
    """The SHA-256 of what is made of a text, by the names in `RECORDED`."""
    write, language, cleaning = TEXTS[name]
    write(folder / name)
    text = TextStore(prepare_text([file_source(folder / name)], language, cleaning, folder / "cache"))
    tables = {key: getattr(text, key).tolist() for key in ("document_ends", "document_characters", "text_hashes")}
    tables |= {"source_ends": text.source_ends, "reading": text.reading}
    # Every sentence but those of two documents, in the order of the text.
    vocabulary = train_wordpiece(SentenceSample(text, np.array([1, 3]), leave_out=True), vocab_size=300)
    tokens = TokenizedCorpus(encoding.prepare_tokens(text, make_tokenizer(PIECES, lowercase=False), folder / "cache"))
    return {
        "rows": sha256([[row[key] for key in sorted(row)] for row in text.rows()]),
        "tables": sha256(tables),
        "vocabulary": sha256(vocabulary.convert_ids_to_tokens(range(len(vocabulary)))),
        "tokens": tokens.fingerprint(),
    }


def sha256(values):
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def formats() -> dict[str, int]:
    return {
        "TEXT_FORMAT": text_store.TEXT_FORMAT,
        "STORE_FORMAT": token_store.STORE_FORMAT,
        "ENCODING_FORMAT": encoding.ENCODING_FORMAT,
        "TOKENIZER_FORMAT": prepare.TOKENIZER_FORMAT,
    }


def versions() -> dict[str, str]:
    libraries = {name: importlib.metadata.version(name) for name in ("sentencex", "tokenizers")}
    return {**libraries, "unicode": unicodedata.unidata_version}


# ---------------------------------------------------------------------------------------------------------------------
# The check


def other_version(name: str, recorded: dict) -> str | None:
    """A line about the first installed version that `name` follows from and that is not the recorded one."""
    for library in RECORDED[name][1]:
        if versions()[library] != recorded["versions"][library]:
            return f"recorded with {library} {recorded['versions'][library]}, and {versions()[library]} is installed"
    return None


def difference(name: str, found: str, before: str, recorded: dict) -> str | None:
    """What to do about content, or a format, that is not the recorded one; None if all is as recorded."""
    its_formats = RECORDED[name][0]
    raised = [key for key in its_formats if formats()[key] != recorded["formats"][key]]
    if raised:
        return (
            f"{raised[0]} is {formats()[raised[0]]}, and {recorded['formats'][raised[0]]} is recorded; {RECORD_ANEW}"
        )
    if found != before:
        return (
            f"the {name} of a text are not what {RECORD.name} says: old caches and checkpoints would be taken for new "
            f"ones. If that is meant, raise {' or '.join(its_formats)} by 1, then {RECORD_ANEW}"
        )
    return None


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_gives_what_is_recorded(text, tmp_path):
    recorded = json.loads(RECORD.read_text())
    found = measured(text, tmp_path)
    compared = [name for name in RECORDED if not other_version(name, recorded)]
    for name in compared:
        message = difference(name, found[name], recorded["texts"][text][name], recorded)
        assert message is None, message
    if len(compared) < len(RECORDED):
        pytest.skip(next(filter(None, (other_version(name, recorded) for name in RECORDED))))


def split_otherwise(monkeypatch):
    segment = sentences.sentencex.segment

    def otherwise(language, paragraph):  # the last sentence of each paragraph together with the one before
        *first, last = segment(language, paragraph)
        return [*first[:-1], " ".join([*first[-1:], last])]

    monkeypatch.setattr(sentences.sentencex, "segment", otherwise)


@pytest.fixture
def recorded_now(tmp_path_factory):
    """A record made here, so that the tests below do not depend on the installed versions."""
    texts = {text: measured(text, tmp_path_factory.mktemp(text)) for text in TEXTS}
    return {"formats": formats(), "versions": versions(), "texts": texts}


def test_another_splitting_of_sentences_is_noticed(recorded_now, tmp_path, monkeypatch):
    split_otherwise(monkeypatch)
    for text in TEXTS:
        found, before = measured(text, tmp_path), recorded_now["texts"][text]
        said = difference("rows", found["rows"], before["rows"], recorded_now)
        assert "raise TEXT_FORMAT by 1, then record anew with `python tests/test_formats.py`" in said
        shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(text_store, "TEXT_FORMAT", text_store.TEXT_FORMAT + 1)
    said = difference("rows", found["rows"], before["rows"], recorded_now)
    assert said.startswith("TEXT_FORMAT is ") and said.endswith(RECORD_ANEW)


def cut_long_sentences_elsewhere(monkeypatch):
    monkeypatch.setattr(sentences, "LONGEST_SENTENCE", 900)


def write_continuations_otherwise(monkeypatch):
    monkeypatch.setattr(wordpiece, "CONTINUATION", "@@")


def encode_otherwise(monkeypatch):
    encode = encoding.SentenceEncoder.__call__

    def backwards(encoder, sentences):
        ids, lengths, words = encode(encoder, sentences)
        return ids[::-1].copy(), lengths, words

    monkeypatch.setattr(encoding.SentenceEncoder, "__call__", backwards)


@pytest.mark.parametrize(
    "change, name, constants_to_raise",
    [
        (cut_long_sentences_elsewhere, "rows", "TEXT_FORMAT"),
        (write_continuations_otherwise, "vocabulary", "TOKENIZER_FORMAT"),
        (encode_otherwise, "tokens", "ENCODING_FORMAT or STORE_FORMAT"),
    ],
)
def test_other_content_is_noticed_and_says_which_constant_to_raise(
    recorded_now, change, name, constants_to_raise, tmp_path, monkeypatch
):
    change(monkeypatch)
    found, before = measured("english", tmp_path), recorded_now["texts"]["english"]
    assert f"raise {constants_to_raise} by 1" in difference(name, found[name], before[name], recorded_now)
    if name != "rows":
        assert difference("rows", found["rows"], before["rows"], recorded_now) is None


# ---------------------------------------------------------------------------------------------------------------------
# Names in the cache


def names(home):
    return {path.name for path in (home / "d2l_bert").glob("t*-*")}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_raised_text_format_makes_the_text_anew_and_refuses_a_checkpoint_on_other_text(
    books, home, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    run = ["pretrain", f"--corpus={books}", f"--output_dir={out}", "--max_steps=4", "--save_steps=2", *SMALL]
    assert main(run) == 0
    weights, before = (out / "model.safetensors").read_bytes(), names(home)
    assert {name.partition("-")[0] for name in before} == {"text", "tokenizer", "tokens"}
    monkeypatch.setattr(text_store, "TEXT_FORMAT", text_store.TEXT_FORMAT + 1)
    # The same sentences, made anew: a checkpoint is named by its tokens, and the run goes on.
    shutil.rmtree(out / "checkpoint-4")
    resume = [*run, "--resume_from_checkpoint=latest"]
    assert main(resume) == 0
    assert len(names(home)) == 2 * len(before) and names(home) > before
    assert (out / "model.safetensors").read_bytes() == weights
    # Other sentences: the checkpoint is refused by name.
    monkeypatch.setattr(text_store, "TEXT_FORMAT", text_store.TEXT_FORMAT + 1)
    split_otherwise(monkeypatch)
    shutil.rmtree(out / "checkpoint-4")
    capsys.readouterr()
    assert main(resume) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{out / 'checkpoint-2'}: a checkpoint of another run: corpus (fingerprint) was " in said


@pytest.mark.parametrize(
    "module, constant, made_anew",
    [
        (text_store, "TEXT_FORMAT", {"text", "tokenizer", "tokens"}),
        (prepare, "TOKENIZER_FORMAT", {"tokenizer"}),
        (encoding, "ENCODING_FORMAT", {"tokens"}),
        (encoding, "STORE_FORMAT", {"tokens"}),
    ],
)
def test_a_raised_format_makes_anew_what_follows_from_it(module, constant, made_anew, books, home, monkeypatch):
    run = TextConfig(corpus=[str(books)], vocab_size=300)
    prepare.prepare(run)
    before = names(home)
    monkeypatch.setattr(module, constant, getattr(module, constant) + 1)
    prepare.prepare(run)
    assert {name.partition("-")[0] for name in names(home) - before} == made_anew


def test_the_text_is_named_by_the_versions_that_sentences_follow_from(books, home, monkeypatch):
    run = TextConfig(corpus=[str(books)], vocab_size=300)
    prepare.prepare(run)
    before, version = names(home), importlib.metadata.version
    for library, made_anew in (
        ("sentencex", {"text", "tokenizer", "tokens"}),
        ("tokenizers", {"tokenizer", "tokens"}),
    ):
        monkeypatch.setattr(importlib.metadata, "version", _other(version, library))
        prepare.prepare(run)
        assert {name.partition("-")[0] for name in names(home) - before} == made_anew
        monkeypatch.setattr(importlib.metadata, "version", version)
        before = names(home)


def _other(version, library):
    return lambda name: "0.0.1" if name == library else version(name)


_opened = []
_watching = False


def _note(event, arguments):
    if _watching and event == "open" and isinstance(arguments[0], (str, bytes, Path)):
        _opened.append(os.fsdecode(arguments[0]))


def test_no_source_file_is_read_while_a_text_is_prepared(books, home, monkeypatch):
    global _watching
    run = TextConfig(corpus=[str(books)], vocab_size=300, preprocessing_num_workers=1)
    prepare.prepare(run)  # imports what is imported late
    shutil.rmtree(home)
    sys.addaudithook(_note)
    _watching = True
    try:
        prepare.prepare(run)
    finally:
        _watching = False
    assert any(path.endswith("ids.npy") for path in _opened)  # files are seen
    assert [path for path in _opened if Path(path).suffix in (".py", ".pyc")] == []


PREPARE = """
import sys
import d2l_bert
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.prepare import prepare
prepare(TextConfig(corpus=[sys.argv[1]], vocab_size=300))
print(d2l_bert.__file__)
"""


@pytest.mark.slow
def test_comments_in_every_file_of_the_package_change_no_name_in_the_cache(books, home, tmp_path):
    prepare.prepare(TextConfig(corpus=[str(books)], vocab_size=300))
    copy = tmp_path / "site" / "d2l_bert"
    shutil.copytree(Path(d2l_bert.__file__).parent, copy)
    for package in (tokenization, training, modeling, model_cards):
        folder = Path(next(iter(package.__path__)))
        shutil.copytree(folder, copy / folder.name)
    files = list(copy.rglob("*.py"))
    assert len(files) > 70
    for file in files:
        file.write_text(file.read_text() + "\n# One more comment.\n")
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "HF_HOME": str(tmp_path / "other")}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(books)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == copy
    assert names(tmp_path / "other") == names(home) and len(names(home)) == 3


def test_the_identity_of_python_docs_names_the_versions_of_python_and_of_its_packages(monkeypatch):
    source = file_source("python-docs")
    assert source.identity[:2] == ["python-docs", platform.python_version()]
    packages = source.identity[2]
    for package in ("torch", "numpy", "transformers", "tokenizers", "datasets", "accelerate"):
        assert packages[package] == importlib.metadata.version(package)
    assert "d2l-bert" not in packages and "pytest" not in packages
    before = fingerprint(source.identity)
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    assert fingerprint(file_source("python-docs").identity) != before
    monkeypatch.undo()
    assert fingerprint(file_source("python-docs").identity) == before
    version = importlib.metadata.Distribution.version.fget
    monkeypatch.setattr(
        importlib.metadata.Distribution,
        "version",
        property(lambda package: "0.0.1" if package.metadata["Name"] == "torch" else version(package)),
    )
    after = file_source("python-docs").identity
    assert after[2] == {**packages, "torch": "0.0.1"} and fingerprint(after) != before


def write_record() -> None:
    """Write `recorded_formats.json` anew."""
    with tempfile.TemporaryDirectory() as folder:
        texts = {}
        for text in TEXTS:
            (Path(folder) / f"of-{text}").mkdir()
            texts[text] = measured(text, Path(folder) / f"of-{text}")
    record = {"formats": formats(), "versions": versions(), "texts": texts}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    write_record()
    print(f"recorded {', '.join(TEXTS)} in {RECORD}")
