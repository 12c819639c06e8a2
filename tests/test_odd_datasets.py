"""Folders of datasets from strangers: what they name stays inside, what they hold is validated, splits are kept."""

import json
import os
import subprocess
import sys

import datasets
import pytest
from text_sources import texts, write_files

from d2l_bert.messages import UserError
from d2l_bert.tokenization.hub_datasets import dataset_builder, dataset_folder
from d2l_bert.tokenization.sources import WhatToRead, dataset_source
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.rows import read_dataset


ROWS = {"text": [f"Row {number} of the text." for number in range(40)], "label": [0, 1] * 20}


def saved(folder, split=None):
    datasets.Dataset.from_dict(ROWS, split=split).save_to_disk(folder)
    return folder


def read_both(folder, split="train"):
    """What pretraining and fine-tuning read of the dataset."""
    config = FinetuneConfig(model="x", task="text-classification", dataset=str(folder), train_split=split)
    return texts(dataset_source(str(folder), WhatToRead(split=split))), read_dataset(str(folder), config, {})


def refused(folder, said):
    for read in (
        lambda: texts(dataset_source(str(folder))),
        lambda: read_dataset(str(folder), FinetuneConfig(model="x", task="regression", dataset=str(folder)), {}),
    ):
        with pytest.raises(UserError, match=said) as refusal:
            read()
        assert "\n" not in str(refusal.value)


CARD = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {}\n---\n"


@pytest.mark.parametrize("target", ["../secret.txt", "/{}/secret.txt", "sub/../../secret.txt", "link.txt"])
def test_a_card_names_files_of_its_folder_alone(target, tmp_path):
    write_files(tmp_path, {"secret.txt": "A key.", "set/sub/a.txt": "Text."})
    (tmp_path / "set" / "link.txt").symlink_to("../secret.txt")
    (tmp_path / "set" / "README.md").write_text(CARD.format(target.format(tmp_path)))
    refused(tmp_path / "set", "leads out of|no regular file|cannot be read")


ADDRESS = "http://192.0.2.1/a.txt"  # that of no machine (RFC 5737)
CARDS_OF_ADDRESSES = {
    "README.md": CARD.format(ADDRESS),
    ".huggingface.yaml": f"configs:\n- config_name: default\n  data_files: [{ADDRESS}]\n",
    "README.md, in a list": CARD.format(f"[sub/a.txt, 'zip://a.txt::{ADDRESS}']"),
    "README.md, as a folder": f"---\nconfigs:\n- config_name: default\n  data_dir: {ADDRESS}\n---\n",
}


@pytest.mark.parametrize("card", CARDS_OF_ADDRESSES)
def test_a_card_that_names_an_address_is_refused_before_it_is_asked(card, tmp_path, monkeypatch):
    write_files(tmp_path, {"set/sub/a.txt": "Text.", f"set/{card.partition(',')[0]}": CARDS_OF_ADDRESSES[card]})

    def ask(*_, **__):
        raise AssertionError("asked")

    monkeypatch.setattr("datasets.data_files.resolve_pattern", ask)
    refused(tmp_path / "set", "names http|names zip")


CONFIGURATION = "---\nconfigs:\n- config_name: default\n  {}\n---\n"
CLASSES = "features:\n  - {{name: text, dtype: string}}\n  - {{name: label, dtype: {{class_label: {{names: {}}}}}}}"
WRONG_CARDS = {
    "a pattern from the root": CONFIGURATION.format("data_files: '/**/*.csv'"),
    "a pattern of folders above": CONFIGURATION.format("data_files: ['a.csv', '../../../../**/*.csv']"),
    "patterns by their splits": CONFIGURATION.format("data_files: [{split: train, path: ['a.csv', '/**/*.csv']}]"),
    "patterns in a dict": CONFIGURATION.format("data_files: {train: '/**/*.csv'}"),
    "a pattern that is no relative path": CONFIGURATION.format("data_files: 'x:**/*.csv'"),
    "a pattern that takes long to match": CONFIGURATION.format("data_files: '*a*a*a*a*a*a*a*b.csv'"),
    "the root as the folder": CONFIGURATION.format("data_dir: '/'"),
    "the folder above": CONFIGURATION.format("data_dir: sub/../.."),
    "a second configuration": CONFIGURATION.format("data_files: a.csv\n- config_name: more\n  data_dir: /"),
    "configurations in a dict": "---\nconfigs:\n  config_name: default\n  data_dir: /\n---\n",
    "a separator that is a regular expression": CONFIGURATION.format("sep: '(\\w+ ?)+$'"),
    "a reader": CONFIGURATION.format("engine: python"),
    "a guessed separator": CONFIGURATION.format("delimiter: null"),
    "a slow encoding": CONFIGURATION.format("encoding: punycode"),
    "an option without a plain value": CONFIGURATION.format("skiprows: {a: 1}"),
    "classes with gaps": f"---\ndataset_info:\n  {CLASSES.format({'0': 'a', '300000000': 'b'})}\n---\n",
    "classes of a configuration": CONFIGURATION.format(CLASSES.format({"0": "a", "300000000": "b"})),
    "classes in a list": f"---\ndataset_info:\n- config_name: default\n  {CLASSES.format({0: 'a', 2: 'b'})}\n---\n",
}


