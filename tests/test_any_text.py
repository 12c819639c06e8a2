"""Text of any kind: a tokenizer keeps what tells words apart, what is lost is counted, its vocabulary is exact.

The judge is Transformers alone: the tokenizer is saved, loaded as a user loads it, and asked about each word.
"""

import random
import re
import tracemalloc
import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.coverage import coverage_of, facts_of, measure_unknown_share, remarks
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.rules import Rules, contents_of, count_words
from d2l_bert.tokenization.wordpiece import SPECIAL_TOKENS, save_tokenizer, train_on_words, train_wordpiece


RNG = random.Random(0)
ENGLISH = "The old man went down to the sea. He saw a ship and it was far away; so he sat there until evening came."


def noise(letters, words, shortest, longest):
    """Random words."""
    return " ".join("".join(RNG.choices(letters, k=RNG.randint(shortest, longest))) for _ in range(words))


# A text of each kind: sentences with what BERT's rules would lose. Written for this test, or made up of random words.
TEXTS = {
    "german": "Der schöne Vogel war schon da. Die Bären fuhren früh über die Brücke; fördern ist nicht fordern.",
    "vietnamese": "Ma má mà mả mã mạ. Bàn này bán rồi, bạn bán bàn. Dừa và dứa và dưa. Một người đã đến từ Hà Nội.",
    "vietnamese, decomposed": unicodedata.normalize("NFD", "Ma má mà mả mã mạ. Bàn này bán rồi, bạn bán bàn."),
    "greek, polytonic": "Ἐν ἀρχῇ ἦν ὁ λόγος, καὶ ὁ λόγος ἦν πρὸς τὸν θεόν. ὃ ἦν ὅ, ἡ ἢ ἤ, οὗ οὐ οὔ.",
    "russian": "Мой дом стоит у реки. Его и ее мы знаем; все ещё всё, чей-то край и крайний, й не и.",
    "turkish": "Işık ısık değil, çok güzel bir gün. Kuş uçtu, kus dedi; oldu öldü, acı açı.",
    "arabic with vowel points": "عَلِمَ عُلِمَ عِلْم عَلَّمَ. كَتَبَ كُتِبَ كُتُب. ذَهَبَ الوَلَدُ إِلَى المَدْرَسَةِ.",
    "hebrew with points": "סֵפֶר סַפָּר סִפֵּר. דָּבָר דִּבֵּר דֶּבֶר.",
    "persian": "می\u200cخواهم کتاب\u200cها را ببینم. نمی\u200cدانم چه می\u200cشود. خانه\u200cای بزرگ داشتیم.",
    "hindi": "कूल हवा आई। कुल दस लोग थे। कल आना। दिन में काम है। दीन को दान दो। मैं में नहीं।",
    "bengali": "আমি কাল কালী কলা কালা কিল কুল দেখি। বাড়ি বাড়ী বড়ো। সে দিন দীন দান করে।",
    "telugu": "కల కాల కిల కీల కులం కూల కెల కోల. నేను పాట పాటు పోట పుట పిట చూశాను.",
    "thai": "ม้า หมา มา แม่ แม้ ใกล้ไกล ข้าวขาวข่าว เสือเสื้อเสื่อ ผมไปบ้านแล้วกลับมาอีกครั้ง",
    "khmer": "ខ្ញុំ\u200bទៅ\u200bផ្សារ\u200bហើយ\u200bទិញ\u200bបន្លែ\u200bនិង\u200bត្រី។ គាត់\u200bចូលចិត្ត\u200bអាន\u200bសៀវភៅ។",
    "burmese": "ကျွန်တော်စာအုပ်ဖတ်နေပါတယ်။ ကား ကာ ကိ ကီ ကု ကူ ကေ ကဲ ကို ကြ ကျ ကွ ကှ။",
    "japanese": "パンダがかぎを見た。ハンダはかきを見た。ばはぱ、ぶふぷ。学校で本を読んだ。",
    "chinese": "".join(chr(0x4E00 + 7 * n) + ("。" if n % 20 == 19 else "") for n in range(1500)),
    "korean": noise("".join(map(chr, range(ord("가"), ord("깋") + 1))), 900, 1, 3)
    + ". 나는 학교에 간다. 책을 읽었다.",
    "amharic": "ሰላም ለዓለም። እኔ ወደ ገበያ ሄድኩ። መጽሐፍ አነበብኩ።",
    "yoruba": "Ọkọ̀ ọkọ ọkọ́ ọ̀kọ̀. Igba igbá ìgbà ìgbá. Mo ti jẹun tán.",
    "dna, long lines": noise("ACGT", 40, 300, 500),
    "proteins": noise("ACDEFGHIKLMNPQRSTVWY", 60, 150, 400),
    "c": "int main(void) { for (int i = 0; i < n; i++) { buf[i] = *p++; } return getValue(&ctx->lock, MAX_LEN); }",
    "base64": noise("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", 30, 60, 300),
    "emoji": "I ❤️ this 👩‍👩‍👧 so much 🤣🤣 #winning @ann café 🇩🇪 👍🏽 lol!!",
    "english": ENGLISH,
}


