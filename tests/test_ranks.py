"""Several ranks of one run: they train on one text, say an error once, and leave the caller's process group alone."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import SMALL
from promises.driving import end, error_lines, start
from runs import log_rows


RANKS_APART = Path(__file__).with_name("ranks_apart.py")
RUN = [*SMALL, "--mixed_precision=no", "--max_steps=4", "--license=mit"]


@pytest.fixture
def apart(books, tmp_path):
    """A folder for two ranks without a common disk; both have the text `books`, also under the name `validation`."""
    for place in ("0/books", "1/books", "0/validation", "1/validation"):
        shutil.copytree(books, tmp_path / "apart" / place)
    return tmp_path / "apart"


def run_apart(folder, *words):
    """Train on two ranks; returns the `subprocess.Popen` objects, and a function that reads what each has said."""
    said = folder / "said.txt"
    words, environment = ["pretrain", "--output_dir=out", *words], {"APART": str(folder)}
    ranks = start(words, script=RANKS_APART, environment=environment, processes=2, said=said)
    return ranks, lambda: [said.read_text(), Path(f"{said}.1").read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("differs", ["books", "validation"])
def test_ranks_that_read_different_texts_are_refused_before_the_first_step(apart, differs):
    """Equal texts in two places train; with another word in rank 1's files, no rank takes a step."""
    words = ["--corpus=books", *RUN, "--vocab_size=100"]  # so small that both vocabularies have this size
    words += ["--validation_corpus=validation"] if differs == "validation" else []
    for file in (apart / "1" / differs).iterdir():  # of the same size
        file.write_text(file.read_text().replace("nobody", "no one"))
    ranks, said = run_apart(apart, *words)
    assert end(ranks, 90) == [2, 2], said()
    assert len(error_lines("\n".join(said()))) == 1 and "Traceback" not in "".join(said()), said()
    assert not (apart / "0" / "out").exists()
    shutil.copytree(apart / "0" / differs, apart / "1" / differs, dirs_exist_ok=True)
    ranks, said = run_apart(apart, *words)
    assert end(ranks, 90) == [0, 0], said()
    assert log_rows(apart / "0" / "out")[-1]["step"] == 4


@pytest.mark.slow
def test_an_error_of_rank_1_alone_is_said_once_and_names_the_rank(apart, trained):
    """Only rank 0 has the model to start from. A launcher would now end rank 0; here the test does."""
    shutil.copytree(trained, apart / "0" / "start")
    words = ["--corpus=books", "--init_from=start", "--max_steps=4", "--max_seq_length=48"]
    ranks, said = run_apart(apart, *words)
    code = ranks[1].wait(60)
    ranks[0].terminate()
    end(ranks, 30)
    (line,) = [line for line in error_lines("\n".join(said())) if "start" in line]
    assert code == 2 and re.search(r"\b(rank|process) 1\b", line) and "Traceback" not in said()[1], said()


@pytest.mark.slow
def test_a_dry_run_that_is_refused_says_so_once(apart):
    """Both ranks see the mistake: the output folder holds other files and no run."""
    for rank in "01":
        (apart / rank / "out").mkdir()
        (apart / rank / "out" / "letter.txt").write_text("Dear Emma,")
    ranks, said = run_apart(apart, "--corpus=books", *RUN, "--dry_run")
    assert end(ranks, 60) == [2, 2], said()
    (line,) = error_lines("\n".join(said()))
    assert "letter.txt" in line


# ---------------------------------------------------------------------------------------------------------------------
# `d2l_bert.pretrain` in a program of the user's own, which is launched as several ranks

PROGRAM = """
import sys
import torch
import d2l_bert

if __name__ == "__main__":
    folder, corpus, group = sys.argv[1:]
    if group == "own group":
        torch.distributed.init_process_group("gloo")
    for name in ("first", "second"):
        architecture = d2l_bert.D2lBertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=48,
        )
        run = d2l_bert.PretrainConfig(
            corpus=[corpus], output_dir=f"{folder}/{name}", vocab_size=300, max_seq_length=48, max_steps=3,
            global_batch_size=8, mixed_precision="no", dataloader_num_workers=0, license="mit",
        )
        d2l_bert.pretrain(architecture, run)
        print(f"the {name} run is done")
        if group == "own group":
            ranks = torch.tensor([1.0 + torch.distributed.get_rank()])
            torch.distributed.all_reduce(ranks)
            assert ranks.item() == 3.0
    if group == "own group":
        torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["no group", "own group"])
def test_a_launched_program_can_pretrain_twice_and_keeps_its_process_group(books, tmp_path, group):
    """Without a group of the program's own, and with one, which still adds over the ranks after each run."""
    program, said = tmp_path / "program.py", tmp_path / "said.txt"
    program.write_text(PROGRAM)
    ranks = start([tmp_path, books, group], script=program, processes=2, said=said)
    assert end(ranks, 120) == [0, 0], said.read_text()
    for name in ("first", "second"):
        assert (tmp_path / name / "model.safetensors").exists() and log_rows(tmp_path / name)[-1]["step"] == 3
        assert all(f"the {name} run is done" in file.read_text() for file in (said, Path(f"{said}.1")))
