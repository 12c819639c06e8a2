"""What is made of a text is recorded: other content under the same format fails.

If a change is meant to give other sentences, ids or entries, raise the constant that the failure names, then record:

    python tests/test_formats.py
"""

import hashlib
import importlib.metadata
import json
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from d2l_bert.tokenization import encoding, prepare, text_store, token_store, wordpiece
from d2l_bert.tokenization.rules import Rules
from d2l_bert.tokenization.sources import file_source
from d2l_bert.tokenization.text_store import TextStore, prepare_text
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


TEXTS = {"english": (write_english, "en"), "chinese": (write_chinese, "zh")}  # how each is written, its language

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
    write, language = TEXTS[name]
    write(folder / name)
    text = TextStore(prepare_text([file_source(folder / name)], language, folder / "cache"))
    tables = {key: getattr(text, key).tolist() for key in ("documents", "sources", "characters", "hashes")}
    tables |= {"source_count": text.source_count, "reading": text.reading}
    # Every sentence but those of two documents, in the order of the text.
    vocabulary = train_wordpiece(text.part(~np.isin(np.arange(len(text)), (1, 3))), vocab_size=300)
    tokenizer = make_tokenizer(PIECES, Rules(lowercase=False))
    tokens = TokenizedCorpus(encoding.prepare_tokens(text.part(), tokenizer, folder / "cache"))
    return {
        "rows": sha256([text.file.get_batch(number).to_pydict() for number in range(text.file.num_record_batches)]),
        "tables": sha256(tables),
        "vocabulary": sha256(vocabulary.convert_ids_to_tokens(range(len(vocabulary)))),
        "tokens": tokens.fingerprint,
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


# ---------------------------------------------------------------------------------------------------------------------
# Names in the cache


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
