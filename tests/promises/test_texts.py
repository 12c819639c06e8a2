"""Text to tokens: a stock tokenizer, the same bytes for the same text, parts, streams, weights of sources, formats."""

import gzip
import json
import re
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining, train_wordpiece

from .driving import (
    PLACES,
    SMALL,
    SPECIALS,
    command,
    python,
    read_json,
    watched,
    weights_of,
    whole_ids,
    write_books,
    write_numbered,
    write_numbered_tokenizer,
)


def test_the_tokenizer_is_stock_and_splits_as_wordpiece_is_defined(model, texts):
    """Lower case, punctuation apart, then the longest piece first (Wu et al., 2016), written out here."""
    settings = read_json(model / "tokenizer_config.json")
    assert settings["tokenizer_class"] == "BertTokenizer" and "auto_map" not in settings
    vocabulary = (model / "vocab.txt").read_text().splitlines()
    number = {piece: n for n, piece in enumerate(vocabulary)}
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.get_vocab() == number and vocabulary[:5] == SPECIALS

    def pieces(word):
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in number:
                    found.append(piece)
                    start = end
                    break
            else:
                return ["[UNK]"]
        return found

    text = (texts / "book-03.txt").read_text() + " Zebras' quizzes, undreamt-of!"
    expected = [piece for word in re.findall(r"\w+|[^\w\s]", text.lower()) for piece in pieces(word)]
    assert tokenizer.tokenize(text) == expected


# What lower-casing, stripping marks, WordPiece's 100 characters, or a small alphabet would lose.
LETTERS = {
    "vietnamese": ("Ma má mà mả mã mạ.", "Bạn bán bàn này rồi."),
    "khmer": ("ខ្ញុំ\u200bទៅ\u200bផ្សារ។", "គាត់\u200bអាន\u200bសៀវភៅ។"),
    "persian": ("می\u200cخواهم کتاب\u200cها را.", "نمی\u200cدانم."),
    "dna": ("ACGTTGCA" * 40, "GATTACAG" * 30),
    "chinese": ("".join(map(chr, range(0x4E00, 0x4E00 + 1500))), "人山人海"),
}


@pytest.mark.parametrize("kind", LETTERS)
def test_what_is_read_is_what_is_trained_on(kind, tmp_path):
    """By default every character of a text, in lower case, is in the tokens of a step, and no token is [UNK]."""
    lines = [f"{line} {line[: 1 + number]}" for line in LETTERS[kind] for number in range(20)]  # no two are equal
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    sizes = [option for option in SMALL if "vocab_size" not in option]
    words = ["pretrain", "--corpus", tmp_path / "text.txt", "--output_dir", tmp_path / "run", "--max_steps=8"]
    with watched(D2lBertForMaskedLM) as (trained, _):
        assert command(*words, *sizes, "--objective=none", "--global_batch_size=64", "--license=mit") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    seen = {letter for batch in trained for id in whole_ids(batch).unique() for letter in decoded(tokenizer, id)}
    assert set("".join(lines).lower()) - seen <= {" ", "\u200b"}
    assert tokenizer.unk_token_id not in torch.cat([whole_ids(batch).flatten() for batch in trained])
    said = read_json(tmp_path / "run" / "run_config.json")["data"]["account"]
    assert said["unknown_characters"] == said["dropped_marks"] == said["merged_types"] == 0


def decoded(tokenizer, token_id):
    return tokenizer.convert_ids_to_tokens(int(token_id)).replace("##", "")


def test_what_a_tokenizer_loses_is_said(texts, model, tmp_path, capsys):
    """The books' tokenizer knows none of these words; they are counted by hand, and nothing is trained."""
    (tmp_path / "text.txt").write_text("Ωμέγα Δέλτα. Anna met Ωμέγα.\n" * 30, encoding="utf-8")
    words = ["--corpus", tmp_path / "text.txt", "--tokenizer", model, "--output_dir", tmp_path / "out"]
    assert command("pretrain", *words, "--max_steps=3", "--license=mit") == 2
    assert "62.5% of the characters stand in [UNK]" in capsys.readouterr().err  # 15 of 24 in each line
    assert not (tmp_path / "out").exists()
    assert command("prepare", *words, "--max_unknown_share=1") == 0
    assert "dropped are" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tokenizer_loads_without_the_package(model):
    code = f"""
import sys
sys.modules["d2l_bert"] = None
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(model)!r}, trust_remote_code=False)
print(type(tokenizer).__name__, tokenizer("Anna met [MASK].")["input_ids"])
"""
    done = python(code)
    name, _, ids = done.stdout.strip().partition(" ")
    assert name.startswith("BertTokenizer"), done.stderr
    assert json.loads(ids) == AutoTokenizer.from_pretrained(model)("Anna met [MASK].")["input_ids"]


