"""`pretrain` at its edges: precisions, ways to start, rows of evaluations, starts from a model, refusals, weights."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import SMALL, write_books
from interrupted_runs import steps_counted
from promises.driving import command, end, error_lines, python, read_json, start, watched
from torch.optim.optimizer import register_optimizer_step_pre_hook

from d2l_bert import RECIPES, D2lBertForPreTraining


pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
RUN = [*SMALL, "--mixed_precision=no", "--license=mit"]

only_on_cpus = pytest.mark.skipif(
    torch.cuda.is_available() or torch.backends.mps.is_available(), reason="this machine has a GPU"
)


def without(options, name):
    return [option for option in options if not option.startswith(f"--{name}=")]


def record_of(folder):
    return read_json(folder / "run_config.json")["run"]


def log_rows(folder):
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# Precision


@only_on_cpus
@pytest.mark.parametrize("more", [[], ["--dry_run"]])
def test_fp16_on_a_cpu_is_refused_with_what_a_cpu_has(books, tmp_path, fails, more):
    words = [*without(RUN, "mixed_precision"), "--mixed_precision=fp16", "--max_steps=2", *more]
    line = fails("pretrain", "--corpus", books, "--output_dir", tmp_path / "out", *words)
    assert "fp16" in line and "bf16" in line
    assert not (tmp_path / "out").exists()


@only_on_cpus
def test_fp16_of_the_launcher_on_a_cpu_is_refused_too(books, tmp_path, fails, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    words = [*without(RUN, "mixed_precision"), "--max_steps=2"]
    line = fails("pretrain", "--corpus", books, "--output_dir", tmp_path / "out", *words)
    assert "fp16" in line and "bf16" in line


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_precision_of_the_launcher_is_followed_or_its_replacement_is_said(
    books, tmp_path, monkeypatch, capsys, has_bf16
):
    """`accelerate launch` also sets `no` if its user has not chosen: then the hardware decides, and a line says so."""
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_bf16)
    words = ["pretrain", "--corpus", books, *without(RUN, "mixed_precision"), "--max_steps=2"]
    for launchers, options, expected in (
        ("bf16", [], "bf16"),
        ("bf16", ["--mixed_precision=no"], "no"),
        ("no", [], "bf16" if has_bf16 else "no"),
        ("no", ["--mixed_precision=bf16"], "bf16"),
    ):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launchers)
        folder = tmp_path / f"{launchers}{len(options)}"
        assert command(*words, "--output_dir", folder, *options) == 0
        said = capsys.readouterr().err
        assert record_of(folder)["mixed_precision"] == expected
        assert (f"not the launcher's {launchers}" in said) == (expected != launchers and not options)


# ---------------------------------------------------------------------------------------------------------------------
# Ways to start a run


def is_run_of_two_steps(folder):
    return (folder / "model.safetensors").exists() and record_of(folder)["max_steps"] == 2


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import:RuntimeWarning")
@pytest.mark.parametrize("way", ["file", "module"])
def test_the_file_and_the_module_run_the_command(books, tmp_path, monkeypatch, way):
    """`python training/pretrain.py ...` and `python -m d2l_bert.training.pretrain ...`, in this process."""
    words = ["--corpus", str(books), "--output_dir", str(tmp_path / "out"), *RUN, "--max_steps=2"]
    file = ROOT / "training" / "pretrain.py"
    monkeypatch.setattr(sys, "argv", [str(file), *words])
    try:
        if way == "file":
            runpy.run_path(str(file), run_name="__main__")
        else:
            runpy.run_module("d2l_bert.training.pretrain", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        assert not stop.code
    assert is_run_of_two_steps(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        ["training/pretrain.py"],
        ["-m", "d2l_bert.training.pretrain"],
        "-m accelerate.commands.launch --cpu --num_processes=1 --num_machines=1 --dynamo_backend=no "
        "--mixed_precision=no training/pretrain.py".split(),
    ],
    ids=["file", "module", "accelerate launch"],
)
def test_a_process_started_with_the_file_or_the_module_trains_and_refuses(books, tmp_path, way):
    """Exit code 2 and a line for an option that does not exist, too."""
    words = ["--corpus", books, "--output_dir", tmp_path / "out", *RUN, "--max_steps=2"]
    for more, code in (([], 0), (["--no_such_option"], 2)):
        done = subprocess.run(
            list(map(str, [sys.executable, *way, *words, *more])),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if code == 0:
            assert done.returncode == 0 and is_run_of_two_steps(tmp_path / "out"), done.stderr
        else:
            assert done.returncode != 0  # the launcher has an exit code of its own
            (line,) = [line for line in done.stderr.splitlines() if "error:" in line and "no_such_option" in line]


# ---------------------------------------------------------------------------------------------------------------------
# Evaluations


def test_the_rows_of_an_objective_are_said_and_evaluate_has_the_same_for_all(books, trained, tmp_path, capsys):
    """All start from one model and stay there: their MLM losses are the same where the rows and their masks are."""
    folders = []
    for objective in ("nsp", "sop", "none"):
        words = [*without(RUN, "learning_rate"), f"--init_from={trained}", "--max_steps=1", "--learning_rate=1e-12"]
        words = [word for word in words if not re.match("--(num_|hidden_|inter|max_pos|vocab)", word)]
        folders.append(tmp_path / objective)
        words += ["--output_dir", folders[-1], f"--objective={objective}"]
        assert command("pretrain", "--corpus", books, *words) == 0
        assert "evaluate --objective none" in capsys.readouterr().out
        assert "`--objective none`" in (folders[-1] / "README.md").read_text()
    output = tmp_path / "figures.json"
    words = ["--corpus", books, "--held_out", "--objective=none", "--pppl_sentences=0", "--output", output]
    assert command("evaluate", *folders, *words) == 0
    figures = [of["text"] for of in read_json(output)["models"]]
    assert figures[0]["masked_tokens"] > 50
    assert len({of["masked_tokens"] for of in figures}) == 1
    for of in figures[1:]:
        assert of["mlm_loss"] == pytest.approx(figures[0]["mlm_loss"], abs=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# A start from a trained model


@pytest.fixture(scope="module")
def from_trained(books, trained, tmp_path_factory):
    """The folder of a run of two steps that goes on from `trained`, on its text, without a learning rate given."""
    folder = tmp_path_factory.mktemp("from") / "out"
    words = [f"--init_from={trained}", "--max_steps=2", "--max_seq_length=48", "--global_batch_size=8"]
    words += ["--mixed_precision=no", "--license=mit"]
    assert command("pretrain", "--corpus", books, "--output_dir", folder, *words) == 0
    return folder


def test_the_log_of_a_run_that_starts_from_a_model_begins_with_that_models_figures(trained, from_trained):
    """On the text that the model was trained on, they are the figures that its own run ended with."""
    first = log_rows(from_trained)[0]
    assert first["step"] == 0 and "eval_mlm_loss" in first
    assert first["eval_mlm_loss"] == pytest.approx(read_json(trained / "metrics.json")["eval_mlm_loss"], rel=1e-3)


@pytest.mark.parametrize("recipe", ["tiny", "small"])
def test_a_run_that_starts_from_a_model_has_a_lower_rate_unless_one_is_given(books, trained, tmp_path, recipe):
    _, run = RECIPES[recipe]()
    words = ["pretrain", "--corpus", books, f"--recipe={recipe}", f"--init_from={trained}", "--max_seq_length=48"]
    words += ["--max_steps=1", "--global_batch_size=8", "--mixed_precision=no", "--license=mit"]
    assert command(*words, "--output_dir", tmp_path / "own") == 0
    assert 0 < record_of(tmp_path / "own")["learning_rate"] < run.learning_rate
    given = 2 * run.learning_rate
    assert command(*words, "--output_dir", tmp_path / "given", f"--learning_rate={given}") == 0
    assert record_of(tmp_path / "given")["learning_rate"] == given


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


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "mlflow", "comet_ml"])
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(books, tmp_path, fails, tracker):
    if find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    words = [*RUN, "--max_steps=2", f"--report_to={tracker}"]
    line = fails("pretrain", "--corpus", books, "--output_dir", tmp_path / "out", *words)
    assert re.search(f"pip install ['\"]?{tracker.replace('_', '[-_]')}", line)


@pytest.mark.slow
def test_without_tensorboard_its_line_has_the_command_that_installs_it(books, tmp_path):
    words = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *RUN, "--max_steps=2"]
    words.append("--report_to=tensorboard")
    hidden = "import sys; sys.modules.update(tensorboard=None, tensorboardX=None); "
    done = python(f"{hidden}from d2l_bert.__main__ import main; sys.exit(main({words!r}))")
    (line,) = error_lines(done.stderr)
    assert done.returncode == 2 and re.search("pip install ['\"]?tensorboard", line)


@pytest.mark.parametrize("reader", ["read_sources", "count_words", "prepare_tokens"])
def test_out_of_memory_while_the_text_is_read_does_not_advise_smaller_steps(
    books, tmp_path, fails, monkeypatch, reader
):
    def run_out(*arguments, **options):
        raise MemoryError("Unable to allocate 8.00 TiB for an array")

    monkeypatch.setattr(f"d2l_bert.tokenization.prepare.{reader}", run_out)
    text = tmp_path / "text.txt"  # not in the cache yet
    text.write_text("\n\n".join(file.read_text().replace("nobody", reader) for file in sorted(books.iterdir())))
    words = ["--documents=blank_line", *RUN, "--max_steps=2"]
    line = fails("pretrain", "--corpus", text, "--output_dir", tmp_path / "out", *words)
    assert "memory" in line
    assert "micro_batch_size" not in line and "gradient_checkpointing" not in line


# ---------------------------------------------------------------------------------------------------------------------
# Schedules of lengths


@pytest.mark.parametrize(
    "options",
    ["--max_steps=10 --length_schedule 16:0.96", "--max_steps=3 --length_schedule 16:0.5 32:0.4"],
)
def test_a_schedule_of_lengths_leaves_a_step_of_full_length(books, tmp_path, capsys, options):
    """Or it is refused, in one line that names the option. Packed rows are full but for a few tokens."""
    with watched(D2lBertForPreTraining) as (trained, _):
        code = command("pretrain", "--corpus", books, "--output_dir", tmp_path / "out", *RUN, *options.split())
    if code == 2:
        (line,) = error_lines(capsys.readouterr().err)
        assert "length_schedule" in line
    else:
        assert code == 0
        assert trained[-1]["attention_mask"].sum(1).max() > 32


@pytest.mark.parametrize("length, pairs", [(48, 85), (100, 41)])
def test_a_step_of_shorter_pairs_has_about_the_tokens_of_a_step_of_full_length(books, tmp_path, length, pairs):
    """32 pairs of 128 tokens: of 48 tokens 85.3 pairs, of 100 tokens 41."""
    words = [*RUN, "--max_position_embeddings=128", "--max_seq_length=128", "--global_batch_size=32"]
    words += ["--max_steps=2", f"--length_schedule={length}:0.5"]
    with watched(D2lBertForPreTraining) as (trained, _):
        batches_before_steps = []
        hook = register_optimizer_step_pre_hook(lambda *_: batches_before_steps.append(len(trained)))
        try:
            assert command("pretrain", "--corpus", books, "--output_dir", tmp_path / "out", *words) == 0
        finally:
            hook.remove()
    first_step = trained[: batches_before_steps[0]]
    assert sum(int(batch["attention_mask"].any(1).sum()) for batch in first_step) == pairs


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
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained / name, tmp_path / "tokenizer")
    words = ["pretrain", "--corpus", tmp_path / "books", tmp_path / "signs.txt", "--documents=file", "--max_steps=2"]
    words += ["--source_weights", "0.000000001", "1", "--tokenizer", tmp_path / "tokenizer", "--max_eval_pairs=50"]
    words += [*without(RUN, "vocab_size"), "--output_dir", tmp_path / "out"]
    processes = start(words, said=tmp_path / "said.txt")
    try:
        (code,) = end(processes, 90)
    except subprocess.TimeoutExpired:
        pytest.fail("the run does not end")
    lines = error_lines((tmp_path / "said.txt").read_text())
    assert (code, len(lines)) in ((0, 0), (2, 1)), (tmp_path / "said.txt").read_text()
