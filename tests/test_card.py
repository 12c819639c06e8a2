"""The card: its facts come from the files of the run and of `evaluate --update_card`; no name changes its Markdown."""

import json
import re
from pathlib import Path

import pytest
from conftest import write_books
from hub_cards import read_card
from huggingface_hub import ModelCard
from judged_models import OF_BLIMP, write_pairs

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.model_cards.blimp import ONE_OF_EACH, PHENOMENON_OF
from d2l_bert.model_cards.card import count_parameters, local_name, portable, render_card
from d2l_bert.model_cards.checks import check_card
from d2l_bert.model_cards.evaluations import update_folder
from d2l_bert.records import read_record


FILES = ("config.json", "run_config.json", "metrics.json")


@pytest.fixture
def facts(trained):
    """The contents of config.json, run_config.json and metrics.json of a run, for a test to change."""
    return [read_record(trained / name) for name in FILES]


@pytest.fixture
def card(tmp_path):
    """A function that gives the card of a folder with these contents."""

    def rendered(facts, name="model"):
        for file, content in zip(FILES, facts, strict=True):
            (tmp_path / file).write_text(json.dumps(content))
        return ModelCard(render_card(tmp_path, name, parameters=19133))

    return rendered


def rows(text):
    """The rows of all tables with two columns, as a dict."""
    return dict(re.findall(r"^\| ((?:[^|\\]|\\.)+) \| (.+) \|$", text, re.MULTILINE))


# By the names of the figures in a card's metadata, those in metrics.json.
CARD_FIGURES = {
    "MLM loss": "eval_mlm_loss",
    "MLM perplexity": "eval_perplexity",
    "MLM accuracy": "eval_mlm_accuracy",
    "NSP loss": "eval_nsp_loss",
    "NSP accuracy": "eval_nsp_accuracy",
}


def test_the_cards_metadata_holds_the_same_numbers_and_passes_the_hubs_rules(card, trained, facts):
    _, _, metrics = facts
    found = ModelCard.load(trained / "README.md")
    assert not read_card((trained / "README.md").read_text())[1]
    assert count_parameters(trained) == D2lBertForPreTraining.from_pretrained(trained).num_parameters()
    assert found.data.library_name == "transformers" and found.data.pipeline_tag == "fill-mask"
    assert found.data.license == "apache-2.0"
    assert found.data.language is None
    assert found.data.datasets is None
    by_score = sorted(metrics["predictions"], key=lambda example: -example["output"][0]["score"])
    surest = by_score[:3]
    assert found.data.widget == [{"text": example["text"]} for example in surest]
    assert all(f"| {example['text']} | `{example['output'][0]['label']}` (" in found.text for example in surest)
    figures = {result.metric_name: result.metric_value for result in found.data.eval_results}
    assert figures.keys() == CARD_FIGURES.keys()
    for name, key in CARD_FIGURES.items():
        assert figures[name] == round(metrics[key], 4)


@pytest.mark.parametrize(
    ("key", "gone"),
    [
        ("eval_mlm_loss", ["MLM loss"]),
        ("eval_mlm_accuracy", ["MLM accuracy", "masked tokens predicted, on held-out text"]),
        ("eval_nsp_accuracy", ["NSP accuracy"]),
        ("train_words_seen", ["words seen in training"]),
        ("train_seconds", ["time"]),
        ("train_skipped_steps", []),
        ("predictions", []),
    ],
)
def test_a_row_whose_number_is_in_no_file_is_left_out(card, facts, key, gone):
    whole = card(facts)
    del facts[2][key]
    left = card(facts)
    assert rows(whole.text).keys() - rows(left.text).keys() >= set(gone)
    assert "None" not in left.text and "nan" not in left.text.lower().split()
    assert len(left.data.eval_results) == 5 - key.startswith("eval_")
    assert ("widget" in left.data.to_dict()) == ("likeliest tokens" in left.text) == (key != "predictions")


