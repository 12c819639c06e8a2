"""Runs that publish their models: at the end, and during training."""

import json
import shutil
import time

import pytest
import torch
from conftest import SMALL
from publishing import SENT, published
from safetensors.torch import load_file

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.model_cards.push import Pusher


CHECKPOINT = SENT - {"metrics.json", "training_curves.png"}


def pretrain(books, out, *options):
    arguments = [f"--corpus={books}", f"--output_dir={out}", "--max_steps=40", "--save_steps=20", *SMALL]
    return main(["pretrain", *arguments, "--mixed_precision=no", "--license=apache-2.0", *options])


@pytest.mark.slow
def test_publishing_during_training_does_not_change_the_trained_weights(here, trained, books, tmp_path):
    out = tmp_path / "model"
    # A commit takes longer than the rest of the run.
    here.fail = lambda method, path: time.sleep(0.5) if "/commit/" in path else None
    options = ["--push_to_hub", "--hub_strategy=all_checkpoints", "--hub_private_repo=false", "--save_steps=10"]
    assert pretrain(books, out, *options) == 0
    assert (out / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert not list(out.glob(".hub-*"))
    assert list(here.branches("someone/model")) == ["main", "checkpoint-10", "checkpoint-20", "checkpoint-30"]
    assert not here.is_private("someone/model")


@pytest.mark.parametrize(
    ("strategy", "branches", "commits"),
    [
        ("end", [], 1),
        pytest.param("every_save", [], 4, marks=pytest.mark.slow),
        pytest.param("checkpoint", ["last-checkpoint"], 1, marks=pytest.mark.slow),
        ("all_checkpoints", ["checkpoint-10", "checkpoint-20", "checkpoint-30"], 1),
    ],
)
def test_checkpoints_go_to_the_branches_of_the_strategy(
    here, books, tmp_path, monkeypatch, strategy, branches, commits
):
    kept = tmp_path / "kept"

    saved = Pusher.saved

    def keep(self, checkpoint, step):
        shutil.copytree(checkpoint, kept / checkpoint.name)
        saved(self, checkpoint, step)
        self.waiting.join()  # wait for the upload, so that no checkpoint is skipped

    monkeypatch.setattr(Pusher, "saved", keep)
    options = ["--push_to_hub", f"--hub_strategy={strategy}", "--save_steps=10", "--save_total_limit=1"]
    assert pretrain(books, tmp_path / "bert", *options) == 0
    assert list(here.branches("someone/bert")) == ["main", *branches]
    assert len(here.commits("someone/bert")) == 1 + commits and len(here.tags("someone/bert")) == 1
    assert published(here).keys() == SENT
    for branch in branches:
        step = 30 if branch == "last-checkpoint" else int(branch.removeprefix("checkpoint-"))
        files = published(here, revision=branch)
        assert files.keys() == CHECKPOINT
        assert files["model.safetensors"] == (kept / f"checkpoint-{step}" / "model.safetensors").read_bytes()
        card = files["README.md"].decode()
        assert f'from_pretrained("someone/bert", revision="{branch}", trust_remote_code=True' in card
        assert "license: apache-2.0" in card and "MLM loss" not in card and "Reproduce" not in card
        assert card.count("# bert\n") == 1 and f"taken after {step} steps of a run of 40" in " ".join(card.split())
        assert f"| steps | {step} of 40 of 8 pairs |" in card
        titles = [commit.title for commit in here.repositories["someone/bert"].history(branch)]
        assert titles[0] == f"checkpoint-{step}"
        assert json.loads(files["run_config.json"])["run"]["corpus"] == ["books"]
    if strategy == "all_checkpoints":
        model = D2lBertForPreTraining.from_pretrained("someone/bert", revision="checkpoint-10", cache_dir=tmp_path)
        weights = load_file(kept / "checkpoint-10" / "model.safetensors")
        assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


@pytest.mark.slow
def test_a_hub_that_stops_answering_costs_no_training_and_is_reported(here, books, tmp_path, capsys):
    here.fail = lambda method, path: here.stop() or 0 if "/preupload/" in path else None
    out = tmp_path / "bert"
    assert pretrain(books, out, "--push_to_hub", "--hub_strategy=all_checkpoints", "--hub_private_repo=false") == 2
    said = capsys.readouterr().err
    assert "checkpoint-20 was not sent" in said and "Traceback" not in said
    assert f"the model is complete in {out}: d2l-bert publish {out} bert --public" in said.splitlines()[-1]
    assert SENT <= {path.name for path in out.iterdir()} and here.is_private("someone/bert")
    here.fail = None
    here.start()
    assert main(["publish", str(out), "bert", "--public"]) == 0 and not here.is_private("someone/bert")
    assert published(here)["model.safetensors"] == (out / "model.safetensors").read_bytes()
