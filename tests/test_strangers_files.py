"""Files of strangers that once did harm or ended a command: each is refused in one line, or shown as it is."""

import json
import os
import shutil

import pytest
from finetuning import file_options, finetune, rows_of
from safetensors.torch import load_file, save_file

from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.model_cards import card, pictures
from d2l_bert.options import what_is_wrong
from d2l_bert.training.finetuning import scoring
from d2l_bert.training.finetuning.rows import Row, Split, write_predictions
from d2l_bert.training.run_folder import refuse_foreign_entries


@pytest.mark.parametrize("place", ["attempts", "attempts/evil", "attempts/rate/model", "checkpoint-5", "log.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_run_s_folder_with_links_or_pipes_is_refused(tmp_path, place, kind):
    folder = tmp_path / "run"
    victim = tmp_path / "victim"
    victim.mkdir()
    (folder / place).parent.mkdir(parents=True)
    if kind == "link":
        (folder / place).symlink_to(victim)
    else:
        os.mkfifo(folder / place)
    with pytest.raises(UserError, match="is a link, a pipe or a device"):
        refuse_foreign_entries(folder)


@pytest.mark.slow
def test_a_fine_tuning_that_goes_on_deletes_nothing_behind_a_link(trained, tmp_path):
    rows = list(rows_of(12, 0))
    options = [*file_options(tmp_path, train=rows), "--validation_share=0", "--max_steps=1", "--task=classification"]
    finetune(trained, tmp_path / "out", *options)
    precious = tmp_path / "victim" / "model" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    (tmp_path / "out" / "attempts" / "evil").symlink_to(tmp_path / "victim")
    again = [f"--output_dir={tmp_path / 'out'}", "--resume_from_checkpoint=latest"]
    assert main(["finetune", str(trained), *options, *again]) == 2
    assert precious.read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 7}, "another rate or seed"),
        ({"steps": -5}, "impossible number"),
        ({"log": [{"loss": 1.0}]}, "its log has a row"),
        ({"validation": {"accuracy": 99.0}}, "validation rows that can be"),
    ],
)
def test_figures_of_an_attempt_that_cannot_be_are_one_line(trained, tmp_path, fails, change, said):
    rows = list(rows_of(12, 0))
    options = [*file_options(tmp_path, train=rows, validation=rows), "--max_steps=1", "--task=classification"]
    finetune(trained, tmp_path / "out", *options)
    (file,) = (tmp_path / "out").glob("attempts/*/result.json")
    content = json.loads(file.read_text())
    for name, value in change.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(content))
    line = fails("finetune", trained, *options, f"--output_dir={tmp_path / 'out'}", "--resume_from_checkpoint=latest")
    assert said in line


@pytest.mark.slow
def test_a_model_of_an_attempt_that_has_changed_is_not_taken_over(trained, tmp_path, fails):
    rows = list(rows_of(12, 0))
    options = [*file_options(tmp_path, train=rows, validation=rows), "--max_steps=1", "--task=classification"]
    finetune(trained, tmp_path / "out", *options)
    again = ["finetune", trained, *options, f"--output_dir={tmp_path / 'out'}", "--resume_from_checkpoint=latest"]
    (model,) = (tmp_path / "out").glob("attempts/*/model")
    whole = load_file(model / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in whole.items()}, model / "model.safetensors", {"format": "pt"})
    assert "model.safetensors is not as it was saved" in fails(*again)
    (model / "model.safetensors").unlink()
    assert "model.safetensors is missing" in fails(*again)
    result = json.loads((model.parent / "result.json").read_text())
    del result["sha256"]
    (model.parent / "result.json").write_text(json.dumps(result))
    assert "config.json was not saved with it" in fails(*again)
    shutil.rmtree(model.parent)
    assert main([str(word) for word in again]) == 0


def test_weights_that_config_json_names_elsewhere_are_refused(trained, tmp_path, fails):
    model = shutil.copytree(trained, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_weights": "sub/model.safetensors"}))
    assert "transformers_weights" in fails("fill-mask", model, "a [MASK]")


def test_a_model_whose_outputs_are_not_finite_is_refused(trained, tmp_path, fails):
    model = shutil.copytree(trained, tmp_path / "model")
    weights = {name: 1e30 * tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert "not finite" in fails("fill-mask", model, "a [MASK]")


@pytest.mark.parametrize("before", ["", " ", "\n", "\ufeff"])  # the Hub's library reads metadata after these, too
def test_metadata_that_stand_for_gigabytes_are_refused(before, tmp_path):
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    lines = [f"{before}---", "a0: &a0 [x, x]", *levels, "license: *a8", "---", "# A model"]
    (tmp_path / "README.md").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="reference"):
        card.read_card(tmp_path)


def test_a_card_beyond_any_size_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("<!-- figures of d2l-bert evaluate -->\n" * 4000)
    with pytest.raises(UserError, match="has more than"):
        card.read_card(tmp_path)


def test_each_class_has_its_row_in_the_report_whatever_its_name():
    names = ["accuracy", "accuracy (class)", "macro avg", "macro avg (class)"]
    true = [names[number % 4] for number in range(40)]
    report = scoring.report_by_class(true, true, names)
    of_classes = [row for name, row in report.items() if name.endswith("(class)")]
    assert [row["support"] for row in of_classes] == [10] * 4


def test_no_new_column_takes_the_place_of_another(tmp_path):
    split = Split(title="rows", name="rows", rows=[Row("row 1", {"probability of a": "x"})], fingerprint="f")
    predicted = {"probability of a": [0.25], "probability of a (predicted)": [0.75]}
    write_predictions(tmp_path / "p.jsonl", split, predicted)
    row = json.loads((tmp_path / "p.jsonl").read_text())
    assert row["probability of a"] == "x"
    assert sorted(row.values(), key=str)[:2] == [0.25, 0.75]
    assert len(row) == 3


def test_a_picture_shows_names_with_two_dollars_as_they_are(tmp_path):
    names = ["$$x$$", "b$", r"\(y\)"]
    said = pictures.plot_confusion(names, names, names, "t$$x$$ of a long name " * 5, tmp_path / "picture.png")
    assert "$$x$$" in said and (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan")])
def test_a_number_beyond_what_a_float_holds_is_no_value(value):
    assert "must be a finite number" in what_is_wrong(value, float, "(0, 100]")
