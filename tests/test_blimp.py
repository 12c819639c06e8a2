"""Minimal pairs: scores and decisions against a plain loop, ties, standard errors, the reading of BLiMP's files."""

import json
import math
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from judged_models import read_pairs, save_models, write_pairs
from promises.test_evaluating import pseudo_likelihood
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForMaskedLM, AutoProcessor, AutoTokenizer

from d2l_bert.__main__ import main
from d2l_bert.model_cards.blimp import PHENOMENON_OF
from d2l_bert.tokenization.wordpiece import literal_json, literal_tokenizer
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import MaskedModel
from d2l_bert.training.evaluation.minimal_pairs import (
    MinimalPair,
    blimp_results,
    name_of_pairs,
    read_blimp,
)
from d2l_bert.training.evaluation.pseudo_likelihood import encode, pseudo_log_likelihoods


@pytest.fixture(scope="module")
def models(trained, books, tmp_path_factory):
    return save_models(trained, books, tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "blimp")


def scores_of(model, sentences, score, batch_tokens=4096):
    config = EvaluateConfig(score=score, batch_tokens=batch_tokens)
    return pseudo_log_likelihoods(model, encode(model, sentences, score), config, make_accelerator("no"), "").numpy()


def sentences_in(rows):
    """The good and the bad sentence of each pair, one after the other."""
    sentences = []
    for row in rows:
        sentences += [row["sentence_good"], row["sentence_bad"]]
    return sentences


@pytest.mark.parametrize("score", ["pll", "within_word_l2r"])
@pytest.mark.parametrize(
    "name",
    ["ours", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "roberta", "mlm", "distilbert", "albert"))],
)
def test_scores_and_decisions_are_those_of_a_plain_loop(models, pairs, name, score):
    sentences = sentences_in(read_pairs(pairs)[:8])
    sentences += ["Umbrella!", "Unbelievable: 17 xylophones, said the harbourmaster."]  # words of many pieces
    model = MaskedModel(str(models[name]))
    expected = []
    for sentence in sentences:
        ids = model.tokenizer(sentence)["input_ids"]
        unknown = [place for place, number in enumerate(ids) if number == model.tokenizer.unk_token_id]
        expected.append(pseudo_likelihood(models[name], sentence, score == "within_word_l2r", unknown))
    for batch_tokens in (1, 40, 10_000):
        found = scores_of(model, sentences, score, batch_tokens)
        np.testing.assert_allclose(found, expected, atol=1e-4)
    if score == "pll":  # the other score differs, or the test would not see which was computed
        assert abs(scores_of(model, sentences, "within_word_l2r")[-1] - found[-1]) > 1e-3


def test_an_added_marker_is_a_token_of_a_scored_sentence_as_in_use_and_a_mask_in_the_text_is_text(models):
    tokenizer = AutoTokenizer.from_pretrained(models["bert"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["[E1]"]})
    model = types.SimpleNamespace(tokenizer=tokenizer, backend=literal_tokenizer(literal_json(tokenizer)))
    encoded = encode(model, ["Anna [E1] was.", "Anna [MASK] was."])
    assert encoded.ids[0].tolist() == tokenizer("Anna [E1] was.")["input_ids"]
    assert tokenizer.mask_token_id not in encoded.ids[1]


def test_sentences_that_the_tokenizer_does_not_tell_apart_have_the_same_score(models):
    """Computed in different batches they would differ in the last digits, and be no tie."""
    model = MaskedModel(str(models["mlm"]))
    scores = scores_of(model, ["Anna was old.", "Anna was red.", "anna  was OLD."], "pll", batch_tokens=1)
    assert scores[0] == scores[2] != scores[1]


def test_a_tie_counts_half_and_errors_are_binomial():
    """Three of four right in one paradigm; one right, one wrong and two ties in another: worked out by hand."""
    pairs = [MinimalPair("a", "x", "g", "b")] * 4 + [MinimalPair("b", "y", "g", "b")] * 4
    scores_of_pairs = [(-1, -2), (-1, -3), (-1, -5), (-2, -1), (-1, -2), (-2, -1), (-3, -3), (-7, -7)]
    scores = np.array(scores_of_pairs, dtype=float).ravel()
    found = blimp_results(pairs, scores)
    assert found["paradigms"]["a"]["accuracy"] == 0.75
    assert found["paradigms"]["b"]["accuracy"] == 0.5
    assert found["paradigms"]["b"]["ties"] == 2
    assert found["ties"] == 2
    assert found["pairs"] == 8
    errors = math.sqrt(0.75 * 0.25 / 4), math.sqrt(0.5 * 0.5 / 4)
    assert found["paradigms"]["a"]["standard_error"] == pytest.approx(errors[0])
    assert found["accuracy"] == 0.625
    assert found["standard_error"] == pytest.approx(math.hypot(*errors) / 2)
    assert found["phenomena"]["x"]["accuracy"] == 0.75
    assert found["phenomena"]["y"]["standard_error"] == errors[1]


