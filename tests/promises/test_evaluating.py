"""`evaluate` against its definitions, and `embed` against sentence-transformers, written out or computed by others."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM

from d2l_bert import D2lBertConfig, D2lBertForPreTraining

from .driving import (
    SMALL,
    SPECIALS,
    command,
    read_json,
    watched,
    write_books,
    write_numbered,
    write_numbered_tokenizer,
)


def test_the_final_figures_of_a_run_are_those_of_its_held_out_batches(texts, tmp_path):
    """From all logits of the finished model, on the batches of the last evaluation."""
    words = [
        "pretrain",
        "--corpus",
        texts,
        "--output_dir",
        tmp_path / "out",
        *SMALL,
        "--max_steps=8",
        "--eval_steps=8",
        "--micro_batch_size=2",
        "--hidden_dropout_prob=0.2",  # none by default, and then an evaluation with it is no other
    ]
    with watched(D2lBertForPreTraining) as (_, evaluated):
        assert command(*words, "--license=mit") == 0
    batches = [batch for batch in evaluated if "labels" in batch]
    metrics, model = (
        read_json(tmp_path / "out" / "metrics.json"),
        D2lBertForPreTraining.from_pretrained(tmp_path / "out"),
    )
    batches = batches[: len(batches) - 1]  # the last one is the example of the report
    assert len({int((batch["labels"] != -100).sum()) for batch in batches}) > 1, "batches of different weights"
    losses, right, pair_losses, pair_right = [], [], [], []
    model = model.double().eval()
    with torch.no_grad():
        for batch in batches:
            outputs = model(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
            rows, slots = (batch["labels"] != -100).nonzero(as_tuple=True)
            logits = outputs.prediction_logits[rows, batch["masked_positions"][rows, slots]]
            labels = batch["labels"][rows, slots]
            losses += (-logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]).tolist()
            right += (logits.argmax(-1) == labels).tolist()
            shares, labels = outputs.seq_relationship_logits.log_softmax(-1), batch["next_sentence_label"]
            pair_losses += (-shares.gather(1, labels[:, None])[:, 0]).tolist()
            pair_right += (shares.argmax(-1) == labels).tolist()
    assert metrics["eval_masked_tokens"] == len(losses) and metrics["eval_pairs"] == len(pair_losses)
    assert metrics["eval_mlm_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)
    assert metrics["eval_mlm_accuracy"] == pytest.approx(np.mean(right), abs=1e-9)
    assert metrics["eval_nsp_loss"] == pytest.approx(np.mean(pair_losses), rel=1e-4)
    assert metrics["eval_nsp_accuracy"] == pytest.approx(np.mean(pair_right), abs=1e-9)


def evaluate(tmp_path, *words):
    output = tmp_path / f"figures-{len(list(tmp_path.glob('figures-*')))}.json"
    assert command("evaluate", *words, "--output", output) == 0
    return read_json(output)["models"]


def test_the_figures_on_a_text_are_those_of_the_true_tokens(tmp_path):
    """A text of numbered words: the true token at a masked place is told by the words around it."""
    words = write_numbered(tmp_path / "text", documents=12, seed=4)
    folder = write_numbered_tokenizer(tmp_path / "model", words)
    vocabulary = words + len(SPECIALS) + 1
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = D2lBertConfig(vocab_size=vocabulary, max_position_embeddings=64, initializer_range=0.5, **sizes)
    D2lBertForPreTraining(config).save_pretrained(folder)
    with watched(D2lBertForPreTraining) as (_, evaluated):
        (found,) = evaluate(tmp_path, folder, "--corpus", tmp_path / "text", "--max_seq_length=48")
    model = D2lBertForPreTraining.from_pretrained(folder).eval()
    figures, losses, ranks, pair_losses = found["text"], [], [], []
    stop = vocabulary - 1
    for batch in evaluated:
        if "masked_positions" not in batch or len(batch) < 3:
            continue
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        with torch.no_grad():
            outputs = model(batch["input_ids"], mask, batch["token_type_ids"])
        for row, (ids, places) in enumerate(zip(batch["input_ids"], batch["masked_positions"], strict=True)):
            segments = batch["token_type_ids"][row]
            for place in sorted(set(places.tolist()) - {0}):
                truth = true_token(ids, segments, mask[row], place, stop)
                if truth is None:
                    continue
                shares = outputs.prediction_logits[row, place].double().log_softmax(-1)
                losses.append(-float(shares[truth]))
                ranks.append(int((shares > shares[truth]).sum()))
        pair_losses.append(outputs.seq_relationship_logits[batch["token_type_ids"].any(1)])  # rows with a B
    # At the ends of segments and where much is masked, the words around a token do not tell it.
    assert len(losses) > 0.6 * figures["masked_tokens"] and len(losses) <= figures["masked_tokens"]
    assert figures["mlm_loss"] == pytest.approx(np.mean(losses), rel=0.03)
    assert figures["mlm_accuracy"] == pytest.approx(np.mean([rank == 0 for rank in ranks]), abs=0.01)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["mlm_loss"]), rel=1e-6)
    assert sum(map(len, pair_losses)) == figures["pairs"]


def true_token(ids, segments, real, place, stop):
    """The token at a place, from the words around it, whose numbers grow by one a place; None if they do not tell."""
    same = [
        n for n in range(len(ids)) if segments[n] == segments[place] and real[n] and len(SPECIALS) <= ids[n] < stop
    ]
    before, after = [n for n in same if n < place][-3:], [n for n in same if n > place][:3]
    offsets = [Counter(int(ids[n]) - n for n in side).most_common(1) for side in (before, after)]
    if not all(found and found[0][1] >= 2 for found in offsets):
        return None
    (left, _), (right, _) = (found[0] for found in offsets)
    if left == right:
        return left + place
    return stop if right == left - 1 and ids[place] in (4, stop) else None


def test_what_one_segment_tells_is_tried_on_other_pairs_than_it_is_learnt_from(tmp_path):
    """Each word stands once in the texts: it tells the label of its own pair, and nothing of any other."""
    words = write_numbered(tmp_path / "text", documents=40, seed=4)
    words = write_numbered(tmp_path / "check", documents=40, seed=5, first=words)
    tokenizer = write_numbered_tokenizer(tmp_path / "tokenizer", words)
    sizes = [option for option in SMALL if "vocab" not in option]
    options = ["--tokenizer", tokenizer, "--validation_corpus", tmp_path / "check", "--hidden_size=8", "--max_steps=1"]
    assert command("pretrain", "--corpus", tmp_path / "text", "--output_dir", tmp_path / "run", *sizes, *options) == 0
    metrics = read_json(tmp_path / "run" / "metrics.json")
    (found,) = evaluate(tmp_path, tmp_path / "run", "--corpus", tmp_path / "check", "--pppl_sentences=0")
    assert found["text"]["pairs"] == metrics["eval_pairs"] > 100
    chance = pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(metrics["eval_pairs"]))
    assert metrics["eval_nsp_one_segment_accuracy"] == chance
    assert found["text"]["nsp_one_segment_accuracy"] == chance


SENTENCES = [
    "Anna walked to the garden with the apple.",
    "They left the candle in the tower.",
    "Nobody saw the glove again.",
]


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory):
    """A stock BERT with random weights and the trained model's tokenizer."""
    folder = tmp_path_factory.mktemp("stock")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes, initializer_range=0.3)).save_pretrained(folder)
    return folder