def test_a_figure_stands_beside_that_of_a_model_that_knows_frequencies_alone(card, facts):
    facts[2]["eval_token_entropy"] = 2.0
    found = rows(card(facts).text)
    expected = {"MLM loss": "2.000 nats", "MLM perplexity": "7.4", "NSP loss": "0.693 nats", "NSP accuracy": "50.0 %"}
    assert {name: found[name].rpartition(" | ")[2] for name in expected} == expected
    figures = card(tuned_facts(facts[0])).text
    assert "| test accuracy | 75.0 % | 50.0 % |" in figures and "| test f1 | 37.5 % |  |" in figures


def test_a_card_without_later_figures_has_no_empty_section(card, facts):
    assert not any("<!--" in card(each).text for each in (facts, tuned_facts(facts[0])))


@pytest.mark.parametrize("is_tuned", [False, True])
def test_a_start_model_of_the_hub_is_named_with_its_address(card, facts, is_tuned):
    facts = tuned_facts(facts[0]) if is_tuned else facts
    record = facts[1]
    record["base_model"] = {"name": "someone/bert", "revision": "abc123", "fingerprint": None, "language": "de"}
    record.get("run", {}).update(init_from="someone/bert", language="de")
    found = card(facts)
    assert found.data.base_model == "someone/bert" and found.data.language == "de"
    assert "from [someone/bert](https://huggingface.co/someone/bert)" in found.text
    record["fingerprints"] = [{"name": "someone/bert", "fingerprint": "f00d"}]  # a folder of this machine
    found = card(facts)
    assert found.data.base_model is None and "huggingface.co" not in found.text and "from someone/bert" in found.text


@pytest.mark.parametrize(
    ("objective", "asked", "others"),
    [("nsp", "is B what followed A", "order"), ("sop", "does A come before B", "followed")],
)
def test_the_accuracy_on_pairs_says_what_was_asked_beside_what_one_segment_tells(
    card, facts, objective, asked, others
):
    config, record, metrics = facts
    record["run"]["objective"] = objective
    kept = {name: value for name, value in metrics.items() if "nsp" not in name}
    pairs = {"loss": 0.4, "accuracy": 0.8125, "one_segment_accuracy": 0.4925}
    metrics = {**kept, **{f"eval_{objective}_{name}": value for name, value in pairs.items()}}
    found = rows(card([config, record, metrics]).text)
    ((question, answer),) = [(row, text) for row, text in found.items() if asked in row]
    assert others not in question and "81.2 %" in answer and "49.2 %" in answer


# ---------------------------------------------------------------------------------------------------------------------
# Names

ODD = "a | b\n\n# big $x$ <b> `c"
TABLE = {"name": ODD, "rows": 16, "fingerprint": "feed"}


def test_only_the_options_that_hold_paths_are_shortened_whatever_else_is_called_alike():
    record = {"learnt": {"classes": [".", "a/b"]}, "finetune": {"output_dir": ".", "label_separator": "."}}
    read = {"name": "d", "fingerprint": "f00d"}
    made = portable({**record, "local_paths": {".": read}})
    assert made["learnt"] == record["learnt"]
    assert made["finetune"] == {"output_dir": Path.cwd().name, "label_separator": "."}
    assert made["fingerprints"] == [read]
    assert len(made) == 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(("/srv/x/ds:default", "ds:default"), ("/srv/x/ds", "ds"), ("/srv/x/ds/", "ds"), ("/srv/x/ds/:c", "ds:c")),
        *(("../x/ds", "ds"), ("../x/ds:c", "ds:c"), ("~/x/ds", "ds"), ("file:///srv/x/ds", "ds")),
        *(("someone/ds", "someone/ds"), ("someone/ds:c", "someone/ds:c"), ("bert", "bert"), ("srv/x/ds", "ds")),
    ],
)
def test_no_folder_stays_in_the_options_of_a_record(given, expected):
    assert local_name(given) == local_name(expected) == expected
    options = {"dataset": [given], "validation_dataset": given, "init_from": None, "text_column": "/a/b"}
    made = portable({"run": options, "local_paths": {}})["run"]
    assert made == {**options, "dataset": [expected], "validation_dataset": expected}