@torch.no_grad()
@pytest.mark.parametrize("name", ["ours", "bert"])
def test_the_backend_mlm_of_babylm_gives_the_same_scores(models, pairs, name):
    """The calls of its `sentence_zero_shot`, on padded rows; each token with a place in the text is masked once."""
    place = str(models[name])
    options = {"trust_remote_code": True, "revision": None}
    model = AutoModelForMaskedLM.from_pretrained(place, **options).eval()
    processor = AutoProcessor.from_pretrained(place, padding_side="right", **options)
    assert not hasattr(processor, "tokenizer") and processor.pad_token_id is not None
    sentences = sentences_in(read_pairs(pairs)[:8])
    read = [processor(text=sentence, return_offsets_mapping=True) for sentence in sentences]
    masked = []
    for number, one in enumerate(read):
        masked += [(number, place) for place, (_, end) in enumerate(one["offset_mapping"]) if end > 0]
    numbers, places = torch.tensor(masked).T
    rows = [torch.tensor(read[number]["input_ids"]) for number, _ in masked]
    targets = torch.stack([row[at] for row, at in zip(rows, places, strict=True)])
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    ids = pad_sequence(rows, batch_first=True, padding_value=processor.pad_token_id)
    each = torch.arange(len(ids))
    ids[each, places] = processor.mask_token_id
    logits = model(input_ids=ids, attention_mask=mask)["logits"]
    found = logits[each, places].log_softmax(-1)[each, targets]
    expected = torch.zeros(len(sentences)).index_add(0, numbers, found)
    np.testing.assert_allclose(scores_of(MaskedModel(place), sentences, "pll"), expected, atol=1e-3)


@pytest.mark.slow
def test_minicons_gives_the_same_scores(models, pairs):
    """The field's own tool (Misra, 2022), by sums of log-probabilities."""
    scorer = pytest.importorskip("minicons.scorer", reason="minicons is not installed")
    sentences = sentences_in(read_pairs(pairs))
    for name in ("ours", "bert"):
        judge = scorer.MaskedLMScorer(str(models[name]), "cpu")
        judge.tokenizer.batch_encode_plus = judge.tokenizer.__call__  # Transformers 5 has only the latter
        model = MaskedModel(str(models[name]))
        for score, metric in (("pll", "original"), ("within_word_l2r", "within_word_l2r")):
            expected = judge.sequence_score(sentences, reduction=lambda x: x.sum(0).item(), PLL_metric=metric)
            np.testing.assert_allclose(scores_of(model, sentences, score), expected, atol=1e-3)


def test_a_paradigm_under_two_phenomena_is_refused(trained, tmp_path, fails):
    row = {"sentence_good": "Anna walked.", "sentence_bad": "Anna walk.", "UID": "own"}
    rows = [{**row, "linguistics_term": term} for term in ("agreement", "binding")]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    line = fails("evaluate", trained, f"--blimp={tmp_path}")
    assert "line 2: 'own' belongs to 'binding' here, and to 'agreement' before" in line


@pytest.mark.slow
def test_only_pairs_of_its_paradigms_are_blimp(trained, tmp_path, capsys):
    """67 paradigms under 13 phenomena, as in the released models' figures; of each there are 1,000 pairs."""
    assert len(PHENOMENON_OF) == 67
    released = json.loads(Path("model_cards/d2l-bert-tiny-books-10m/metrics.json").read_text())
    names = {key.partition("/")[2] for key in released if key.startswith("eval_blimp_accuracy/")}
    assert set(PHENOMENON_OF.values()) == names and len(names) == 13
    good = "Anna walked to the garden."
    bad = "Anna walk to the garden."
    row = {"sentence_good": good, "sentence_bad": bad}
    passive = {**row, "UID": "passive_1", "linguistics_term": "argument_structure"}
    cases = [
        ("all", [passive, {**row, "UID": "wh_island"}], True),
        ("own", [row, row], False),
        ("mixed", [passive, {**row, "UID": "own"}], False),
        ("renamed", [{**passive, "linguistics_term": "binding"}], False),
        ("more", [passive] * 1001, False),
        ("named alike", [row, row], False),
    ]
    for name, rows, is_blimp in cases:
        (tmp_path / name).mkdir()
        file = "passive_1.jsonl" if name == "named alike" else "pairs.jsonl"
        (tmp_path / name / file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        pairs = read_blimp(str(tmp_path / name))
        assert name_of_pairs(pairs, str(tmp_path / name)) == ("BLiMP" if is_blimp else f"minimal pairs of {name}")
    for name, words in (
        ("all", "BLiMP, score pll: 2 pairs in 2 of 67"),
        ("own", "minimal pairs of own, score pll: 2"),
    ):
        output = tmp_path / f"{name}.json"
        assert main(["evaluate", str(trained), f"--blimp={tmp_path / name}", f"--output={output}"]) == 0
        said = capsys.readouterr()
        assert words in said.out
        assert ("BLiMP" in said.out + said.err) == (name == "all")
        assert json.loads(output.read_text())["models"][0]["blimp"]["title"] == words.partition(",")[0]
