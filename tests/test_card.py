"""The model card: every fact in it comes from the run's files, and no name in it changes its Markdown."""

import json
import re
from importlib.metadata import version

import pytest
from hub_cards import read_card
from huggingface_hub import ModelCard

from d2l_bert import D2lBertForPreTraining
from d2l_bert.folders import read_json
from d2l_bert.model_cards.card import card_of, count_parameters, render_card


FILES = ("config.json", "run_config.json", "metrics.json")


@pytest.fixture
def facts(trained):
    """The contents of config.json, run_config.json and metrics.json of a run, for a test to change."""
    return [read_json(trained / name) for name in FILES]


def card(facts, name="model"):
    config, record, metrics = facts
    return ModelCard(card_of(name, config, 19133, record, metrics, {"training_curves.png": "Training curves"}))


def rows(text):
    """The rows of all tables with two columns, as a dict."""
    return dict(re.findall(r"^\| ((?:[^|\\]|\\.)+) \| (.+) \|$", text, re.MULTILINE))


def test_the_cards_metadata_holds_the_same_numbers_and_passes_the_hubs_rules(trained, facts):
    _, _, metrics = facts
    found = ModelCard.load(trained / "README.md")
    assert read_card((trained / "README.md").read_text())[1:] == ([], [])
    assert found.data.library_name == "transformers" and found.data.pipeline_tag == "fill-mask"
    assert found.data.license == "apache-2.0" and found.data.language is None and found.data.datasets is None
    surest = sorted(metrics["predictions"], key=lambda example: -example["output"][0]["score"])[:3]
    assert found.data.widget == [{"text": example["text"]} for example in surest]
    assert all(f"| {example['text']} | `{example['output'][0]['label']}` (" in found.text for example in surest)
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
    "eval_mlm_accuracy": ["MLM accuracy", "masked tokens predicted, on held-out text"],
    "eval_nsp_accuracy": ["NSP accuracy"],
    "train_words_seen": ["words seen in training"],
    "train_seconds": ["time"],
    "train_skipped_steps": [],
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
        assert "widget" not in left.data.to_dict() and "likeliest tokens" not in left.text


@pytest.mark.parametrize(
    ("objective", "asked", "others"),
    [("nsp", "is B what followed A", "order"), ("sop", "does A come before B", "followed")],
)
def test_the_accuracy_on_pairs_says_what_was_asked_beside_what_one_segment_tells(facts, objective, asked, others):
    config, record, metrics = facts
    record["run"]["objective"] = objective
    kept = {name: value for name, value in metrics.items() if "nsp" not in name}
    pairs = {"loss": 0.4, "accuracy": 0.8125, "one_segment_accuracy": 0.4925}
    metrics = {**kept, **{f"eval_{objective}_{name}": value for name, value in pairs.items()}}
    found = rows(card([config, record, metrics]).text)
    ((question, answer),) = [(row, text) for row, text in found.items() if asked in row]
    assert others not in question and "81.2 %" in answer and "49.2 %" in answer


def test_an_option_of_a_name_that_the_card_has_never_seen_is_shown_by_its_name(facts):
    config, record, _ = facts
    names = {"masking": "checkerboard", "optim": "lion", "lr_scheduler_type": "sawtooth", "pairing": "verses"}
    record["run"] |= names
    config["hidden_act"] = "mish"
    text = card(facts).text
    assert all(f"`{name}`" in text for name in (*names.values(), "mish"))


# ---------------------------------------------------------------------------------------------------------------------
# Names

ODD = "a | b\n\n# big $x$ <b> `c"


def tuned_facts(config):
    """The files of a fine-tuned model whose classes, table and base model have odd names."""
    config = {**config, "architectures": ["D2lBertForSequenceClassification"]}
    report = {name: {"precision": 0.5, "recall": 0.25, "f1-score": 0.375, "support": 8.0} for name in ("x", ODD)}
    figures = {"accuracy": 0.75, "f1": 0.375, "loss": 1.0}
    record = {
        "auto_class": "AutoModelForSequenceClassification",
        "pipeline_task": "text-classification",
        "finetune": {"license": "mit", "lr_scheduler_type": "linear", "weight_decay": 0.01},
        "base_model": {"name": ODD, "revision": None, "fingerprint": "f00d"},
        "data": {
            "splits": {"test": {"name": ODD, "rows": 16, "fingerprint": "feed"}},
            "labels": ["x", ODD],
            "hub_datasets": [],
        },
        "learning_rates": [1e-4],
        "command": "d2l-bert finetune",
    }
    metrics = {
        **{f"test_{name}": value for name, value in figures.items()},
        "metrics_shown": list(figures),
        "seeds": [{"seed": 1, "steps": 9, "best_step": 9, "test": figures}],
        **{"mean": {"test": figures}, "sd": {"test": dict.fromkeys(figures)}, "kept_seed": 1, "learning_rate": 1e-4},
        **{"classification_report": {"test": {**report, "accuracy": 0.75}}, "f1_of": ODD, "train_seconds": 3.0},
    }
    return [config, record, metrics]


def test_the_card_of_a_fine_tuned_model_shows_its_classes_whatever_their_names(facts):
    found = card(tuned_facts(facts[0]))
    assert re.findall("^#+ (.+)", found.text, re.MULTILINE) == [
        *("model", "How to use it", "Figures of this model", "By class, on the test rows", "Data and training"),
        *("Limits", "Reproduce it", "Citation"),
    ]
    shown = r"`` a \| b # big $x$ <b> `c ``"
    assert f"| {shown} | 50.0 % | 25.0 % | 37.5 % | 8 |" in found.text
    assert rows(found.text)["F1 is that of the class"] == shown and f"`x`, {shown}" in found.text
    assert r"16 rows of a \| b # big \$x\$ \<b> \`c, fingerprint `feed`" in found.text
    assert "| test accuracy | 75.0 % |" in found.text and read_card(found.content)[1:] == ([], [])


def test_a_table_by_class_ends_after_30_rows(facts):
    tuned = tuned_facts(facts[0])
    row = tuned[2]["classification_report"]["test"]["x"]
    report = {f"class {number}": {**row, "support": number} for number in range(40)}
    tuned[2]["classification_report"] = {"test": report}
    table = re.findall(r"^\| `class (\d+)` \|", card(tuned).text, re.MULTILINE)
    assert table == [str(number) for number in range(39, 9, -1)]


def test_markdown_signs_and_quotes_in_names_and_words_are_escaped(facts):
    facts[2]["predictions"] = [{"text": 'à | b "[MASK]"', "output": [{"label": "|", "score": 0.5}]}]
    facts[1]["data"]["corpus_name"] = ODD
    found = card(facts, name='d\'accord "x"')
    assert rows(found.text)[r'à \| b "[MASK]"'] == r"`\|` (0.50)"
    assert read_card(found.content)[1:] == ([], []) and "\n# big" not in found.text
    assert r'fill("à | b \"[MASK]\"")' in found.text
    for block in re.findall(r"```python\n(.*?)```", found.text, re.DOTALL):
        compile(block, "the card", "exec")


def test_a_published_folder_gives_the_same_card_again(trained, tmp_path):
    """The published files hold everything that the card needs."""
    for name in (*FILES, "model.safetensors", "training_curves.png"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    assert render_card(tmp_path, "model") == (trained / "README.md").read_text()
    assert count_parameters(tmp_path) == D2lBertForPreTraining.from_pretrained(trained).num_parameters()
    (tmp_path / "metrics.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="holds no JSON object"):
        render_card(tmp_path, "model")