def tuned_facts(config):
    """The files of a fine-tuned model whose classes, table and base model have odd names."""
    config = {**config, "architectures": ["D2lBertForSequenceClassification"]}
    row = {"precision": 0.5, "recall": 0.25, "f1-score": 0.375, "support": 8.0}
    report = dict.fromkeys(("x", ODD, "macro avg"), row)
    figures = {"accuracy": 0.75, "f1": 0.375, "loss": 1.0}
    record = {
        "auto_class": "AutoModelForSequenceClassification",
        "pipeline_task": "text-classification",
        "finetune": {"license": "mit", "lr_scheduler_type": "linear", "weight_decay": 0.01},
        "base_model": {"name": ODD, "revision": None, "fingerprint": "f00d"},
        "fingerprints": [{"name": ODD, "fingerprint": "f00d"}],
        "data": {
            "splits": {"test": TABLE},
            "hub_datasets": [],
        },
        "learnt": {"classes": ["x", ODD]},
        "learning_rates": [1e-4],
        "command": "d2l-bert finetune",
    }
    metrics = {
        **{f"test_{name}": value for name, value in figures.items()},
        "metrics_shown": list(figures),
        "seeds": [{"seed": 1, "steps": 9, "best_step": 9, "test": figures}],
        **{"mean": {"test": figures}, "sd": {"test": dict.fromkeys(figures)}, "kept_seed": 1, "learning_rate": 1e-4},
        **{"classification_report": {"test": {**report, "accuracy": 0.75}}, "f1_of": ODD, "train_seconds": 3.0},
        "know_nothing": {"test": {"prediction": "always x", "figures": {"accuracy": 0.5}, "is_beaten": True}},
    }
    return [config, record, metrics]


def test_the_card_of_a_fine_tuned_model_shows_its_classes_whatever_their_names(card, facts):
    tuned = tuned_facts(facts[0])
    found = card(tuned)
    assert re.findall("^##+ (.+)", found.text, re.MULTILINE) == [
        *("How to use it", "Figures of this model", "By class, on the test rows", "Data and training"),
        *("Limits", "Reproduce it", "Citation"),
    ]
    shown = r"`` a \| b # big $x$ <b> `c ``"
    in_a_sentence = "`` a | b # big $x$ <b> `c ``"
    assert f"| {shown} | 50.0 % | 25.0 % | 37.5 % | 8 |" in found.text
    assert f"F1 is that of the class {in_a_sentence}." in found.text and f"`x`, {shown}" in found.text
    assert r"16 rows of a \| b # big \$x\$ \<b> \`c, fingerprint `feed`" in found.text
    assert "macro avg" not in found.text and not read_card(found.content)[1]
    # The figures of a data set of the Hub are of the split that it has there.
    table = {**TABLE, "name": "me/x, split validation"}
    tuned[1]["data"] |= {"hub_datasets": ["me/x"], "splits": {"test": table}}
    tuned[2]["eval/me/x/mlm_loss"] = 2.0
    assert {of.dataset_split for of in card(tuned).data.eval_results} == {"validation", "evaluation"}
    # A table by class ends after 30 rows.
    rows_of = tuned[2]["classification_report"]["test"]
    rows_of |= {f"class {number}": {**rows_of["x"], "support": number} for number in range(9, 49)}
    table = re.findall(r"^\| `class (\d+)` \|", card(tuned).text, re.MULTILINE)
    assert table == [str(number) for number in range(48, 18, -1)]


def test_markdown_signs_and_quotes_in_names_and_words_are_escaped(card, facts):
    facts[2]["predictions"] = [{"text": 'à | b "[MASK]"', "output": [{"label": "|", "score": 0.5}]}]
    facts[1]["data"]["corpus_name"] = ODD
    facts[1]["run"]["language"] = "de, pt-br"
    found = card(facts, name='d\'accord "x"')
    assert rows(found.text)[r'à \| b "[MASK]"'] == r"`\|` (0.50)" and found.data.language == ["de", "pt"]
    assert not read_card(found.content)[1] and "\n# big" not in found.text
    assert r'fill("à | b \"[MASK]\"")' in found.text
    for block in re.findall(r"```python\n(.*?)```", found.text, re.DOTALL):
        compile(block, "the card", "exec")