def test_the_same_text_gives_the_same_tokenizer(texts):
    sentences = (texts / "book-00.txt").read_text().splitlines()
    first, second = (train_wordpiece(sentences, vocab_size=120).get_vocab() for _ in range(2))
    assert first == second and 100 < len(first) <= 120


def tokens_of(folder):
    """The counts and the fingerprint of what a run or `prepare` has read."""
    data = read_json(folder / "run_config.json")["data"]
    return {
        name: data[name] for name in ("train_documents", "train_tokens", "held_out_documents", "corpus_fingerprint")
    }


RUN = [*SMALL, "--max_steps=3", "--license=mit"]


def test_a_prepared_text_trains_the_same_weights_as_the_text(texts, tmp_path, capsys):
    assert command("prepare", "--corpus", texts, "--output_dir", tmp_path / "tokens", "--vocab_size=300") == 0
    prepared = [option for option in RUN if "vocab_size" not in option]
    assert command("pretrain", "--corpus", texts, "--output_dir", tmp_path / "a", *RUN) == 0
    assert command("pretrain", "--corpus", tmp_path / "tokens", "--output_dir", tmp_path / "b", *prepared) == 0
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")
    assert tokens_of(tmp_path / "a") == tokens_of(tmp_path / "b")
    assert command("prepare", "--check", tmp_path / "tokens") == 0
    for file in sorted(path for path in (tmp_path / "tokens").rglob("*") if path.is_file()):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert command("prepare", "--check", tmp_path / "tokens") == 2, f"a changed byte in {file.name} is noticed"
        file.write_bytes(content)
    capsys.readouterr()