def marks_in(text):
    """The number of marks, such as accents, that stand above or below a character."""
    return sum(unicodedata.category(character) == "Mn" for character in unicodedata.normalize("NFD", text))


def judged(tokenizer, text, folder):
    """Of a text, by a tokenizer loaded anew: the shares of characters in [UNK], of marks lost, and of merged types."""
    save_tokenizer(tokenizer, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    types = sorted(set(words_of(text)))
    of_ids = {}
    unknown = 0
    lost = 0
    for word in types:
        encoded = tokenizer(word, add_special_tokens=False, return_offsets_mapping=True)
        spans = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        unknown += sum(end - start for id, (start, end) in spans if id == tokenizer.unk_token_id)
        made = "".join(tokenizer.convert_ids_to_tokens(encoded["input_ids"])).replace("##", "")
        lost += max(0, marks_in(word) - marks_in(made))
        of_ids.setdefault(tuple(encoded["input_ids"]), set()).add(word.casefold())
    merged = sum(len(same) for same in of_ids.values() if len(same) > 1)
    characters = sum(map(len, types))
    return unknown / characters, lost / characters, merged / len(types)


def words_of(text):
    """Words between white space; a zero-width space ends a word, too, where one stands in many."""
    return text.replace("\u200b", " ").split() if text.count("\u200b") > 2 else text.split()


@pytest.mark.parametrize("kind", TEXTS)
def test_nothing_that_tells_words_apart_is_lost(kind, tmp_path):
    text = TEXTS[kind]
    unknown, lost, merged = judged(train_wordpiece([text] * 5), text, tmp_path)
    assert unknown <= 0.01 and lost <= 0.005 and merged <= 0.01, (unknown, lost, merged)


@pytest.mark.parametrize("kind", ["german", "hindi", "khmer", "japanese", "dna, long lines", "emoji", "english"])
def test_the_account_is_what_the_loaded_tokenizer_does(kind, tmp_path):
    """Also where the options lose something: accents are stripped, and the alphabet is cut."""
    text = TEXTS[kind]
    tokenizer = train_wordpiece([text] * 5, strip_accents=True, limit_alphabet=20)
    unknown, lost, merged = judged(tokenizer, text, tmp_path)
    words = count_words([" ".join(sorted(set(words_of(text))))])  # each word once, as the judge counts
    coverage = coverage_of(words, tokenizer)
    assert coverage["unknown_characters"] / coverage["characters"] == pytest.approx(unknown)
    assert measure_unknown_share(tokenizer, [" ".join(words)]) == pytest.approx(unknown)
    assert coverage["merged_types"] / coverage["word_types"] >= merged  # which counts pairs that differ in case once
    if not unknown:
        assert coverage["dropped_marks"] / coverage["characters"] == pytest.approx(lost)


# ---------------------------------------------------------------------------------------------------------------------
# What the text decides


LONG = f"{ENGLISH} " * 30


@pytest.mark.parametrize(
    ("text", "options", "are_stripped"),
    [
        (LONG, {}, True),
        (LONG + "café", {}, True),
        (LONG + "Bạn bán bàn này rồi, má mà mả mã mạ. " * 2, {}, False),
        (LONG + "한", {}, False),
        (LONG, {"lowercase": False}, False),
        (TEXTS["german"], {"strip_accents": True}, True),
        (LONG, {"strip_accents": False}, False),
    ],
)
def test_accents_are_stripped_only_where_hardly_a_word_has_one(text, options, are_stripped):
    assert facts_of(train_wordpiece([text] * 3, **options))["strip_accents"] == are_stripped


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (LONG * 16, BertTokenizer),
        (LONG * 16 + "👩\u200d👩\u200d👧", BertTokenizer),
        (LONG * 16 + "a\u200bba\u200cb", BertTokenizer),
        (LONG * 160 + noise("abcdef0123456789", 1, 300, 300), BertTokenizer),
        (TEXTS["dna, long lines"], PreTrainedTokenizerFast),
        (TEXTS["khmer"], PreTrainedTokenizerFast),
        (TEXTS["persian"], PreTrainedTokenizerFast),
    ],
)
def test_a_class_of_its_own_only_where_the_text_needs_it(text, kind):
    assert type(train_wordpiece([text] * 3)) is kind


