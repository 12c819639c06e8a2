"""`d2l-bert evaluate` on a text: figures against the definitions written out, tables, notes, and several processes."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import write_books
from judged_models import save_models, write_pairs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from d2l_bert.cli import main
from d2l_bert.folders import read_json
from d2l_bert.tokenization.token_store import TokenizedCorpus
from d2l_bert.training import masking
from d2l_bert.training.data import HeldOutPairs, ordinary_ids
from d2l_bert.training.evaluation import text as evaluation_text
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import load_masked_model
from d2l_bert.training.evaluation.pseudo_likelihood import encode


pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 48


@pytest.fixture(scope="module")
def models(trained, books, tmp_path_factory):
    return save_models(trained, books, tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def other_books(tmp_path_factory):
    """A text that no model was trained on."""
    return write_books(tmp_path_factory.mktemp("other") / "others", count=3, seed=5)


@pytest.fixture
def evaluate(tmp_path):
    """Run the command; returns the content of its JSON file."""

    def run(*arguments):
        output = tmp_path / f"figures-{len(list(tmp_path.glob('figures-*.json')))}.json"
        assert main(["evaluate", *map(str, arguments), f"--output={output}"]) == 0
        return json.loads(output.read_text())

    return run


@pytest.fixture
def seen_pairs(monkeypatch):
    """The pairs and keys of each evaluation, as (TokenizedCorpus, pairs, keys), with the tokenizer's token ids."""
    seen, original = [], HeldOutPairs.parts

    def parts(self):
        for pairs, keys in original(self):
            seen.append((self.make_batch.tokens, pairs, keys))
            yield pairs, keys

    monkeypatch.setattr(evaluation_text.HeldOutPairs, "parts", parts)
    return seen


