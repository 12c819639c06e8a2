"""`pretrain` at its edges: ways to start, rows of evaluations, refusals of unfinished runs, weights of sources."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SMALL, write_books
from promises.driving import command, end, error_lines, read_json, start
from runs import steps_counted


pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
RUN = [*SMALL, "--mixed_precision=no", "--license=mit"]


# ---------------------------------------------------------------------------------------------------------------------
# Ways to start a run


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")
@pytest.mark.parametrize("way", ["file", "module"])
def test_the_file_and_the_module_run_the_command(books, tmp_path, monkeypatch, way):
    """`python training/pretrain.py ...` and `python -m d2l_bert.training.pretrain ...`, in this process."""
    words = ["--corpus", str(books), "--output_dir", str(tmp_path / "out"), *RUN, "--max_steps=2"]
    file = str(ROOT / "training" / "pretrain.py")
    monkeypatch.setattr(sys, "argv", [file, *words])
    with pytest.raises(SystemExit, match="0"):
        if way == "file":
            runpy.run_path(file, run_name="__main__")
        else:
            runpy.run_module("d2l_bert.training.pretrain", run_name="__main__", alter_sys=True)
    assert read_json(tmp_path / "out" / "run_config.json")["run"]["max_steps"] == 2


@pytest.mark.slow
def test_accelerate_launch_trains_and_refuses(books, tmp_path):
    launch = "-m accelerate.commands.launch --cpu --num_processes=1 --num_machines=1 --dynamo_backend=no "
    launch += (
        f"--mixed_precision=no training/pretrain.py --corpus={books} --output_dir={tmp_path / 'out'} --max_steps=2"
    )
    launched = [sys.executable, *launch.split(), *RUN]
    done = subprocess.run(launched, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "model.safetensors").exists(), done.stderr
    done = subprocess.run([*launched, "--no_such_option"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0  # the launcher has an exit code of its own
    (line,) = [line for line in error_lines(done.stderr) if "no_such_option" in line]


# ---------------------------------------------------------------------------------------------------------------------
# Evaluations


def test_the_rows_of_an_objective_are_said_and_evaluate_has_the_same_for_all(books, trained, tmp_path, capsys):
    """All start from one model and stay there: their MLM losses are the same where the rows and their masks are."""
    words = [f"--init_from={trained}", "--max_steps=1", "--learning_rate=1e-12", "--max_seq_length=48"]
    folders = [tmp_path / objective for objective in ("nsp", "sop", "none")]
    for folder in folders:
        options = ["--output_dir", folder, f"--objective={folder.name}"]
        assert command("pretrain", "--corpus", books, *words, *options) == 0
        assert "evaluate --objective none" in capsys.readouterr().out
        assert (folder.name != "none") == ("--objective none`" in (folder / "README.md").read_text())
    output = tmp_path / "figures.json"
    words = ["--corpus", books, "--held_out", "--objective=none", "--pppl_sentences=0", "--output", output]
    assert command("evaluate", *folders, *words) == 0
    figures = [of["text"] for of in read_json(output)["models"]]
    for of in figures:
        assert of["masked_tokens"] == figures[0]["masked_tokens"] > 50
        assert of["mlm_loss"] == pytest.approx(figures[0]["mlm_loss"], abs=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals that name the way out


@pytest.fixture(scope="module")
def unfinished(books, tmp_path_factory):
    """The folder of a run that SIGTERM stopped at step 3, with a checkpoint there."""
    folder = tmp_path_factory.mktemp("unfinished") / "out"
    with steps_counted(sigterm_at=3):
        assert command("pretrain", "--corpus", books, "--output_dir", folder, *RUN, "--max_steps=9") == 128 + 15
    assert (folder / "checkpoint-3").is_dir() and not (folder / "config.json").exists()
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "fill-mask RUN [MASK]",
        "next-sentence RUN a b",
        "evaluate RUN --corpus BOOKS",
        "finetune RUN --task=classification --train_file=FILE --output_dir=OUT",
        "embed RUN FILE --nearest a",
        "pretrain --init_from=RUN --corpus BOOKS --max_steps=2 --output_dir=OUT",
    ],
    ids=lambda words: words.partition(" ")[0],
)
def test_the_folder_of_an_unfinished_run_is_refused_with_its_last_checkpoint(
    books, unfinished, tmp_path, fails, words
):
    file = tmp_path / "table.csv"
    file.write_text("text,label\n" + "Anna walked to the garden.,yes\nBoris lost the drum.,no\n" * 20)
    places = {"RUN": unfinished, "BOOKS": books, "FILE": file, "OUT": tmp_path / "out"}
    line = fails(*(re.sub("RUN|BOOKS|FILE|OUT", lambda name: str(places[name[0]]), word) for word in words.split()))
    assert "model_type" not in line
    assert str(unfinished) in line
    assert "checkpoint-3" in line or "--resume_from_checkpoint" in line


# ---------------------------------------------------------------------------------------------------------------------
# Weights of sources


@pytest.mark.slow
def test_a_weight_on_a_document_that_nothing_can_be_learnt_from_ends_in_time(trained, tmp_path):
    """
    Nearly all the weight is on one document of two signs that the tokenizer does not know, beside 500,000 tokens.

    In an epoch that document is read as often as its weight says. A run, or a refusal in one line, must not need all
    of these readings.
    """
    write_books(tmp_path / "books", count=2000)
    (tmp_path / "signs.txt").write_text("☃ ☃\n")
    tokenizer = shutil.copytree(trained, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    words = ["pretrain", "--corpus", tmp_path / "books", tmp_path / "signs.txt", "--documents=file", "--max_steps=2"]
    words += ["--source_weights", "0.000000001", "1", "--tokenizer", tokenizer, "--max_eval_pairs=50"]
    words += [option for option in RUN if not option.startswith("--vocab_size")]
    (code,) = end(start([*words, "--output_dir", tmp_path / "out"], said=tmp_path / "said.txt"), 90)
    said = (tmp_path / "said.txt").read_text()
    assert (code, len(error_lines(said))) in ((0, 0), (2, 1)), said
