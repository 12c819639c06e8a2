"""The benchmark of the book's run on books, with a contestant whose losses are known."""

import dataclasses
import json
import math
import sys
from contextlib import contextmanager

import pytest

from benchmarks import d2l_books


class KnownLosses:
    """A contestant whose NSP loss is 0.9, and 0.6 from the third step on; it remembers what it was given."""

    def __init__(self, book):
        self.book, self.rates, self.batches = book, [], []

    def call(self, method, *arguments):
        if method == "evaluate":
            return [4.0 * 100, 20.0, 100.0, 0.65 * 10, 6.0, 10.0]  # in the order of benchmarks.peers.COUNTS
        file, rate = arguments
        self.rates.append(rate)
        with open(file, "rb") as opened:
            self.batches.append(hash(opened.read()))
        return 5.0, 0.9 if len(self.rates) < 3 else 0.6


@pytest.fixture
def contestants(monkeypatch):
    """Replace the processes of the contestants; returns those that were started, by the order of their start."""
    started = []

    @contextmanager
    def contestant(task, name, python=sys.executable, **more):
        started.append((name, KnownLosses(more.get("book")), task.architecture.hidden_dropout_prob))
        yield started[-1][1]

    monkeypatch.setattr(d2l_books.Task, "contestant", contestant)
    return started


@pytest.fixture
def run(books, tmp_path, monkeypatch, capsys):
    """Run the benchmark with some options; returns what it prints and the content of its JSON file."""
    (tmp_path / "texts").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "texts" / name).symlink_to(books)

    def start(*options):
        sizes = ["--max_steps=4", "--eval_steps=2", "--global_batch_size=8", f"--output={tmp_path / 'out.json'}"]
        monkeypatch.setattr(
            sys, "argv", ["d2l_books", str(tmp_path / "texts"), "--d2l_python=python", *sizes, *options]
        )
        d2l_books.main()
        return capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())

    return start


def test_both_programs_get_the_same_pairs_and_their_losses_are_recorded(run, contestants, tmp_path):
    printed, found = run()
    (book, books_process, _), (ours, our_process, _) = contestants
    assert (book, ours) == ("d2l", "ours")
    assert books_process.batches == our_process.batches and len(set(our_process.batches)) == 4
    assert books_process.rates == [0.01] * 4 and our_process.rates[0] == 0.01 > our_process.rates[-1] > 0
    assert found["ln_2"] == math.log(2) and str(tmp_path) not in json.dumps(found)
    losses = found["runs"]["ours"]
    assert losses["train_nsp_loss"] == [0.9, 0.9, 0.6, 0.6] and losses["learning_rates"] == our_process.rates
    assert losses["held_out"].keys() == {"2", "4"} and losses["held_out"]["4"]["eval_mlm_loss"] == 4.0
    assert losses["summary"]["mean_nsp_loss"] == 0.75 and losses["summary"]["nsp_loss"] == 0.65
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    row = next(line for line in printed.splitlines() if line.startswith("  ours"))
    assert row.split()[1:9] == ["0.750", "0.900", "0.750", "no", "0.650", "4.000", "yes", "d2l-bert,"]


def test_an_experiment_changes_one_thing_at_a_time(run, contestants, monkeypatch):
    names = ["warmup", "clipped", "no_dropout", "masks_once", "longer"]
    once = dataclasses.replace(d2l_books.VARIANTS["masks_once"], distinct_steps=2)
    monkeypatch.setitem(d2l_books.VARIANTS, "masks_once", once)
    _, found = run("--experiment", *names)
    assert list(found["runs"]) == ["book", *names]
    kinds, processes, dropout = zip(*contestants, strict=True)
    assert set(kinds) == {"d2l"} and dropout == (0.2, 0.2, 0.2, 0.0, 0.2, 0.2)
    assert [process.book for process in processes] == [{}, {}, {"max_grad_norm": 1.0}, {}, {}, {}]
    assert [len(process.rates) for process in processes] == [4, 4, 4, 4, 4, 40]
    book, warmup, _, no_dropout, masks_once, longer = processes
    assert book.batches == warmup.batches == no_dropout.batches == longer.batches[:4]
    assert masks_once.batches == book.batches[:2] * 2


def test_wrong_options_are_refused(run, contestants, capsys):
    for options, line in {
        ("--experiment", "faster"): "--experiment faster: no such variant; give book, warmup",
        ("--output=out.txt",): "--output out.txt: give a name that ends in .json",
    }.items():
        with pytest.raises(SystemExit):
            run(*options)
        assert line in capsys.readouterr().err