@pytest.mark.parametrize(
    ("text", "word", "other", "are_same"),
    [
        (TEXTS["khmer"], "ផ្សារ\u200bហើយ", "ផ្សារ ហើយ", True),
        (TEXTS["persian"], "می\u200cشود", "میشود", False),
        ("👩\u200d💻 👩💻 👨\u200d💻 👨💻", "👩\u200d💻", "👩💻", False),
        (TEXTS["persian"], "a\x07b\u200eb\ufffd", "abb", True),  # BERT's cleaning, but for the joiners
    ],
)
def test_a_zero_width_space_ends_a_word_and_a_joiner_goes_on(text, word, other, are_same):
    tokenize = train_wordpiece([text] * 3, vocab_size=400).tokenize
    assert (tokenize(word) == tokenize(other)) == are_same
    assert are_same or "".join(tokenize(word)).replace("##", "") == word


@pytest.mark.slow
@pytest.mark.parametrize(("times", "least", "most"), [(60, 1, 4096 / 4), (8, 4096 / 4, 4096 / 2)])
def test_rare_characters_do_not_fill_the_vocabulary_and_frequent_ones_stand_in_it(times, least, most):
    """60 times as many English words leave below 0.1 % of the characters to Hangul."""
    lexicon = [noise("abcdefghijklmnopqrstuvwxyz", 1, 2, 7) for _ in range(3000)]
    english = count_words([noise(lexicon, 30_000, 1, 1)])
    words = Counter({word: times * count for word, count in english.items()})
    hangul = "".join(map(chr, range(0xAC00, 0xAC00 + 6000)))
    words += count_words([noise(hangul, 3000, 2, 2)])
    vocabulary = train_on_words(words, Rules(), vocab_size=4096).get_vocab()
    korean = [entry for entry in vocabulary if "가" <= entry[-1] <= "힣"]
    assert least <= len(korean) < most


def test_a_chinese_text_is_written_in_its_own_characters_unless_they_are_limited():
    chinese = "".join(map(chr, range(0x4E00, 0x4E00 + 2000))) * 3
    assert measure_unknown_share(train_wordpiece([chinese]), [chinese]) <= 0.001
    assert measure_unknown_share(train_wordpiece([chinese], limit_alphabet=1000), [chinese]) == 0.5


def test_the_options_of_a_tokenizer_are_those_of_the_run(tmp_path):
    lines = [f"Bàn này bán rồi, bạn bán {number} bàn." for number in range(60)]
    text = "".join(f"{unicodedata.normalize(('NFC', 'NFD')[n % 2], line)}\n" for n, line in enumerate(lines))
    (tmp_path / "text.txt").write_text(text)
    options = {"unicode_normalization": "NFC", "individual_digits": True, "lowercase": False, "documents": "line"}
    tokenizer = prepare(TextConfig(corpus=[str(tmp_path / "text.txt")], vocab_size=300, **options)).tokenizer
    assert tokenizer.tokenize("12 Bàn") == ["1", "2", "Bàn"]
    assert tokenizer.tokenize(unicodedata.normalize("NFD", "bàn")) == ["bàn"]


