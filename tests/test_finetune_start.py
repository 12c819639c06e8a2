"""The model that a fine-tuning starts from, its options against each other, and what a new run deletes."""

import json
import shutil

import pytest
import torch
from finetuning import finetune, rows_of, write_csv
from huggingface_hub import ModelCard
from transformers import AlbertConfig, AlbertModel, AutoConfig, AutoTokenizer, BertConfig, BertModel

from d2l_bert import D2lBertForPreTraining, D2lBertForSequenceClassification
from d2l_bert.model_cards.card import render_card
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import load_data
from d2l_bert.training.finetuning.folder import start_folder
from d2l_bert.training.finetuning.run import CLASSES
from d2l_bert.training.finetuning.start import make_model, read_start


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rows_file(tmp_path):
    return f"--train_file={write_csv(tmp_path / 'train.csv', rows_of(20, 0))}"


def made(model, rows_file, **options):
    """The model that a run starts with, and the names of its modules with fresh weights."""
    file = rows_file.partition("=")[2]
    config = FinetuneConfig(model=str(model), task="classification", train_file=file, **options)
    kind = CLASSES[config.kind](config)
    load_data(config, kind)
    torch.manual_seed(0)
    return make_model(read_start(config, kind), kind, config.from_scratch)


@pytest.mark.parametrize("labels", [2, 5])
def test_the_head_of_another_task_is_drawn_anew(labels, trained, rows_file, tmp_path):
    saved = D2lBertForSequenceClassification.from_pretrained(trained, num_labels=labels)
    with torch.no_grad():
        saved.classifier.weight.fill_(7.0)
    saved.save_pretrained(tmp_path / "base")
    save_tokenizer(AutoTokenizer.from_pretrained(trained), tmp_path / "base")
    model, fresh = made(tmp_path / "base", rows_file)
    assert "classifier" in fresh and model.classifier.weight.shape[0] == 2
    assert 0 < model.classifier.weight.std() < 1 and (model.classifier.bias == 0).all()
    assert torch.equal(model.bert.pooler.dense.weight, saved.bert.pooler.dense.weight)


def test_an_encoder_that_does_not_fit_its_configuration_is_refused(trained, rows_file, tmp_path, fails):
    saved = D2lBertForSequenceClassification.from_pretrained(trained)
    saved.save_pretrained(tmp_path / "base")
    save_tokenizer(AutoTokenizer.from_pretrained(trained), tmp_path / "base")
    config = AutoConfig.from_pretrained(tmp_path / "base")
    config.intermediate_size += 8
    config.save_pretrained(tmp_path / "base")
    line = fails("finetune", tmp_path / "base", "--task=classification", rows_file, f"--output_dir={tmp_path / 'out'}")
    assert "bert.encoder.layer.0." in line and "the shape that config.json gives" in line


def test_weights_that_are_not_finite_are_refused_by_every_command(trained, rows_file, tmp_path, fails):
    """The head for NSP is left out or drawn anew in all but `evaluate`, so the encoder's weight is damaged."""
    saved = D2lBertForPreTraining.from_pretrained(trained)
    name = "bert.encoder.layer.0.attention.query.bias"
    for value in (float("nan"), float("-inf")):
        saved.get_parameter(name).data[3] = value
        saved.save_pretrained(tmp_path / "base")
        save_tokenizer(AutoTokenizer.from_pretrained(trained), tmp_path / "base")
        for command, *options in (
            ("evaluate", f"--corpus={rows_file.partition('=')[2]}", f"--output={tmp_path / 'out.json'}"),
            ("embed", rows_file.partition("=")[2], f"--output={tmp_path / 'out.npy'}"),
            ("attention", "anna left", f"--output={tmp_path / 'out.png'}"),
            ("attention", "anna left", "anna came", "--word=anna"),
            ("finetune", "--task=classification", rows_file, f"--output_dir={tmp_path / 'out'}"),
        ):
            line = fails(command, tmp_path / "base", *options)
            of = name.removeprefix("bert.") if command in ("embed", "attention") else name
            assert f"its weights are not finite ({of} holds NaN or infinity); give an earlier checkpoint" in line
    assert not list(tmp_path.glob("out*"))


