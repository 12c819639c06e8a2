"""The model card: every fact in it comes from the run's files."""

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from hub_cards import read_card
from huggingface_hub import ModelCard

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.folders import read_json
from d2l_bert.model_cards.card import card_of, count_parameters, render_card


REAL_RUN = Path(__file__).parent / "card"  # the files of a run of `make demo`, and the card expected from them


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


def test_the_card_of_a_real_run_is_the_expected_text():
    config, record, metrics = (
        read_json(REAL_RUN / name) for name in ("config.json", "run_config.json", "metrics.json")
    )
    parameters = D2lBertForPreTraining(D2lBertConfig(**config)).num_parameters()
    assert card_of("d2l-bert-demo", config, parameters, record, metrics, True) == (REAL_RUN / "README.md").read_text()


def test_every_number_on_the_card_is_in_the_runs_files(trained, facts):
    config, record, metrics = facts
    found = ModelCard.load(trained / "README.md")
    shown = rows(found.text)
    for name, key in (("MLM", "mlm"), ("NSP", "nsp")):
        assert shown[f"{name} loss"] == f"{metrics[f'eval_{key}_loss']:.3f} nats"
        assert shown[f"{name} accuracy"] == f"{100 * metrics[f'eval_{key}_accuracy']:.1f} %"
    assert shown["MLM perplexity"] == f"{metrics['eval_perplexity']:.1f}"
    assert f"On {metrics['eval_pairs']:,} pairs" in found.text
    assert f"{metrics['eval_masked_tokens']:,} masked tokens" in found.text
    assert shown["time"] == f"{metrics['train_seconds']:,.0f} s"
    speeds = (metrics["train_pairs_per_second"], metrics["train_tokens_per_second"])
    assert shown["speed"] == "{:,.0f} pairs/s, {:,.0f} tokens/s".format(*speeds)
    assert shown["share of the peak (MFU)"].startswith(f"{100 * metrics['train_mfu']:.1f} %")
    assert shown["padding"].startswith(f"{100 * metrics['train_padding_share']:.1f} %")
    assert shown["waiting for data"].startswith(f"{100 * metrics['train_data_wait_share']:.1f} %")
    assert shown["memory"] == f"{metrics['train_memory_mb']:,.0f} MB"
    data = record["data"]
    assert shown["training text"] == f"{data['train_documents']:,} documents, {data['train_tokens']:,} tokens"
    assert shown["held out"] == f"{data['held_out_documents']:,} documents, {data['held_out_tokens']:,} tokens"
    assert shown["corpus"] == f"{data['corpus_name']}, fingerprint `{data['corpus_fingerprint']}`"
    assert f"{data['tokenizer']['pieces_per_word']:.2f} pieces a word" in shown["tokenizer"]
    model = D2lBertForPreTraining.from_pretrained(trained)
    assert f"A BERT of {model.num_parameters():,} parameters" in found.text
    assert shown["vocabulary"] == f"{config['vocab_size']:,} WordPiece tokens"
    assert shown["seed"] == "42" and shown["steps"] == "40 of 8 pairs" and shown["precision"] == "float32"
    assert "{{" not in found.text and "{%" not in found.text and "None" not in found.text


def test_the_cards_metadata_holds_the_same_numbers_and_passes_the_hubs_rules(trained, facts):
    _, _, metrics = facts
    found = ModelCard.load(trained / "README.md")
    assert read_card((trained / "README.md").read_text())[1:] == ([], [])
    assert found.data.library_name == "transformers" and found.data.pipeline_tag == "fill-mask"
    assert found.data.license == "apache-2.0" and found.data.language == "en" and found.data.datasets is None
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


def test_without_run_config_and_metrics_the_card_describes_the_configuration_alone(facts):
    found = card([facts[0], {}, {}])
    assert rows(found.text).keys() == {
        "field",
        *("class", "layers, hidden size, heads", "feed-forward size", "vocabulary", "positions", "switches"),
    }
    assert found.data.eval_results is None and found.data.license is None and "Reproduce" not in found.text


def test_blimp_accuracy_is_shown_if_it_was_measured(facts):
    assert "BLiMP" not in card(facts).content
    facts[2]["eval_blimp_accuracy"] = 0.6543
    found = card(facts)
    assert rows(found.text)["BLiMP accuracy"] == "65.4 %"
    (blimp,) = [result for result in found.data.eval_results if result.metric_name == "BLiMP accuracy"]
    assert (blimp.metric_value, blimp.dataset_type) == (0.6543, "nyu-mll/blimp")


def test_an_infinite_perplexity_is_in_the_card_but_not_in_its_metadata(facts):
    facts[2]["eval_perplexity"] = float("inf")
    found = card(facts)
    assert rows(found.text)["MLM perplexity"] == "inf"
    assert "MLM perplexity" not in {result.metric_name for result in found.data.eval_results}
    assert read_card(found.content)[1:] == ([], [])


def test_a_start_model_from_the_hub_is_the_base_model_and_one_from_a_folder_is_not(facts):
    facts[1]["run"]["init_from"] = "somebody/some-bert"
    found = card(facts)
    assert found.data.base_model == "somebody/some-bert"
    assert rows(found.text)["start"] == "the weights, architecture and vocabulary of somebody/some-bert"
    path = {"name": "somebody/some-bert", "fingerprint": "0"}
    # The record of a run's folder, then that of a published folder.
    for places in ({"local_paths": {"somebody/some-bert": path}}, {"local_paths": {}, "fingerprints": [path]}):
        facts[1].update(places)
        found = card(facts)
        assert found.data.base_model is None and "pretrained further" in found.text


