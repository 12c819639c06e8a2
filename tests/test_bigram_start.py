"""The start from the text's bigrams: counts by hand, products with the whole matrix, and what the model then knows."""

from collections import Counter

import numpy as np
import pytest
import torch
from conftest import SMALL
from promises.driving import end, read_json, start
from runs import log_rows, run, steps_counted
from safetensors.torch import load_file
from stores import corpus_of

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM
from d2l_bert.__main__ import main
from d2l_bert.training import bigram_start
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.data import bigrams
from d2l_bert.training.data.bigrams import Bigrams, WeightedPmi, count_bigrams, word_vectors
from d2l_bert.training.data.order import EpochPairs
from d2l_bert.training.report import advice


ENTRIES = 80
CLS = 1
SEP = 2


def bigrams_of(ids):
    """The counts of one long row."""
    first = ids[:-1]
    second = ids[1:]
    keys, counts = np.unique(first * ENTRIES + second, return_counts=True)
    as_first, as_second, tokens = (np.bincount(each, minlength=ENTRIES) for each in (first, second, ids))
    return Bigrams(keys, counts, as_first, as_second, tokens)


@pytest.fixture
def chain():
    """Counts of a text in which every second token follows from the one before."""
    rng = np.random.default_rng(0)
    ids = rng.choice(np.arange(3, ENTRIES), 60_000, p=rng.dirichlet(np.full(ENTRIES - 3, 0.5)))
    ids[1::2] = 3 + (ids[::2] * 7) % (ENTRIES - 3)
    return bigrams_of(ids)


def whole_pmi(counted):
    """The matrix of the smoothed PMI, and that of its weights, in float64."""
    n = np.zeros((ENTRIES, ENTRIES))
    n.flat[counted.keys] = counted.counts
    rows = n.sum(1)
    columns = n.sum(0)
    weights = np.sqrt(rows + columns + 0.5)
    weights /= np.sqrt(np.mean(rows + columns + 0.5))
    return np.log((n + 0.3) / (np.outer(rows, columns) / n.sum() + 0.3)), np.outer(weights, weights)


# ---------------------------------------------------------------------------------------------------------------------
# Counts and vectors


@pytest.mark.parametrize("objective, pairing", [("nsp", "sentences"), ("sop", "segments"), ("none", "segments")])
@pytest.mark.parametrize("at_once", [30, 2**23])
def test_counts_are_those_of_the_rows_that_a_run_trains_on(objective, pairing, at_once, tmp_path, monkeypatch):
    """By hand, row for row, in blocks of any size; the end of a row and the begin of the next are no neighbours."""
    monkeypatch.setattr(bigrams, "TOKENS_AT_ONCE", at_once)
    lengths = np.random.default_rng(0).integers(1, 9, (12, 5)).tolist()
    corpus = corpus_of(tmp_path, lengths)
    corpus.ids = 3 + np.asarray(corpus.ids) % 40  # repeated tokens, none of them special
    pairs = list(EpochPairs(corpus, PretrainConfig(objective=objective, pairing=pairing, max_steps=1), 16).parts(0))
    expected = Counter()
    tokens = Counter()
    for pair in np.concatenate(pairs).tolist():
        a = corpus.ids[pair[0] : pair[1]].tolist()
        b = corpus.ids[pair[2] : pair[3]].tolist()
        row = [CLS, *a, SEP, *b, *([SEP] if b else [])]
        expected.update(zip(row, row[1:], strict=False))
        tokens.update([*a, *b])
    found = count_bigrams(corpus, pairs, CLS, SEP, ENTRIES)
    keys = zip(*np.divmod(found.keys, ENTRIES), strict=True)
    assert dict(zip(((int(x), int(w)) for x, w in keys), found.counts.tolist(), strict=True)) == expected
    assert {number: count for number, count in enumerate(found.tokens.tolist()) if count} == tokens
    assert (found.keys[1:] > found.keys[:-1]).all()
    assert found.as_first.sum() == found.as_second.sum() == expected.total()


