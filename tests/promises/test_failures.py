"""An error ends the run within seconds, on every rank, with its line; nothing that was written is lost."""

import resource

import pytest
import torch

from d2l_bert import D2lBertForPreTraining

from .driving import SMALL, command, end, error_lines, seconds_since_fault, start, weights_of


RUN = [*SMALL, "--max_steps=40", "--save_steps=2", "--license=mit"]


def run_with(fault, texts, tmp_path, *options, processes=1):
    """The exit codes of a run with a fault, what each rank said, and the seconds from the fault to the end of all."""
    said = tmp_path / "said.txt"
    words = ["pretrain", "--corpus", texts, "--output_dir", tmp_path / "out", *RUN, *options]
    runs = start(words, script="faulty.py", environment=fault, processes=processes, said=said)
    codes = end(runs, 60)
    texts_said = [file.read_text() for file in (said, *sorted(tmp_path.glob("said.txt.*")))]
    return codes, texts_said, seconds_since_fault("".join(texts_said))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_batches_are_made_ends_the_run(texts, tmp_path, workers):
    codes, (said,), seconds = run_with(
        {"PROMISES_LOADER": "the rope broke"}, texts, tmp_path, f"--dataloader_num_workers={workers}"
    )
    assert codes == [1] and "the rope broke" in said and "Traceback" in said and seconds < 10


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_both(texts, tmp_path, rank):
    fault = {"PROMISES_ERROR": "the rope broke", "PROMISES_AT_STEP": "5", "PROMISES_RANK": str(rank)}
    codes, said, seconds = run_with(fault, texts, tmp_path, processes=2)
    assert 0 not in codes and "the rope broke" in said[rank] and "the rope broke" not in said[1 - rank]
    assert seconds < 10
    assert (tmp_path / "out" / "checkpoint-4").is_dir()


def test_a_full_disk_is_one_line_and_costs_no_checkpoint(texts, tmp_path, capsys):
    """No file may grow beyond 60,000 bytes, which the weights need; then the limit is lifted, and the run goes on."""
    options = [*SMALL, "--max_steps=6", "--save_steps=2", "--license=mit"]
    words = ["pretrain", "--corpus", texts, *options]
    assert command(*words, "--output_dir", tmp_path / "whole") == 0
    folder = tmp_path / "out"
    assert command(*words, "--output_dir", folder) == 0
    for name in ("model.safetensors", "metrics.json"):
        (folder / name).unlink()
    for checkpoint in (folder / "checkpoint-6",):
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    capsys.readouterr()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, most))
    try:
        assert command(*words, "--output_dir", folder, "--resume_from_checkpoint=latest") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    captured = capsys.readouterr().err
    (line,) = error_lines(captured)
    assert "checkpoint-6" in line and "cannot be written" in line and "Traceback" not in captured
    assert [path.name for path in sorted(folder.glob("checkpoint-*"))] == ["checkpoint-4"]
    assert not list(folder.glob(".*.part"))
    assert command(*words, "--output_dir", folder, "--resume_from_checkpoint=latest") == 0
    assert weights_of(folder) == weights_of(tmp_path / "whole")


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_ten_in_a_row_end_the_run(
    texts, tmp_path, capsys, monkeypatch, spoilt
):
    forward, number, weights, spoil_at = D2lBertForPreTraining.forward, [], [], {3}

    def spoil(self, *arguments, **named):
        outputs = forward(self, *arguments, **named)
        if self.training:
            number.append(None)
            weights.append(torch.cat([parameter.detach().flatten().clone() for parameter in self.parameters()]))
            if len(number) in spoil_at:
                if spoilt == "loss":
                    outputs.mlm_loss = outputs.mlm_loss.detach() * torch.nan
                else:
                    outputs.loss = outputs.loss * torch.inf
        return outputs

    monkeypatch.setattr(D2lBertForPreTraining, "forward", spoil)
    words = ["pretrain", "--corpus", texts, *SMALL, "--save_steps=1", "--save_total_limit=99", "--micro_batch_size=64"]
    assert command(*words, "--output_dir", tmp_path / "one", "--max_steps=4") == 0
    assert not (tmp_path / "one" / "checkpoint-3").exists(), "no checkpoint of a step that was left out"
    assert torch.equal(weights[3], weights[2]), "step 3 changed nothing"
    assert not torch.equal(weights[2], weights[1])
    number.clear()
    spoil_at = set(range(3, 99))
    capsys.readouterr()
    assert command(*words, "--output_dir", tmp_path / "two", "--max_steps=40") == 2
    (line,) = error_lines(capsys.readouterr().err)
    assert "10 steps in a row" in line and "checkpoint-2" in line
