"""Minimal pairs: scores and decisions against a plain loop, ties, standard errors, the reading of BLiMP's files."""

import json
import math

import numpy as np
import pytest
import torch
from judged_models import read_pairs, save_models, write_pairs
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from transformers import AutoModelForMaskedLM, AutoTokenizer

from d2l_bert.cli import main
from d2l_bert.errors import UserError
from d2l_bert.training.evaluation.blimp import Paradigm, blimp_results, read_blimp
from d2l_bert.training.evaluation.masked_models import load_masked_model
from d2l_bert.training.evaluation.pseudo_likelihood import encode, masked_rows, pseudo_log_likelihoods
from d2l_bert.training.evaluation.run import plot_phenomena


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(trained, books, tmp_path_factory):
    return save_models(trained, books, tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "blimp")


def plain_scores(folder, sentences, score):
    """One sentence, one mask and one forward pass at a time, with Transformers alone."""
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    scores = []
    for sentence in sentences:
        encoding = tokenizer(sentence)
        ids, words, total = encoding["input_ids"], encoding.word_ids(), 0.0
        for position, word in enumerate(words):
            if word is None:  # a special token
                continue
            masked = list(ids)
            masked[position] = tokenizer.mask_token_id
            if score == "within_word_l2r":
                for later in range(position + 1, len(ids)):
                    if words[later] == word:
                        masked[later] = tokenizer.mask_token_id
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([masked])).logits[0, position]
            total += float(logits.double().log_softmax(-1)[ids[position]])
        scores.append(total)
    return scores


@pytest.mark.parametrize("score", ["pll", "within_word_l2r"])
@pytest.mark.parametrize("name", ["ours", "bert", "mlm", "distilbert", "albert", "roberta"])
def test_scores_and_decisions_are_those_of_a_plain_loop(models, pairs, name, score):
    rows = read_pairs(pairs)[:8]
    sentences = [row[key] for row in rows for key in ("sentence_good", "sentence_bad")]
    sentences += ["Umbrella!", "Unbelievable: 17 xylophones, said the harbourmaster."]  # words of many pieces
    model = load_masked_model(str(models[name]))
    expected = plain_scores(models[name], sentences, score)
    for batch_tokens in (1, 40, 10_000):
        found = pseudo_log_likelihoods(model, encode(model, sentences, score), score, batch_tokens)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
    if score == "pll":  # the other score differs, or the test would not see which was computed
        others = pseudo_log_likelihoods(model, encode(model, sentences, "within_word_l2r"), "within_word_l2r")
        assert abs(float(others[-1] - found[-1])) > 1e-3


def test_the_processes_share_the_batches(models, pairs):
    model, rows = load_masked_model(str(models["bert"])), read_pairs(pairs)
    encoded = encode(model, [row["sentence_good"] for row in rows])
    together = pseudo_log_likelihoods(model, encoded, batch_tokens=100)
    parts = [pseudo_log_likelihoods(model, encoded, "pll", 100, 2, rank) for rank in range(2)]
    assert torch.equal(parts[0] + parts[1], together)
    assert all(part.abs().sum() > 0.3 * together.abs().sum() for part in parts)


def test_a_row_that_two_sentences_share_is_computed_once(models):
    """Masked at the only word that differs, both sentences of a pair are the same row."""
    model = load_masked_model(str(models["mlm"]))
    encoded = encode(model, ["Anna was old.", "Anna was red.", "Anna was old."])
    (rows,) = masked_rows(encoded, model.tokenizer.mask_token_id, "pll")
    tokens = len(encoded.ids[0]) - 2
    assert len(encoded.ids) == 2 and len(rows.row) == 2 * tokens
    assert len(rows.ids) == 2 * tokens - 1


def test_a_tie_counts_half_and_errors_are_binomial():
    """Three of four right in one paradigm; one right, one wrong and two ties in another: worked out by hand."""
    first = Paradigm("a", "x", ["g"] * 4, ["b"] * 4)
    second = Paradigm("b", "y", ["g"] * 4, ["b"] * 4)
    scores = np.array([-1, -2, -1, -3, -1, -5, -2, -1] + [-1, -2, -2, -1, -3, -3, -7, -7], dtype=float)
    found = blimp_results([first, second], scores)
    assert found["paradigms"]["a"]["accuracy"] == 0.75 and found["paradigms"]["b"]["accuracy"] == 0.5
    assert found["paradigms"]["b"]["ties"] == 2 and found["ties"] == 2 and found["pairs"] == 8
    errors = math.sqrt(0.75 * 0.25 / 4), math.sqrt(0.5 * 0.5 / 4)
    assert found["paradigms"]["a"]["standard_error"] == pytest.approx(errors[0])
    assert found["accuracy"] == 0.625
    assert found["standard_error"] == pytest.approx(math.hypot(*errors) / 2)
    assert found["phenomena"]["x"]["accuracy"] == 0.75 and found["phenomena"]["y"]["standard_error"] == errors[1]


def test_each_paradigm_has_the_same_weight_whatever_its_size():
    sizes = {"a": 1, "b": 3}
    paradigms = [Paradigm(name, "x", ["g"] * size, ["b"] * size) for name, size in sizes.items()]
    found = blimp_results(paradigms, np.array([2, 1] + [1, 2] * 3, dtype=float))
    assert found["accuracy"] == 0.5 == found["phenomena"]["x"]["accuracy"]