@pytest.mark.parametrize("card", WRONG_CARDS)
def test_a_card_is_checked_before_the_library_follows_it(card, tmp_path, monkeypatch):
    write_files(tmp_path, {"set/a.csv": "text,label\nA,0\n", "set/README.md": WRONG_CARDS[card]})

    def build(*_, **__):
        raise AssertionError("the library builds it")

    monkeypatch.setattr("datasets.load_dataset_builder", build)
    options = "sep|engine|delimiter|encoding|skiprows"
    refused(
        tmp_path / "set", f"not in the folder|a file of this machine|stars|has the option '({options})'|not numbered 0"
    )


def test_a_link_to_a_folder_elsewhere_is_not_walked_through(tmp_path, monkeypatch):
    write_files(tmp_path, {"set/a.csv": "text\nA\n", "other/b.csv": "text\nB\n"})
    (tmp_path / "set" / "train").symlink_to("../other")
    monkeypatch.setattr("datasets.load_dataset_builder", None)
    refused(tmp_path / "set", "is a link that leads out of")


def test_a_card_that_is_a_pipe_is_not_waited_for(tmp_path):
    write_files(tmp_path, {"set/a.csv": "text\nA\n"})
    os.mkfifo(tmp_path / "set" / ".huggingface.yaml")
    refused(tmp_path / "set", "no regular file")


@pytest.mark.parametrize(
    "card", ["a separator that is a regular expression", "a pattern that takes long to match", "classes with gaps"]
)
def test_the_card_of_a_dataset_on_the_hub_is_checked_too(card, datasets_here, monkeypatch):
    files = {"README.md": WRONG_CARDS[card].encode(), "a.csv": b"text,label\nA,0\n"}
    datasets_here.add_dataset("someone/wrong", files)
    monkeypatch.setattr("datasets.load_dataset_builder", None)
    refused("someone/wrong", "stars|has the option 'sep'|not numbered 0")


def test_a_card_with_plain_options_is_followed(tmp_path):
    options = "data_files: [{split: train, path: 'data/*.csv'}]\n  sep: ';'\n  header: 0\n  keep_default_na: false"
    options += "\n  language: {en: 1}"  # which no reader has
    card = CONFIGURATION.format(f"{options}\n  {CLASSES.format({'0': 'no', '1': 'yes'})}")
    write_files(tmp_path, {"set/data/a.csv": "text;label\nNA, or not;1\nB;0\n", "set/README.md": card})
    documents, splits = read_both(tmp_path / "set")
    assert documents == [["NA, or not"], ["B"]]
    assert splits["train"].class_names == {"label": ["no", "yes"]}


BOMB = "a0: &a0 {x: y}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))


@pytest.mark.parametrize("name, card", [("README.md", f"\n---\n{BOMB}---\n"), (".huggingface.yaml", BOMB)])
def test_a_card_of_a_few_lines_that_stand_for_gigabytes_is_refused(name, card, tmp_path):
    write_files(tmp_path, {"set/a.txt": "Text.", f"set/{name}": card})
    refused(tmp_path / "set", "reference")


