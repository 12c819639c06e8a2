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

# What is recorded of each text, and the constants that name it in the cache.
RECORDED = {
    "rows": ["TEXT_FORMAT"],
    "tables": ["TEXT_FORMAT"],
    "vocabulary": ["TOKENIZER_FORMAT"],
    "tokens": ["ENCODING_FORMAT", "STORE_FORMAT"],
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
    rows += ["", " "]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
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
PIECES += ["smith", "the", "##es", "sentence", "table", "café", "cafe", "…", "“", *"老师说号学生。"]


def measured(name: str, folder: Path) -> dict[str, str]:
    """The SHA-256 of what is made of a text, by the names in `RECORDED`."""
    write, language = TEXTS[name]
    write(folder / name)
    text = TextStore(prepare_text([file_source(folder / name)], language, folder / "cache"))
    tables = {key: getattr(text, key).tolist() for key in ("sources", "characters", "hashes")}
    tables["documents"] = text.document_of_block.tolist()
    tables |= {"source_count": text.source_count, "reading": text.reading}
    # Every sentence but those of two documents, in the order of the text.
    vocabulary = train_wordpiece(text.part(~np.isin(np.arange(len(text)), (1, 3))), vocab_size=300)
    tokenizer = make_tokenizer(PIECES, Rules(lowercase=False))
    tokens = TokenizedCorpus(encoding.prepare_tokens(text.part(), tokenizer, folder / "cache"))
    rows = [text.file.get_batch(number).to_pydict() for number in range(text.file.num_record_batches)]
    return {
        "rows": sha256(rows),
        "tables": sha256(tables),
        "vocabulary": sha256(vocabulary.convert_ids_to_tokens(range(len(vocabulary)))),
        "tokens": tokens.fingerprint,
    }


def sha256(values):
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def made_with() -> dict[str, dict]:
    """The formats of today, and the versions of what a text's sentences and tokens follow from."""
    libraries = {name: importlib.metadata.version(name) for name in ("sentencex", "tokenizers")}
    return {
        "formats": {
            "TEXT_FORMAT": text_store.TEXT_FORMAT,
            "STORE_FORMAT": token_store.STORE_FORMAT,
            "ENCODING_FORMAT": encoding.ENCODING_FORMAT,
            "TOKENIZER_FORMAT": prepare.TOKENIZER_FORMAT,
        },
        "versions": {**libraries, "unicode": unicodedata.unidata_version},
    }


# ---------------------------------------------------------------------------------------------------------------------
# The check


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_gives_what_is_recorded(text, tmp_path):
    recorded = json.loads(RECORD.read_text())
    today = made_with()
    if today["versions"] != recorded["versions"]:
        pytest.skip(f"recorded with {recorded['versions']}, and {today['versions']} are installed")
    assert today["formats"] == recorded["formats"], "record anew with `python tests/test_formats.py`"
    found = measured(text, tmp_path)
    changed = [
        f"the {name} of a text (raise {' or '.join(formats)} by 1)"
        for name, formats in RECORDED.items()
        if found[name] != recorded["texts"][text][name]
    ]
    assert not changed, (
        f"{', '.join(changed)} are not what {RECORD.name} says: old caches and checkpoints would be taken for new "
        f"ones. If that is meant, raise the constants, then record anew with `python tests/test_formats.py`"
    )


def write_record() -> None:
    """Write `recorded_formats.json` anew."""
    with tempfile.TemporaryDirectory() as folder:
        for text in TEXTS:
            (Path(folder) / f"of-{text}").mkdir()
        texts = {text: measured(text, Path(folder) / f"of-{text}") for text in TEXTS}
    RECORD.write_text(json.dumps({**made_with(), "texts": texts}, indent=2) + "\n")


if __name__ == "__main__":
    write_record()
    print(f"recorded {', '.join(TEXTS)} in {RECORD}")
