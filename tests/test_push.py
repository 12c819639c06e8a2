"""Runs that publish their models: at the end, and during training."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from conftest import SMALL
from local_hub import TOKEN
from publishing import SENT, published
from safetensors.torch import load_file

from d2l_bert import RECIPES, D2lBertForPreTraining
from d2l_bert.cli import main
from d2l_bert.model_cards import push
from d2l_bert.model_cards.push import Pusher


EVERY_SAVE = [*SMALL, *"--max_steps=4 --save_steps=2 --license=mit --push_to_hub --hub_strategy=every_save".split()]


CHECKPOINT = SENT - {"metrics.json", "training_curves.png"}


def pretrain(books, out, *options):
    arguments = [f"--corpus={books}", f"--output_dir={out}", "--max_steps=40", "--save_steps=20", *SMALL]
    return main(["pretrain", *arguments, "--mixed_precision=no", "--license=apache-2.0", *options])


@pytest.mark.parametrize("options", [[], ["--hub_model_id=someone/named", "--hub_private_repo=false"]])
def test_the_finished_model_is_published_as_by_the_publish_command(here, books, tmp_path, capsys, options):
    out = tmp_path / "my-bert"
    assert pretrain(books, out, "--push_to_hub", *options) == 0
    repo_id = "someone/named" if options else "someone/my-bert"
    assert f"published: {here.endpoint}/{repo_id} ({'public' if options else 'private'})" in capsys.readouterr().out
    assert here.is_private(repo_id) == (not options)
    files, tags = published(here, repo_id), here.tags(repo_id)
    assert files.keys() == SENT and len(tags) == 1 and list(here.branches(repo_id)) == ["main"]
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert main(["publish", str(out), repo_id]) == 0
    assert here.tags(repo_id) == tags and published(here, repo_id) == files


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
        ("every_save", [], 4),
        ("checkpoint", ["last-checkpoint"], 1),
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
        assert f'from_pretrained("someone/bert", revision="{branch}", trust_remote_code=True)' in card
        assert "license: apache-2.0" in card and "MLM loss" not in card and "Reproduce" not in card
        assert card.count("# bert\n") == 1 and f"taken after {step} steps of a run of 40" in " ".join(card.split())
        assert f"| steps | {step} of 40 of 8 pairs |" in card
        titles = [commit.title for commit in here.repositories["model", "someone/bert"].history(branch)]
        assert titles[0] == f"checkpoint-{step}"
        assert json.loads(files["run_config.json"])["run"]["corpus"] == ["books"]
    if strategy == "all_checkpoints":
        model = D2lBertForPreTraining.from_pretrained("someone/bert", revision="checkpoint-10", cache_dir=tmp_path)
        weights = load_file(kept / "checkpoint-10" / "model.safetensors")
        assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights.items())


def test_a_checkpoint_saved_during_an_upload_is_skipped_and_this_is_reported(
    here,
    books,
    tmp_path,
    capsys,
):
    out = tmp_path / "bert"

    def hold(method, path):
        """Hold the upload of the first checkpoint until the last one is saved."""
        for _ in range(600):
            if "/commit/last-checkpoint" not in path or (out / "checkpoint-40").exists():
                return
            time.sleep(0.1)

    here.fail = hold
    options = ["--push_to_hub", "--hub_strategy=checkpoint", "--save_steps=10"]
    assert pretrain(books, out, *options) == 0
    assert "checkpoint-20 is not sent, as an earlier checkpoint is still being sent" in capsys.readouterr().err
    assert published(here).keys() == SENT


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


def test_a_checkpoint_is_sent_with_the_runs_own_record_even_if_the_folders_record_is_damaged(
    here, books, tmp_path, monkeypatch
):
    folder, files, seen = tmp_path / "bert", push.published_files, []

    def damage_and_list(checkpoint):
        (folder / "run_config.json").write_text("{")
        return files(checkpoint)

    def see(staged, config):
        seen.append(json.loads((staged / "run_config.json").read_text()))
        raise OSError("seen enough")

    monkeypatch.setattr(push, "published_files", damage_and_list)
    monkeypatch.setattr(push, "outgoing", see)
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={folder}", *EVERY_SAVE]) == 0
    assert [(record["checkpoint_step"], record["run"]["max_steps"]) for record in seen] == [(2, 4)]


def test_a_bug_while_sending_a_checkpoint_is_shown_with_its_traceback_and_the_run_goes_on(
    here, books, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise KeyError("of ours")

    monkeypatch.setattr("d2l_bert.model_cards.push.outgoing", fail)
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'bert'}", *EVERY_SAVE]) == 0
    said = capsys.readouterr().err
    assert "checkpoint-2 was not sent: 'of ours'" in said and "in fail" in said


def test_a_run_makes_its_repository_public_only_with_the_finished_model(here, books, tmp_path):
    seen = []

    def look(method, path):
        if here.repositories:
            seen.append((method, path, here.is_private("someone/bert"), bool(here.tags("someone/bert"))))

    here.fail = look
    options = ["--push_to_hub", "--hub_private_repo=false", "--hub_strategy=every_save"]
    assert pretrain(books, tmp_path / "bert", *options, "--max_steps=4", "--save_steps=2") == 0
    assert all(is_private for _, _, is_private, _ in seen) and not here.is_private("someone/bert")
    assert seen[-1] == ("PUT", "/api/models/someone/bert/settings", True, True)  # only the finished model has a tag
    assert len([path for _, path, *_ in seen if "/commit/" in path]) == 2


def test_a_run_says_at_its_start_that_earlier_commits_become_public(here, trained, books, tmp_path, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    here.requests.clear()
    words = "someone/bert is private: it is made public when the model is there"
    for options, says in (([], False), (["--hub_private_repo=false"], True)):
        capsys.readouterr()
        assert pretrain(books, tmp_path / "bert", "--push_to_hub", *options, "--dry_run") == 0
        assert (words in capsys.readouterr().err) == says
    assert {request.method for request in here.requests} == {"GET"} and here.is_private("someone/bert")


@pytest.mark.parametrize(
    ("options", "token", "words"),
    [
        (["--push_to_hub"], None, "log in with `hf auth login`"),
        (["--push_to_hub"], "hf_unknown", "log in with `hf auth login`"),
        (["--push_to_hub", "--license=apache"], TOKEN, "write apache-2.0"),
        (["--push_to_hub", "--hub_model_id=a b"], TOKEN, "cannot be a repository"),
        (["--hub_model_id=someone/bert"], TOKEN, "hub_model_id is for push_to_hub"),
        (["--hub_strategy=checkpoint"], TOKEN, "hub_strategy is for push_to_hub"),
        (["--hub_private_repo=false"], TOKEN, "hub_private_repo is for push_to_hub"),
    ],
)
def test_publishing_errors_are_found_at_the_start_of_the_run(
    here,
    books,
    tmp_path,
    monkeypatch,
    capsys,
    options,
    token,
    words,
):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    for dry_run in ([], ["--dry_run"]):
        assert pretrain(books, tmp_path / "out", *options, *dry_run) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
        assert not (tmp_path / "out").exists() and not here.repositories


def test_a_repository_of_another_user_is_refused_before_training(here, books, tmp_path, capsys):
    assert pretrain(books, tmp_path / "out", "--push_to_hub", "--hub_model_id=another/bert") == 2
    assert "log in with `hf auth login`" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_dry_run_sends_nothing(here, books, tmp_path):
    assert pretrain(books, tmp_path / "out", "--push_to_hub", "--hub_strategy=every_save", "--dry_run") == 0
    asked = [(request.method, request.path) for request in here.requests]
    # The client sends the first of these requests once per process.
    assert [request for request in asked if request != ("GET", "/api/agent-harnesses")] == [("GET", "/api/whoami-v2")]


def test_a_run_that_is_stopping_starts_no_upload(here, books, tmp_path, monkeypatch, capsys):
    sent, saved = [], Pusher.saved

    def stop(self, checkpoint, step):
        sent.append(checkpoint.name)
        os.kill(os.getpid(), signal.SIGTERM)
        saved(self, checkpoint, step)

    monkeypatch.setattr(Pusher, "saved", stop)
    with pytest.raises(SystemExit) as left:
        pretrain(books, tmp_path / "out", "--push_to_hub", "--hub_strategy=all_checkpoints", "--save_steps=10")
    assert left.value.code == 143 and sent == ["checkpoint-10"]
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-10"}, "no step more"
    assert "was not sent" not in capsys.readouterr().err


def test_the_next_run_removes_files_of_an_upload_that_was_killed(books, tmp_path):
    out = tmp_path / "out"
    assert pretrain(books, out, "--max_steps=2") == 0
    (out / ".hub-left").mkdir()
    assert pretrain(books, out, "--max_steps=2", "--overwrite_output_dir") == 0
    assert not (out / ".hub-left").exists()


def test_only_models_of_the_embedded_corpus_have_a_licence_by_default():
    run = RECIPES["tiny"]()[1]
    assert run.known_license() == "apache-2.0"
    for option in ({"corpus": ["books"]}, {"dataset": ["some/set"]}, {"init_from": "some/bert"}, {"tokenizer": "t"}):
        assert replace(run, **option).known_license() is None
        assert replace(run, **option, license="mit").known_license() == "mit"


def test_the_default_run_can_be_published_without_further_options(here, tmp_path):
    """Trains on a few pages of the embedded corpus."""
    out = tmp_path / "bert"
    assert main(["pretrain", "--max_documents=60", f"--output_dir={out}", "--max_steps=2", *SMALL]) == 0
    assert main(["publish", str(out), "bert"]) == 0
    assert "license: apache-2.0" in published(here, "someone/bert")["README.md"].decode()


def test_a_run_on_other_text_needs_a_licence_to_be_published(here, books, tmp_path, capsys):
    options = [f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", "--max_steps=2", *SMALL, "--push_to_hub"]
    assert main(["pretrain", *options]) == 2
    assert "needs a licence; give --license" in capsys.readouterr().err and not (tmp_path / "out").exists()
