"""The model card: every fact in it comes from the run's files."""

import json
import re
from importlib.metadata import version

import pytest
from hub_cards import read_card
from huggingface_hub import ModelCard

from d2l_bert import D2lBertForPreTraining
from d2l_bert.folders import read_json
from d2l_bert.model_cards.card import card_of, count_parameters, render_card


@pytest.fixture
def facts(trained):
    """The contents of config.json, run_config.json and metrics.json of a run, for a test to change."""
    return [read_json(trained / name) for name in ("config.json", "run_config.json", "metrics.json")]


def card(facts, name="model"):
    config, record, metrics = facts
    return ModelCard(card_of(name, config, 19133, record, metrics, True))


def rows(text):
    """The rows of all tables with two columns, as a dict."""
    return dict(re.findall(r"^\| ((?:[^|\\]|\\.)+) \| (.+) \|$", text, re.MULTILINE))


def test_the_cards_metadata_holds_the_same_numbers_and_passes_the_hubs_rules(trained, facts):
    _, _, metrics = facts
    found = ModelCard.load(trained / "README.md")
    assert read_card((trained / "README.md").read_text())[1:] == ([], [])
    assert found.data.library_name == "transformers" and found.data.pipeline_tag == "fill-mask"
    assert found.data.license == "apache-2.0" and found.data.language is None and found.data.datasets is None
    assert found.data.widget == metrics["predictions"] and len(found.data.widget) == 5
    figures = {result.metric_name: result.metric_value for result in found.data.eval_results}
    keys = ("mlm_loss", "perplexity", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
    names = ("MLM loss", "MLM perplexity", "MLM accuracy", "NSP loss", "NSP accuracy")
    assert figures == {name: round(metrics[f"eval_{key}"], 4) for name, key in zip(names, keys, strict=True)}


@pytest.mark.skipif(version("huggingface_hub") < "2", reason="version 1 asks the public Hub, whatever it is told")
def test_the_hubs_own_check_accepts_the_cards_metadata(hub, trained, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    ModelCard.load(trained / "README.md").validate()
    assert [(request.path, request.status) for request in hub.requests] == [("/api/validate-yaml", 200)]


ROWS = {
    "eval_mlm_loss": ["MLM loss"],
    "eval_perplexity": ["MLM perplexity"],
    "eval_mlm_accuracy": ["MLM accuracy"],
    "eval_nsp_accuracy": ["NSP accuracy"],
    "train_seconds": ["time"],
    "train_tokens_per_second": [],
    "train_mfu": ["share of the peak (MFU)"],
    "train_padding_share": ["padding"],
    "train_data_wait_share": ["waiting for data"],
    "train_memory_mb": ["memory"],
    "predictions": [],
}


@pytest.mark.parametrize("key", ROWS)
def test_a_row_whose_number_is_in_no_file_is_left_out(facts, key):
    whole = card(facts)
    del facts[2][key]
    left = card(facts)
    assert rows(whole.text).keys() - rows(left.text).keys() >= set(ROWS[key])
    assert "None" not in left.text and "nan" not in left.text.lower().split()
    names = {result.metric_name for result in left.data.eval_results}
    assert set(ROWS[key]).isdisjoint(names) and len(names) == 5 - (key.startswith("eval_"))
    if key == "predictions":
        assert "widget" not in left.data.to_dict() and "What it makes of some masks" not in left.text


def test_markdown_signs_and_quotes_in_names_and_words_are_escaped(facts):
    facts[2]["predictions"][0] = {"text": 'à | b "[MASK]"', "output": [{"label": "|", "score": 0.5}]}
    found = card(facts, name='d\'accord "x"')
    assert rows(found.text)[r'à \| b "[MASK]"'] == r"`\|` (0.50)"
    assert read_card(found.content)[1:] == ([], [])
    assert r'fill("à | b \"[MASK]\"")' in found.text
    for block in re.findall(r"```python\n(.*?)```", found.text, re.DOTALL):
        compile(block, "the card", "exec")


def test_a_published_folder_gives_the_same_card_again(trained, tmp_path):
    """The published files hold everything that the card needs."""
    files = ("config.json", "model.safetensors", "run_config.json", "metrics.json", "training_curves.png")
    for name in files:
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    assert render_card(tmp_path, "model") == (trained / "README.md").read_text()
    assert count_parameters(tmp_path) == D2lBertForPreTraining.from_pretrained(trained).num_parameters()
    (tmp_path / "metrics.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="holds no JSON object"):
        render_card(tmp_path, "model")