# ---------------------------------------------------------------------------------------------------------------------
# `evaluate --update_card`: figures in metrics.json and the card, by the rules of `publish`; later ones replace


TEXT = {"mlm_loss": 3.21, "perplexity": 24.8, "mlm_accuracy": 0.25, "masked_tokens": 1234, "pairs": 99}
TEXT |= {"nsp_loss": 0.5, "nsp_accuracy": 0.75, "pair_task": "nsp", "pseudo_perplexity": 1139632.94}
BLIMP = {"accuracy": 0.6, "standard_error": 0.01, "paradigm_count": 2, "pairs": 2000, "score": "pll", "title": "BLiMP"}
BLIMP |= {"phenomena": {"binding": {"accuracy": 0.65}, "island_effects": {"accuracy": 0.55}}, "paradigms": {}}


def card_figures(folder):
    """The figures in the card's metadata, by name; the rows of its tables; and its text."""
    card = ModelCard.load(folder / "README.md")
    in_metadata = {result.metric_name: result.metric_value for result in card.data.eval_results or []}
    lines = [line for line in card.text.splitlines() if line.count(" | ") == 1]
    rows = dict(line.strip("| ").split(" | ") for line in lines)
    return in_metadata, rows, card.text


@pytest.mark.slow
def test_the_command_updates_a_runs_folder_which_can_be_published(folder, tmp_path):
    texts = write_books(tmp_path / "others", count=3, seed=5)
    pairs = write_pairs(tmp_path / "pairs", names=OF_BLIMP, phenomena=("binding", "island_effects"))
    own = read_record(folder / "metrics.json")
    options = [f"--corpus={texts}", "--pppl_sentences=4", f"--blimp={pairs}", "--update_card"]
    output = tmp_path / "figures.json"
    assert main(["evaluate", str(folder), *options, f"--output={output}"]) == 0
    figures = json.loads(output.read_text())["models"][0]
    metrics = read_record(folder / "metrics.json")
    assert own.items() <= metrics.items()
    assert metrics["eval/others/mlm_loss"] == figures["text"]["mlm_loss"]
    assert metrics["eval_blimp_accuracy"] == figures["blimp"]["accuracy"]
    check_card(folder)
    assert (folder / "README.md").read_text() == render_card(folder)
    in_metadata, rows, text = card_figures(folder)
    assert in_metadata["MLM loss on others"] == round(figures["text"]["mlm_loss"], 4)
    assert in_metadata["MLM loss"] == round(own["eval_mlm_loss"], 4)
    assert rows["pseudo-perplexity of a word on others"] == f"{figures['text']['pseudo_perplexity']:,.1f}"
    assert f"binding {100 * figures['blimp']['phenomena']['binding']['accuracy']:.1f}" in text
    assert "nyu-mll/blimp" in (folder / "README.md").read_text()


@pytest.mark.slow
def test_pairs_of_ones_own_are_never_called_blimp(folder, tmp_path):
    pairs = write_pairs(tmp_path / "own *pairs*")
    assert main(["evaluate", str(folder), f"--blimp={pairs}", "--update_card"]) == 0
    metrics = read_record(folder / "metrics.json")
    in_metadata, rows, text = card_figures(folder)
    accuracy = metrics["eval/own *pairs*/minimal_pairs_accuracy"]
    assert in_metadata["accuracy on minimal pairs of own *pairs*"] == round(accuracy, 4)
    assert rows[r"accuracy on minimal pairs of own \*pairs\*"] == f"{100 * accuracy:.1f} %" and "39 minimal" in text
    assert "blimp" not in (folder / "README.md").read_text().lower()
    assert "blimp" not in json.dumps(metrics)
    check_card(folder)
    assert (folder / "README.md").read_text() == render_card(folder)
    # Nor figures of others that metrics.json has under this name.
    update_folder(folder, None, None, {**BLIMP, "phenomena": {"verbs": {"accuracy": 1.0}}})
    assert "blimp" not in (folder / "README.md").read_text().lower()


