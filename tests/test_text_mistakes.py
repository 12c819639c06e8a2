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


def test_an_added_token_of_two_words_is_encoded_in_training_as_in_use(tmp_path):
    tokenizer = train_wordpiece(SENTENCES, min_frequency=1)
    tokenizer.add_tokens([AddedToken("the table", normalized=True)])
    save_tokenizer(tokenizer, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids, lengths, _ = SentenceEncoder(tokenizer.backend_tokenizer.to_str())(SENTENCES)
    expected = [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in SENTENCES]
    assert ids.tolist() == sum(expected, []) and lengths.tolist() == list(map(len, expected))
    assert tokenizer.convert_tokens_to_ids("the table") in ids
