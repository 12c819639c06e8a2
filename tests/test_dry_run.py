"""What a dry run says of a run is what the run then does: its steps, and its passes over the text."""

import re

import pytest
from conftest import SMALL
from promises.driving import command, read_json, watched

from d2l_bert import D2lBertForPreTraining


pytestmark = pytest.mark.usefixtures("one_thread")

RUN = [*SMALL, "--mixed_precision=no", "--license=mit", "--logging_steps=1000", "--max_eval_pairs=50"]


def dry_run(books, folder, capsys, *options) -> tuple[int, float]:
    """The steps and the passes over the text that a dry run says."""
    capsys.readouterr()
    assert command("pretrain", "--corpus", books, "--output_dir", folder, *RUN, *options, "--dry_run") == 0
    captured = capsys.readouterr()
    said = "\n".join(line for line in (captured.out + captured.err).splitlines() if line.startswith("dry run: "))
    steps, passes = re.search(r"([\d,]+) steps?\b", said), re.search(r"([\d,.]+) pass(es)? over the text", said)
    assert steps and passes, said
    return int(steps[1].replace(",", "")), float(passes[1].replace(",", ""))


@pytest.mark.parametrize(
    "options",
    [
        "--num_train_epochs=2 --objective=none --pairing=sentences --packing --global_batch_size=32",
        "--num_train_epochs=2 --pairing=sentences",
        "--num_train_epochs=2 --length_schedule 16:0.5 --pairing=sentences",
        "--num_train_epochs=2 --batch_size_schedule 2:0.4 4:0.3 --length_schedule none",
        "--max_steps=30 --batch_size_schedule 4:0.5",
        "--max_steps=30 --length_schedule 16:0.5 --batch_size_schedule 4:0.7",
    ],
)
def test_a_dry_run_says_the_number_of_steps_that_the_run_takes(books, tmp_path, capsys, options):
    said, _ = dry_run(books, tmp_path / "out", capsys, *options.split())
    assert command("pretrain", "--corpus", books, "--output_dir", tmp_path / "out", *RUN, *options.split()) == 0
    assert said == read_json(tmp_path / "out" / "run_config.json")["run"]["max_steps"]


@pytest.mark.parametrize(
    "options",
    [
        "--pairing=sentences",  # a pair of two short sentences has fewer tokens than a row
        "--pairing=segments",
        "--pairing=sentences --batch_size_schedule 4:0.5",
    ],
)
def test_the_passes_that_a_dry_run_says_are_the_tokens_of_the_pairs_over_those_of_the_text(
    books, tmp_path, capsys, options
):
    """Counted in the batches of the run itself, without [CLS] and [SEP], which begin and end the segments."""
    words = ["--max_steps=120", "--length_schedule=none", *options.split()]
    _, said = dry_run(books, tmp_path / "out", capsys, *words)
    with watched(D2lBertForPreTraining) as (trained, _):
        assert command("pretrain", "--corpus", books, "--output_dir", tmp_path / "out", *RUN, *words) == 0
    tokens = 0
    for batch in trained:
        real, in_b = batch["attention_mask"], batch["token_type_ids"]
        tokens += int(real.sum() - 2 * real.any(1).sum() - in_b.any(1).sum())
    passes = tokens / read_json(tmp_path / "out" / "run_config.json")["data"]["train_tokens"]
    assert passes > 0.5
    assert said == pytest.approx(passes, rel=0.1)


@pytest.mark.parametrize("options", ["--num_train_epochs=20", "--num_train_epochs=20 --pairing=sentences"])
def test_a_run_of_twenty_epochs_that_takes_a_step_more_ends_without_advice_against_so_many(
    books, tmp_path, capsys, options
):
    words = ["pretrain", "--corpus", books, "--output_dir", tmp_path / "out", *RUN, *options.split()]
    assert command(*words, "--global_batch_size=64", "--length_schedule=none", "--eval_steps=1000") == 0
    captured = capsys.readouterr()
    assert not re.search(r"(?im)^note:.*\bpasses\b", captured.out + captured.err)
