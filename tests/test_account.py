"""What is said of a text before training: short enough to be read, with its beginnings and what is odd in it."""

import dataclasses
import json
import unicodedata

import pytest

from d2l_bert.__main__ import main
from d2l_bert.model_cards.checks import published_files
from d2l_bert.tokenization.account import ACCOUNT_FILE, LATER_LINES, MOST_LINES, WIDTH, Account, packed
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.odd_words import (
    count_capital_sigmas,
    count_compatible,
    count_decomposed,
    count_entities,
    count_escapes,
    count_mojibake,
    count_reversed,
    count_spelled_twice,
    count_tags,
    count_twins,
    count_two_alphabets,
    count_types_of_case,
    count_zawgyi,
)
from d2l_bert.tokenization.prepare import prepare


@pytest.fixture
def logged(caplog):
    caplog.set_level("INFO", "d2l_bert")
    return caplog


# ---------------------------------------------------------------------------------------------------------------------
# The lines


def test_few_short_lines_are_logged_and_all_are_kept(logged):
    account = Account()
    for number in range(6):
        account.say(f"{number} {'x' * 500}")
    account.keep("a detail")
    for number in range(9):
        account.remark(f"remark {number}")
    account.log_remarks()
    assert len(logged.messages) == MOST_LINES - LATER_LINES
    assert max(map(len, logged.messages)) == WIDTH
    assert logged.messages[-2:] == ["remark 2", f"6 more remarks: see {ACCOUNT_FILE}, or --full_account"]
    assert len(account.lines) == 16
    assert len(account.lines[0]) == 502


def test_the_whole_account_is_logged_if_asked(logged):
    account = Account(is_whole=True)
    account.keep("x" * 500)
    for number in range(20):
        account.remark(f"remark {number}")
    account.log_remarks()
    assert logged.messages == account.lines


def test_items_are_packed_into_lines():
    assert packed("also", [], 2) == []
    lines = packed("also", ["a" * 70, "b" * 70, "c" * 20, "d" * 70], 2)
    assert lines == [f"also: {'a' * 70}", f"also: {'b' * 70}; {'c' * 20}"]


# ---------------------------------------------------------------------------------------------------------------------
# A text


def text_of(folder, sentences, **options):
    """A prepared text of files with these sentences, one a file."""
    folder.mkdir()
    for number, sentence in enumerate(sentences):
        (folder / f"{number:03}.txt").write_text(f"{sentence}\n" * 3, encoding="utf-8")
    return prepare(TextConfig(corpus=[str(folder)], vocab_size=200, **options))


def test_beginnings_and_an_end_are_shown(tmp_path, logged):
    sentences = [f"Book {number} begins so. It goes on here. Thus it ends {number}." for number in range(30)]
    text = text_of(tmp_path / "books", sentences)
    shown = "\n".join(logged.messages)
    assert '"Book 0 begins so." ... "Thus it ends 0."' in shown
    assert '"Book 15 begins so."' in shown
    assert all(len(line) <= WIDTH for line in logged.messages)
    assert len(logged.messages) <= MOST_LINES - LATER_LINES + 1
    assert set(logged.messages) <= set(text.account)


def test_a_text_without_a_sentence_is_refused_and_not_shown(tmp_path, fails):
    """With a validation text nothing has to be held out of it, so that it is first missed by the tokenizer."""
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "check.txt").write_text("It rains. It snows. It pours. It hails.\n" * 5)
    texts = [f"--corpus={tmp_path / 'empty.txt'}", f"--validation_corpus={tmp_path / 'check.txt'}"]
    assert "empty.txt" in fails("pretrain", *texts, f"--output_dir={tmp_path / 'run'}", "--license=mit")


def test_the_account_enters_no_record(tmp_path):
    text = text_of(tmp_path / "books", [f"Secret {number} word." for number in range(30)])
    assert any("Secret" in line for line in text.account)
    assert "Secret" not in json.dumps(text.counts())
    assert "Secret" not in text.summary()