def test_the_account_of_a_few_words_is_right():
    decomposed = unicodedata.normalize("NFD", "é")
    texts = [f"é {decomposed} a a\u200bbb \ue000 é {decomposed} a bb"]
    rules = Rules(unicode_normalization="NFC", zero_width_spaces=True)
    coverage = coverage_of(count_words(texts), train_on_words(count_words(texts), rules, min_frequency=1))
    assert coverage["merged_types"] == 0  # é in two normal forms is one letter
    assert coverage["word_types"] == 5  # both forms of é, a, bb and the private character
    assert coverage["dropped_characters"] == 1 and coverage["unknown_characters"] == coverage["dropped_marks"] == 0


def test_other_words_than_those_between_spaces():
    dna = noise("ACGT", 30, 60, 90)
    kmers = train_wordpiece([dna], pre_tokenizer="kmers:6")
    word = dna.split()[0].lower()
    words = [word[first : first + 6] for first in range(0, len(word), 6)]
    assert [group for group, _ in kmers.backend_tokenizer.pre_tokenizer.pre_tokenize_str(word)] == words
    assert "".join(kmers.tokenize(word)).replace("##", "") == word
    assert train_wordpiece([ENGLISH], pre_tokenizer="characters").tokenize("the sea") == list("thesea")
    digits = train_wordpiece(["host 10.0.0.1 took 123 ms at 1234567"] * 3, individual_digits=True)
    assert digits.tokenize("123 host") == ["1", "2", "3", "host"]
    assert facts_of(digits)["entries_with_digits"] <= 20


# ---------------------------------------------------------------------------------------------------------------------
# What is said


def said(text, tokenizer=None, is_given=False, language=None, **options):
    words = count_words([text] * 3)
    tokenizer = tokenizer or train_wordpiece([text] * 3, **options)
    return " | ".join(remarks(coverage_of(words, tokenizer), contents_of(words), tokenizer, is_given, language))


SMILES = "C1CCCCC1 c1ccccc1 Cc1ccccc1 CC1CCCCC1 [Co] [CO] C1CCNCC1 c1ccncc1 CC(=O)Oc1ccccc1C(=O)O"
LOG = " ".join(f"10.{n}.7.{3 * n} GET /{n:04x} {n * 7919}" for n in range(300))


@pytest.mark.parametrize(
    ("text", "options", "option"),
    [
        (SMILES, {}, "--lowercase false"),
        (TEXTS["base64"], {}, "--lowercase false"),
        (TEXTS["turkish"], {"language": "tr"}, "--lowercase false"),
        (TEXTS["turkish"], {}, "--lowercase false"),
        (TEXTS["german"], {"strip_accents": True}, "--strip_accents false"),
        ("the quiet sea was here " * 20 + "tŷ", {"strip_accents": True}, "--strip_accents false"),  # a mark in 382
        (TEXTS["chinese"], {"limit_alphabet": 500}, "--limit_alphabet"),
        (LOG, {}, "--individual_digits true"),
        (f"{TEXTS['vietnamese']} {TEXTS['vietnamese, decomposed']}", {}, "--unicode_normalization NFC"),
        (TEXTS["russian"], {}, "--language"),
        ("\ue000\ue001 the \ue002\ue003 cat " * 50, {}, "characters are dropped; replace"),
    ],
)
def test_what_is_lost_is_said_with_the_option(text, options, option):
    assert option in said(text, **options)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (ENGLISH, {}),
        (TEXTS["german"], {"language": "de"}),
        (TEXTS["russian"], {"language": "ru"}),
        (TEXTS["japanese"], {"language": "ja"}),
        (SMILES, {"lowercase": False, "individual_digits": True}),
        (LOG, {"individual_digits": True}),
    ],
)
def test_nothing_is_said_of_a_text_that_is_kept(text, options):
    assert said(text, **options) == ""


def test_a_tokenizer_that_was_given_is_named_as_the_cause():
    assert "--tokenizer" in said(TEXTS["german"], train_wordpiece([ENGLISH] * 3), is_given=True)


# ---------------------------------------------------------------------------------------------------------------------
# The trained vocabulary: exact and reproducible


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_texts(seed=0, sentences=300):
    """
    Sentences of made-up words: every letter both starts words and continues them; many pairs are equally frequent.
    """
    rng = random.Random(seed)
    words = ["".join(rng.choices(LETTERS, k=rng.randint(2, 7))) for _ in range(400)]
    words += [a + b for a, b in zip(LETTERS, reversed(LETTERS), strict=True)]
    texts = []
    for _ in range(sentences):
        drawn = " ".join(rng.choices(words, k=8))
        texts.append(f"{drawn.capitalize()}.")
    return [*texts, " ".join(words)]


