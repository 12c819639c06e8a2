"""Each released model: its recipe can run, its card is that of its files, its record that of the recipe."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
import torch
from hub_cards import read_card
from transformers import AutoTokenizer, pipeline

import d2l_bert
from benchmarks.release import RELEASES, flags, read_recipe, texts_of
from d2l_bert import D2lBertForPreTraining, D2lBertModel
from d2l_bert.__main__ import make_parser
from d2l_bert.commands import resolve_pretrain
from d2l_bert.folders import content_hash, read_json
from d2l_bert.model_cards.card import render_card


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
    return [read_json(place / name) for name in JSON_FILES]


def test_every_release_has_a_recipe_whose_options_are_known():
    assert RECORDED
    texts = tomllib.loads((RELEASES / "texts.toml").read_text())
    for name in sorted(path.parent.name for path in RELEASES.glob("*/release.toml")):
        recipe = read_recipe(name)
        # The bytes depend on both, and their defaults on a measurement.
        assert recipe["pretrain"]["torch_compile"] in ("true", "false") and recipe["pretrain"]["micro_batch_size"] > 0
        for command, options in (
            ("pretrain", recipe["pretrain"]),
            *(("evaluate", options) for options in recipe["evaluate"].values()),
            *(("finetune", options) for options in recipe["finetune"].values()),
        ):
            for text, below in texts_of(options):
                assert texts[text]["fingerprints"].keys() & {below, "."}
            words = [command, *([] if command == "pretrain" else [name]), *flags(options)]
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
    recipe, way_out = read_recipe(place.name), WAY_OUT.format(place.name)
    assert release["recipe"] == recipe, way_out
    planned = {f"evaluate {name}": options for name, options in recipe["evaluate"].items()}
    planned |= {f"finetune {name}": options for name, options in recipe["finetune"].items()}
    assert release["measured"] == planned, way_out
    words = ["pretrain", *flags(recipe["pretrain"]), "--seed", str(recipe["seed"])]
    architecture, run = resolve_pretrain(make_parser(words).parse_args(words))
    for field in dataclasses.fields(run):
        # Other options are resolved when a run begins: a number of epochs becomes a number of steps, for example.
        if field.metadata["identity"] and (value := getattr(run, field.name)) not in (None, "auto"):
            assert record["run"][field.name] == value or field.name == "num_train_epochs", (field.name, way_out)
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
    release, metrics = read_json(place / "release.json"), read_json(place / "metrics.json")
    assert content_hash(place / "model.safetensors") == release["weights_sha256"] != release["float32_sha256"]
    model = D2lBertForPreTraining.from_pretrained(place)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    fill = pipeline("fill-mask", model=str(place))
    for prediction in metrics["predictions"]:
        found = fill(prediction["text"], top_k=len(prediction["output"]))
        assert [each["token_str"] for each in found] == [each["label"] for each in prediction["output"]]
        assert [each["score"] for each in found] == pytest.approx(
            [each["score"] for each in prediction["output"]], abs=2e-3
        )


def test_the_repository_ships_what_its_recipes_say_in_14_mb():
    assert {place.name for place in SHIPPED} == {
        place.name for place in RECORDED if read_recipe(place.name)["ships_weights"]
    }
    assert sum((place / "model.safetensors").stat().st_size for place in SHIPPED) <= 14e6


def test_a_word_has_another_vector_in_each_text_in_the_released_model_of_the_book():
    """The example of section 15.10."""
    place = RELEASES / "d2l-bert-d2l-books"
    tokenizer, encoder = AutoTokenizer.from_pretrained(place), D2lBertModel.from_pretrained(place)
    vectors = []
    for texts in (["a crane is flying"], ["a crane driver came", "he just left"]):
        encoded = tokenizer(*texts, return_tensors="pt")
        with torch.no_grad():
            states = encoder(**encoded).last_hidden_state[0]
        vectors += [states[encoded.char_to_token(0, texts[0].index("crane"))], states[0]]
    crane, start, other_crane, _ = vectors
    assert torch.cosine_similarity(crane, other_crane, dim=0) < 0.99  # 0.954; 1 in an encoder that has collapsed
    assert torch.cosine_similarity(crane, start, dim=0) < 0.9
