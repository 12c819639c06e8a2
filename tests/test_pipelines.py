"""Pipelines: our next-sentence-prediction, and Transformers' own with our heads."""

import shutil

import pytest
import torch
import transformers
from transformers import pipeline

import d2l_bert
from d2l_bert.__main__ import main
from d2l_bert.folders import read_json, write_json
from d2l_bert.pair_tasks import PAIR_TASKS


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(trained):
    return transformers.AutoTokenizer.from_pretrained(trained)


def test_stock_pipelines_take_our_heads(trained, tokenizer):
    text = "Anna walked to the garden."
    states = pipeline("feature-extraction", model=str(trained))(text, return_tensors=True)
    model = d2l_bert.D2lBertModel.from_pretrained(trained).eval()
    with torch.no_grad():
        torch.testing.assert_close(states, model(**tokenizer(text, return_tensors="pt")).last_hidden_state)
    for task, head in (
        ("text-classification", "ForSequenceClassification"),
        ("token-classification", "ForTokenClassification"),
    ):
        model = getattr(d2l_bert, f"D2lBert{head}").from_pretrained(
            trained, id2label={0: "good", 1: "bad", 2: "odd"}, label2id={"good": 0, "bad": 1, "odd": 2}
        )
        answers = pipeline(task, model=model, tokenizer=tokenizer)(text)
        with torch.no_grad():
            shares = model.eval()(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0]
        best = shares if task == "text-classification" else shares[1]
        answer = answers[0]
        assert answer.get("label", answer.get("entity")) == model.config.id2label[int(best.argmax())]
        assert answer["score"] == pytest.approx(best.max().item(), rel=1e-4)


def test_two_texts_are_answered_in_the_labels_of_what_the_model_was_trained_to_tell(trained, tmp_path, capsys):
    """A model of SOP, by its record, tells the order; the same probabilities as NSP's for the two labels."""
    record, shares = read_json(trained / "run_config.json"), []
    for objective in ("nsp", "sop"):
        folder = tmp_path / objective
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
        write_json(folder / "run_config.json", {**record, "run": {**record["run"], "objective": objective}})
        assert main(["next-sentence", str(folder), "Anna walked home.", "Hugo came."]) == 0
        rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
        shares.append([{name: share for share, name in rows}[label] for label in PAIR_TASKS[objective].labels])
    assert shares[0] == shares[1]