def test_from_scratch_needs_no_weights(trained, rows_file, tmp_path):
    shutil.copytree(trained, tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    finetune(
        tmp_path / "base", tmp_path / "out", "--task=classification", rows_file, "--max_steps=1", "--from_scratch"
    )


@pytest.fixture(scope="module")
def finished(trained, tmp_path_factory):
    """A folder of a finished run with a constant rate, on files."""
    folder = tmp_path_factory.mktemp("finished")
    train, validation = (write_csv(folder / f"{name}.csv", rows_of(20, n)) for n, name in enumerate(("a", "b")))
    finetune(
        trained, folder / "out", "--task=classification", f"--train_file={train}", f"--validation_file={validation}",
        "--max_steps=1", "--lr_scheduler_type=constant",
    )  # fmt: skip
    return folder / "out"


def changed_card(finished, folder, change):
    """The card's metadata of a copy of a finished run, after a change of its record."""
    shutil.copytree(finished, folder)
    record = json.loads((folder / "run_config.json").read_text())
    change(record)
    (folder / "run_config.json").write_text(json.dumps(record))
    return ModelCard(render_card(folder, "out")).data.to_dict()


def test_the_card_of_a_model_from_scratch_names_no_base_model(finished, tmp_path):
    for from_scratch in (False, True):

        def change(record, from_scratch=from_scratch):
            record["base_model"] |= {"name": "someone/bert", "revision": "0" * 40}
            record["finetune"]["from_scratch"] = from_scratch

        metadata = changed_card(finished, tmp_path / str(from_scratch), change)
        assert ("base_model" in metadata, "base_model_relation" in metadata) == (not from_scratch,) * 2


def test_figures_of_a_file_are_not_those_of_the_dataset_on_the_hub(finished, tmp_path):
    def change(record, file="b.csv"):
        record["data"]["hub_datasets"] = ["someone/rows"]
        record["finetune"]["validation_file"] = file

    def measured_on(metadata):
        return {result["dataset"]["type"] for entry in metadata["model-index"] for result in entry["results"]}

    assert measured_on(changed_card(finished, tmp_path / "file", change)) == {"b.csv"}
    of_hub = changed_card(finished, tmp_path / "hub", lambda record: change(record, None))
    assert measured_on(of_hub) == {"someone/rows"}


def test_the_card_of_a_constant_rate_names_no_warm_up(finished):
    assert "| schedule | `constant` |" in (finished / "README.md").read_text()


def test_a_new_run_deletes_only_what_a_run_writes(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "out")
    pictures = json.loads((folder / "metrics.json").read_text())["pictures"]
    notes = [folder / "notes.txt", folder / "plots" / "mine.png", folder / "runs" / "mine" / "log"]
    for note in notes:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text("precious")
    (folder / "models_in_training" / "rate-1-seed-1").mkdir(parents=True)
    start_folder(FinetuneConfig(model="m", overwrite_output_dir=True), folder, {"finetune": {}})
    assert all(note.read_text() == "precious" for note in notes) and "confusion_matrix.png" in pictures
    kept = {path.name for path in folder.iterdir()}
    assert {"notes.txt", "plots", "runs", "run_config.json"} <= kept
    assert not kept & {"model.safetensors", "metrics.json", "predictions.csv", "models_in_training", *pictures}


def test_a_file_of_the_user_in_the_output_folder_trains_a_new_run(finished, trained, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "out")
    rows = write_csv(folder / "rows.csv", rows_of(20, 0))
    finetune(
        trained, folder, "--task=classification", f"--train_file={rows}", "--overwrite_output_dir", "--max_steps=1"
    )
    assert rows.exists()


def test_a_finished_run_is_replaced_and_not_resumed(finished, trained, rows_file, fails):
    for option in ([], ["--resume_from_checkpoint=latest"]):
        line = fails("finetune", trained, "--task=classification", rows_file, f"--output_dir={finished}", *option)
        assert "holds a finished run" in line and "replace it with --overwrite_output_dir" in line


@pytest.mark.parametrize(
    "options, words",
    [
        ("--validation_share 0 --eval_steps 4", "eval_steps is for eval_strategy steps"),
        ("--lr_scheduler_type constant --warmup_ratio 0.1", "warmup_ratio: lr_scheduler_type constant has no warm-up"),
    ],
)
def test_options_without_effect_are_refused(options, words, fails):
    assert words in fails("finetune", "no/model", "--task", "sst2", *options.split())


SIZES_OF_STOCK = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def test_layerwise_decay_needs_layers(trained, rows_file, tmp_path, fails):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    AlbertModel(AlbertConfig(vocab_size=len(tokenizer), embedding_size=32, **SIZES_OF_STOCK)).save_pretrained(
        tmp_path / "base"
    )
    save_tokenizer(tokenizer, tmp_path / "base")
    command = ["finetune", tmp_path / "base", "--task=classification", rows_file, f"--output_dir={tmp_path / 'out'}"]
    line = fails(*command, "--layerwise_decay=0.9")
    assert "layerwise_decay: no layers are found in a albert model" in line


def test_a_model_without_a_padding_token_is_refused(trained, rows_file, tmp_path, fails):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    BertModel(BertConfig(vocab_size=len(tokenizer), **SIZES_OF_STOCK)).save_pretrained(tmp_path / "base")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "base")
    line = fails("finetune", tmp_path / "base", "--task=classification", rows_file, f"--output_dir={tmp_path / 'out'}")
    assert "has no padding token" in line
