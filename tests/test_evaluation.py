"""`d2l-bert evaluate` on a text: figures against the definitions written out, tables, notes, and several processes."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import write_books
from judged_models import save_models, write_pairs
from transformers import AutoModelForMaskedLM, AutoTokenizer

from d2l_bert.cli import main
from d2l_bert.training.evaluation import text as evaluation_text
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.evaluation.masked_models import load_masked_model


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


HEADS = {"ours": "seq_relationship_logits", "bert": "seq_relationship_logits", "albert": "sop_logits"}


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
