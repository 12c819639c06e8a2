"""The benchmarks that train or measure many models: what they read and print, with measurements that are known."""

import json
import sys

import pytest

from benchmarks import search, words_seen


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def saved_run(tmp_path):
    """A run with models at 1,000 and 2,000 words, whose last checkpoint has seen 2,500."""
    run = tmp_path / "run"
    for name, words in (("chck_2K", 2000), ("chck_1K", 1000)):
        write(run / name / "words_seen.json", {"words_seen": words})
        write(run / name / "model.safetensors", name)
    for step, words in ((100, 2500), (20, 700)):
        write(run / f"checkpoint-{step}" / "training_state.json", {"step": step, "words_seen": words})
    write(run / "model.safetensors", "the finished model")
    return run


def test_models_of_a_run_are_found_by_the_words_that_they_have_seen(saved_run):
    names = {words: folder.name for words, folder in words_seen.models_of(saved_run).items()}
    assert list(names.items()) == [(1000, "chck_1K"), (2000, "chck_2K"), (2500, "run")]


def test_models_are_measured_once_and_drawn_in_the_order_of_their_words(saved_run, tmp_path, monkeypatch, capsys):
    measured, results = [], tmp_path / "seen"

    def measure(model, books, blimp):
        measured.append(model.name)
        return {"mlm_loss": 9.0 - len(measured), "pppl": 100.0, "accuracy": 0.5, "standard_error": 0.01}

    monkeypatch.setattr(words_seen, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["words_seen", str(saved_run), f"--results={results}"])
    words_seen.main()
    assert "run, 0.0M words: MLM loss 8.000, BLiMP 50.0" in capsys.readouterr().out
    write(saved_run / "chck_1K" / "model.safetensors", "other weights")
    words_seen.main()
    assert measured == ["chck_1K", "chck_2K", "run", "chck_1K"]
    rows = json.loads(results.with_suffix(".json").read_text())["run"]
    assert [(row["words"], row["mlm_loss"]) for row in rows] == [(1000, 5.0), (2000, 7.0), (2500, 6.0)]
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_list_names_runs_and_their_options(tmp_path):
    text = "# a comment\n\nfirst: --masking token --mlm_probability '0.5->0.1'\n second : --seed 3 \n"
    assert search.read_list(write(tmp_path / "list.txt", text)) == {
        "first": ["--masking", "token", "--mlm_probability", "0.5->0.1"],
        "second": ["--seed", "3"],
    }


def test_the_table_has_means_and_deviations_over_the_seeds_and_the_best_run_first(tmp_path, capsys):
    row = {"accuracy": 0.3, "nsp": None, "pppl": 200.0, "tokens": 2_000_000, "seconds": 90}
    rows = [
        {**row, "name": name, "mlm": mlm, "blimp": blimp, "command": f"d2l-bert pretrain --optim {name} --seed {seed}"}
        for name, seed, mlm, blimp in (("adamw", 1, 4.0, 0.55), ("muon", 1, 3.8, 0.58), ("muon", 2, 3.6, 0.60))
    ]
    search.print_table(write(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in lines] == [11] * 4
    assert "| 2 | 3.700 (0.141) | 30.0 (0.0) |  | 200 (0) | 59.0 (1.4) | 2.0M | 1.5 |" in lines[2]
    assert lines[3].startswith("| adamw | `--optim adamw` | 1 | 4.000 | 30.0 |  | 200 | 55.0 |")


@pytest.mark.parametrize(
    "options, minutes", [(["--max_steps", "7"], None), (["--max_minutes", "7"], "7"), ([], "5.0")]
)
def test_a_run_without_a_length_of_its_own_takes_the_minutes(options, minutes, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(search.subprocess, "run", lambda command, **more: commands.append(command))
    monkeypatch.setattr(search, "figures", lambda folder: {"mlm": 1.0})
    given = type("Given", (), {"work_dir": tmp_path, "minutes": 5.0, "threads": 1, "parallel": 2})
    given.books = given.blimp = tmp_path
    row = search.run("name", options, 3, given)
    train, evaluate = commands
    assert (train[train.index("--max_minutes") + 1] if "--max_minutes" in train else None) == minutes
    assert evaluate[evaluate.index("evaluate") + 1] == train[train.index("--output_dir") + 1]
    assert train.count("--max_minutes") == (minutes is not None)
    assert (row["seed"], row["mlm"]) == (3, 1.0)
    assert "--seed 3" in row["command"] and str(tmp_path) not in row["command"]