@pytest.fixture
def datasets_here(here, monkeypatch):
    """The local Hub as that of the library `datasets`, too."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", here.endpoint)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return here


@pytest.mark.parametrize(
    "target",
    ["/{}/secret.txt", "../../../../../../../..{}/secret.txt", "file://{}/secret.txt", "zip://a.txt::{}/secret.zip"],
)
def test_a_dataset_on_the_hub_names_no_file_of_this_machine(target, tmp_path, datasets_here):
    write_files(tmp_path, {"secret.txt": "A key."})
    card = CARD.format(target.format(tmp_path)).encode()
    datasets_here.add_dataset("someone/set", {"README.md": card, "a.txt": b"Text."})
    refused("someone/set", "`data_files`|a file of this machine")
    assert any("someone/set" in request.path for request in datasets_here.requests)


def test_a_dataset_on_the_hub_that_names_its_own_files_is_read(datasets_here):
    datasets_here.add_dataset("someone/own", {"README.md": CARD.format("a.txt").encode(), "a.txt": b"Text."})
    assert texts(dataset_source("someone/own")) == [["Text."]]


@pytest.mark.parametrize("name", ["csv", "json", "pandas", "parquet", "text", "imagefolder", "arrow"])
def test_a_reader_of_the_library_is_no_dataset(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(name, f"'{name}' is a format")
    write_files(tmp_path, {f"{name}/a.txt": "Text."})
    refused(name, f"'{name}' is a format.*./{name}")
    assert texts(dataset_source(f"./{name}")) == [["Text."]]


def test_a_link_among_the_files_of_a_folder_is_refused(tmp_path):
    write_files(tmp_path, {"secret.txt": "A key.", "set/a.txt": "Text."})
    (tmp_path / "set" / "b.txt").symlink_to("../secret.txt")
    refused(tmp_path / "set", "leads out of")
    (tmp_path / "set" / "b.txt").unlink()
    assert texts(dataset_source(str(tmp_path / "set"))) == [["Text."]]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("state.json", {"_data_files": [{"filename": "../x.arrow"}]}, "no file in this folder"),
        ("state.json", {"_data_files": [{"filename": "/dev/zero"}]}, "no file in this folder"),
        ("state.json", {"_data_files": [{"filename": 5}]}, "filename must be str"),
        ("state.json", {"_data_files": {}}, "_data_files must be a list"),
        ("state.json", {}, "lacks the entry"),
        ("dataset_dict.json", {"splits": ["../other"]}, "no file in this folder"),
        ("dataset_dict.json", {"splits": "train"}, "splits must be a list"),
    ],
)
def test_a_saved_dataset_names_files_of_its_folder_alone(file, content, said, tmp_path):
    saved(tmp_path / "other")
    (tmp_path / "x.arrow").write_bytes((tmp_path / "other" / "data-00000-of-00001.arrow").read_bytes())
    folder = saved(tmp_path / "set")
    before = json.loads((folder / file).read_text()) if file == "state.json" and content else {}
    (folder / file).write_text(json.dumps({**before, **content}))
    refused(folder, said)


def test_links_and_pipes_in_a_saved_dataset_are_refused(tmp_path):
    folder = saved(tmp_path / "set")
    file = folder / "data-00000-of-00001.arrow"
    file.rename(tmp_path / "secret.arrow")
    file.symlink_to("../secret.arrow")
    refused(folder, "leads out of")
    file.unlink()
    os.mkfifo(file)
    refused(folder, "no regular file")


@pytest.mark.slow
def test_bytes_of_a_saved_dataset_are_validated_before_they_are_followed(tmp_path):
    """In a process of its own, as a place outside of the file can end it."""
    folder = saved(tmp_path / "set")
    code = (
        "import random, sys\nfrom pathlib import Path\nfrom d2l_bert.messages import UserError\n"
        "from d2l_bert.tokenization.sources import dataset_source\n"
        "file, rng, refused = Path(sys.argv[1], 'data-00000-of-00001.arrow'), random.Random(0), 0\n"
        "whole = file.read_bytes()\n"
        "for _ in range(60):\n"
        "    content = bytearray(whole)\n"
        "    for _ in range(rng.choice([1, 4, 40])):\n"
        "        place = 8 * rng.randrange(len(content) // 8)\n"
        "        content[place : place + 4] = rng.randbytes(4)\n"
        "    file.write_bytes(content[: rng.choice([len(content), len(content), rng.randrange(len(content))])])\n"
        "    try:\n"
        "        list(dataset_source(sys.argv[1]).documents)\n"
        "    except UserError:\n"
        "        refused += 1\n"
        "print(refused)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout.split()[-1]) > 20, done.stderr[-2000:]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_saved_dataset_of_one_split_is_that_split_and_no_other(split, tmp_path):
    folder = saved(tmp_path / "set", split)
    refused(folder, f"it has {split}")
    documents, splits = read_both(folder, split)
    assert len(documents) == 40 and splits["train"].name == f"set, split {split}"


def test_a_saved_dataset_without_a_split_is_read_but_not_as_one_that_is_named(tmp_path):
    folder = saved(tmp_path / "set")
    for split in ("train", "validation", "test"):
        assert len(texts(dataset_source(str(folder), WhatToRead(split=split)))) == 40
    with pytest.raises(UserError, match="no splits, and no 'dev'"):
        dataset_source(str(folder), WhatToRead(split="dev"))


def test_a_dataset_in_memory_is_read_whichever_split_it_is_of(tmp_path):
    rows = datasets.Dataset.from_dict(ROWS, split="test")
    assert len(texts(dataset_source(dataset_folder(rows, "text", "train")))) == 40


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_another_user_s_cache_of_a_dataset_is_said(tmp_path, caplog):
    write_files(tmp_path, {"set/a.txt": "Text."})
    dataset_source(str(tmp_path / "set"))
    assert "another user" not in caplog.text
    os.chown(dataset_builder(str(tmp_path / "set"), None).cache_dir, 12345, 12345)
    dataset_source(str(tmp_path / "set"))
    assert "belongs to another user" in caplog.text