def test_all_that_a_run_prints_before_training_is_short(tmp_path, capsys):
    """A folder with all that is said: files left out, odd lines, damaged words, a validation text, a loss left out."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        words = " ".join(f"word{number * 7 + place}" for place in range(8))
        odd = f"<p>\x1b[31m\n{words}. Das ist fÃ¼r GrÃ¶ÃŸe &quot;ﬁ&quot; aBc\x0bdEf.\n</p>\n{number}\n{words} Wort-\n"
        (folder / f"{number:02}.txt").write_text(odd * 4, encoding="utf-8")
    (folder / "notes.rst").write_text("Not read.")
    options = ["--max_steps=2", "--vocab_size=200", "--max_seq_length=32", "--attention_init=bigrams", "--license=mit"]
    sizes = ["--hidden_size=16", "--num_hidden_layers=1", "--num_attention_heads=2", "--intermediate_size=16"]
    texts = [f"--corpus={folder}", f"--validation_corpus={folder / '00.txt'}", f"--output_dir={tmp_path / 'run'}"]
    assert main(["pretrain", *texts, *options, *sizes]) == 0
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    before_training = printed.partition("step ")[0].splitlines()
    assert len(before_training) <= MOST_LINES
    assert max(map(len, before_training)) <= WIDTH
    account = (tmp_path / "run" / ACCOUNT_FILE).read_text(encoding="utf-8")
    assert r"\x0b" in account
    assert "\x0b" not in account
    assert r"\x1b" in account
    assert "\x1b" not in account
    assert ACCOUNT_FILE not in published_files(tmp_path / "run")
    for record in ("run_config.json", "metrics.json", "README.md", "training_log.jsonl"):
        assert "word17" not in (tmp_path / "run" / record).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "sentence, said",
    [
        ("Das ist fÃ¼r GrÃ¶ÃŸe.", "Windows-1252"),
        ("He said &quot;no&quot; to it.", "entities"),
        ("ေမာင္ေလး သြားသည္။", "Zawgyi"),
        ("Ο ΔΡΟΜΟΣ ΕΙΝΑΙ.", "δρομοσ"),
        ("The ﬁsh and the fish.", "NFKC"),
        ("Pete\u0301r cafe\u0301.", "NFD"),
        (unicodedata.normalize("NFD", "비가 갑니다."), "NFD"),
        ("It rains.<br /><br />It snows.", "tags"),
        (r"It rains.\n\nIt snows in Orl\u00e9ans.", "escapes"),
        ("Petrică ştie şi știe.", "rarer"),
        ("این یک كتاب کتاب.", "rarer"),
        ("Мoя тётя.", "alike"),
        (".םילשורי לא הלע דליה", "backwards"),
        ("Ïðèâåò, ìèð.", "encoding"),
        ("स\u0921\u093cक स\u095cक है।", "NFC"),
    ],
)
def test_what_is_odd_in_words_is_said_with_what_mends_it(sentence, said, tmp_path, logged):
    sentences = [f"{sentence} {number}." for number in range(24)]
    text_of(tmp_path / "odd", sentences)
    assert any(said in line for line in logged.messages)
    logged.clear()
    plain = "Das ist für Größe, Wörter <3. Ο δρόμος, मोन ကောင်း. Моя тётя știe, AI-модель. הילד עלה. น้ำ. 비가. C:\\neu."
    text_of(tmp_path / "plain", [f"{plain} {number}." for number in range(24)])
    assert not any(said in line for line in logged.messages)


# ---------------------------------------------------------------------------------------------------------------------
# Odd words


def test_odd_words_are_counted():
    assert count_mojibake({"fÃ¼r": 3, "für": 5, "“Hi”": 2, "NÃO": 1, "â€œHi": 4}) == 7
    for encoding in ("latin-1", "cp1251", "mac_roman"):
        word = "Größe" if encoding != "cp1251" else "Ёлки"
        assert count_mojibake({word.encode().decode(encoding): 3, word: 5, "№С°": 1, "√2": 1, "Ні": 2}) == 3
    assert count_mojibake({"Привет".encode("cp1251").decode("cp1252"): 3, "çà": 1, "Œuvré": 1}) == 3
    assert count_entities({"&quot;no&quot;": 2, "AT&T": 5, "a;&b": 1, "&#39;s": 3, "&#xe9;": 1}) == 6
    assert count_zawgyi({"ေမာင္ေလး": 2, "မောင်လေး": 3, "ကျောင်း": 1, "ပြေး": 1, "ဩဇာ": 1}) == 2
    assert count_capital_sigmas({"ΔΡΟΜΟΣ": 2, "ΔΡΟΜΟΣ,": 1, "δρόμος": 3, "Σ": 4, "ΣΑΣΑ": 1}) == 3
    assert (
        count_tags({"rains.<br": 2, "/><br": 1, "</p>It": 3, "<unk>": 1, "[SEP]": 1, "<3": 9, "a<b>c": 1, "f[i]": 9})
        == 9
    )
    assert (
        count_escapes({r"rains.\nIt": 2, r"caf\u00e9": 1, r"\nu": 5, r"C:\new": 5, r'"no\n"': 5, r"\section": 5}) == 3
    )
    assert count_two_alphabets({"cлово": 2, "слово": 3, "word": 3, "IT-отдел": 4}) == 2
    assert count_twins({"şi": 2, "și": 5, "ţara": 1, "یک": 9}) == 2
    assert count_reversed({"םלש": 2, "שלם": 3, "(ץע": 1, "ם": 4}) == 3
    assert count_decomposed({"cafe\u0301": 2, "caf\u00e9": 3, "\u0921\u093c": 4}) == 2
    assert count_types_of_case({"US": 1, "us": 2, "Us": 1, "them": 5}) == 2


def test_words_in_two_spellings_are_counted():
    composed = "caf\u00e9"
    decomposed = "cafe\u0301"
    assert count_spelled_twice({composed: 5, decomposed: 2, "cafe": 7}) == 2
    assert count_spelled_twice({composed: 5, "cafe": 7}) == 0
    assert count_spelled_twice({decomposed: 5}) == 0
    assert count_spelled_twice({"\u095c": 2, "\u0921\u093c": 3}) == 2  # both are the letter RRA


def test_letters_of_other_forms_are_counted():
    assert (
        count_compatible({"ﬁsh": 2, "fish": 9, "ＡＢ": 1, "１９": 4, "x…": 8, "m²": 3, "café": 5, "cafe\u0301": 6})
        == 7
    )
    assert count_compatible({"น้ำ": 2, "ຄຳ": 3}) == 0  # the vowel AM of Thai and Lao is no variant


def test_the_option_is_no_part_of_a_text():
    options = TextConfig().token_options()
    assert "full_account" not in options
    assert dataclasses.replace(TextConfig(), full_account=True).token_options() == options
