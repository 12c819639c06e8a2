"""Pipelines: our next-sentence-prediction, and Transformers' own with our heads."""

import pytest
import torch
import transformers
from transformers import pipeline
from transformers.pipelines import PIPELINE_REGISTRY

import d2l_bert


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


@pytest.mark.skipif(
    "question-answering" not in PIPELINE_REGISTRY.get_supported_tasks(),
    reason="this transformers has no such pipeline",
)
def test_the_question_answering_pipeline_takes_our_head(trained, tokenizer):
    model = d2l_bert.D2lBertForQuestionAnswering.from_pretrained(trained)
    context = "Anna walked to the garden."
    answer = pipeline("question-answering", model=model, tokenizer=tokenizer)(question="Who?", context=context)
    assert answer["answer"] in context