@pytest.mark.parametrize(
    ("hub_datasets", "name", "kind"),
    [
        ([], "my books, Wörter", "my-books-W-rter"),
        ([], "日本", "text"),
        (["Salesforce/wikitext"], "Salesforce/wikitext", "Salesforce/wikitext"),
        (["some/set"], "books, some/set", "books-some-set"),
    ],
)
def test_data_sets_get_names_that_the_hub_accepts(facts, hub_datasets, name, kind):
    facts[1]["data"] |= {"hub_datasets": hub_datasets, "corpus_name": name}
    found = card(facts)
    assert {(result.dataset_type, result.dataset_name) for result in found.data.eval_results} == {
        (kind, f"{name}, held-out documents")
    }
    assert found.data.datasets == (hub_datasets or None)
    assert read_card(found.content)[1:] == ([], [])


def test_a_language_with_a_region_is_written_as_the_hub_expects(facts):
    facts[1]["run"]["language"] = "pt-br"
    found = card(facts)
    assert found.data.language == "pt" and found.data.to_dict()["language_bcp47"] == ["pt-br"]
    assert read_card(found.content)[1:] == ([], [])


def test_markdown_signs_and_quotes_in_names_and_words_are_escaped(facts):
    facts[2]["predictions"][0] = {"text": 'à | b "[MASK]"', "output": [{"label": "|", "score": 0.5}]}
    found = card(facts, name='d\'accord "x"')
    assert rows(found.text)[r'à \| b "[MASK]"'] == r"`\|` (0.50)"
    assert read_card(found.content)[1:] == ([], [])
    assert r'fill("à | b \"[MASK]\"")' in found.text
    for block in re.findall(r"```python\n(.*?)```", found.text, re.DOTALL):
        compile(block, "the card", "exec")


def test_the_card_states_the_share_of_the_peak_and_the_number_of_skipped_steps(facts):
    metrics = facts[2]
    assert 0 < metrics["train_mfu"] < 1 and metrics["train_memory_mb"] > 10 and metrics["train_skipped_steps"] == 0
    metrics["train_mfu"] = 0.4567
    text = card(facts).text
    assert "45.7 % of the measured peak" in text and "left out" not in text
    metrics["train_skipped_steps"] = 3
    assert "; 3 steps skipped" in card(facts).text


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "| AdamW, peak rate 0.003, betas 0.9 and 0.98, weight decay 0.01; 5 % warm-up, then a straight line |"),
        ({"lr_scheduler_type": "cosine"}, "5 % warm-up, then half a cosine |"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "flat, then 1 - sqrt in the last 20 % of the steps |"),
        ({"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.125}, "in the last 12.5 % of the steps |"),
        ({"mask_replace_prob": 0.9, "random_replace_prob": 0.02}, "90 % `[MASK]`, 2 % random, 8 % kept |"),
        ({"optim": "muon"}, "| Muon for the matrices of the encoder's blocks, AdamW for all else, peak rate 0.003, "),
        ({"ema_decay": 0.999}, "a straight line; the weights are a moving average with decay 0.999 |"),
    ],
)
def test_the_card_states_optimizer_schedule_and_average(facts, options, said):
    facts[1]["run"].update(options)
    text = card(facts).text
    assert said in text
    assert "40 of 8 pairs |" in text


def test_gpus_several_processes_and_long_runs_are_described_in_fitting_units(facts):
    facts[1]["machine"] |= {"processes": 8, "accelerator": "NVIDIA H200", "threads": 1}
    facts[2] |= {"train_seconds": 1209600.0}
    told = rows(card(facts).text)
    assert told["machine"] == "8 processes, each on NVIDIA H200" and "memory of a process" in told
    assert told["time"] == "1,209,600 s, 336.0 hours"
    facts[1]["machine"] |= {"processes": 1, "accelerator": None, "processor": "A"}
    assert rows(card(facts).text)["machine"] == "A, 1 thread"


def test_the_card_states_which_part_of_the_text_was_used_and_how_it_was_cleaned(facts):
    plain = rows(card(facts).text)
    assert plain.keys().isdisjoint({"data sets", "shares of the sources", "at most", "cleaning", "rows"})
    facts[1]["data"] |= {"hub_datasets": ["some/set"]}
    chosen = {"dataset": ["some/set:first"], "max_documents": 5000, "drop_duplicate_paragraphs": True}
    facts[1]["run"] |= {**chosen, "extend_vocab": 1000, "source_weights": ["3", "1"], "packing": True}
    told = rows(card(facts).text)
    assert told["data sets"] == "some/set:first; split train" and told["at most"] == "5,000 documents of each source"
    assert told["cleaning"] == "`drop_duplicate_paragraphs=True`" and told["shares of the sources"] == "3 : 1"
    assert told["tokenizer"].endswith("up to 1,000 words of the corpus were added") and "rows" in told
    facts[1]["run"] |= {"length_schedule": ["16:0.5", "32:0.25"]}
    assert (
        "48 tokens; 16, and 3 times as many pairs a step, in the first 50 % of the steps; 32, and as many pairs"
        in (rows(card(facts).text)["pairs"])
    )


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
