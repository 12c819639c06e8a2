"""Publishing to a Hub (a local server that speaks its protocol), by the real client: whole, private, public last."""

import json
import shutil
import time
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard, constants
from local_hub import TOKEN, LocalHub, environment

from .driving import SMALL, command, error_lines, python, read_json


@pytest.fixture
def hub(monkeypatch):
    """A local Hub, which this process takes for the Hub, with the token of `someone`."""
    with LocalHub({TOKEN: "someone"}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        address = "{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.endpoint}/{address}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        patient = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})  # no wait before a retry
        monkeypatch.setattr("huggingface_hub.utils._http.time", patient)
        yield hub


PUBLISHED = set(
    "README.md config.json configuration_d2l_bert.py metrics.json model.safetensors modeling_d2l_bert.py "
    "run_config.json tokenizer.json tokenizer_config.json training_curves.png vocab.txt".split()
)


def files_of(hub, repository="someone/bert", revision="main"):
    return {name: data for name, data in hub.files(repository, revision).items() if name != ".gitattributes"}


def test_a_folder_is_sent_whole_private_without_pickles_paths_or_the_token(hub, model, capsys):
    assert command("publish", model, "bert") == 0
    said = capsys.readouterr()
    files = files_of(hub)
    assert files.keys() == PUBLISHED and hub.is_private("someone/bert")
    assert f"{hub.endpoint}/someone/bert" in said.out and "private" in said.out
    for name, data in files.items():
        assert not data.startswith((b"\x80", b"PK")), f"{name} is no pickle"
        assert TOKEN.encode() not in data and str(model.parent).encode() not in data, name
    assert TOKEN not in said.out + said.err
    (tag,) = hub.tags("someone/bert")
    card = files["README.md"].decode()
    assert f'from_pretrained("someone/bert", revision="{tag}"' in card and 'model="someone/bert"' in card
    assert files["model.safetensors"] == (model / "model.safetensors").read_bytes()


def test_a_repository_becomes_public_in_the_last_request(hub, model):
    assert command("publish", model, "someone/bert", "--public") == 0
    assert not hub.is_private("someone/bert")
    changing = [request for request in hub.requests if request.method in ("POST", "PUT", "DELETE")]
    assert changing[-1].path.endswith("/settings") and changing[-1].method == "PUT"
    assert any("/commit/" in request.path for request in changing[:-1])


@pytest.mark.parametrize("fails_at", ["/commit/", "/tag/", "/settings"])
def test_an_upload_that_broke_off_stays_private_and_the_same_command_completes_it(hub, model, capsys, fails_at):
    hub.fail = lambda method, path: 500 if fails_at in path and method != "GET" else None
    assert command("publish", model, "someone/bert", "--public") == 2
    (line,) = error_lines(capsys.readouterr().err)
    assert "500" in line and hub.is_private("someone/bert")
    hub.fail = None
    assert command("publish", model, "someone/bert", "--public") == 0
    assert files_of(hub).keys() == PUBLISHED and not hub.is_private("someone/bert")


def test_the_card_s_figures_are_those_of_the_folder(hub, model):
    assert command("publish", model, "01-ai/bert", "--dry_run") == 0 and not hub.requests
    assert command("publish", model, "someone/1bert") == 0
    card = ModelCard(files_of(hub, "someone/1bert")["README.md"].decode())
    metrics = read_json(model / "metrics.json")
    shown = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert shown["MLM loss"] == round(metrics["eval_mlm_loss"], 4)
    assert shown["NSP accuracy"] == round(metrics["eval_nsp_accuracy"], 4)
    assert 'model="someone/1bert"' in card.text


CHANGES = {
    "weights of another shape": lambda folder: change(folder / "config.json", hidden_size=64),
    "a damaged file of weights": lambda folder: cut(folder / "model.safetensors"),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "another vocabulary": lambda folder: (folder / "vocab.txt").write_text("[PAD]\n"),
    "changed code": lambda folder: add(folder / "modeling_d2l_bert.py", "\nprint('hello')\n"),
    "a figure that was not measured": lambda folder: change(folder / "metrics.json", eval_mlm_loss=0.1),
    "no licence": lambda folder: edit(folder / "README.md", "license: mit\n", ""),
    "a path of this machine": lambda folder: add(folder / "README.md", f"\nSee {folder}/notes.\n"),
    "a picture that is gone": lambda folder: (folder / "training_curves.png").unlink(),
    "a licence that the Hub does not know": lambda folder: edit(folder / "README.md", "license: mit", "license: mitt"),
}


def change(file, **values):
    file.write_text(json.dumps({**read_json(file), **values}))


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def add(file, text):
    file.write_text(file.read_text() + text)


def edit(file, old, new):
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


@pytest.mark.parametrize("name", CHANGES)
def test_a_folder_that_contradicts_itself_is_refused_before_anything_is_sent(hub, model, tmp_path, capsys, name):
    folder = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("checkpoint-*"))
    CHANGES[name](folder)
    assert command("publish", folder, "someone/bert") == 2
    captured = capsys.readouterr()
    (line,) = error_lines(captured.err)
    assert str(folder) in line and "Traceback" not in captured.err
    assert not [request for request in hub.requests if request.method != "GET"]


def test_a_run_publishes_its_model_at_its_end(hub, texts, tmp_path):
    words = [
        "pretrain",
        "--corpus",
        texts,
        "--output_dir",
        tmp_path / "bert",
        *SMALL,
        "--max_steps=2",
        "--license=mit",
    ]
    assert command(*words, "--push_to_hub", "--hub_model_id", "someone/bert") == 0
    assert files_of(hub).keys() == PUBLISHED and hub.is_private("someone/bert")
    assert files_of(hub)["model.safetensors"] == (tmp_path / "bert" / "model.safetensors").read_bytes()


def test_saves_by_words_seen_are_models_and_go_to_branches(hub, texts, tmp_path):
    """About 2,000 words are seen in the first step; the models grow up."""
    words = [
        "pretrain",
        "--corpus",
        texts,
        "--output_dir",
        tmp_path / "bert",
        *SMALL,
        "--max_steps=40",
        "--license=mit",
    ]
    options = ["--save_words", "1000", "5000", "--push_to_hub", "--hub_model_id", "someone/bert"]
    assert command(*words, *options) == 0
    folders = sorted(path.name for path in (tmp_path / "bert").glob("chck_*"))
    assert len(folders) == 2 and set(folders) <= set(hub.branches("someone/bert"))
    sent = [files_of(hub, revision=name)["model.safetensors"] for name in (*folders, "main")]
    assert len(set(sent)) == 3
    assert sent[0] == (tmp_path / "bert" / folders[0] / "model.safetensors").read_bytes()


LOAD = """
import sys
sys.modules["d2l_bert"] = None
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
model = AutoModelForMaskedLM.from_pretrained("someone/bert", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("someone/bert", trust_remote_code=True)
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
print([entry["token_str"] for entry in fill("Anna [MASK] to the garden.")])
"""


@pytest.mark.slow
def test_a_reader_without_the_package_loads_what_was_published(hub, model, tmp_path, capsys):
    assert command("publish", model, "someone/bert", "--public") == 0
    done = python(LOAD, environment(hub, tmp_path / "home", None))
    assert done.returncode == 0, done.stderr
    capsys.readouterr()
    assert command("fill-mask", model, "Anna [MASK] to the garden.") == 0
    words = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert done.stdout.strip() == str(words)