def test_a_corpus_in_parts_is_one_corpus(tmp_path):
    """Each part's words are in the batches of one epoch, and an epoch mixes the parts."""
    words = 0
    for part in range(3):
        words = write_numbered(tmp_path / "text" / f"part{part}", documents=25, seed=part, first=words)
    tokenizer = write_numbered_tokenizer(tmp_path / "tokenizer", words)
    for part in range(3):
        text, output = tmp_path / "text" / f"part{part}", tmp_path / "parts" / f"part{part}"
        assert command("prepare", "--corpus", text, "--tokenizer", tokenizer, "--output_dir", output) == 0
    parts = sorted((tmp_path / "parts").iterdir())
    sizes = [option for option in SMALL if "vocab" not in option and "batch" not in option]
    words_of = ["pretrain", "--corpus", *parts, "--output_dir", tmp_path / "out", *sizes, "--num_train_epochs=1"]
    with watched(D2lBertForMaskedLM) as (trained, _):
        assert (
            command(*words_of, "--objective=none", "--global_batch_size=32", "--hidden_size=8", "--license=mit") == 0
        )
    ends = [read_json(part / "prepared.json")["counts"]["train_words"] for part in parts]
    assert sum(ends) > 5000
    seen = torch.cat([whole_ids(batch).flatten() for batch in trained])
    seen = seen[(seen >= len(SPECIALS)) & (seen < words + len(SPECIALS))] - len(SPECIALS)
    data = read_json(tmp_path / "out" / "run_config.json")["data"]
    assert len(seen.unique()) / data["train_words"] > 0.99
    early = whole_ids(trained[0]).flatten()
    early = early[(early >= len(SPECIALS)) & (early < words + len(SPECIALS))] - len(SPECIALS)
    borders = [0, words // 3, 2 * words // 3, words]
    assert all(((early >= low) & (early < high)).any() for low, high in zip(borders, borders[1:], strict=False))


def test_sources_share_an_epoch_as_their_weights_say(tmp_path):
    middle = write_numbered(tmp_path / "a", documents=40, seed=1)
    words = write_numbered(tmp_path / "b", documents=40, seed=2, first=middle)
    tokenizer = write_numbered_tokenizer(tmp_path / "tokenizer", words)
    sizes = [option for option in SMALL if "vocab" not in option and "batch" not in option]
    options = ["--tokenizer", tokenizer, "--objective=none", "--global_batch_size=64", "--hidden_size=8", *sizes]
    with watched(D2lBertForMaskedLM) as (trained, _):
        words_of = ["pretrain", "--corpus", tmp_path / "a", tmp_path / "b", "--source_weights", "3", "1", *options]
        assert command(*words_of, "--num_train_epochs=2", "--output_dir", tmp_path / "out", "--license=mit") == 0
    seen = torch.cat([whole_ids(batch).flatten() for batch in trained])
    seen = seen[(seen >= len(SPECIALS)) & (seen < words + len(SPECIALS))] - len(SPECIALS)
    assert (seen < middle).float().mean().item() == pytest.approx(0.75, abs=0.05)


def test_the_same_texts_in_another_format_are_the_same_corpus(texts, tmp_path):
    """Text files, packed files, and rows of JSON Lines, CSV and Parquet, read or streamed."""
    books = [path.read_text() for path in sorted(texts.iterdir())]
    packed = tmp_path / "packed" / "texts"
    packed.mkdir(parents=True)
    for number, book in enumerate(books):
        (packed / f"book-{number:02d}.txt.gz").write_bytes(gzip.compress(book.encode()))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    table = pa.table({"text": books})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    pyarrow.csv.write_csv(table, tmp_path / "rows.csv")
    data = tmp_path / "dataset"
    data.mkdir()
    shutil.copy(tmp_path / "rows.parquet", data / "train-00000-of-00001.parquet")
    sources = [["--corpus", texts], ["--corpus", packed], ["--corpus", rows], ["--corpus", tmp_path / "rows.parquet"]]
    sources += [["--corpus", tmp_path / "rows.csv"], ["--dataset", data], ["--dataset", data, "--streaming"]]
    found = []
    for number, source in enumerate(sources):
        folder = tmp_path / f"out-{number}"
        assert command("prepare", *source, "--vocab_size=300", "--output_dir", folder) == 0
        record = read_json(folder / "prepared.json")["counts"]
        found.append((record["train_tokens"], record["held_out_tokens"], record["train_documents"]))
    assert len(set(found)) == 1 and found[0][0] > 1000


def test_a_text_of_one_s_own_is_evaluated_whole(texts, tmp_path):
    validation = write_books(tmp_path / "validation", 20, seed=9)
    shutil.copy(texts / "book-05.txt", validation / "same.txt")
    words = ["pretrain", "--corpus", texts, "--validation_corpus", validation, "--output_dir", tmp_path / "out", *RUN]
    with watched(D2lBertForPreTraining):
        assert command(*words) == 0
    data = read_json(tmp_path / "out" / "run_config.json")["data"]
    assert data["train_documents"] == 24 and data["held_out_documents"] == 21
    assert data["validation"]["texts_in_training"] == 1


def test_words_of_a_new_text_extend_a_vocabulary_and_start_from_their_pieces(model, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(
            "The lantern saw the walnut. A walnut left the lantern. Nobody saw anna.\n" * (5 + number)
        )
    words = ["pretrain", "--corpus", text, "--init_from", model, "--extend_vocab=2", "--output_dir", tmp_path / "out"]
    options = [
        "--max_steps=1",
        "--learning_rate=1e-9",
        "--max_seq_length=48",
        "--length_schedule=none",
        "--license=mit",
    ]
    assert (
        command(*words, *options, "--attention_init=normal", "--global_batch_size=4", "--dataloader_num_workers=0")
        == 0
    )
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (model, tmp_path / "out"))
    assert set(new.get_vocab()) - set(old.get_vocab()) == {"lantern", "walnut"}
    before, after = (
        D2lBertForPreTraining.from_pretrained(folder).state_dict() for folder in (model, tmp_path / "out")
    )
    table = "bert.embeddings.word_embeddings.weight"
    torch.testing.assert_close(after[table][: len(old)], before[table], rtol=0, atol=1e-5)
    pieces = old("lantern", add_special_tokens=False)["input_ids"]
    mean = before[table][pieces].mean(0)
    torch.testing.assert_close(after[table][new.get_vocab()["lantern"]], mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["lines of a log", "blocks of sentences", "rows", "rows, a newline in one"])
def test_a_text_keeps_the_documents_that_it_has(kind, tmp_path):
    """Thirty documents, none cut and none joined to its neighbour, as a file or a table has them."""
    texts = [f"Day {n}: anna{' c. bell.' if n % 5 == 0 else ''} took the {PLACES[n % 8]} road" for n in range(30)]
    if kind != "lines of a log":
        texts = [f"Anna left on day {n}.\nShe took the {PLACES[n % 8]} road." for n in range(30)]
    if kind.startswith("rows"):
        texts = [text.replace("\n", "\n" if "newline" in kind and not n else " ") for n, text in enumerate(texts)]
        lines = [json.dumps({"text": text}) for text in texts]
    else:
        lines = [f"{text}\n" if kind.startswith("blocks") else text for text in texts]
    file = tmp_path / ("text.jsonl" if kind.startswith("rows") else "text.txt")
    file.write_text("\n".join(lines) + "\n")
    assert command("prepare", "--corpus", file, "--output_dir", tmp_path / "out", "--vocab_size=200") == 0
    counts = read_json(tmp_path / "out" / "prepared.json")["counts"]["reading"]
    assert counts["documents"] == 30 and not any("place of documents" in key for key in counts)
    assert counts["sentences"] == (30 if kind == "lines of a log" else 60)