def test_sentences_that_the_tokenizer_does_not_tell_apart_are_a_tie(models, tmp_path):
    folder = tmp_path / "pairs"
    folder.mkdir()
    row = {"sentence_good": "Anna was old.", "sentence_bad": "ANNA was OLD."}
    (folder / "case.jsonl").write_text(json.dumps(row) + "\n")
    output = tmp_path / "figures.json"
    assert main(["evaluate", str(models["ours"]), f"--blimp={folder}", f"--output={output}"]) == 0
    blimp = json.loads(output.read_text())["models"][0]["blimp"]
    assert blimp["accuracy"] == 0.5 and blimp["ties"] == 1
    assert blimp["paradigms"]["case"]["phenomenon"] == "case"  # a file without UID and linguistics_term


def test_the_command_gives_the_accuracies_of_a_plain_loop(models, pairs, tmp_path, capsys):
    output, names = tmp_path / "figures.json", ["ours", "bert", "roberta"]
    folders = [str(models[name]) for name in names]
    assert main(["evaluate", *folders, f"--blimp={pairs}", f"--output={output}"]) == 0
    content, rows, printed = json.loads(output.read_text()), read_pairs(pairs), capsys.readouterr().out
    for name, figures in zip(names, content["models"], strict=True):
        good, bad = (plain_scores(models[name], [row[key] for row in rows], "pll") for key in rows[0] if "sent" in key)
        right = {}
        for row, one, other in zip(rows, good, bad, strict=True):
            right.setdefault(row["UID"], []).append(one > other)
        accuracies = {uid: np.mean(decisions) for uid, decisions in right.items()}
        found = figures["blimp"]
        assert {uid: figure["accuracy"] for uid, figure in found["paradigms"].items()} == pytest.approx(accuracies)
        assert found["accuracy"] == pytest.approx(np.mean(list(accuracies.values())))
        expected = np.mean([accuracies["made_up_1"], accuracies["made_up_2"]])
        assert found["phenomena"]["articles"]["accuracy"] == pytest.approx(expected)
        assert f"{100 * found['accuracy']:.1f} ± {100 * found['standard_error']:.1f} %" in printed
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_bar_for_each_model_and_phenomenon(monkeypatch, tmp_path):
    paradigms = [Paradigm("a", "verbs", ["g"] * 4, ["b"] * 4), Paradigm("b", "nouns", ["g"] * 4, ["b"] * 4)]
    right, wrong = [2, 1], [1, 2]
    results = []
    for name, pairs in {"one": [right] * 7 + [wrong], "two": [right] * 2 + [wrong] * 6}.items():
        results.append((name, {"score": "pll", **blimp_results(paradigms, np.array(pairs, dtype=float).ravel())}))
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **b: (drawn.append(self), save(self, *a, **b)))
    plot_phenomena(results, tmp_path / "bars.png")
    (panel,) = drawn[0].axes
    bars = [[bar.get_width() for bar in bars] for bars in panel.containers if isinstance(bars, BarContainer)]
    assert bars == [[0.875, 0.75, 1.0], [0.25, 0.0, 0.5]]  # all paradigms, nouns, verbs
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert labels == ["all paradigms (2)", "nouns (1)", "verbs (1)"]
    assert [line.get_xdata()[0] for line in panel.lines if line.get_label() == "chance (50%)"] == [0.5]
    assert (tmp_path / "bars.png").stat().st_size > 5000


def test_the_hubs_copy_is_read_by_configuration(monkeypatch):
    rows = [{"sentence_good": "a", "sentence_bad": "b", "UID": "u", "linguistics_term": "t"}]
    monkeypatch.setattr("datasets.get_dataset_config_names", lambda name: ["u", "v"])
    monkeypatch.setattr("datasets.load_dataset", lambda name, config, split: [{**row, "UID": config} for row in rows])
    assert read_blimp("hub") == [Paradigm("u", "t", ["a"], ["b"]), Paradigm("v", "t", ["a"], ["b"])]


def test_a_hub_that_is_not_reached_is_said_in_one_line(monkeypatch, tmp_path):
    def unreachable(name):
        raise ConnectionError("no\nroute")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.get_dataset_config_names", unreachable)
    with pytest.raises(UserError, match="nyu-mll/blimp.*no route"):
        read_blimp("hub")


@pytest.mark.slow
def test_minicons_gives_the_same_scores_and_accuracy(models, pairs):
    """The field's own tool (Misra, 2022), by sums of log-probabilities."""
    scorer = pytest.importorskip("minicons.scorer", reason="minicons is not installed")
    sentences = [row[key] for row in read_pairs(pairs) for key in ("sentence_good", "sentence_bad")]
    for name in ("ours", "bert"):
        judge = scorer.MaskedLMScorer(str(models[name]), "cpu")
        judge.tokenizer.batch_encode_plus = judge.tokenizer.__call__  # Transformers 5 has only the latter
        model = load_masked_model(str(models[name]))
        for score, metric in (("pll", "original"), ("within_word_l2r", "within_word_l2r")):
            expected = judge.sequence_score(sentences, reduction=lambda x: x.sum(0).item(), PLL_metric=metric)
            found = pseudo_log_likelihoods(model, encode(model, sentences, score), score).numpy()
            np.testing.assert_allclose(found, expected, atol=1e-3)
            decisions = [np.array(scores).reshape(-1, 2) for scores in (found, expected)]
            accuracies = [(good_bad[:, 0] > good_bad[:, 1]).mean() for good_bad in decisions]
            assert accuracies[0] == pytest.approx(accuracies[1], abs=1e-3)
