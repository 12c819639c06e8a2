"""`evaluate --update_card`: figures in metrics.json and the card, by the rules of `publish`; later ones replace."""

import json

import pytest
from conftest import write_books
from huggingface_hub import ModelCard
from judged_models import write_pairs

from d2l_bert.__main__ import main
from d2l_bert.folders import read_json
from d2l_bert.model_cards.card import render_card
from d2l_bert.model_cards.checks import check_card
from d2l_bert.model_cards.evaluations import update_folder


pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = {"mlm_loss": 3.21, "perplexity": 24.8, "mlm_accuracy": 0.25, "masked_tokens": 1234, "pairs": 99}
TEXT |= {"nsp_loss": 0.5, "nsp_accuracy": 0.75, "pair_task": "nsp", "pseudo_perplexity": 1139632.94}
BLIMP = {"accuracy": 0.6, "standard_error": 0.01, "paradigm_count": 2, "pairs": 2000, "score": "pll"}
BLIMP |= {"phenomena": {"binding": {"accuracy": 0.65}, "island_effects": {"accuracy": 0.55}}}


def card_figures(folder):
    """The figures in the card's metadata, by name; the rows of its tables; and its text."""
    card = ModelCard.load(folder / "README.md")
    rows = dict(line.strip("| ").split(" | ") for line in card.text.splitlines() if line.count(" | ") == 1)
    return {result.metric_name: result.metric_value for result in card.data.eval_results or []}, rows, card.text


def test_the_command_updates_a_runs_folder_which_can_be_published(folder, tmp_path):
    texts, pairs = write_books(tmp_path / "others", count=3, seed=5), write_pairs(tmp_path / "pairs")
    own = read_json(folder / "metrics.json")
    options = [f"--corpus={texts}", "--pppl_sentences=4", f"--blimp={pairs}", "--update_card"]
    output = tmp_path / "figures.json"
    assert main(["evaluate", str(folder), *options, f"--output={output}"]) == 0
    figures, metrics = json.loads(output.read_text())["models"][0], read_json(folder / "metrics.json")
    assert own.items() <= metrics.items()
    assert metrics["eval/others/mlm_loss"] == figures["text"]["mlm_loss"]
    assert metrics["eval_blimp_accuracy"] == figures["blimp"]["accuracy"]
    check_card(folder)
    assert (folder / "README.md").read_text() == render_card(folder)
    in_metadata, rows, text = card_figures(folder)
    assert in_metadata["MLM loss on others"] == round(figures["text"]["mlm_loss"], 4)
    assert in_metadata["MLM loss"] == round(own["eval_mlm_loss"], 4)
    assert rows["pseudo-perplexity of a word on others"] == f"{figures['text']['pseudo_perplexity']:,.1f}"
    assert f"verbs {100 * figures['blimp']['phenomena']['verbs']['accuracy']:.1f}" in text


def test_later_figures_replace_those_of_the_same_text_alone(folder):
    update_folder(folder, "books", TEXT, BLIMP)
    update_folder(folder, "books two", TEXT, None)
    sop = {name.replace("nsp", "sop"): value for name, value in TEXT.items()}
    update_folder(folder, "books", {**sop, "mlm_loss": 2.5, "pair_task": "sop"}, None)
    metrics, (in_metadata, rows, text) = read_json(folder / "metrics.json"), card_figures(folder)
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