def pseudo_likelihood(folder, sentence, by_word=False, left_out=()):
    """
    The sum of log p of each token with it alone masked, or with the tokens behind it in its word masked, too.

    Args:
        left_out: places that are neither masked nor summed.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForMaskedLM.from_pretrained(folder).eval()
    encoded = tokenizer(sentence, return_tensors="pt")
    ids, words, total = encoded["input_ids"][0], encoded.word_ids(), 0.0
    for place in sorted({*range(1, len(ids) - 1)} - {*left_out}):
        masked = ids.clone()
        masked[place] = tokenizer.mask_token_id
        later = [n for n in range(place + 1, len(ids) - 1) if by_word and words[n] == words[place]]
        masked[later] = tokenizer.mask_token_id
        with torch.no_grad():
            total += float(model(input_ids=masked[None]).logits[0, place].double().log_softmax(-1)[ids[place]])
    return total


def test_minimal_pairs_are_decided_by_the_pseudo_likelihood_of_each_sentence(model, stock, tmp_path):
    """As Salazar et al. (2020) and Kauf and Ivanova (2023) define it, one sentence at a time."""
    blimp = tmp_path / "blimp"
    blimp.mkdir()
    pairs = [(sentence, sentence.replace("the", "them", 1).replace("a", "o", 1)) for sentence in SENTENCES]
    pairs += [(bad, good) for good, bad in pairs]
    rows = [
        {"sentence_good": good, "sentence_bad": bad, "UID": "made_up", "linguistics_term": "x"} for good, bad in pairs
    ]
    (blimp / "made_up.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for score, by_word in (("pll", False), ("within_word_l2r", True)):
        found = evaluate(tmp_path, model, stock, "--blimp", blimp, "--score", score)
        for folder, figures in zip((model, stock), found, strict=True):
            scores = {text: pseudo_likelihood(folder, text, by_word) for pair in pairs for text in pair}
            expected = np.mean([scores[good] > scores[bad] for good, bad in pairs])
            assert figures["blimp"]["accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("score, by_word", [("pll", False), ("within_word_l2r", True)])
def test_the_pseudo_perplexity_is_that_of_its_words(model, tmp_path, score, by_word):
    text = tmp_path / "text"
    text.mkdir()
    for number, sentence in enumerate(SENTENCES):
        (text / f"{number}.txt").write_text(f"{sentence}\n")
    (found,) = evaluate(tmp_path, model, "--corpus", text, "--pppl_sentences=3", "--score", score)
    total = sum(pseudo_likelihood(model, sentence, by_word) for sentence in SENTENCES)
    words = sum(len(sentence.split()) for sentence in SENTENCES)
    assert found["text"]["pseudo_perplexity"] == pytest.approx(math.exp(-total / words), rel=1e-3)


MIXED = ["Anna walked to the κηπος with the apple.", "They left the candle in the πυργος.", "Nobody saw μηλον again."]


@pytest.mark.parametrize("score, by_word", [("pll", False), ("within_word_l2r", True)])
def test_an_unknown_word_is_not_scored_and_its_share_of_the_characters_is_told(model, tmp_path, score, by_word):
    """What stands between white space is left out whole, with the full stop that has the same word."""
    (tmp_path / "text").mkdir()
    (tmp_path / "blimp").mkdir()
    for number, sentence in enumerate(MIXED):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{sentence}\n")
    rows = [{"sentence_good": sentence, "sentence_bad": sentence.replace("the", "a")} for sentence in MIXED]
    (tmp_path / "blimp" / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--corpus", tmp_path / "text", "--blimp", tmp_path / "blimp", "--pppl_sentences=3", "--score", score]
    (found,) = evaluate(tmp_path, model, *options, "--objective=none")
    tokenizer, total, words, tokens = AutoTokenizer.from_pretrained(model), 0.0, 0, 0
    for sentence in MIXED:
        place, left_out = 1, []
        for word in sentence.split():
            ids = tokenizer(word, add_special_tokens=False)["input_ids"]
            if tokenizer.unk_token_id in ids:
                left_out += range(place, place + len(ids))
            else:
                words, tokens = words + 1, tokens + len(ids)
            place += len(ids)
        assert left_out
        total += pseudo_likelihood(model, sentence, by_word, left_out)
    text = found["text"]
    assert (text["pppl_words"], text["pppl_tokens"]) == (words, tokens) and words == len(" ".join(MIXED).split()) - 3
    assert text["pseudo_perplexity"] == pytest.approx(math.exp(-total / words), rel=1e-3)

    def share(sentences):
        letters = "".join(sentences).replace(" ", "")
        return sum(letter >= "α" for letter in letters) / len(letters)

    assert text["unknown_share"] == pytest.approx(share(MIXED))
    pairs = [sentence for row in rows for sentence in row.values()]
    assert found["blimp"]["unknown_share"] == pytest.approx(share(pairs))


def test_embed_tells_the_share_of_unknown_characters(model, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("anna met boris\nκηπος in the πυργος\n" * 3 + "\n")
    assert command("embed", model, tmp_path / "lines.txt", "--output", tmp_path / "vectors.npy") == 0
    assert f"{11 / (12 + 16):.1%}" in capsys.readouterr().err


def test_evaluate_changes_nothing_unless_it_is_told_to_update_the_card(model, tmp_path):
    text = write_books(tmp_path / "text", 20, seed=3)
    before = {path: path.read_bytes() for path in model.iterdir() if path.is_file()}
    first = evaluate(tmp_path, model, "--corpus", text)
    second = evaluate(tmp_path, model, "--corpus", text)
    assert first == second, "always the same pairs and masks"
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_sentence_transformers(model, stock, tmp_path, pooling):
    lines = [*SENTENCES, "", "anna", "They left. " * 60]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    for number, folder in enumerate((model, stock)):
        output = tmp_path / f"vectors-{number}.npy"
        options = ["--pooling", pooling, "--batch_tokens=64"]
        assert command("embed", folder, tmp_path / "lines.txt", "--output", output, *options) == 0
        module = Transformer(str(folder))
        modules = [module, Pooling(module.get_word_embedding_dimension(), pooling_mode=pooling)]
        expected = SentenceTransformer(modules=modules, device="cpu").encode(lines)
        np.testing.assert_allclose(np.load(output), expected, rtol=1e-4, atol=1e-5)


def test_the_nearest_lines_are_those_of_the_largest_cosine(model, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("\n".join(SENTENCES) + "\n")
    assert command("embed", model, tmp_path / "lines.txt", "--nearest", "Anna met boris.") == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if "line" in line]
    module = Transformer(str(model))
    encoder = SentenceTransformer(modules=[module, Pooling(module.get_word_embedding_dimension())], device="cpu")
    lines, query = (
        encoder.encode(SENTENCES, normalize_embeddings=True),
        encoder.encode(["Anna met boris."], normalize_embeddings=True),
    )
    cosines = (lines @ query[0]).tolist()
    order = sorted(range(3), key=lambda n: -cosines[n])
    assert [int(words[2]) - 1 for words in shown] == order
    assert [float(words[0]) for words in shown] == pytest.approx([cosines[n] for n in order], abs=1e-3)
