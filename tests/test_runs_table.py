"""The table of runs that `evaluate` makes: runs that differ in their seed alone are one row."""

import csv
import json
import statistics

import pytest
from conftest import SMALL

from d2l_bert.__main__ import main


pytestmark = pytest.mark.usefixtures("one_thread")


def test_runs_of_several_seeds_are_one_row_with_mean_and_deviation(books, tmp_path, capsys):
    folders = [tmp_path / name for name in ("nsp-1", "nsp-2", "nsp-3", "mlm")]
    for folder in folders:
        kind, _, seed = folder.name.partition("-")
        options = [f"--output_dir={folder}", f"--seed={seed or 1}", "--max_steps=4", "--license=mit"]
        options += ["--objective=none"] if kind == "mlm" else []
        assert main(["pretrain", f"--corpus={books}", *SMALL, *options]) == 0
    words = ["evaluate", *map(str, folders), f"--corpus={books}", "--held_out", "--pppl_sentences=0"]
    capsys.readouterr()
    for name in ("all.json", "runs.csv", "runs.md"):
        assert main([*words, f"--output={tmp_path / name}"]) == 0
    table = (tmp_path / "runs.md").read_text()
    assert table in capsys.readouterr().out
    first, second = csv.DictReader((tmp_path / "runs.csv").open(newline=""))
    assert (first["runs"], first["seeds"], second["runs"], second["seeds"]) == ("nsp", "3", "mlm", "1")
    models = json.loads((tmp_path / "all.json").read_text())["models"]
    for column, name in {"MLM loss": "mlm_loss", "NSP accuracy": "nsp_accuracy"}.items():
        values = [model["text"][name] for model in models[:3]]
        assert float(first[column]) == pytest.approx(statistics.fmean(values))
        assert float(first[f"{column}, standard deviation"]) == pytest.approx(statistics.stdev(values))
    assert second["NSP accuracy"] == second["MLM loss, standard deviation"] == ""
    seconds = [json.loads((folder / "metrics.json").read_text())["train_seconds"] for folder in folders[:3]]
    assert float(first["minutes"]) == pytest.approx(statistics.fmean(seconds) / 60)
    header, _, *rows = table.splitlines()
    assert header.count("|") == rows[0].count("|") == rows[1].count("|") and "(" in rows[0] and "(" not in rows[1]
