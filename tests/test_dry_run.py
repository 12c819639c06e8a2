"""What a dry run says of a run is what the run then does: its steps, and its passes over the text."""

import re

import pytest
import torch
from conftest import SMALL, write_books
from promises.driving import command, read_json, watched

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining


pytestmark = pytest.mark.usefixtures("one_thread")

CLS, SEP = 2, 3  # as in every vocabulary that a run trains
RUN = [*SMALL, "--mixed_precision=no", "--license=mit", "--logging_steps=1000", "--max_eval_pairs=50"]


@pytest.fixture(scope="module")
def few_books(tmp_path_factory):
    return write_books(tmp_path_factory.mktemp("few") / "books", count=6)


@pytest.mark.parametrize(
    "options",
    [
        "--num_train_epochs=2 --objective=none --pairing=sentences --packing --global_batch_size=32",
        "--num_train_epochs=2 --pairing=sentences --length_schedule none",  # some pairs have fewer tokens than a row
        "--num_train_epochs=2 --length_schedule 16:0.5 --pairing=sentences",
        "--num_train_epochs=2 --batch_size_schedule 2:0.4 4:0.3 --length_schedule none",
        "--max_steps=30 --batch_size_schedule 4:0.5 --length_schedule none",
        "--max_steps=30 --length_schedule 16:0.5 --batch_size_schedule 4:0.7",
    ],
)
def test_a_dry_run_says_the_number_of_steps_that_the_run_takes(few_books, tmp_path, capsys, options):
    """
    And its passes over the text: the tokens in the batches of the run itself without [CLS] and [SEP], which begin and
    end the segments, over those of the text.
    """
    words = ["pretrain", "--corpus", few_books, "--output_dir", tmp_path / "out", *RUN, *options.split()]
    assert command(*words, "--dry_run") == 0
    said = re.search(r"dry run: ([\d,]+) steps of .*, ([\d,.]+) passes over the text", capsys.readouterr().out)
    model_class = D2lBertForMaskedLM if "--objective=none" in options else D2lBertForPreTraining
    with watched(model_class) as (trained, _):
        assert command(*words) == 0
    record, tokens = read_json(tmp_path / "out" / "run_config.json"), 0
    assert int(said[1].replace(",", "")) == record["run"]["max_steps"]
    for batch in trained:
        begins_or_ends = torch.isin(batch["input_ids"], torch.tensor([CLS, SEP]))
        tokens += int((batch["attention_mask"].bool() & ~begins_or_ends).sum())
    # Segments of pairs that exchange their Bs are cut to one length: many of 16 tokens, some of 48.
    if "16:0.5" not in options:
        assert float(said[2].replace(",", "")) == pytest.approx(tokens / record["data"]["train_tokens"], rel=0.15)


@pytest.mark.parametrize("pairing", ["segments", "sentences"])
def test_a_run_of_twenty_epochs_that_takes_a_step_more_ends_without_advice_against_so_many(
    few_books, tmp_path, capsys, pairing
):
    words = ["pretrain", "--corpus", few_books, "--output_dir", tmp_path / "out", *RUN, f"--pairing={pairing}"]
    words += ["--num_train_epochs=20", "--global_batch_size=64", "--length_schedule=none", "--eval_steps=1000"]
    assert command(*words) == 0
    assert "Note: 20 passes" not in capsys.readouterr().out
