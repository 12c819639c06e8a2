"""The functions for programs: what the commands do, with data and models in memory; threads, notebooks, launchers."""

import dataclasses
import json
import logging
import os
import pickle
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from conftest import SMALL
from finetuning import read_csv, rows_of
from text_sources import write_table
from transformers import AutoModelForMaskedLM, AutoTokenizer

import d2l_bert
from d2l_bert import FinetuneResult, PrepareResult, PretrainResult, UserError, messages, train_wordpiece
from d2l_bert.__main__ import main
from d2l_bert.tokenization.in_memory import as_dataset, as_splits
from d2l_bert.training import processes
from d2l_bert.training.finetuning.config import FinetuneConfig


ROOT = Path(__file__).parents[1]
FUNCTIONS = ("prepare", "pretrain", "finetune", "evaluate", "predict", "score", "embed", "export", "publish")


# ---------------------------------------------------------------------------------------------------------------------
# Names and options


def test_a_function_is_found_by_its_name_whatever_modules_are_imported():
    modules = {module.name for module in pkgutil.iter_modules(d2l_bert.__path__)}
    for place in ("modeling", "tokenization", "training", "model_cards"):  # not where an editable install looks
        import_module(f"d2l_bert.{place}")
        modules.add(place)
    assert modules.isdisjoint(d2l_bert.__all__)
    for name in ("tokenization.prepare", "training.pretrain", "training.evaluation.evaluate", "inference.embed"):
        import_module(f"d2l_bert.{name}")
    for name in FUNCTIONS:
        assert name in d2l_bert.__all__ and callable(getattr(d2l_bert, name))


@pytest.mark.parametrize("name", [name for name in d2l_bert.__all__ if name.endswith("Config") and "D2l" not in name])
def test_the_documentation_of_options_has_a_line_for_each(name):
    config = getattr(d2l_bert, name)
    lines = config.__doc__.partition("Attributes:\n")[2].splitlines()
    shown = [line.strip().partition(":")[0] for line in lines]
    declared = [field.name for field in dataclasses.fields(config) if "help" in field.metadata]
    assert shown == declared


def test_numbers_of_numpy_are_options():
    config = d2l_bert.PretrainConfig(max_steps=np.int64(3), learning_rate=np.float32(0.5), seed=np.uint8(7))
    config.check()
    assert json.dumps([config.max_steps, config.learning_rate, config.seed]) == "[3, 0.5, 7]"


@pytest.mark.parametrize("rates", [3e-4, "3e-4", [3e-4], ["3e-4"], np.float64(3e-4), [3e-4, 1e-5]])
def test_an_option_of_several_values_takes_numbers_and_one_alone(rates):
    config = FinetuneConfig(model="m", task="text-classification", train_file="a.csv", learning_rate=rates)
    config.label_column = "mood"
    config.check()
    assert config.learning_rates()[0] == 3e-4 and config.label_column == ["mood"]
    assert config.learning_rates()[1:] == ([1e-5] if len(np.atleast_1d(rates)) > 1 else [])


@pytest.mark.parametrize("rates", [True, [True], {"a": 1}, None, [[1e-4]]])
def test_what_is_no_list_of_numbers_is_refused(rates):
    config = FinetuneConfig(model="m", task="text-classification", train_file="a.csv", learning_rate=rates)
    with pytest.raises(UserError, match="learning_rate"):
        config.check()


