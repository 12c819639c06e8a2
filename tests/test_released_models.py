"""Each released model: its recipe can run, its card is that of its files; `make release` makes a model again."""

import dataclasses
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hub_cards import read_card
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

import d2l_bert
from benchmarks import release
from benchmarks.release import RELEASES, flags, read_recipe, texts_of
from d2l_bert import D2lBertForPreTraining, D2lBertModel
from d2l_bert.__main__ import main, make_parser
from d2l_bert.commands import options_of_pretrain
from d2l_bert.folders import content_hash, short_hash, write_json
from d2l_bert.messages import UserError
from d2l_bert.model_cards.card import render_card
from d2l_bert.records import read_record
from d2l_bert.tokenization.sources import file_source
from d2l_bert.training.recipes import resolve


RECORDED = sorted(path.parent for path in RELEASES.glob("*/release.json"))
JSON_FILES = ("config.json", "run_config.json", "metrics.json", "release.json")
WAY_OUT = "make release MODEL={} FLAGS=--record records the model anew"


@pytest.fixture(params=RECORDED, ids=lambda folder: folder.name)
def place(request):
    """The folder of a recorded release."""
    return request.param


@pytest.fixture
def files(place):
    """The contents of its JSON files."""
    return [read_record(place / name) for name in JSON_FILES]


def test_every_release_has_a_recipe_whose_options_are_known():
    assert RECORDED
    texts = tomllib.loads((RELEASES / "texts.toml").read_text())
    for name in sorted(path.parent.name for path in RELEASES.glob("*/release.toml")):
        recipe = read_recipe(name)
        # The bytes depend on both, and their defaults on a measurement.
        assert recipe["pretrain"]["torch_compile"] in ("true", "false")
        assert recipe["pretrain"]["micro_batch_size"] > 0
        commands = [(["pretrain"], recipe["pretrain"])]
        for command in ("evaluate", "finetune"):
            commands += [([command, name], options) for options in recipe[command].values()]
        for command, options in commands:
            for text, below in texts_of(options):
                assert texts[text]["fingerprints"].keys() & {below, "."}
            words = [*command, *flags(options)]
            make_parser(words).parse_args(words)  # exits if an option is not known


