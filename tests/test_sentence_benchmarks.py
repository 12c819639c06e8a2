"""`benchmarks.embed` and `benchmarks.simcse`: the judge by hand, and both programs on tiny cases."""

import re
import sys

import numpy as np
import pytest
from printed import line_with, numbers
from transformers import AutoModel

from benchmarks import embed as embed_bench
from benchmarks import simcse
from d2l_bert import PretrainConfig
from d2l_bert.tokenization.prepare import prepare


pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_judge_gives_the_share_of_right_answers_and_their_ranks(capsys):
    queries = np.eye(4)[[0, 1, 2, 3]]
    answers = np.array([[5, 0, 0, 0], [2, 1, 0, 0], [0, 1, 0, 0], [0, 0, 3, 1]], dtype=float)
    simcse.show("made up", (queries, answers))
    cosines = answers / np.linalg.norm(answers, axis=1, keepdims=True)
    ranks = []
    for query in range(4):
        of_query, right = cosines[:, query], cosines[query, query]
        ranks.append(1 + sum(of_query > right) + (sum(of_query == right) - 1) / 2)
    assert ranks == [1, 2, 3, 1]
    assert numbers(line_with(capsys.readouterr().out.splitlines(), "made up")) == [50, 100, 0.708]


def test_the_queries_and_answers_are_neighbours_in_held_out_paragraphs(books):
    text = prepare(PretrainConfig(corpus=[str(books)], vocab_size=400, max_steps=1, preprocessing_num_workers=1))
    corpus, held_out = text.tokens, text.held_out
    queries, answers = simcse.neighbours(corpus, held_out, 1000)
    assert 3 < len(queries) == len(answers) == len({answer.tobytes() for answer in answers})
    pairs = set()
    for document in held_out:
        sentences = [simcse.sentence_ids(corpus, number).tobytes() for number in corpus.sentences(int(document))]
        pairs |= set(zip(sentences[:-1], sentences[1:], strict=True))
    assert all((query.tobytes(), answer.tobytes()) in pairs for query, answer in zip(queries, answers, strict=True))


def test_rare_words_count_more_than_frequent_ones():
    queries, answers = [np.array([7, 8])], [np.array([7, 7, 9]), np.array([9, 8]), np.array([9])]
    query, others = simcse.word_vectors(queries, answers, 10)
    assert query[0, 7] == pytest.approx(np.log(4 / 2)) == query[0, 8]
    assert others[0, 7] == pytest.approx(np.sqrt(2) * np.log(2)) and others[0, 9] == pytest.approx(0)


@pytest.mark.slow
def test_simcse_trains_with_dropout_and_leaves_a_sentence_encoder(trained, books, tmp_path, monkeypatch, capsys):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    out = tmp_path / "encoder"
    options = [f"--corpus={books}", f"--output_dir={out}", "--max_steps=4", "--batch_size=8", "--candidates=20"]
    monkeypatch.setattr(sys, "argv", ["simcse", str(trained), *map(str, options)])
    monkeypatch.chdir(tmp_path)
    simcse.main()
    lines = capsys.readouterr().out.splitlines()
    for name in ("words alone", "model, mean", "model, cls", "after SimCSE, mean", "after SimCSE, cls"):
        assert 0 < numbers(line_with(lines, name))[-1] <= 1
    before, after = AutoModel.from_pretrained(trained), AutoModel.from_pretrained(out)
    assert after.config.hidden_dropout_prob == 0
    changed = [not (after.state_dict()[name] == value).all() for name, value in before.state_dict().items()]
    assert any(changed)
    encoder = sentence_transformers.SentenceTransformer(str(out), device="cpu")
    assert encoder.encode(["a crane is flying"]).shape == (1, 32) and not (tmp_path / "unused").exists()


@pytest.mark.slow
def test_both_sides_of_the_embed_benchmark_give_the_same_vectors_in_turns(trained, monkeypatch, capsys):
    pytest.importorskip("sentence_transformers")
    monkeypatch.setattr(sys, "argv", ["embed", str(trained), "--lines=40", "--repetitions=2"])
    embed_bench.main()
    printed = capsys.readouterr().out
    assert re.search(r"40 lines of \d+ to \d+ tokens", printed)
    for name in ("d2l-bert embed", "sentence-transformers", "ratio"):
        median, low, high = numbers(line_with(printed.splitlines(), name).replace(name, "").replace("d2l", ""))[:3]
        assert 0 < low <= median <= high
