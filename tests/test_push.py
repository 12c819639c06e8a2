"""Runs that publish their models: at the end, and during training."""

import json
import shutil
import time

import pytest
from conftest import SMALL
from publishing import SENT, published

from d2l_bert.__main__ import main
from d2l_bert.model_cards.push import Pusher


def pretrain(books, out, *options):
    arguments = [f"--corpus={books}", f"--output_dir={out}", "--max_steps=40", "--save_steps=10", *SMALL]
    options = ["--mixed_precision=no", "--license=apache-2.0", "--push_to_hub", *options]
    return main(["pretrain", *arguments, *options])


@pytest.mark.slow
def test_publishing_during_training_does_not_change_the_trained_weights(here, trained, books, tmp_path):
    # A commit takes longer than the rest of the run.
    here.fail = lambda method, path: time.sleep(0.5) if "/commit/" in path else None
    assert pretrain(books, tmp_path / "model", "--hub_strategy=all_checkpoints", "--hub_private_repo=false") == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
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
    kept, saved = tmp_path / "kept", Pusher.saved

    def keep(self, checkpoint):
        shutil.copytree(checkpoint, kept / checkpoint.name)
        saved(self, checkpoint)
        self.waiting.join()  # wait for the upload, so that no checkpoint is skipped

    monkeypatch.setattr(Pusher, "saved", keep)
    assert pretrain(books, tmp_path / "bert", f"--hub_strategy={strategy}", "--save_total_limit=1") == 0
    assert list(here.branches("someone/bert")) == ["main", *branches]
    assert len(here.commits("someone/bert")) == 1 + commits and len(here.tags("someone/bert")) == 1
    assert published(here).keys() == SENT
    for branch in branches:
        step = branch.removeprefix("checkpoint-") if strategy == "all_checkpoints" else "30"
        files = published(here, revision=branch)
        assert files.keys() == SENT - {"metrics.json", "training_curves.png"}
        assert files["model.safetensors"] == (kept / f"checkpoint-{step}" / "model.safetensors").read_bytes()
        card = files["README.md"].decode()
        assert f'from_pretrained("someone/bert", revision="{branch}", trust_remote_code=True' in card
        assert "license: apache-2.0" in card and "MLM loss" not in card and "Reproduce" not in card
        assert card.count("# bert\n") == 1 and f"taken after {step} steps of a run of 40" in card
        assert f"| steps | {step} of 40 of 8 pairs |" in card
        assert here.repositories["someone/bert"].at(branch).title == f"checkpoint-{step}"
        assert json.loads(files["run_config.json"])["run"]["corpus"] == ["books"]


@pytest.mark.slow
def test_a_hub_that_stops_answering_costs_no_training_and_is_reported(here, books, tmp_path, capsys):
    here.fail = lambda method, path: here.stop() or 0 if "/preupload/" in path else None
    out = tmp_path / "bert"
    assert pretrain(books, out, "--hub_strategy=all_checkpoints", "--hub_private_repo=false") == 2
    said = capsys.readouterr().err
    assert "checkpoint-20 was not sent" in said and "Traceback" not in said
    assert f"the model is complete in {out}, and d2l-bert publish {out} bert --public sends it" in said
    assert SENT <= {path.name for path in out.iterdir()} and here.is_private("someone/bert")
    here.fail = None
    here.start()
    assert main(["publish", str(out), "bert", "--public"]) == 0 and not here.is_private("someone/bert")
    assert published(here)["model.safetensors"] == (out / "model.safetensors").read_bytes()