def test_a_refusal_names_flags_on_the_command_line_and_arguments_in_a_program(trained, tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("a\nb\n")
    given = {"text_column": "review", "task": "text-classification", "train_file": str(tmp_path / "rows.csv")}
    words = [f"--{name}={value}" for name, value in given.items()]
    assert main(["finetune", str(trained), *words]) == 2
    shown = capsys.readouterr().err
    with pytest.raises(UserError) as refused:
        d2l_bert.finetune(trained, **given)
    assert "--text_column" in shown and "text_column" in str(refused.value)
    assert str(refused.value) == shown.partition("error: ")[2].strip().replace("--", "")


@pytest.mark.parametrize(
    "message, in_python",
    [
        ("--task is missing; give it", "task is missing; give it"),
        ("lower --a_rate, or leave it (--b 0)", "lower a_rate, or leave it (b 0)"),
        ("train on it: d2l-bert pretrain --corpus x", "train on it: d2l-bert pretrain --corpus x"),
        ("run npm install --ignore-scripts; '--x' a--b", "run npm install --ignore-scripts; '--x' a--b"),
    ],
)
def test_flags_become_arguments_but_not_in_commands(message, in_python):
    error = pickle.loads(pickle.dumps(UserError(message)))
    assert (str(error), error.message) == (in_python, message)


# ---------------------------------------------------------------------------------------------------------------------
# Data in memory


def test_lists_frames_and_datasets_are_the_same_rows():
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    dataset = datasets.Dataset.from_list(rows)
    frame = pd.DataFrame(rows, index=[7, 9])
    for data in (rows, tuple(rows), dataset, frame):
        assert as_dataset(data).to_list() == rows
    assert as_dataset(datasets.DatasetDict(dev=dataset), split="dev").to_list() == rows
    for texts in (["a", "b"], pd.Series(["a", "b"], name="notes", index=[7, 9])):
        assert as_dataset(texts, "body").to_list() == [{"body": "a"}, {"body": "b"}]


@pytest.mark.parametrize("kind", [list, pd.DataFrame, datasets.Dataset.from_list])
def test_a_dict_of_data_has_splits_as_a_dataset_dict(kind):
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    splits = {"train": kind(rows), "test": kind(rows[:1])}
    assert as_dataset(splits, split="test").to_list() == rows[:1]
    found = as_splits(splits)
    assert {name: split.to_list() for name, split in found.items()} == {"train": rows, "test": rows[:1]}
    with pytest.raises(UserError, match="one of them: train, test"):
        as_dataset(splits)
    with pytest.raises(UserError, match="split test: .*no rows"):
        as_splits({"train": rows, "test": []})


@pytest.mark.parametrize(
    "data, words",
    [
        ([], "no rows"),
        (pd.DataFrame({"text": []}), "no rows"),
        (["a", None], "entry 2 of the list is a NoneType"),
        ([{"text": "a"}, "b"], "entry 2 of the list is a str"),
        ([3], "entry 1 of the list is a int"),
        (3, "a int cannot be read"),
        ([{"text": "a"}, {"text": 3}], "several kinds"),
        (pd.DataFrame({"text": ["a", 3]}), "several kinds"),
        (datasets.DatasetDict(a=datasets.Dataset.from_dict({"text": ["a"]})), "one of them: a"),
        (["whole", "half \ud83d of a pair"], r"surrogate.*half \\ud83d"),
        ([{"text": "half \ud83d of a pair"}], r"surrogate.*half \\ud83d"),
        (pd.DataFrame({"text": ["half \ud83d of a pair"]}, dtype=object), r"surrogate.*half \\ud83d"),
        (pd.Series(["half \ud83d of a pair"], dtype=object), r"surrogate.*half \\ud83d"),
    ],
)
def test_data_that_are_no_rows_are_refused_in_one_line(data, words):
    with pytest.raises(UserError, match=words) as refused:
        as_dataset(data)
    assert "\n" not in str(refused.value)


def test_one_string_is_no_list_of_texts_and_batches_are_read_as_their_texts():
    texts = ["the old garden", "the new tower", "an old tower"] * 3
    with pytest.raises(UserError, match="one string"):
        train_wordpiece("the old garden")
    with pytest.raises(UserError, match="int"):
        train_wordpiece([["a"], [3]])
    in_batches = train_wordpiece([texts[:4], texts[4:]])
    assert in_batches.get_vocab() == train_wordpiece(texts).get_vocab()


def test_the_vectors_of_a_list_are_those_of_its_file(trained, tmp_path):
    lines = ["The garden was old.", "", "Anna found a hammer."]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    assert main(["embed", str(trained), str(tmp_path / "lines.txt"), f"--output={tmp_path / 'v.npy'}"]) == 0
    result = d2l_bert.embed(trained, lines)
    assert np.array_equal(result.vectors, np.load(tmp_path / "v.npy"))
    assert result.line_count == 3 and result.output is None
    tokenizer = AutoTokenizer.from_pretrained(trained)
    model = AutoModelForMaskedLM.from_pretrained(trained).train()
    assert np.array_equal(d2l_bert.embed(model, lines, tokenizer=tokenizer).vectors, result.vectors)
    assert model.training  # the caller's model stays as it was


def test_what_is_no_model_is_refused(trained, tmp_path):
    with pytest.raises(UserError, match="the model is a int"):
        d2l_bert.embed(3, ["a"])
    model = d2l_bert.D2lBertModel(d2l_bert.D2lBertConfig())
    with pytest.raises(UserError, match="give tokenizer, too"):
        d2l_bert.embed(model, ["a"])
    with pytest.raises(UserError, match="tokenizer is for a model in memory"):
        d2l_bert.embed(trained, ["a"], tokenizer=AutoTokenizer.from_pretrained(trained))
    with pytest.raises(UserError, match="data and corpus both"):
        d2l_bert.prepare(["a"], output_dir=tmp_path / "out", corpus=["b.txt"])
    with pytest.raises(UserError, match="'pooled'"):
        d2l_bert.embed(trained, ["a"], pooled="mean")
    with pytest.raises(UserError, match="max_steps"):
        d2l_bert.pretrain(max_step=3, output_dir=tmp_path / "out")
    with pytest.raises(UserError, match="architecture is a list"):
        d2l_bert.pretrain([], output_dir=tmp_path / "out")


def test_what_cannot_predict_is_told_with_its_own_cause_and_the_name_that_was_given(trained):
    with pytest.raises(UserError, match="^nowhere: no folder here has this name"):
        d2l_bert.predict("nowhere", ["a"])
    with pytest.raises(UserError, match=f"^{trained}: no run_config.json of finetune"):
        d2l_bert.predict(trained, ["a"])
    loaded = AutoModelForMaskedLM.from_pretrained(trained)
    with pytest.raises(UserError, match=f"^{trained}: no run_config.json of finetune"):
        d2l_bert.predict(loaded, ["a"])
    made = type(loaded)(d2l_bert.D2lBertConfig(vocab_size=loaded.config.vocab_size))
    with pytest.raises(UserError, match="^model in memory: no run_config.json of finetune"):
        d2l_bert.predict(made, ["a"], tokenizer=AutoTokenizer.from_pretrained(trained))


@pytest.mark.parametrize("callbacks", [print, [print, "a name"], None])
def test_callbacks_that_are_no_functions_are_refused_before_anything_is_written(tmp_path, callbacks):
    with pytest.raises(UserError, match="callbacks"):
        d2l_bert.pretrain(data=["a text"], output_dir=tmp_path / "out", callbacks=callbacks)
    assert not list(tmp_path.iterdir())


def test_a_text_beside_one_in_the_options_object_is_refused(tmp_path):
    run = d2l_bert.PretrainConfig(corpus=["a.txt"], output_dir=str(tmp_path / "out"))
    with pytest.raises(UserError, match="data and corpus"):
        d2l_bert.pretrain(run=run, data=["a text"])


def test_splits_that_no_option_names_are_said(tmp_path, caplog):
    rows = [{"text": "a", "label": "b"}]
    splits = {"train": rows, "valid": rows, "dev": rows, "test": rows}
    with pytest.raises(UserError):
        d2l_bert.finetune("nothing/here/at/all", splits, validation_split="valid", task="no task")
    assert "not read: dev;" in caplog.text


def test_a_result_shows_its_figures():
    metrics = {"validation_loss": 1.0, "test_loss": 0.5, "test_accuracy": 2 / 3, "kept_seed": 42, "seeds": [{}]}
    tuned = FinetuneResult(output_dir=Path("out"), metrics=metrics, predictions_file=None)
    assert "test_accuracy=0.6667" in repr(tuned) and "validation" not in repr(tuned) and "seed" not in repr(tuned)
    untested = {"validation_loss": 1.0, "validation_accuracy": 0.5}
    assert "validation_accuracy=0.5" in repr(dataclasses.replace(tuned, metrics=untested))
    metrics = {"eval_mlm_loss": 3.25, "eval_nsp_accuracy": 0.75, "train_mfu": 0.5, "predictions": []}
    assert repr(PretrainResult(Path("a"), metrics, [])).endswith("eval_mlm_loss=3.25, eval_nsp_accuracy=0.75)")
    assert "max_steps=9" in repr(PretrainResult(None, {"max_steps": 9, "train_seconds": 2.0}, []))
    names = ("train_documents", "train_tokens", "held_out_documents", "held_out_tokens")
    counts = dict.fromkeys(names, 12_345) | {"reading": {}}
    assert "train_tokens=12345" in repr(PrepareResult(Path("a"), counts, []))


# ---------------------------------------------------------------------------------------------------------------------
# Threads, and messages in a notebook


def test_a_second_run_in_a_process_is_refused_while_the_first_goes_on():
    with processes.restore_host_settings():
        with pytest.raises(UserError, match="another run"), processes.restore_host_settings():
            raise AssertionError
    with processes.restore_host_settings():  # the refusal has left the first one's hold alone
        pass


@pytest.mark.parametrize(
    "is_prompt, level, is_shown", [(True, logging.NOTSET, True), (True, logging.ERROR, False), (False, 0, False)]
)
def test_messages_are_shown_at_a_prompt_unless_logging_is_set_up(monkeypatch, capsys, is_prompt, level, is_shown):
    ours = logging.getLogger("d2l_bert")
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)  # as it is in a new process
    monkeypatch.setattr(ours, "level", level)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    if not is_prompt:
        monkeypatch.delattr(sys, "ps1")
    ours.manager._clear_cache()
    before = (ours.level, list(ours.handlers), ours.propagate)
    with messages.messages_shown_to_person():
        logging.getLogger("d2l_bert.training.log").info("step 1")
        messages.report.info("the end")
    assert (ours.level, list(ours.handlers), ours.propagate) == before
    said = capsys.readouterr()
    assert ("step 1" in said.err, "the end" in said.out) == (is_shown, is_shown)


