"""Texts that are taken for something else: prepared folders, semicolons, one long document, tokens of two words."""

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from d2l_bert import train_wordpiece
from d2l_bert.cli import main
from d2l_bert.tokenization.encoding import SentenceEncoder
from d2l_bert.tokenization.wordpiece import save_tokenizer


SENTENCES = [f"The {thing} is on the {place}." for thing in ("cup", "book", "pen") for place in ("table", "floor")]


@pytest.fixture
def parts(tmp_path):
    """Prepared parts `parts/0` and `parts/1` with one tokenizer, of texts named `0` and `1`; `other` with another."""
    for number in range(2):
        folder = tmp_path / "texts" / str(number)
        folder.mkdir(parents=True)
        for text in range(30):
            (folder / f"{text}.txt").write_text("\n\n".join(SENTENCES[text % 3 + number :] + [f"Text {text}."]))
    prepare = ["prepare", "--vocab_size=120"]
    assert main([*prepare, f"--corpus={tmp_path / 'texts/0'}", f"--output_dir={tmp_path / 'parts/0'}"]) == 0
    same = f"--tokenizer={tmp_path / 'parts/0'}"
    assert main(["prepare", f"--corpus={tmp_path / 'texts/1'}", f"--output_dir={tmp_path / 'parts/1'}", same]) == 0
    other = ["--vocab_size=80", f"--corpus={tmp_path / 'texts/1'}", f"--output_dir={tmp_path / 'other'}"]
    assert main(["prepare", *other]) == 0
    return tmp_path / "parts"


def test_parts_that_do_not_go_together_are_refused_by_check(parts, fails, capsys):
    assert main(["prepare", "--check", str(parts / "0"), str(parts / "1")]) == 0
    assert "its tokenizer is not that of" in fails("prepare", "--check", parts / "0", parts.parent / "other")


@pytest.mark.parametrize(
    "command", ["pretrain --max_steps 1 --output_dir OUT", "evaluate MODEL", "prepare --output_dir OUT"]
)
def test_a_folder_of_prepared_folders_is_not_read_as_text(parts, trained, tmp_path, fails, command):
    words = command.replace("OUT", str(tmp_path / "out")).replace("MODEL", str(trained)).split()
    said = fails(*words, "--corpus", parts)
    assert "a prepared folder, not text" in said and not (tmp_path / "out").exists()


def test_a_prepared_folder_is_no_text_to_evaluate_on(parts, trained, fails):
    assert "a prepared folder, not text" in fails("evaluate", trained, "--corpus", parts / "0")


def test_a_table_separated_by_semicolons_is_told_so(trained, tmp_path, fails):
    (tmp_path / "a.csv").write_text("text;label\n" + "anna left;0\nboris came;1\n" * 5)
    for command in (
        f"finetune {trained} --task classification --train_file {tmp_path / 'a.csv'}",
        f"pretrain --corpus {tmp_path / 'a.csv'} --max_steps 1",
    ):
        assert "text;label" in fails(*command.split(), "--output_dir", tmp_path / "out")


def test_a_document_of_many_short_paragraphs_is_said_to_count_by_blocks(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("\n\n".join(f"Sentence number {n} is short." for n in range(960)))
    assert (
        main(["prepare", f"--corpus={tmp_path / 'one.txt'}", f"--output_dir={tmp_path / 'out'}", "--vocab_size=90"])
        == 0
    )
    assert "30 blocks of sentences that count as documents" in capsys.readouterr().err


def test_an_added_token_of_two_words_is_encoded_in_training_as_in_use(tmp_path):
    tokenizer = train_wordpiece(SENTENCES, min_frequency=1)
    tokenizer.add_tokens([AddedToken("the table", normalized=True)])
    save_tokenizer(tokenizer, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids, lengths, _ = SentenceEncoder(tokenizer.backend_tokenizer.to_str())(SENTENCES)
    expected = [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in SENTENCES]
    assert ids.tolist() == sum(expected, []) and lengths.tolist() == list(map(len, expected))
    assert tokenizer.convert_tokens_to_ids("the table") in ids