def test_where_bigrams_are_too_many_the_frequent_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(bigrams, "TOKENS_AT_ONCE", 500)
    corpus = corpus_of(tmp_path, [[40] * 50])
    ids = np.random.default_rng(0).integers(3, ENTRIES, 2000)
    ids[::4], ids[1::4] = 5, 6
    corpus.ids = ids
    pairs = list(EpochPairs(corpus, PretrainConfig(objective="none", max_steps=1), 128).parts(0))
    whole = count_bigrams(corpus, pairs, CLS, SEP, ENTRIES)
    monkeypatch.setattr(bigrams, "MOST_BIGRAMS", 200)
    found = count_bigrams(corpus, pairs, CLS, SEP, ENTRIES)
    assert len(found.keys) <= 200 < len(whole.keys)
    assert (found.as_first == whole.as_first).all() and (found.tokens == whole.tokens).all()
    most = whole.keys[whole.counts.argmax()]
    assert found.counts[found.keys == most] == whole.counts.max() > 400


def test_products_are_those_with_the_matrix_that_is_never_made(chain):
    pmi, weights = whole_pmi(chain)
    right, left = torch.randn(2, ENTRIES, 7, generator=torch.Generator().manual_seed(0))
    found = WeightedPmi(chain).products(right, left)
    for each, expected in zip(found, ((pmi * weights) @ right.numpy(), (pmi * weights).T @ left.numpy()), strict=True):
        np.testing.assert_allclose(each, expected, atol=2e-3 * np.abs(expected).max())


def test_word_vectors_give_the_pmi_and_fewer_columns_nearly_the_best_of_their_rank(chain):
    pmi, weights = whole_pmi(chain)

    def vectors_and_error(size):
        vectors = word_vectors(chain, size, torch.Generator().manual_seed(0))
        found = (vectors.words @ vectors.form @ vectors.words.T).numpy()
        return vectors, (found - pmi) * weights

    whole, error = vectors_and_error(ENTRIES)
    assert np.abs(error).max() < 0.02 * np.abs(pmi * weights).max()
    _, error = vectors_and_error(40)
    singular_values = np.linalg.svd(pmi * weights)[1]
    best_of_20 = (singular_values[20:] ** 2).sum()  # 40 directions hold 20 of each side
    assert (error**2).sum() < best_of_20 < (weights * pmi**2).sum()
    np.testing.assert_allclose(whole.shares.sum(), 1, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# What the model knows before its first step


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--tie_word_embeddings=false",
        "--embedding_layer_norm=false --hidden_act=relu",
        "--hidden_size=48 --num_attention_heads=3 --num_hidden_layers=1",
        "--objective=none --pairing=sentences --packing=true",
        "--objective=sop --num_hidden_layers=4",
        "--hidden_size=640 --num_attention_heads=2 --num_hidden_layers=1",  # fewer entries than columns
        "--hidden_size=40 --num_attention_heads=8",
    ],
)
def test_an_untrained_model_knows_more_than_frequencies(options, books, tmp_path):
    run(
        books,
        tmp_path / "model",
        "--attention_init=bigrams",
        "--max_steps=1",
        "--learning_rate=1e-9",
        *options.split(),
    )
    metrics = read_json(tmp_path / "model" / "metrics.json")
    first = log_rows(tmp_path / "model")[0]
    assert first["step"] == 0 and first["eval_mlm_loss"] == metrics["eval_initial_mlm_loss"]
    assert metrics["eval_initial_mlm_loss"] < 0.8 * metrics["eval_token_entropy"]
    assert "before the first step" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")