@pytest.mark.parametrize("disabled, has_bar", [("", True), ("1", False)])
def test_a_prompt_has_bars_unless_the_variable_of_tqdm_turns_them_off(monkeypatch, capsys, disabled, has_bar):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setenv("TQDM_DISABLE", disabled)
    assert list(messages.with_progress(range(3), "reading books", 3)) == [0, 1, 2]
    assert ("reading books:   0%" in capsys.readouterr().err) == has_bar


PROGRAM = f"""
import sys
import d2l_bert
OPTIONS = {dict(word.removeprefix("--").split("=") for word in SMALL)!r}
OPTIONS = {{name: value if name == "optim" else float(value) if "rate" in name else int(value)
           for name, value in OPTIONS.items()}}
"""


def run_program(lines, folder, *launcher, **options):
    """Run a program in a folder; returns the finished process."""
    (folder / "program.py").write_text(PROGRAM + lines)
    command = [sys.executable, *launcher, "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.slow
def test_of_two_threads_one_trains_and_the_other_is_refused_and_training_again_gives_the_same(books, tmp_path):
    lines = f"""
import threading
def train(name):
    try:
        print("done", d2l_bert.pretrain(data={str(books)!r}, output_dir=name, max_steps=3, **OPTIONS).output_dir)
    except d2l_bert.UserError as error:
        print("refused", error)
threads = [threading.Thread(target=train, args=(name,)) for name in ("a", "b")]
for thread in threads: thread.start()
for thread in threads: thread.join()
train("c")
"""
    done = run_program(lines, tmp_path)
    assert done.returncode == 0, done.stderr
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert sorted(words) == ["done", "done", "refused"] and words[-1] == "done"
    first, again = (tmp_path / line.split()[1] for line in done.stdout.splitlines() if line.startswith("done"))
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_ctrl_c_is_a_keyboard_interrupt_after_the_step_is_saved(books, tmp_path):
    lines = f"""
import os, signal
def stop(row):
    if row["step"] == 2:
        os.kill(os.getpid(), signal.SIGINT)
try:
    d2l_bert.pretrain(
        data={str(books)!r}, output_dir="run", max_steps=90, logging_steps=1, callbacks=[stop], **OPTIONS
    )
except KeyboardInterrupt:
    print("stopped")
"""
    done = run_program(lines, tmp_path)
    assert done.returncode == 0 and done.stdout == "stopped\n", done.stderr
    saved = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert saved in (["checkpoint-2"], ["checkpoint-3"])


@pytest.mark.slow
def test_a_launched_program_trains_and_predicts_in_two_processes(books, tmp_path):
    write_table(tmp_path / "train.csv", rows_of(40, 0))
    lines = f"""
import torch
from accelerate import PartialState
run = d2l_bert.pretrain(data={str(books)!r}, output_dir="run", max_steps=3, **OPTIONS)
tuned = d2l_bert.finetune("run", "train.csv", task="text-classification", output_dir="tuned", max_steps=2)
predicted = d2l_bert.predict("tuned", ["the old garden", "a hammer"], output="out.csv")
vectors = d2l_bert.embed("run", ["the old garden"]).vectors
try:
    d2l_bert.pretrain(data="nowhere", output_dir="no", **OPTIONS)
except d2l_bert.UserError as error:
    print("refused", "nowhere" in str(error))
state = PartialState()
with open(f"rank-{{state.process_index}}.txt", "w") as file:
    print(state.num_processes, run.metrics["eval_mlm_loss"], tuned.metrics["validation_loss"],
          predicted.predictions, vectors.sum(), file=file)
"""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={29_700 + os.getpid() % 200}"]
    done = run_program(lines, tmp_path, *launcher, env={**os.environ, "ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("refused True") == 2
    first, second = ((tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second and first.startswith("2 ")
    assert [row["text"] for row in read_csv(tmp_path / "out.csv")] == ["the old garden", "a hammer"]


@pytest.mark.slow
def test_a_notebook_shows_the_lines_of_a_run_without_any_set_up(books, tmp_path):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    shown = []

    def take(message):
        shown.append(json.dumps(message["content"]))

    call = f"run = d2l_bert.pretrain(data={str(books)!r}, output_dir='run', max_steps=3, **OPTIONS)"
    try:
        client.execute_interactive(f"{PROGRAM}\n{call}", timeout=240, output_hook=take)
        reply = client.execute_interactive("print(run.output_dir)", timeout=60, output_hook=take)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    said = "".join(shown)
    assert reply["content"]["status"] == "ok"
    assert "step 3/3" in said and "training" in said and "The model is in run" in said


# ---------------------------------------------------------------------------------------------------------------------
# All the ways in one program, and the commands


# In the names of what is measured anew in each run; and the captions of pictures, which name the file of the rows.
DIFFERING = ("seconds", "per_second", "mfu", "memory", "wait_share", "pictures")


def comparable(figures):
    """Figures without those that differ from run to run."""
    if isinstance(figures, list):
        return [comparable(entry) for entry in figures]
    if not isinstance(figures, dict):
        return figures
    kept = {name: value for name, value in figures.items() if not any(word in name for word in DIFFERING)}
    return {name: comparable(value) for name, value in kept.items()}


@pytest.mark.slow
def test_a_program_goes_all_the_ways_and_its_figures_are_those_of_the_commands(books, tmp_path, monkeypatch):
    lines = " ".join(file.read_text() for file in sorted(books.glob("*.txt"))).split(". ")
    texts = [". ".join(lines[begin : begin + 8]).replace("\n", " ").strip() + "." for begin in range(0, 480, 8)]
    folders = {}
    for name in ("program", "again", "commands"):
        folder = folders[name] = tmp_path / name
        folder.mkdir()
        (folder / "texts.txt").write_text("\n".join(texts) + "\n")
        write_table(folder / "texts.jsonl", [{"text": text} for text in texts])
        write_table(folder / "train.jsonl", rows_of(40, 0))
        write_table(folder / "test.jsonl", rows_of(12, 1))
    for name in ("program", "again"):
        command = [sys.executable, ROOT / "tests" / "all_ways.py"]
        done = subprocess.run([*command], cwd=folders[name], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
    monkeypatch.chdir(folders["commands"])
    sizes = "--hidden_size=32 --num_hidden_layers=1 --num_attention_heads=2 --intermediate_size=64"
    for words in (
        "prepare --corpus texts.jsonl --output_dir tokens --vocab_size 300",
        "pretrain --corpus tokens --output_dir model --license mit --max_steps 4 --max_seq_length 32 "
        f"--global_batch_size 8 {sizes}",
        "finetune model --task text-classification --train_file train.jsonl --test_file test.jsonl --output_dir tuned "
        "--max_steps 4",
        "evaluate model --corpus texts.jsonl --pppl_sentences 3 --output evaluated.json",
        "predict tuned test.jsonl --output predicted.jsonl",
        "embed model texts.txt --output vectors.npy",
        "export model stock",
    ):
        assert main(words.split()) == 0, words
    by_commands = {name: json.loads(Path(name, "metrics.json").read_text()) for name in ("model", "tuned")}
    evaluated = json.loads(Path("evaluated.json").read_text())["models"]
    predicted = [json.loads(line) for line in Path("predicted.jsonl").read_text().splitlines()]
    for name in ("program", "again"):
        figures = json.loads((folders[name] / "figures.json").read_text())
        uses = json.loads((folders[name] / "uses.json").read_text())
        assert comparable(figures["pretrain"]) == comparable(by_commands["model"])
        assert comparable(figures["finetune"]) == comparable(by_commands["tuned"])
        assert comparable(uses["evaluate"]) == comparable(evaluated)
        for column, values in uses["predict"].items():
            assert values == [row[column] for row in predicted]
        assert np.array_equal(np.load(folders[name] / "vectors.npy"), np.load("vectors.npy"))
        for file in ("model/model.safetensors", "tuned/model.safetensors", "stock/model.safetensors"):
            assert (folders[name] / file).read_bytes() == Path(file).read_bytes()
        assert {"model.safetensors", "README.md"} <= uses["publish"].keys()