def test_one_paradigm_of_each_phenomenon_stands_beside_all_of_blimp(folder):
    paradigms = {name: {"accuracy": 0.9 if name in ONE_OF_EACH else 0.5} for name in PHENOMENON_OF}
    update_folder(folder, None, None, {**BLIMP, "paradigms": paradigms, "paradigm_count": 67})
    _, _, text = card_figures(folder)
    assert "in 60.0 % ± 1.0 % of 2,000 minimal pairs" in text
    assert "by one paradigm of each phenomenon 90.0 %" in text
    some = {name: paradigms[name] for name in ONE_OF_EACH}
    update_folder(folder, None, None, {**BLIMP, "paradigms": some, "paradigm_count": 13})
    _, _, text = card_figures(folder)
    assert "by one paradigm of each phenomenon" not in text


def test_later_figures_replace_those_of_the_same_text_alone(folder):
    update_folder(folder, "books", TEXT, BLIMP)
    update_folder(folder, "books two", TEXT, None)
    sop = {name.replace("nsp", "sop"): value for name, value in TEXT.items()}
    update_folder(folder, "books", {**sop, "mlm_loss": 2.5, "pair_task": "sop"}, None)
    metrics = read_record(folder / "metrics.json")
    in_metadata, rows, text = card_figures(folder)
    assert metrics["eval/books/mlm_loss"] == 2.5 and "eval/books/nsp_loss" not in metrics
    assert metrics["eval/books two/mlm_loss"] == 3.21 and metrics["eval_blimp_accuracy"] == 0.6
    assert in_metadata["MLM loss on books"] == 2.5 and "NSP loss on books" not in in_metadata
    assert in_metadata["SOP loss on books"] == 0.5 and in_metadata["NSP loss on books two"] == 0.5
    assert in_metadata["SOP accuracy on books"] == 0.75 and rows["SOP accuracy on books"] == "75.0 %"
    assert in_metadata["NSP accuracy on books two"] == 0.75 and rows["NSP accuracy on books two"] == "75.0 %"
    assert rows["MLM loss on books"] == "2.500 nats" and "NSP loss on books" not in rows
    assert rows["pseudo-perplexity of a word on books"] == "1,139,632.9"
    assert "in 60.0 % ± 1.0 % of 2,000 minimal pairs" in text and "binding 65.0, island effects 55.0" in text
    assert "2 of its 67 paradigms, one of each phenomenon" in text
    update_folder(folder, None, None, {**BLIMP, "phenomena": {"binding": {"accuracy": 0.7}}})
    assert "island effects" not in card_figures(folder)[2] and "one of each" not in card_figures(folder)[2]
    assert (folder / "README.md").read_text() == render_card(folder)
    check_card(folder)


def test_on_a_full_disk_the_figures_and_the_card_stay_as_they_were(folder, monkeypatch):
    before = {name: (folder / name).read_bytes() for name in ("metrics.json", "README.md")}
    write_text = Path.write_text

    def full(path, text, **how):
        if path.name == "README.md":
            raise OSError(28, "No space left on device", str(path))
        return write_text(path, text, **how)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="free some space"):
        update_folder(folder, "books", TEXT, None)
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert not [*folder.glob(".*part*")]


@pytest.mark.parametrize("name", ["metrics.json", "README.md"])
def test_a_link_in_place_of_the_card_is_refused_before_the_model_is_evaluated(folder, books, fails, name):
    (folder / name).rename(folder / "other")
    (folder / name).symlink_to("other")
    assert "is a link" in fails("evaluate", folder, f"--corpus={books}", "--update_card")
    assert (folder / name).is_symlink()


@pytest.mark.parametrize("written", ["by the run", "by hand"])
def test_a_card_that_was_edited_keeps_its_words(folder, written):
    path = folder / "README.md"
    if written == "by hand":
        path.write_text("---\nlicense: mit\n---\n\n# A model\n")
    path.write_text(path.read_text() + "\nMy own words.\n")
    update_folder(folder, "books", TEXT, None)
    update_folder(folder, None, None, BLIMP)
    text = path.read_text()
    assert "My own words." in text and text.count("## Further evaluation") == 1
    assert text.count("<!-- figures of d2l-bert evaluate -->") == 1
    check_card(folder)
