"""Existing tokenizers of any shape are taken or refused by name; saved ones have the same ids in other libraries."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_export import NODE_MODULES, needs_node
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast

from d2l_bert.messages import UserError
from d2l_bert.modeling.loading import hash_of_model
from d2l_bert.tokenization.encoding import SentenceEncoder
from d2l_bert.tokenization.existing_tokenizers import load_tokenizer
from d2l_bert.tokenization.rules import count_words
from d2l_bert.tokenization.wordpiece import (
    SPECIAL_TOKENS,
    extend_wordpiece,
    general_tokenizer,
    literal_json,
    save_tokenizer,
    stock_tokenizer,
    tokenizer_fingerprint,
)
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data.batches import BatchMaker, ordinary_ids


TEXTS = [
    *("", "  ", "Hello World, don't stop!", "ACGTACGTACGTAA", "ACGT" * 60 + " tail", "x" * 205 + "-" + "y" * 150),
    *("a" * 100, "a" * 101, "tab\there\nline\r\nend\x0b\x0c", "ctl\x00a\x01b\x7fc\x85d", "café naïve e\u0301 Å"),
    *("中文字 mixed漢字", "😀👍🏽👩\u200d👩\u200d👧 " + "😀" * 103, "2024 7 1234567", "१२३ ١٢٣ １２３ ²³ ½ 𝟘𝟙"),
    *("សួស្តី\u200bពិភព", "a\u200bb \ufeffc\u200cd\u2060e\u00adf", "[MASK] and [SEP]in[CLS]", "कूल कुल ม้า かぎ"),
    *("a\u00a0b\u3000c\u2028d", "$100+€5=~`^|<>", "“quoted”—dash… x_y http://a.b/c?d=1", "ſ ß İ ﬁ"),
]
# transformers.js lower-cases a final sigma to ς and puts no spaces around Chinese beyond U+FFFF, in a BertTokenizer,
# too: these two are not in TEXTS.

VERSION_4 = Path(__file__).parent.parent / "build/transformers-4"  # where `make older` installs it
needs_version_4 = pytest.mark.skipif(not VERSION_4.is_dir(), reason="Transformers 4 is missing: make older")


def vocabulary(*words):
    """Ids of the special tokens, the words, and each character of TEXTS, at the start and inside of words."""
    both = {*"".join(TEXTS), *normalizers.NFD().normalize_str("".join(TEXTS).lower())}
    characters = [prefix + character for character in sorted(both) if character.strip() for prefix in ("", "##")]
    return {piece: index for index, piece in enumerate(dict.fromkeys([*SPECIAL_TOKENS, *words, *characters]))}


def backend(normalizer, *patterns, limit=100, words=()):
    """A tokenizer with BERT's pre-tokenizer, behind which it splits at the matches of some patterns."""
    made = Tokenizer(models.WordPiece(vocabulary(*words), unk_token="[UNK]", max_input_chars_per_word=limit))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if patterns:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), *splits])
    return made


def cased():
    return normalizers.BertNormalizer(lowercase=False, strip_accents=False)


