"""A checkpoint's step is what its JSON says, whatever its folder is called; a deleted checkpoint is named first."""

import json
import os
import re
import shutil
import signal

import pytest
from conftest import SMALL
from interrupted_runs import steps_counted
from promises.driving import command, read_json, weights_of

from d2l_bert import D2lBertForPreTraining


pytestmark = pytest.mark.usefixtures("one_thread")

LAST = 10
RUN = [*SMALL, "--mixed_precision=no", f"--max_steps={LAST}", "--save_total_limit=9", "--license=mit"]
RUN += ["--eval_steps=4"]


@pytest.fixture(scope="module")
def whole(books, tmp_path_factory):
    """The folder of a run that was never stopped, with checkpoints at steps 4, 8 and 10."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert command("pretrain", "--corpus", books, "--output_dir", folder, *RUN, "--save_steps=4") == 0
    return folder


def only_copy_of_step_4(whole, folder, name):
    """A run's folder whose only checkpoint is that of step 4, under another name; returns the checkpoint."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("checkpoint-*", "model.safetensors", "metrics.json"))
    return shutil.copytree(whole / "checkpoint-4", folder / name)


@pytest.mark.parametrize("name", ["best", "run2024", "checkpoint-9"])
def test_a_run_resumed_from_a_renamed_checkpoint_and_stopped_goes_on_where_it_stopped(
    books, whole, tmp_path, capsys, name
):
    """Two steps after step 4, SIGTERM: step 6 is saved, and `latest` goes on from there to the same weights."""
    folder = tmp_path / "out"
    saved = only_copy_of_step_4(whole, folder, name)
    words = ["pretrain", "--corpus", books, "--output_dir", folder, *RUN, "--save_steps=100"]
    with steps_counted(sigterm_at=2) as taken:
        code = command(*words, "--resume_from_checkpoint", saved)
    assert code == 143 and len(taken) == 2, capsys.readouterr().err
    states = [read_json(path) for path in folder.glob("*/training_state.json")]
    assert sorted(state["step"] for state in states) == [4, 6], "the checkpoint that it went on from stays"
    with steps_counted() as taken:
        assert command(*words, "--resume_from_checkpoint=latest") == 0
    assert len(taken) == LAST - 6
    assert weights_of(folder) == weights_of(whole)


@pytest.mark.parametrize("name", ["best", "run2024"])
def test_a_run_stopped_before_its_first_step_loses_none_of_those_before(
    books, whole, tmp_path, monkeypatch, capsys, name
):
    """SIGTERM in the evaluation of step 4, as it resumes: what the message advises goes on from step 4."""
    folder = tmp_path / "out"
    saved = only_copy_of_step_4(whole, folder, name)
    log = folder / "training_log.jsonl"  # as if the run had been stopped before the evaluation of step 4
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row for row in rows if row["step"] <= 4 and not any(key.startswith("eval_") for key in row)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["pretrain", "--corpus", books, "--output_dir", folder, *RUN, "--save_steps=100"]
    forward, calls = D2lBertForPreTraining.forward, []

    def stopped(self, *arguments, **named):
        if not self.training and not calls:
            calls.append(None)
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(D2lBertForPreTraining, "forward", stopped)
    with steps_counted() as taken:
        code = command(*words, "--resume_from_checkpoint", saved)
    said = capsys.readouterr().err
    assert code == 143 and not taken, said
    (advised,) = re.findall(r"--resume_from_checkpoint[= ](\S+)", said)
    with steps_counted() as taken:
        assert command(*words, "--resume_from_checkpoint", advised.rstrip(".,;")) == 0
    assert len(taken) == LAST - 4
    assert weights_of(folder) == weights_of(whole)


def test_checkpoints_that_resuming_will_delete_are_named_before_the_first_step(books, whole, tmp_path, capsys):
    """From the checkpoint of step 4 the run goes on differently from those of steps 8 and 10."""
    folder = shutil.copytree(whole, tmp_path / "out")
    words = ["pretrain", "--corpus", books, "--output_dir", folder, *RUN, "--save_steps=100"]
    assert command(*words, "--resume_from_checkpoint", folder / "checkpoint-4") == 0
    before = capsys.readouterr().err.partition("step  5/")[0]
    told = [line for line in before.splitlines() if re.search("delet|remov|discard", line)]
    for name in ("checkpoint-8", "checkpoint-10"):
        assert any(name in line for line in told), before
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-4"]