def expected_figures(folder, corpus: TokenizedCorpus, pairs, keys, head):
    """The figures from their definitions: one pair in a forward pass, all logits, and sums divided once."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    auto_class = AutoModelForPreTraining if head else AutoModelForMaskedLM
    model = auto_class.from_pretrained(folder).eval()
    first, end = ordinary_ids(tokenizer)
    losses, ranks, pair_losses, pair_right = [], [], [], []
    for pair, key in zip(pairs, keys, strict=True):
        a, b = (corpus.ids.at(np.arange(pair[f"{s}_start"], pair[f"{s}_end"])).tolist() for s in "ab")
        ids = [tokenizer.cls_token_id, *a, tokenizer.sep_token_id]
        segments = [0] * len(ids) + [1] * (len(b) + 1) if b else [0] * len(ids)
        ids += [*b, tokenizer.sep_token_id] if b else []
        ids = np.array([ids])
        ordinary = np.ones(ids.shape, dtype=bool)
        ordinary[0, [0, len(a) + 1, -1]] = False
        masked, chosen = masking.mask_tokens(ids, ordinary, np.array([key]), tokenizer.mask_token_id, first, end)
        inputs = {"input_ids": torch.tensor(masked)}
        if b:
            inputs["token_type_ids"] = torch.tensor([segments])
        with torch.no_grad():
            outputs = model(**inputs)
        logits = outputs.prediction_logits if head else outputs.logits
        for position in np.flatnonzero(chosen[0]):
            probabilities = logits[0, position].double().softmax(-1)
            label = int(ids[0, position])
            losses.append(-math.log(probabilities[label]))
            ranks.append(int((probabilities > probabilities[label]).sum()))
        if head:
            pair_logits = outputs.sop_logits if head == "sop_logits" else outputs.seq_relationship_logits
            chances = pair_logits[0].double().softmax(-1)
            label = int(pair["next_sentence_label"])
            pair_losses.append(-math.log(chances[label]))
            pair_right.append(int(chances.argmax()) == label)
    expected = {
        "mlm_loss": np.mean(losses),
        "perplexity": math.exp(np.mean(losses)),
        "mlm_accuracy": np.mean([rank == 0 for rank in ranks]),
        "mlm_top_5_accuracy": np.mean([rank < 5 for rank in ranks]),
        "masked_tokens": len(losses),
    }
    if head:
        task = "sop" if head == "sop_logits" else "nsp"
        expected |= {
            f"{task}_loss": np.mean(pair_losses),
            f"{task}_accuracy": np.mean(pair_right),
            "pairs": len(pairs),
        }
    else:
        expected["sequences"] = len(pairs)
    return expected


HEADS = {"ours": "seq_relationship_logits", "bert": "seq_relationship_logits", "albert": "sop_logits"}


@pytest.mark.parametrize("name", ["ours", "bert", "albert", "mlm", "distilbert", "roberta"])
def test_the_figures_are_those_of_their_definitions(models, other_books, evaluate, seen_pairs, name):
    content = evaluate(
        models[name],
        f"--corpus={other_books}",
        f"--max_seq_length={LENGTH}",
        "--pppl_sentences=0",
        "--batch_tokens=500",
    )
    found = content["models"][0]["text"]
    corpus = seen_pairs[0][0]
    (pairs, keys), *_ = [(pairs, keys) for _, pairs, keys in seen_pairs]
    expected = expected_figures(models[name], corpus, pairs, keys, HEADS.get(name))
    assert len(pairs) >= 30 and found["tokens"] == len(corpus.ids) > 800
    for figure, value in expected.items():
        assert found[figure] == pytest.approx(value, rel=1e-5), figure
    if name in HEADS:
        assert found["pair_task"] == found["pair_head"] == ("sop" if name == "albert" else "nsp")
    else:
        assert found["pair_task"] is None and not {"nsp_loss", "sop_loss", "pairs"} & found.keys()


def test_the_held_out_figures_of_a_run_are_those_in_its_metrics(trained, books, evaluate):
    """One meaning: `pretrain` and `evaluate` measure the same pairs with the same masks."""
    options = (f"--corpus={books}", "--held_out", f"--max_seq_length={LENGTH}", "--max_eval_pairs=2000")
    found = evaluate(trained, *options, "--pppl_sentences=0")["models"][0]["text"]
    metrics = read_json(trained / "metrics.json")
    for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "masked_tokens", "pairs"):
        assert found[name] == pytest.approx(metrics[f"eval_{name}"], rel=1e-5), name


def test_pseudo_perplexity_is_of_words_and_the_same_sentences_for_all_models(models, other_books, evaluate):
    options = ("--pppl_sentences=7", f"--max_seq_length={LENGTH}")
    found = [
        m["text"] for m in evaluate(models["ours"], models["roberta"], f"--corpus={other_books}", *options)["models"]
    ]
    texts = [load_masked_model(str(models[name])) for name in ("ours", "roberta")]
    config = EvaluateConfig(corpus=[str(other_books)])
    sentences = evaluation_text.read_text(config).sentences(7, texts, LENGTH)
    for figures, name in zip(found, ("ours", "roberta"), strict=True):
        model = AutoModelForMaskedLM.from_pretrained(models[name]).eval()
        tokenizer = AutoTokenizer.from_pretrained(models[name])
        total, tokens = 0.0, 0
        for sentence in sentences:
            ids = tokenizer(sentence)["input_ids"]
            for position in range(1, len(ids) - 1):
                masked = torch.tensor([ids])
                masked[0, position] = tokenizer.mask_token_id
                with torch.no_grad():
                    total += float(model(input_ids=masked).logits[0, position].log_softmax(-1)[ids[position]])
                tokens += 1
        words = sum(len(sentence.split()) for sentence in sentences)
        assert figures["pseudo_perplexity"] == pytest.approx(math.exp(-total / words), rel=1e-4)
        assert (figures["pppl_sentences"], figures["pppl_words"], figures["pppl_tokens"]) == (7, words, tokens)
    assert len(set(sentences)) > 3 and found[0]["pppl_tokens"] != found[1]["pppl_tokens"]


def test_a_sentence_too_long_for_one_model_is_left_out_for_all(models, other_books):
    loaded = [load_masked_model(str(models[name])) for name in ("ours", "roberta")]
    text = evaluation_text.read_text(EvaluateConfig(corpus=[str(other_books)]))
    lengths = [encode(model, text.sentences(10_000, loaded, LENGTH)).lengths() for model in loaded]
    limit = int(np.median(lengths[1]))
    kept = text.sentences(10_000, loaded, limit)
    assert 0 < len(kept) < len(lengths[0])
    assert max(encode(model, kept).lengths().max() for model in loaded) <= limit


def test_a_text_without_a_sentence_for_pseudo_perplexity_is_said(models, evaluate, tmp_path, capsys):
    (tmp_path / "long.txt").write_text("Anna walked to the garden, then to the kitchen and home.\n" * 9)
    content = evaluate(models["mlm"], f"--corpus={tmp_path / 'long.txt'}", "--max_seq_length=8")
    said = capsys.readouterr().err
    assert (
        "no pseudo-perplexity: each sentence of long.txt has no token, or more tokens than" in said
        and "length (8)" in said
    )
    assert "pseudo_perplexity" not in content["models"][0]["text"]


def test_the_table_says_which_model_has_no_head_for_pairs(models, other_books, evaluate, capsys):
    evaluate(models["bert"], models["mlm"], f"--corpus={other_books}", "--pppl_sentences=3")
    printed = capsys.readouterr().out
    header, parameters, _, text, loss, *_ = printed.splitlines()
    assert header.split() == ["bert", "mlm"] and text == "Text: others"
    (pseudo,) = [line for line in printed.splitlines() if "pseudo-perplexity of a word" in line]
    assert all(re.fullmatch(r"\d{1,3}(,\d{3})*\.\d", number) for number in pseudo.split()[-2:])
    assert any("," in number for number in pseudo.split()[-2:])
    assert re.fullmatch(r"  MLM loss \(nats a token\) +\d+\.\d{3} +\d+\.\d{3}", loss)
    for figure in ("loss", "accuracy"):
        (row,) = [line for line in printed.splitlines() if line.startswith(f"  NSP {figure}")]
        assert row.endswith("  -") and re.search(r"\d", row)
    assert "with --objective none all MLM figures are on single segments" in printed
    evaluate(models["bert"], models["mlm"], f"--corpus={other_books}", "--pppl_sentences=0", "--objective=none")
    printed = capsys.readouterr().out
    assert "NSP" not in printed and "single segments." not in printed


def test_a_model_that_was_trained_on_the_text_is_named(trained, books, evaluate, capsys):
    evaluate(trained, f"--corpus={books}", "--pppl_sentences=0", "--max_eval_pairs=4")
    assert "was trained on this very text, books; --held_out evaluates on the part" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one(models, other_books, evaluate, tmp_path):
    pairs = write_pairs(tmp_path / "pairs")
    folders = [str(models[name]) for name in ("ours", "bert", "roberta")]
    options = [f"--corpus={other_books}", "--pppl_sentences=9", f"--blimp={pairs}", "--batch_tokens=300"]
    alone = evaluate(*folders, *options)
    output = tmp_path / "two.json"
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "-m",
        "d2l_bert",
        "evaluate",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command += [*folders, *options, f"--output={output}"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("MLM loss") == 1  # the main process prints, no other
    both = json.loads(output.read_text())
    for one, two in zip(alone["models"], both["models"], strict=True):
        assert two["blimp"] == one["blimp"]
        assert two["text"].keys() == one["text"].keys()
        for name, value in one["text"].items():
            assert two["text"][name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name


def test_a_model_of_the_hub_is_evaluated_by_its_id(here, models, other_books, evaluate, monkeypatch, tmp_path):
    files = {path.name: path.read_bytes() for path in models["bert"].iterdir() if path.is_file()}
    from huggingface_hub import HfApi

    api = HfApi(endpoint=here.endpoint)
    api.create_repo("someone/bert")
    api.upload_folder(repo_id="someone/bert", folder_path=str(models["bert"]))
    monkeypatch.chdir(tmp_path)
    options = (f"--corpus={other_books}", "--pppl_sentences=0")
    content = evaluate("someone/bert", *options)
    local = evaluate(models["bert"], *options)
    assert files and content["models"][0]["text"] == local["models"][0]["text"]


def test_a_tokenizer_that_does_not_fit_is_refused(models, tmp_path, fails, other_books):
    for damage, words in (
        ({"mask_token": None}, "its tokenizer has no mask token"),
        ({"more": True}, "tokens and the model"),
    ):
        folder = tmp_path / words.split()[-1]
        shutil.copytree(models["mlm"], folder)
        if "more" in damage:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.add_tokens(["onemore"])
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, mask_token=None)
        tokenizer.save_pretrained(folder)
        assert words in fails("evaluate", folder, f"--corpus={other_books}")


def test_weights_that_are_missing_are_said_in_the_users_words(models, tmp_path, fails, other_books):
    folder = shutil.copytree(models["ours"], tmp_path / "lacking")
    weights = load_file(folder / "model.safetensors")
    for part, words in {
        "attention.query": "without weights for bert.encoder.layer.0.attention.query",
        "mlm": "it was saved as D2lBertForPreTraining, without weights for mlm",
    }.items():
        kept = {name: tensor for name, tensor in weights.items() if part not in name}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        assert words in fails("evaluate", folder, f"--corpus={other_books}")