def test_heads_of_each_block_look_one_place_farther_than_those_before(chain):
    config = D2lBertConfig(
        vocab_size=ENTRIES,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=32,
        attn_implementation="eager",
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    model = D2lBertForMaskedLM(config).eval()
    with torch.no_grad():
        vectors = word_vectors(chain, 72, torch.Generator().manual_seed(0))
        bigram_start.arrange(model, vectors, torch.Generator().manual_seed(0))
    ids = torch.randint(3, ENTRIES, (1, 32))
    attentions = model(input_ids=ids, output_attentions=True).attentions
    for number, probabilities in enumerate(attentions, 1):
        for head, shift in ((0, -number), (1, number)):
            found = probabilities[0, head, 8:24].argmax(-1)
            assert found.tolist() == list(range(8 + shift, 24 + shift)), (number, head)


@pytest.mark.slow
def test_where_neighbours_tell_nothing_the_start_is_left_out(tmp_path, capsys):
    """Words in random order: no strength is better than none, and today's start stays to the last byte."""
    rng = np.random.default_rng(0)
    words = "ash beech birch cedar elm fir hazel larch lime maple oak pine poplar rowan willow yew".split()
    (tmp_path / "text").mkdir()
    for number in range(20):
        lines = [" ".join(rng.choice(words, 12)) for _ in range(40)]
        (tmp_path / "text" / f"{number}.txt").write_text("\n".join(lines))

    def weights_from(start):
        options = (f"--attention_init={start}", "--max_steps=1", "--objective=none", "--pairing=sentences")
        return run(tmp_path / "text", tmp_path / start, *options)

    weights = weights_from("bigrams")
    assert weights == weights_from("neighbours")
    assert "left out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("sentences", [20, 60])
def test_a_text_of_some_sentences_is_trained_on(sentences, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("".join(f"A sentence of number {number}.\n" for number in range(sentences)))
    options = ("--attention_init=bigrams", "--max_steps=1", "--objective=none", "--pairing=sentences")
    run(tmp_path / "text.txt", tmp_path / "model", *options)
    assert "attention_init bigrams: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_text_with_too_little_beside_the_held_out_part_is_trained_on(books, tmp_path, capsys):
    run(books, tmp_path / "model", "--attention_init=bigrams", "--max_steps=1", "--validation_fraction=0.99999")
    assert "attention_init bigrams: left out, as the text is too short" in capsys.readouterr().err


@pytest.mark.slow
def test_one_head_cannot_have_it(books, tmp_path, capsys):
    options = ("--num_attention_heads=1", "--max_steps=1")
    starts = [f"--attention_init={start}" for start in ("bigrams", "neighbours")]
    first, second = (run(books, tmp_path / start, start, *options) for start in starts)
    assert "left out" in capsys.readouterr().err and first == second
    rows = log_rows(tmp_path / "--attention_init=neighbours")
    assert all(row["step"] for row in rows), "a run that knows nothing of its text is not evaluated at its start"


def test_a_saved_model_keeps_its_weights(trained, books, fails):
    fails("init_from", "pretrain", f"--corpus={books}", f"--init_from={trained}", "--attention_init=bigrams")


def check_same(*folders):
    """The same weights, but for a step with a rate of 1e-30, which turns zeros into numbers of this size."""
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    for name in one.keys() | two.keys():
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-20)


@pytest.mark.slow
def test_the_start_is_the_same_with_any_number_of_threads(books, tmp_path):
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            options = ("--attention_init=bigrams", "--max_steps=1", "--learning_rate=1e-30", "--weight_decay=0")
            run(books, tmp_path / str(count), *options)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    check_same(tmp_path / "1", tmp_path / "2")


@pytest.mark.slow
def test_a_resumed_run_counts_nothing_and_keeps_its_first_loss(books, tmp_path, monkeypatch):
    options = ("--attention_init=bigrams", "--max_steps=6", "--save_steps=2")
    whole = run(books, tmp_path / "whole", *options)
    with steps_counted(sigterm_at=4), pytest.raises(SystemExit):
        main(["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'cut'}", *SMALL, *options])
    monkeypatch.setattr(bigram_start, "count_bigrams", None)
    assert run(books, tmp_path / "cut", *options, "--resume_from_checkpoint=latest") == whole
    metrics = [read_json(tmp_path / name / "metrics.json") for name in ("whole", "cut")]
    assert metrics[0]["eval_initial_mlm_loss"] == metrics[1]["eval_initial_mlm_loss"]


@pytest.mark.parametrize("loss, said", [(4.2, "nothing itself"), (3.9, "little itself"), (3.5, "")])
def test_a_model_that_began_below_frequencies_is_compared_with_its_beginning(loss, said):
    metrics = {"train_words_seen": 1, "eval_mlm_loss": loss, "eval_token_entropy": 6.0, "eval_initial_mlm_loss": 4.1}
    assert said in advice(metrics, 1)
    assert bool(said) == bool(advice(metrics, 1))
    assert not advice({**metrics, "eval_mlm_loss": 4.0}, 1, is_fresh=False)


@pytest.mark.slow
def test_two_processes_start_from_the_same_weights_as_one(books, tmp_path):
    words = [
        "pretrain",
        f"--corpus={books}",
        *SMALL,
        "--attention_init=bigrams",
        "--max_steps=1",
        "--learning_rate=1e-30",
    ]
    for count in (1, 2):
        said = tmp_path / f"{count}.txt"
        ranks = start(
            [*words, "--weight_decay=0", f"--output_dir={tmp_path / str(count)}"], processes=count, said=said
        )
        assert end(ranks) == [0] * count, said.read_text()
    check_same(tmp_path / "1", tmp_path / "2")
