"""Models that are refused before anything is sent: damaged folders, wrong names, wrong tokens."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from local_hub import TOKEN
from publishing import change_card, change_json
from safetensors.torch import load_file, save_file

from d2l_bert.__main__ import main


def cut(file, share):
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def name_of_positions(weights):
    return next(name for name in weights if "position" in name)


# What the folder's files hold wrongly, and what the error line names. tests/promises has more.
BROKEN = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
    "a pickle instead": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "no file named model.safetensors",
    ),
    "a weight gone": (lambda f: change_weights(f, lambda w: w.pop(name_of_positions(w))), "(bert."),
    "a weight too many": (
        lambda f: change_weights(f, lambda w: w.update({"bert.extra.weight": torch.ones(2)})),
        "bert.extra.weight",
    ),
    "a weight not finite": (
        lambda f: change_weights(f, lambda w: w[name_of_positions(w)].fill_(torch.nan)),
        "not finite",
    ),
    "a vocabulary of another size": (lambda f: change_json(f / "config.json", vocab_size=500), "the shape"),
    "another padding": (lambda f: change_json(f / "config.json", pad_token_id=3), "not that of the model, 3"),
    "a damaged tokenizer": (lambda f: cut(f / "tokenizer.json", 0.5), "tokenizer cannot be loaded"),
    "a tokenizer of Transformers 5 alone": (
        lambda f: change_json(f / "tokenizer_config.json", tokenizer_class="TokenizersBackend"),
        "(TokenizersBackend;",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json: names a None model"),
    "a damaged configuration": (lambda f: cut(f / "config.json", 0.5), "config.json: cannot be read"),
    "another kind of model": (lambda f: change_json(f / "config.json", model_type="roberta"), "names a roberta model"),
    "stock BERT with a class of ours": (lambda f: change_json(f / "config.json", model_type="bert"), "config.json"),
    "an unknown class": (lambda f: change_json(f / "config.json", architectures=["D2lBertForX"]), "D2lBertForX"),
    "a class that is no name": (lambda f: change_json(f / "config.json", architectures=[3]), "config.json"),
    "no size of the vocabulary": (lambda f: change_json(f / "config.json", vocab_size=None), "vocab_size"),
    "labels that are a number": (lambda f: change_json(f / "config.json", id2label=3), "config.json"),
    "classes that the Hub cannot find": (
        lambda f: change_json(f / "config.json", auto_map={"AutoConfig": "configuration_d2l_bert.D2lBertConfig"}),
        "lacks classes in auto_map",
    ),
    "no code": (lambda f: (f / "modeling_d2l_bert.py").unlink(), "modeling_d2l_bert.py is missing"),
    "other code for the configuration": (
        lambda f: (f / "configuration_d2l_bert.py").write_bytes((f / "configuration_d2l_bert.py").read_bytes()[:-1]),
        "configuration_d2l_bert.py is missing, or is not that of the installed",
    ),
    "no metadata": (lambda f: (f / "README.md").write_text("# A model\n"), "has no licence"),
    "invalid YAML": (lambda f: change_card(f, "license: apache", "license: [apache"), "README.md: cannot be read"),
    "a card that is no text": (
        lambda f: (f / "README.md").write_bytes(b"---\nlicense: mit\n---\n\xff"),
        "README.md: cannot be read",
    ),
    "a loss that is no number": (lambda f: change_json(f / "metrics.json", eval_mlm_loss="low"), "metrics.json"),
    "endless brackets": (lambda f: (f / "metrics.json").write_text("[" * 100_000), "metrics.json: cannot be read"),
    "a damaged record": (lambda f: cut(f / "run_config.json", 0.5), "run_config.json: cannot be read"),
    "full paths in the record": (
        lambda f: change_json(f / "run_config.json", local_paths={str(Path.home() / "texts"): {"name": "texts"}}),
        "run_config.json: names a folder of this machine",
    ),
    "somebody's home": (
        lambda f: (f / "README.md").open("a").write("Trained in /home/jane/texts.\n"),
        "names a folder of this machine (/home/jane)",
    ),
    "a path in the licence": (
        lambda f: (f / "LICENSE").write_text(f"As in {Path.home()}/x"),
        "LICENSE: names a folder of this machine",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_damaged_folder_is_refused_in_one_line_before_anything_is_sent(here, folder, how, capsys):
    breaks, words = BROKEN[how]
    breaks(folder)
    capsys.readouterr()
    assert main(["publish", str(folder), "someone/bert"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("d2l-bert publish: error: ") and said.err.count("\n") == 1 and not said.out
    assert words in said.err and str(folder) in said.err and ";" in said.err, said.err
    assert not here.requests and not here.repositories


@pytest.mark.parametrize(
    ("token", "repo_id"), [(None, "someone/bert"), ("hf_unknown", "someone/bert"), (TOKEN, "another/bert")]
)
def test_missing_or_wrong_tokens_are_refused_in_one_line(here, trained, monkeypatch, capsys, token, repo_id):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert main(["publish", str(trained), repo_id]) == 2
    said = capsys.readouterr().err
    assert "log in with `hf auth login`" in said and said.count("\n") == 1 and not here.repositories


def test_a_dry_run_lists_the_files_before_it_says_what_is_missing(here, folder, capsys):
    change_card(folder, "license: apache-2.0\n", "")
    assert main(["publish", str(folder), "someone/bert", "--dry_run"]) == 2
    said = capsys.readouterr()
    assert "model.safetensors" in said.out and "stays here: checkpoint-20" in said.out
    assert "has no licence" in said.err and said.err.count("\n") == 1 and not here.requests