KINDS = {
    "bert": lambda: BertTokenizer(vocab=vocabulary("hello", "##lo"), do_lower_case=True, model_max_length=512),
    "long": lambda: general_tokenizer(backend(normalizers.BertNormalizer(), ".{1,100}")),
    "kmers": lambda: general_tokenizer(backend(cased(), ".{1,6}", words=["ACGTAC", "GTACGT"])),
    "characters": lambda: general_tokenizer(backend(cased(), ".")),
    "digits": lambda: general_tokenizer(
        backend(normalizers.Sequence([normalizers.Replace(Regex("[\u200b]"), " "), cased()]), r"\p{Nd}")
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a folder of each of KINDS; `expected.json` has its ids of the texts, and a pair's segments."""
    folder = tmp_path_factory.mktemp("saved")
    expected = {}
    for name, make in KINDS.items():
        tokenizer = make()
        save_tokenizer(tokenizer, folder / name)
        ids = [tokenizer.backend_tokenizer.encode(text).ids for text in TEXTS]
        expected[name] = [ids, tokenizer.backend_tokenizer.encode("a b", "c").type_ids, [0, 0, 0, 0, 1, 1]]
    (folder / "expected.json").write_text(json.dumps(expected))
    (folder / "texts.json").write_text(json.dumps(TEXTS))
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Other libraries


LOAD = """
import json, sys
sys.modules["d2l_bert"] = None  # importing it now fails
from transformers import AutoTokenizer, __version__
texts, found = json.load(open("texts.json")), {}
for name in json.load(open("expected.json")):
    for model_type in ("", "bert", "d2l-bert"):
        if model_type:
            json.dump({"model_type": model_type}, open(f"{name}/config.json", "w"))
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=bool(model_type))
        ids = [tokenizer(text)["input_ids"] for text in texts]
        found[name, model_type] = [ids, tokenizer("a b", "c")["token_type_ids"], [0, 0, 0, 0, 1, 1]]
        assert tokenizer.model_max_length == 512 and tokenizer.mask_token == "[MASK]"
print(__version__, json.dumps(list(found.values())))
"""


def in_a_fresh_process(code, folder, version):
    """What a program says last, in a folder, with the Transformers that is installed or with version 4."""
    variables = {**os.environ, **({"PYTHONPATH": str(VERSION_4)} if version == 4 else {})}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("version", [pytest.param(4, marks=needs_version_4), 5])
def test_a_fresh_process_without_the_package_gives_the_same_ids(version, saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    found, _, said = in_a_fresh_process(LOAD, copy, version).partition(" ")
    expected = json.loads((saved / "expected.json").read_text())
    assert found.startswith(f"{version}.")
    assert json.loads(said) == list(itertools.chain.from_iterable([each] * 3 for each in expected.values()))


@pytest.mark.slow
@needs_version_4
@pytest.mark.parametrize("kind", ["bert", "kmers"])
def test_added_tokens_survive_in_both_versions(kind, tmp_path):
    tokenizer = KINDS[kind]()
    text = "a [E1] b[/E1] <w> c"
    tokenizer.add_special_tokens({"additional_special_tokens": ["[E1]", "[/E1]"]})
    tokenizer.add_tokens(["<w>"])
    save_tokenizer(tokenizer, tmp_path / "tok")
    code = (
        "from transformers import AutoTokenizer\n"
        f"it = AutoTokenizer.from_pretrained('tok'); ids = it({text!r})['input_ids']\n"
        "print(ids, len(it), sorted(it.all_special_ids), it.decode(ids, skip_special_tokens=True))"
    )
    said = [in_a_fresh_process(code, tmp_path, version) for version in (4, 5)]
    assert said[0] == said[1] and f"{tokenizer(text)['input_ids']} {len(tokenizer)} [0, 1, 2, 3, 4, " in said[0]


JS_IDS = """
import { env, AutoTokenizer } from "@huggingface/transformers";
import fs from "fs";
env.allowRemoteModels = false; env.localModelPath = process.argv[2];
const read = (file) => JSON.parse(fs.readFileSync(`${process.argv[2]}/${file}`));
const found = {};
for (const name of Object.keys(read("expected.json"))) {
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  found[name] = read("texts.json").map((text) => tokenizer.encode(text));
}
console.log(JSON.stringify(found));
"""


@needs_node
@pytest.mark.slow
def test_transformers_js_gives_the_same_ids(saved, tmp_path):
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    (tmp_path / "script.mjs").write_text(JS_IDS)
    done = subprocess.run(
        ["node", str(tmp_path / "script.mjs"), str(saved)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads((saved / "expected.json").read_text())
    for name, ids in json.loads(done.stdout.splitlines()[-1]).items():
        for text, found, wanted in zip(TEXTS, ids, expected[name][0], strict=True):
            assert found == wanted, (name, text)


# ---------------------------------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_from_its_folder_and_from_a_bare_tokenizer_json(kind, saved, tmp_path):
    made = KINDS[kind]()
    expected = json.loads((saved / "expected.json").read_text())[kind]
    shutil.copy(saved / kind / "tokenizer.json", tmp_path)
    bare = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bare.post_processor = bare.decoder = None  # as `tokenizers` writes a tokenizer that it has trained
    bare.save(str(tmp_path / "tokenizer.json"))
    for name in (saved / kind, tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(str(name))
        assert type(tokenizer) is (BertTokenizer if kind == "bert" else PreTrainedTokenizerFast)
        assert [tokenizer(text)["input_ids"] for text in TEXTS] == expected[0]
        assert tokenizer("a b", "c")["token_type_ids"] == expected[1]
        assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(made)
        assert tokenizer.decode(tokenizer("abc 7")["input_ids"], skip_special_tokens=True) == made.decode(
            made("abc 7")["input_ids"], skip_special_tokens=True
        )


@pytest.mark.parametrize("words", [["anna", "[E1]"], ["Anna"], ["änna", "anna"]])
def test_a_bare_vocab_txt_is_berts_vocabulary_in_lower_case_unless_it_has_capitals(words, tmp_path):
    """Accents are stripped unless a word has one."""
    pieces = [*SPECIAL_TOKENS, *words, "walked", "."]
    (tmp_path / "vocab.txt").write_bytes("\r\n".join([*pieces, ""]).encode())
    text = "Änna walked." if words[0] == "änna" else "Anna walked."
    for name in (tmp_path, tmp_path / "vocab.txt"):
        tokenizer = load_tokenizer(str(name))
        assert type(tokenizer) is BertTokenizer and tokenizer.convert_ids_to_tokens(range(len(pieces))) == pieces
        assert tokenizer.tokenize(text) == [words[0], "walked", "."]
    assert hash_of_model(tmp_path / "vocab.txt") == hash_of_model(tmp_path)


def test_a_bertlike_folder_whose_rules_transformers_5_would_not_follow_is_refused_with_the_way_out(saved, tmp_path):
    folder = Path(shutil.copytree(saved / "long", tmp_path / "long"))
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace("PreTrainedTokenizerFast", "BertTokenizerFast"))
    assert AutoTokenizer.from_pretrained(folder).tokenize("a" * 101) == ["[UNK]"]
    with pytest.raises(ValueError, match="PreTrainedTokenizerFast"):
        load_tokenizer(str(folder))
    assert len(load_tokenizer(str(folder / "tokenizer.json")).tokenize("a" * 101)) == 101


REFUSED = {
    "mask": lambda made, names: names.pop("mask_token") and None,
    "WordLevel": lambda made, names: Tokenizer(models.WordLevel(made.get_vocab(), unk_token="[UNK]")),
    "'@@'": lambda made, names: setattr(made.model, "continuing_subword_prefix", "@@"),
    "[SEP]": lambda made, names: names.update(unk_token="[SEP]"),
    "numbers from 0": lambda made, names: setattr(
        made, "model", models.WordPiece({**made.get_vocab(), "far": 9999}, unk_token="[UNK]")
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_stands_in_the_way_of_a_tokenizer_is_named(reason, tmp_path):
    made = backend(cased(), ".")
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    made = REFUSED[reason](made, names) or made
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert reason in str(caught.value)


@pytest.mark.parametrize("content", ["anna\nwalked\n", "\n".join([*SPECIAL_TOKENS, "anna", "walked", "anna"])])
def test_a_text_that_is_no_vocabulary_is_refused(content, tmp_path):
    (tmp_path / "vocab.txt").write_text(content)
    with pytest.raises(ValueError, match=r"\[PAD\]|'anna' stands there twice"):
        load_tokenizer(str(tmp_path / "vocab.txt"))


# ---------------------------------------------------------------------------------------------------------------------
# Tokens behind the vocabulary


@pytest.fixture(params=["bert", "kmers"])
def marked(request, tmp_path):
    """A tokenizer with two special markers and two added words behind its vocabulary, read from its folder."""
    tokenizer = KINDS[request.param]()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[E1]", "[/E1]"]})
    tokenizer.add_tokens(["<w>", AddedToken("two words", normalized=True)])
    save_tokenizer(tokenizer, tmp_path)
    return load_tokenizer(str(tmp_path))


def test_added_tokens_are_tokens_in_training_as_in_use_and_never_replace_another(marked):
    encode = SentenceEncoder(literal_json(marked))
    for text in ("a [E1] b[/E1] c", "<w>d two words [E1]", "no more"):
        assert encode([text])[0].tolist() == marked(text, add_special_tokens=False)["input_ids"]
    assert marked.mask_token_id not in encode(["a [MASK] b"])[0]
    words = len(marked) - 4
    assert ordinary_ids(marked) == (5, words) and marked.convert_ids_to_tokens(words) == "[E1]"
    with pytest.raises(ValueError, match=r"\[E1\], \[/E1\]"):  # new words would get their ids
        extend_wordpiece(marked, count_words(["hello hello"]), 1)


def test_a_tokenizer_that_replaces_across_words_is_encoded_in_training_as_in_use():
    tokenizer = general_tokenizer(backend(normalizers.Sequence([normalizers.Replace("a b", "c"), cased()])))
    ids = SentenceEncoder(literal_json(tokenizer))(["x a b x"])[0].tolist()
    assert tokenizer.convert_ids_to_tokens(ids) == tokenizer.tokenize("x a b x") == ["x", "c", "x"]


def test_a_tokenizer_with_a_sequence_of_no_steps_is_encoded_in_training_as_in_use():
    tokenizer = general_tokenizer(backend(normalizers.Sequence([])))
    ids = SentenceEncoder(literal_json(tokenizer))(["x a b x"])[0].tolist()
    assert ids == tokenizer("x a b x", add_special_tokens=False)["input_ids"]


# ---------------------------------------------------------------------------------------------------------------------
# Words


def test_unknown_words_are_added_as_if_they_were_split_into_characters():
    """ab saves 5 * 1, zzz 2 * 2, zz and 字 2 * 1; zzzz occurs once, and 101 characters are [UNK] in any case."""
    tokenizer = BertTokenizer(vocab={p: n for n, p in enumerate([*SPECIAL_TOKENS, "a", "##b"])}, do_lower_case=True)
    texts = ["字 字 zzz zzz zz zz zzzz ab ab ab ab ab", "z" * 101 + " " + "z" * 101]
    extended = extend_wordpiece(tokenizer, count_words(texts), 9)
    assert extended.convert_ids_to_tokens(range(7, len(extended))) == ["ab", "zzz", "zz", "字"]
    assert extended.tokenize("字 zzz q") == ["字", "zzz", "[UNK]"]


@pytest.mark.parametrize("kind", ["kmers", "long"])
def test_a_word_in_several_pieces_is_one_word_of_a_list_and_each_piece_a_word_to_mask(kind):
    tokenizer = KINDS[kind]()
    word = "ACGTACGTACGT" if kind == "kmers" else "a" * 150
    words = tokenizer([word, "b"], is_split_into_words=True).word_ids()
    assert words == [None, *[0] * (len(words) - 3), 1, None]
    assert len(words) > 4
    maker = BatchMaker(None, tokenizer, PretrainConfig(), 32)
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    starts = [place for place, token in enumerate(ids) if not maker.is_continuation[token]]
    assert starts == ([0, 1] if kind == "kmers" else [0, 100])


def test_a_carriage_return_inside_of_a_line_of_vocab_txt_is_refused_as_readers_differ_in_it(tmp_path):
    (tmp_path / "vocab.txt").write_bytes("\n".join([*SPECIAL_TOKENS, "a", "b\rc", "d", ""]).encode())
    with pytest.raises(UserError, match="line 7 holds a carriage return"):
        load_tokenizer(str(tmp_path / "vocab.txt"))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="line 7 holds a carriage return"):
        stock_tokenizer(str(tmp_path))


@pytest.mark.parametrize("sign", ["\x85", "\u2028", "\u2029", "\x0c", "\xa0", " "])
def test_other_ends_of_lines_in_vocab_txt_are_read_as_bert_reads_them(sign, tmp_path):
    content = "\n".join([*SPECIAL_TOKENS, f"a{sign}b", f"c{sign}", "d", ""])
    (tmp_path / "vocab.txt").write_bytes(content.encode())
    ours = load_tokenizer(str(tmp_path / "vocab.txt")).get_vocab()
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert ours == AutoTokenizer.from_pretrained(tmp_path).get_vocab() and ours["c"] == 6


@pytest.mark.parametrize("entry", ["x\ny", "x\ry", None])
def test_a_vocabulary_that_is_no_list_of_lines_gets_no_vocab_txt(entry, tmp_path, caplog):
    """Each entry behind it would have another number there."""
    words = [*SPECIAL_TOKENS, "a", *([entry] if entry else []), "b"]
    numbers = {word: number for number, word in enumerate(words)}
    if entry is None:
        numbers["b"] += 1
    save_tokenizer(general_tokenizer(Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))), tmp_path)
    assert not (tmp_path / "vocab.txt").exists() and "no vocab.txt" in caplog.text
    assert stock_tokenizer(str(tmp_path)).get_vocab() == numbers