def test_the_card_is_rendered_again_from_the_files(place, files):
    config = files[0]
    with torch.device("meta"):
        model = getattr(d2l_bert, config["architectures"][0])(d2l_bert.D2lBertConfig(**config))
    card = render_card(place, place.name, model.num_parameters())
    assert card == (place / "README.md").read_text(encoding="utf-8")
    assert (place / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    data, errors = read_card(card)
    assert not errors and len(card.split()) <= 1100
    assert [example["text"] for example in data["widget"]] == files[-1]["recipe"]["prompts"]


# ---------------------------------------------------------------------------------------------------------------------
# The record


def test_the_record_belongs_to_the_recipe_of_today(place, files):
    _, record, _, release = files
    recipe = read_recipe(place.name)
    way_out = WAY_OUT.format(place.name)
    assert release["recipe"] == recipe, way_out
    planned = {}
    for command in ("evaluate", "finetune"):
        for name, options in recipe[command].items():
            planned[f"{command} {name}"] = options
    assert release["measured"] == planned, way_out
    words = ["pretrain", *flags(recipe["pretrain"]), "--seed", str(recipe["seed"])]
    given = options_of_pretrain(make_parser(words).parse_args(words))
    architecture, run = resolve(given.pop("recipe"), given)
    assert record["run"].keys() <= vars(run).keys()  # `evaluate` makes a run of it
    for field in dataclasses.fields(run):
        # Other options are resolved when a run begins: a number of epochs becomes a number of steps, for example.
        value = getattr(run, field.name)
        is_resolved_later = value in (None, "auto") or field.name == "num_train_epochs"
        if field.metadata["identity"] and not is_resolved_later:
            assert record["run"][field.name] == value, (field.name, way_out)
    for option in ("corpus", "validation_corpus"):
        paths = run.text_paths() if option == "corpus" else run.validation_corpus
        assert record["run"][option] == [Path(path).name for path in paths], (option, way_out)
    for name, value in record["architecture"].items():
        assert name in ("vocab_size", "pad_token_id") or getattr(architecture, name) == value, (name, way_out)


# ---------------------------------------------------------------------------------------------------------------------
# The weights in the repository

SHIPPED = [place for place in RECORDED if (place / "model.safetensors").exists()]


@pytest.mark.parametrize("place", SHIPPED, ids=lambda folder: folder.name)
def test_the_shipped_model_is_that_of_its_record_and_fills_masks_as_its_card_says(place):
    release = read_record(place / "release.json")
    metrics = read_record(place / "metrics.json")
    assert content_hash(place / "model.safetensors") == release["weights_sha256"] != release["float32_sha256"]
    model = D2lBertForPreTraining.from_pretrained(place)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    fill = pipeline("fill-mask", model=str(place))
    for prediction in metrics["predictions"]:
        expected = prediction["output"]
        found = fill(prediction["text"], top_k=len(expected))
        assert [each["token_str"] for each in found] == [each["label"] for each in expected]
        scores = [each["score"] for each in expected]
        assert [each["score"] for each in found] == pytest.approx(scores, abs=2e-3)


def test_the_repository_ships_what_its_recipes_say_in_14_mb():
    to_ship = {place.name for place in RECORDED if read_recipe(place.name)["ships_weights"]}
    assert {place.name for place in SHIPPED} == to_ship
    assert sum((place / "model.safetensors").stat().st_size for place in SHIPPED) <= 14e6


def test_a_word_has_another_vector_in_each_text_in_the_released_model_of_the_book():
    """The example of section 15.10."""
    place = RELEASES / "d2l-bert-d2l-books"
    tokenizer = AutoTokenizer.from_pretrained(place)
    encoder = D2lBertModel.from_pretrained(place)
    vectors = []
    for texts in (["a crane is flying"], ["a crane driver came", "he just left"]):
        encoded = tokenizer(*texts, return_tensors="pt")
        with torch.no_grad():
            states = encoder(**encoded).last_hidden_state[0]
        vectors += [states[encoded.char_to_token(0, texts[0].index("crane"))], states[0]]
    crane, start, other_crane, _ = vectors
    assert torch.cosine_similarity(crane, other_crane, dim=0) < 0.99  # 0.954; 1 in an encoder that has collapsed
    assert torch.cosine_similarity(crane, start, dim=0) < 0.9


# ---------------------------------------------------------------------------------------------------------------------
# `make release`: makes a model again, says whether the bytes are the same, records it; refuses other texts


RECIPE = """
about = "A model of the tests."
device = "cpu"
threads = 1
seed = 3

[comparison]  # the card has its table before the model is fine-tuned, too
columns = ["places"]
figures = [["finetune/places/test_accuracy", "%"]]
models = [["another", "1M", "1M", "50.0 %"]]
note = "The other is of the tests, too."

[deviations]
source = "two models of seeds 4 and 5"
eval_mlm_loss = 0.1
"eval/valid/mlm_loss" = 0.1

[pretrain]
corpus = ["$BOOKS/train"]
license = "mit"
length_schedule = "none"
max_steps = 6
eval_steps = 6
mixed_precision = "no"
torch_compile = "false"
micro_batch_size = 8
num_hidden_layers = 1
hidden_size = 32
num_attention_heads = 2
intermediate_size = 64
max_position_embeddings = 64
vocab_size = 400
max_seq_length = 48
global_batch_size = 8

[evaluate.books]
corpus = ["$BOOKS/valid"]
pppl_sentences = 0

[finetune.places]
task = "classification"
train_file = "$TABLES/train.csv"
test_file = "$TABLES/train.csv"
num_seeds = 2
max_steps = 2
"""

NAME = "d2l-bert-small-books"


@pytest.fixture
def given(books, tmp_path):
    """The folders of the texts BOOKS (`train` and `valid`) and TABLES (a file train.csv)."""
    shutil.copytree(books, tmp_path / "books" / "train")
    (tmp_path / "books" / "valid").mkdir()
    shutil.move(tmp_path / "books" / "train" / "book-00.txt", tmp_path / "books" / "valid")
    (tmp_path / "tables").mkdir()
    lines = ["text,label"]
    for number in range(12):
        lines += [f"in the {place} number {number},{place}" for place in ("garden", "tower")]
    (tmp_path / "tables" / "train.csv").write_text("\n".join(lines) + "\n")
    return {"BOOKS": tmp_path / "books", "TABLES": tmp_path / "tables"}


@pytest.fixture
def root(given, tmp_path):
    """A folder like model_cards/ with a release that is not recorded yet."""
    root = tmp_path / "model_cards"
    entries = []
    (root / NAME).mkdir(parents=True)
    (root / NAME / "release.toml").write_text(RECIPE)
    for name, belows in {"BOOKS": ("train", "valid"), "TABLES": (".",)}.items():
        entries.append(f'[{name}]\nwhat = "{name.lower()} of the tests"\nsource = "the tests"\n[{name}.fingerprints]')
        prints = {below: short_hash(file_source(given[name] / below).identity[0]) for below in belows}
        entries += [f'"{below}" = "{found}"' for below, found in prints.items()]
    (root / "texts.toml").write_text("\n".join(entries))
    return root


@pytest.fixture
def in_process(monkeypatch):
    """Run the commands of a release in this process; returns the list of their words, which fills meanwhile."""
    commands = []

    def run(recipe, *words):
        words = [str(word) for word in words]
        commands.append(words)
        if code := main(words):
            sys.exit(code)

    monkeypatch.setattr(release, "run", run)
    return commands


# ---------------------------------------------------------------------------------------------------------------------
# From the recipe to the verdict


def make(root, given, folder, **options):
    return release.release(NAME, given, folder, root=root, **options)


@pytest.mark.slow
def test_a_model_is_recorded_made_again_to_the_byte_and_published(root, given, tmp_path, in_process, capsys):
    place = root / NAME
    first = tmp_path / "build" / NAME
    again = tmp_path / "again"
    assert make(root, given, first, record=True) == 0
    records = {"config.json", "metrics.json", "release.json", "release.toml", "run_config.json"}
    assert {path.name for path in place.iterdir()} == {"README.md", "training_curves.png", *records}
    record = read_record(place / "release.json")
    card = (place / "README.md").read_text()
    git = ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()  # nothing outside of a checkout
    assert (record["commit"] or "") == head
    assert list(record) == [name for name in read_record(RECORDED[0] / "release.json") if name in record]
    assert record["weights_sha256"] in card and "## Make it again" in card and "## Reproduce it" not in card
    assert "A model of the tests." in card and "two models of seeds 4 and 5" in (place / "release.json").read_text()
    assert f"make release MODEL={NAME} BOOKS=DIR\n" in card and "| MLM loss on valid |" in card
    assert not any(str(tmp_path) in path.read_text() for path in place.glob("*.[jm]*"))
    capsys.readouterr()

    # In another folder: the same bytes. The same command once more trains and measures nothing.
    for _ in range(2):
        assert make(root, {"BOOKS": given["BOOKS"]}, again) == 0
        said = capsys.readouterr().out
        assert f"{NAME}: the same bytes as recorded\n" in said
        assert re.search(r"MLM loss on valid: recorded (\S+ nats), here \1, within 0.566 nats", said)
    assert [words[0] for words in in_process] == 2 * ["pretrain", "evaluate"]

    # The card of the folder is that of the record, and the folder can be published.
    assert (first / "README.md").read_text() == card
    assert main(["publish", str(first), f"me/{NAME}", "--dry_run"]) == 0
    assert "release.json" in capsys.readouterr().out
    write_json(first / "release.json", {**record, "weights_sha256": "0" * 64})
    assert main(["publish", str(first), f"me/{NAME}", "--dry_run"]) == 2
    assert "make the release again" in capsys.readouterr().err

    # Another run in the folder makes the record invalid.
    options = [f"--corpus={given['BOOKS']}", "--max_steps=1", "--vocab_size=300", "--license=mit"]
    assert main(["pretrain", f"--output_dir={again}", "--overwrite_output_dir", *options]) == 0
    assert not (again / "release.json").exists() and "Make it again" not in (again / "README.md").read_text()


@pytest.mark.slow
def test_a_task_is_fine_tuned_beside_the_same_architecture_from_scratch(root, given, tmp_path, in_process):
    folder = tmp_path / "made"
    recipe = root / NAME / "release.toml"
    for task, words in (("places", "there is no model of .*; make it first"), ("animals", "give one of places")):
        with pytest.raises(UserError, match=words):
            make(root, given, folder, task=task)
    make(root, {"BOOKS": given["BOOKS"]}, folder)
    for _ in range(2):  # nothing is lost or done again
        make(root, {"BOOKS": given["BOOKS"]}, folder)
        make(root, {"TABLES": given["TABLES"]}, folder, task="places", record=True)
    assert [words[words.index("--from_scratch") + 1] for words in in_process[2:]] == ["false", "true"]
    metrics = read_record(folder / "metrics.json")
    for ending, words in zip(("", ":from_scratch"), in_process[2:], strict=True):
        tuned = read_record(Path(words[words.index("--output_dir") + 1]) / "metrics.json")
        values = [seed["test"]["accuracy"] for seed in tuned["seeds"]]
        assert metrics[f"finetune/places/test_accuracy{ending}"] == pytest.approx(statistics.fmean(values))
        assert metrics[f"finetune/places/test_accuracy{ending}:sd"] == pytest.approx(statistics.stdev(values))
    assert "| places: test accuracy | " in (root / NAME / "README.md").read_text()
    recipe.write_text(recipe.read_text().replace("num_seeds = 2", "num_seeds = 3"))
    make(root, {"TABLES": given["TABLES"]}, folder, task="places")
    assert read_record(folder / "metrics.json")["finetune/places/seeds"] == 3, "other options are other trainings"


@pytest.mark.slow
def test_weights_in_the_repository_are_rounded_and_its_figures_are_theirs(root, given, tmp_path, in_process):
    place = root / NAME
    folder = tmp_path / "made"
    recipe = root / NAME / "release.toml"
    assert make(root, given, folder) == 0
    exact = load_file(folder / "model.safetensors")
    before = read_record(folder / "release.json")
    recipe.write_text(recipe.read_text().replace("seed = 3", "seed = 3\nships_weights = true"))
    assert make(root, given, folder, overwrite=True, record=True) == 0
    record = read_record(place / "release.json")
    metrics = read_record(place / "metrics.json")
    assert record["float32_sha256"] == before["weights_sha256"] != record["weights_sha256"]
    shipped = load_file(place / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in shipped.values())
    assert all((tensor == exact[name].bfloat16()).all() for name, tensor in shipped.items())
    model = D2lBertForPreTraining.from_pretrained(place)
    assert model.dtype == torch.float32 and len(AutoTokenizer.from_pretrained(place)) == model.config.vocab_size
    text = given["BOOKS"] / "train"
    output = tmp_path / "f.json"
    options = [f"--corpus={text}", "--held_out", "--pppl_sentences=0", f"--output={output}"]
    assert main(["evaluate", str(place), *options]) == 0
    (found,) = read_record(output)["models"]
    assert metrics["eval_mlm_loss"] == pytest.approx(found["text"]["mlm_loss"], abs=1e-5)
    # Nothing of the code stands there, and nothing asks for it.
    AutoModelForMaskedLM.from_pretrained(place, trust_remote_code=True)
    assert make(root, given, tmp_path / "again") == 0