def test_a_small_text_gives_exactly_the_pieces_worked_out_by_hand():
    """In 9 hug, 5 pug, 12 pun, 9 bun and 5 hugs, ##u ##n is the most frequent pair (21 times).

    Then come ##u ##g (19; p ##u had 17 and has 5 left), h ##ug (14) and p ##un (12). That makes 20 entries.
    """
    text = "hug " * 9 + "pug " * 5 + "pun " * 12 + "bun " * 9 + "hugs " * 5
    tokenizer = train_wordpiece([text], vocab_size=20)
    characters = ["b", "g", "h", "n", "p", "s", "u", "##g", "##n", "##s", "##u"]
    expected = [*SPECIAL_TOKENS, *characters, "##un", "##ug", "hug", "pun"]
    assert tokenizer.get_vocab() == {piece: index for index, piece in enumerate(expected)}
    assert tokenizer.tokenize("Hugs bug pun mug") == ["hug", "##s", "b", "##ug", "pun", "[UNK]"]
    assert measure_unknown_share(tokenizer, ["Hugs bug", "pun mug."]) == 4 / 14  # mug and the full stop


def test_a_vocab_size_below_the_alphabet_is_refused_with_the_smallest_possible_one():
    with pytest.raises(ValueError, match="vocab_size 20 is below the alphabet") as caught:
        train_wordpiece(make_texts(), vocab_size=20)
    least = int(re.search(r"need (\d+) entries", str(caught.value)).group(1))
    assert least == 5 + 26 + 26 + 1  # special tokens, letters at the start and inside of words, the full stop
    assert len(train_wordpiece(make_texts(), vocab_size=least)) == least
    with pytest.raises(ValueError, match="below the alphabet"):
        train_wordpiece(make_texts(), vocab_size=least - 1)


@pytest.mark.slow
def test_an_iterator_gives_the_same_tokenizer_and_its_texts_are_never_held_in_memory():
    of_list, of_iterator = (train_wordpiece(make(make_texts()), vocab_size=400) for make in (list, iter))
    assert of_list.backend_tokenizer.to_str() == of_iterator.backend_tokenizer.to_str()
    tracemalloc.start()
    train_wordpiece((f"{'ab cd ' * 100}{number % 10}" for number in range(2500)), vocab_size=40)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000  # the text has 1.5 million characters
    tracemalloc.stop()


@pytest.mark.slow
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=5))
def test_any_text_can_be_trained_on_and_has_no_unknown_token_afterwards(texts):
    """Except for white space and the characters that BERT removes."""
    categories = [unicodedata.category(character) for character in "".join(texts) if not character.isspace()]
    has_text = any(category[0] not in "CZ" for category in categories)
    try:
        tokenizer = train_wordpiece(texts, lowercase=False)
    except ValueError as error:
        assert "no text" in str(error) and not has_text
        return
    for text in texts:
        assert tokenizer.unk_token not in tokenizer.tokenize(text.replace("[UNK]", ""))


@pytest.mark.parametrize(
    ("text", "script", "unit"),
    [
        ("ᨲᩣ᩠ᩅᨾᩮᩬᩥᨦ", "Tai_Tham", "tokenizer"),
        ("ｱｲｳｴｵｰ ｶﾞｷﾞ", "Katakana", "tokenizer"),  # half-width
        ("カード コーヒー", "Katakana", "tokenizer"),
        ("ひらがなひらがな サーバー 漢字漢", "Hiragana", "tokenizer"),  # ー is of both
        ("人々 々々", "Han", "tokenizer"),
        ("ꦲꦏ꧀ꦱꦫ", "Javanese", "tokenizer"),
        ("ＡＢＣ ｄｅｆ", "Latin", "white space"),  # full-width
        ("한국어 글", "Hangul", "white space"),
        ("e\u0301te\u0301", "Latin", "white space"),
        ("12 34", "", "white space"),
    ],
)
def test_the_script_of_a_text_is_unicode_s_and_not_guessed_from_names(text, script, unit):
    contents = contents_of(Counter(text.split()))
    assert (contents["script"], contents["word_unit"]) == (script, unit)
