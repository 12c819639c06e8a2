"""Models that are refused before anything is sent: damaged folders, wrong names, wrong tokens."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from local_hub import TOKEN
from publishing import change_card, change_json, published
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


def better_loss(folder):
    loss = round(json.loads((folder / "metrics.json").read_text())["eval_mlm_loss"], 4)
    change_card(folder, f"value: {loss}", "value: 0.1234")


BROKEN = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "a pickle instead": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "published as safetensors only",
    ),
    "weights cut in half": (lambda f: cut(f / "model.safetensors", 0.5), "Error while deserializing header"),
    "a weight gone": (lambda f: change_weights(f, lambda w: w.pop(name_of_positions(w))), "(bert."),
    "a weight too many": (
        lambda f: change_weights(f, lambda w: w.update({"bert.extra.weight": torch.ones(2)})),
        "bert.extra.weight",
    ),
    "a weight not finite": (
        lambda f: change_weights(f, lambda w: w[name_of_positions(w)].fill_(torch.nan)),
        "not finite",
    ),
    "weights of another size": (
        lambda f: [change_json(f / "config.json", intermediate_size=65), (f / "run_config.json").unlink()],
        "does not have the shape",
    ),
    "another vocabulary": (
        lambda f: change_json(f / "config.json", vocab_size=500),
        "a weight does not have the shape",
    ),
    "another padding": (lambda f: change_json(f / "config.json", pad_token_id=3), "not that of the model, 3"),
    "vocab.txt a line short": (
        lambda f: (f / "vocab.txt").write_text("\n".join((f / "vocab.txt").read_text().split("\n")[:-2]) + "\n"),
        "tokens are not those of vocab.txt",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "a damaged tokenizer": (lambda f: cut(f / "tokenizer.json", 0.5), "tokenizer cannot be loaded"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json: names a None model"),
    "a damaged configuration": (lambda f: cut(f / "config.json", 0.5), "config.json: cannot be read"),
    "another kind of model": (lambda f: change_json(f / "config.json", model_type="roberta"), "names a roberta model"),
    "stock BERT with a class of ours": (lambda f: change_json(f / "config.json", model_type="bert"), "config.json of"),
    "an unknown class": (lambda f: change_json(f / "config.json", architectures=["D2lBertForX"]), "D2lBertForX"),
    "classes that the Hub cannot find": (
        lambda f: change_json(f / "config.json", auto_map={"AutoConfig": "configuration_d2l_bert.D2lBertConfig"}),
        "lacks classes in auto_map",
    ),
    "no code": (lambda f: (f / "modeling_d2l_bert.py").unlink(), "modeling_d2l_bert.py is missing"),
    "other code for the configuration": (
        lambda f: (f / "configuration_d2l_bert.py").write_bytes((f / "configuration_d2l_bert.py").read_bytes()[:-1]),
        "configuration_d2l_bert.py: differs from the file of the installed d2l-bert",
    ),
    "other code": (
        lambda f: (f / "modeling_d2l_bert.py").open("a").write("# mine\n"),
        "modeling_d2l_bert.py: differs from the file of the installed d2l-bert",
    ),
    "no metadata": (lambda f: (f / "README.md").write_text("# A model\n"), "has no licence"),
    "invalid YAML": (
        lambda f: change_card(f, "license: apache", "license: [apache"),
        "README.md: cannot be read",
    ),
    "no licence": (lambda f: change_card(f, "license: apache-2.0\n", ""), "has no licence"),
    "an unknown licence": (lambda f: change_card(f, "license: apache-2.0", "license: Apache 2"), "write apache-2.0"),
    "a better loss than was measured": (
        better_loss,
        "README.md: says MLM loss 0.1234, and metrics.json",
    ),
    "a loss that is no number": (
        lambda f: change_json(f / "metrics.json", eval_mlm_loss="low"),
        "put back what the run",
    ),
    "no size of the vocabulary": (
        lambda f: change_json(f / "config.json", vocab_size=None),
        "put back the config.json",
    ),
    "a class that is no name": (
        lambda f: change_json(f / "config.json", architectures=[3]),
        "put back the config.json",
    ),
    "a tokenizer of Transformers 5 alone": (
        lambda f: change_json(f / "tokenizer_config.json", tokenizer_class="TokenizersBackend"),
        "(TokenizersBackend;",
    ),
    "full paths in the record": (
        lambda f: change_json(f / "run_config.json", local_paths={str(Path.home() / "texts"): {"name": "texts"}}),
        "run_config.json: names a folder of this machine",
    ),
    "endless brackets": (lambda f: (f / "metrics.json").write_text("[" * 100_000), "metrics.json: cannot be read"),
    "a card that is no text": (
        lambda f: (f / "README.md").write_bytes(b"---\nlicense: mit\n---\n\xff"),
        "README.md: cannot be read",
    ),
    "somebody's home": (
        lambda f: (f / "README.md").open("a").write("Trained in /home/jane/texts.\n"),
        "names a folder of this machine (/home/jane)",
    ),
    "a path in the licence": (
        lambda f: (f / "LICENSE").write_text(f"As in {Path.home()}/x"),
        "LICENSE: names a folder of this machine",
    ),
    "labels that are a number": (lambda f: change_json(f / "config.json", id2label=3), "put back the config.json"),
    "a damaged record": (lambda f: cut(f / "run_config.json", 0.5), "run_config.json: cannot be read"),
    "a path in the text": (
        lambda f: (f / "README.md").open("a").write(f"Trained on {Path.home()}/secret.\n"),
        "README.md: names a folder of this machine",
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


def test_code_changed_on_purpose_is_sent_if_it_runs(here, folder, tmp_path, capsys):
    code = folder / "modeling_d2l_bert.py"
    code.write_text(code.read_text() + "\nMINE = True\n")
    assert main(["publish", str(folder), "someone/bert", "--changed_code"]) == 0
    assert published(here)["modeling_d2l_bert.py"] == code.read_bytes()
    whole = code.read_text()
    for changed in (
        whole + "\nraise RuntimeError('not today')\n",
        whole + "\nraise SystemExit(0)\n",
        whole.replace("class D2lBertForMultipleChoice", "class Other"),
    ):
        code.write_text(changed)
        capsys.readouterr()
        assert main(["publish", str(folder), "someone/bert", "--changed_code"]) == 2
        said = capsys.readouterr().err
        assert "cannot be run (" in said and said.count("\n") == 1
    assert len(here.commits("someone/bert")) == 2


@pytest.mark.parametrize(
    ("token", "repo_id", "words"),
    [
        (None, "someone/bert", "log in with `hf auth login`"),
        ("hf_unknown", "someone/bert", "log in with `hf auth login`"),
        (TOKEN, "another/bert", "log in with `hf auth login`"),
    ],
)
def test_missing_or_wrong_tokens_are_refused_in_one_line(here, trained, monkeypatch, capsys, token, repo_id, words):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert main(["publish", str(trained), repo_id]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and "Traceback" not in said.err
    assert "hf auth login" in said.err and not here.repositories
