"""`benchmarks.throughput`, on tiny cases: equal work for all contestants, and printed numbers that follow from it.

Contestants run in this process, which saves the start of theirs, and report the seconds that `SECONDS` lists.
"""

import contextlib
import io
import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from printed import line_with, numbers

from benchmarks import peers, throughput, turns, whole_run
from d2l_bert import D2lBertConfig, D2lBertForPreTraining, PretrainConfig
from d2l_bert.cli import main as command_line
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import batching, trials


pytestmark = pytest.mark.usefixtures("one_thread")

PEAK = 1e9  # operations a second


# Of each contestant's turns; ours is 2, 6 and 1.5 times as fast.
SECONDS = {"ours": (0.5, 0.2, 0.4), "stock": (1.0, 1.2, 0.6)}
TINY = "--global_batch_size=6 --micro_batch_size=4 --max_seq_length=32".split()


class InThisProcess:
    """A contestant that works in this process and records its calls. Its turns take the seconds in `SECONDS`."""

    made = []

    def __init__(self, name, setup, python=sys.executable):
        self.name, self.setup, self.calls, self.rates = name, json.loads(json.dumps(setup)), [], []
        self.worker = peers.ContestantProcess({**self.setup, "name": name})
        self.description = str(self.worker.contestant)
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, method, *arguments):
        answer = json.loads(json.dumps(getattr(self.worker, method)(*arguments)))
        if method != "steps":
            return answer
        assert answer > 0
        self.calls.append(arguments[0])
        self.rates += arguments[1]
        turn = len(self.calls) - 2  # the first call warms up and is not timed
        return SECONDS[self.name][turn % 3] if turn >= 0 else answer


@pytest.fixture
def bench(books, monkeypatch, capsys):
    """
    Runs `benchmarks.throughput` for the small size with some options; returns the printed lines and the contestants.
    """
    monkeypatch.setattr(turns, "Contestant", InThisProcess)
    monkeypatch.setattr(turns, "matmul_peak", lambda device, dtype: PEAK)
    monkeypatch.setattr(InThisProcess, "made", [])

    # It would change the signal handlers of the test process.
    monkeypatch.setattr(throughput, "exit_on_signals", lambda: None)

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["throughput", f"--corpus={books}", *TINY, *options])
        throughput.main()
        return capsys.readouterr().out.splitlines(), InThisProcess.made

    return run


@pytest.fixture
def task(books):
    options = {"corpus": [str(books)], "device": "cpu", "dropout": None, "max_seq_length": 32, "global_batch_size": 6}
    return throughput.make_task("small", "sentences", SimpleNamespace(**options, micro_batch_size=4))


def pairs_of(batches, labels_at=None):
    """All pairs of some batches as plain numbers, sorted: ids, segments, labels by position, next sentence label."""
    pairs = []
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            length = int(batch["attention_mask"][row].sum())
            assert batch["attention_mask"][row, :length].all()
            labels = batch["labels"][row].tolist()
            positions = batch["masked_positions"][row].tolist() if "masked_positions" in batch else range(len(labels))
            known = {at: label for at, label in zip(positions, labels, strict=True) if label != -100}
            ids, segments = (batch[name][row, :length].tolist() for name in ("input_ids", "token_type_ids"))
            pairs.append((ids, segments, sorted(known.items()), int(batch["next_sentence_label"][row])))
    return sorted(pairs)


# ---------------------------------------------------------------------------------------------------------------------
# The same work


def test_a_whole_step_holds_the_pairs_of_its_micro_batches(task, tmp_path):
    steps = task.steps(2)
    for number, step in enumerate(task.write_steps(tmp_path, 2)):
        micro_batches, read = steps[number], peers.read_step(step.file)
        assert len(micro_batches) > 1
        for batch, again in zip(micro_batches, read, strict=True):
            assert batch.keys() == again.keys() and all(torch.equal(batch[name], again[name]) for name in batch)
        whole = peers.whole_step(read, 32, 0)
        assert whole["input_ids"].shape == (6, 32)
        assert pairs_of([whole]) == pairs_of(micro_batches)


@pytest.mark.parametrize("variant", ["eager/sdpa/4", "eager/eager/6", "compiled/sdpa/4"])
def test_stock_bert_gets_our_pairs_with_the_labels_at_their_positions(variant, task, monkeypatch):
    monkeypatch.setattr(turns, "Contestant", InThisProcess)
    stock = task.contestant("stock", variant=variant).worker.contestant
    micro_batches = task.steps(1)[0]
    parts = stock.batches(micro_batches)
    assert [len(part["input_ids"]) for part in parts] == ([4, 2] if variant.endswith("4") else [6])
    assert pairs_of(parts) == pairs_of(micro_batches)
    widths = {part["input_ids"].shape[1] for part in parts}
    assert (widths == {32}) == variant.startswith("compiled")
    for part in parts:
        assert part["labels"].shape == part["input_ids"].shape


def test_the_books_model_gets_our_pairs_with_its_own_label_order_and_weights(task):
    book = object.__new__(peers.Book)
    book.length, book.pad, book.changes = 32, 0, {}
    micro_batches = task.steps(1)[0]
    ids, segments, lengths, positions, weights, labels, follows = book.batches(micro_batches)
    assert (labels[weights == 0] == 0).all()
    book.changes = {"real_slots": True}
    assert torch.equal(book.batches(micro_batches)[5], labels.where(weights == 1, -100))
    mask = (torch.arange(32) < lengths[:, None]).long()
    known = labels.where(weights == 1, -100)
    batch = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask, "masked_positions": positions}
    assert pairs_of([batch | {"labels": known, "next_sentence_label": 1 - follows}]) == pairs_of(micro_batches)
    assert weights.sum() == sum((batch["labels"] != -100).sum() for batch in micro_batches)


def arithmetic_by_hand(architecture, pairs):
    """Two operations per weight and token, plus attention's two products; three times that with the backward pass."""
    H, FF, V = architecture.hidden_size, architecture.intermediate_size, architecture.vocab_size
    total = 0
    for ids, _, labels, _ in pairs:
        T = len(ids)
        for layer in range(architecture.num_hidden_layers):
            is_last = layer == architecture.num_hidden_layers - 1
            Q = len(labels) + 1 if is_last else T  # positions that are read: the predicted ones and [CLS]
            total += T * 2 * (H * H * 2) + Q * 2 * (H * H * 2 + H * FF * 2) + 2 * (2 * Q * T * H)
        total += len(labels) * 2 * (H * H + H * V) + 2 * (H * H + 2 * H)
    return 3 * total


# ---------------------------------------------------------------------------------------------------------------------
# The printed numbers


@pytest.mark.slow
def test_the_table_of_a_step_follows_from_the_seconds_of_its_turns(bench):
    settings = ("--torch_compile=false", "--stock", "eager/sdpa/4")
    lines, contestants = bench("--contestants", "ours", "stock", *settings, "--repetitions=3")
    ours, stock = contestants
    assert ours.calls == stock.calls and ours.calls[1:] == [[file] for file in ours.calls[0][:3]]
    assert stock.setup["variant"] == "eager/sdpa/4"
    assert {name: ours.setup["architecture"][name] for name in ("hidden_size", "vocab_size")} == {
        "hidden_size": 128,
        "vocab_size": 20256,
    }
    assert ours.setup["architecture"] == stock.setup["architecture"]
    assert ours.setup["run"] == {**stock.setup["run"], "torch_compile": "false"}
    said = {name: numbers(line_with(lines, f"{name}   ")) for name in SECONDS}
    for name, seconds in SECONDS.items():
        taken = sorted(1000 * second for second in seconds)
        assert said[name][:3] == [taken[1], taken[0], taken[2]]
        speeds = sorted(6 / second for second in seconds)
        assert said[name][3:6] == pytest.approx([speeds[1], speeds[0], speeds[2]], abs=0.05)
    assert numbers(line_with(lines, "ours is")) == [2, 1.5, 6]
    assert numbers(line_with(lines, "peak"))[-3:] == [1, 1, 1]


def test_speed_and_mfu_of_a_step_count_real_tokens_only(bench, task, tmp_path):
    lines, _ = bench("--contestants", "ours", "--torch_compile=false", "--repetitions=1")
    step = task.write_steps(tmp_path, 1)[0]
    pairs = pairs_of(task.steps(1)[0])
    # Not equal: for the last block's attention our count uses the step's average length, not each pair's length.
    assert step.arithmetic == pytest.approx(arithmetic_by_hand(task.architecture, pairs), rel=1e-4)
    assert (step.pairs, step.tokens) == (6, sum(len(ids) for ids, *_ in pairs))
    said = numbers(line_with(lines, "ours   "))
    assert said[6] == round(step.tokens / 0.5)
    assert said[9] == pytest.approx(100 * step.arithmetic / 0.5 / PEAK, abs=0.06)
    assert said[10] > 0  # bytes held before the step


@pytest.mark.parametrize("option", ["--vocab_sizes", "--lengths"])
def test_the_table_of_costs_predicts_the_speed_from_the_arithmetic(option, bench):
    values = (20256, 40512) if option == "--vocab_sizes" else (16, 32)
    lines, contestants = bench(option, *map(str, values), "--repetitions=1")
    speeds, operations = [], []
    for value, contestant in zip(values, contestants, strict=True):
        architecture = SimpleNamespace(**contestant.setup["architecture"])
        assert (
            architecture.vocab_size if option == "--vocab_sizes" else contestant.setup["run"]["max_seq_length"]
        ) == value
        assert contestant.setup["run"]["global_batch_size"] == (6 if option == "--vocab_sizes" else 6 * 32 // value)
        speeds.append(numbers(line_with(lines, f"{value:,} "))[2])
        operations.append(numbers(line_with(lines, f"{value:,} "))[1])
    expected = [numbers(line_with(lines, f"{value:,} "))[5] for value in values]
    assert expected[0] == speeds[0]
    assert expected[1] == pytest.approx(speeds[0] * operations[0] / operations[1], rel=0.01)
    if option == "--vocab_sizes":  # both sizes train on the same pairs
        assert speeds[0] == speeds[1]
        assert operations[1] > 1.5 * operations[0]


@pytest.mark.slow
def test_the_line_below_the_table_of_costs_is_the_fit_of_the_time_per_token(bench, monkeypatch):
    sizes = [20256, 40512, 81024]
    speeds = iter([1 / (3e-6 + 0.5e-9 * size) for size in sizes for _ in ("tokens", "arithmetic")])
    monkeypatch.setattr(throughput, "per_second", lambda *_: [next(speeds)])
    options = ("--torch_compile=false", "--repetitions=1", "--steps=4")
    lines, contestants = bench("--vocab_sizes", *map(str, sizes), *options)
    architectures = [contestant.setup["architecture"] for contestant in contestants]
    assert [architecture["vocab_size"] for architecture in architectures] == sizes
    own, thousand, more, arithmetic, share, off = numbers(line_with(lines, "a token takes"))
    a_token = [numbers(line_with(lines, f"{size:,} "))[1] for size in sizes]
    assert (own, thousand, more, off) == (3, 1000, 0.5, 0)
    assert arithmetic == pytest.approx((a_token[2] - a_token[0]) / (sizes[2] - sizes[0]) * 1000, abs=0.006)
    assert share == pytest.approx(100 * arithmetic * 1e6 / 0.5e-6 / PEAK, rel=0.05)


class PlayedBack:
    """A run of the command that is finished at its start, and then pretends to run: its log grows with each wait.

    It records the signals sent to it and the seconds of each wait. While it is stopped its own clock goes on, as that
    of a real run does.
    """

    clock, pid, returncode = [0.0], "no process", None
    measured = ("train_tokens_per_second", "train_mfu")

    def __init__(self, command, env, **_):
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        with contextlib.redirect_stdout(io.StringIO()):
            self.code = command_line([str(argument) for argument in command[3:]])
        folder = Path(command[command.index("--output_dir") + 1])
        self.log, self.file = folder / "training_log.jsonl", folder / "metrics.json"
        self.record = json.loads((folder / "run_config.json").read_text())
        self.metrics = json.loads(self.file.read_text())
        self.lines = [line for line in self.log.read_text().splitlines() if "tokens_per_second" in line]
        self.rows = [json.loads(line) for line in self.lines]
        self.rows_there, self.since = iter((0, 1, 1, 3)), self.clock[0]
        self.signals, self.watched = [], []

    def wait(self, seconds):
        """Pretend to run for some seconds: show one more part of the log, or end."""
        self.watched.append(seconds)
        if (count := next(self.rows_there, None)) is not None:
            self.log.write_text("".join(f"{line}\n" for line in self.lines[:count]))
            raise subprocess.TimeoutExpired("pretrain", seconds)
        seconds = self.metrics["train_seconds"]
        slower = (seconds + self.clock[0] - self.since) / seconds
        told = {name: self.metrics[name] / slower for name in self.measured}
        self.file.write_text(json.dumps({**told, "train_seconds": seconds * slower}))
        self.returncode = self.code


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["auto", "true"])
def test_a_whole_run_is_compared_with_the_bare_step_that_works_while_the_run_is_stopped(compiled, bench, monkeypatch):
    runs, tokens, stands = [], [], []

    def begin(*arguments, **options):
        runs.append(PlayedBack(*arguments, **options))
        return runs[-1]

    def call(self, method, *arguments):
        """A step takes 0.8 s while it warms up, then 0.5 s. The clock of the stopped run goes on meanwhile."""
        call_in_this_process(self, method, *arguments)
        tokens.append([sum(int(b["attention_mask"].sum()) for b in peers.read_step(file)) for file in arguments[0]])
        stands.append(bool(runs) and runs[-1].signals[-1] == signal.SIGSTOP)
        seconds = (0.5 if stands[-1] else 0.8) * len(arguments[0])
        clock[0] += seconds
        return seconds

    def signal_group(pid, number):
        assert pid == runs[-1].pid
        runs[-1].signals.append(number)

    clock, call_in_this_process = [0.0], InThisProcess.call
    monkeypatch.setattr(InThisProcess, "call", call)
    monkeypatch.setattr(PlayedBack, "clock", clock)
    monkeypatch.setattr(whole_run, "ROWS", 3)
    monkeypatch.setattr(whole_run, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": begin}))
    monkeypatch.setattr(whole_run, "os", SimpleNamespace(killpg=signal_group))
    monkeypatch.setattr(whole_run, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(trials, "compile_now", lambda model, work: None)
    lines, (ours,) = bench("--end_to_end=6", "--repetitions=7", f"--torch_compile={compiled}")
    record = runs[0].record
    decided = ("corpus", "recipe", "pairing", "max_seq_length", "mlm_probability", "global_batch_size")
    decided += ("torch_compile",)
    assert {name: record["run"][name] for name in decided} == {name: ours.setup["run"][name] for name in decided}
    assert (record["run"]["max_steps"], record["run"]["micro_batch_size"]) == (6, 4)
    assert record["run"]["torch_compile"] == {"auto": "false", "true": "true"}[compiled]
    assert {name: record["architecture"][name] for name in ours.setup["architecture"]} == ours.setup["architecture"]

    assert [run.signals for run in runs] == [[signal.SIGSTOP, signal.SIGCONT] * 4] * 3
    # The bare step: 7 steps to warm up, then two turns of about three seconds. No turn before the first row of the log
    # or after the last.
    assert [len(turn) for turn in tokens] == [7, 4, 6] * 3 and stands == [False, True, True] * 3
    assert [run.watched for run in runs] == [pytest.approx([3, 3, 2, 3, 3])] * 3
    a_step = tokens[0][:6]  # the run trains on the same six steps
    assert sum(a_step) == pytest.approx(runs[0].metrics["train_tokens_per_second"] * runs[0].metrics["train_seconds"])
    later, whole, waits = [], [], []
    for run, turn in zip(runs, (0, 3, 6), strict=True):
        bare = sum(tokens[turn + 1] + tokens[turn + 2]) / 5
        of_rows = [sum(a_step[first : first + 2]) for first in (0, 2, 4)]
        seconds = [many / row["tokens_per_second"] for many, row in zip(of_rows, run.rows, strict=True)]
        later.append(100 * sum(of_rows[1:]) / sum(seconds[1:]) / bare)
        whole.append(100 * sum(of_rows) / sum(seconds) / bare)
        waited = [row["data_wait_share"] * each / 2 for row, each in zip(run.rows, seconds, strict=True)]
        waits.append(100 * statistics.mean(waited[:2]) * 6 / sum(seconds))
    for which, found in (("", later), (", the first 2 too", whole)):
        said = numbers(line_with(lines, f"of the bare step's{which}:").partition(":")[2])
        assert said == pytest.approx([statistics.median(found), min(found), max(found)], abs=0.06)
    waited, mfu = numbers(line_with(lines, "waiting for batches"))
    assert waited == pytest.approx(statistics.median(waits), abs=0.006)
    assert mfu == pytest.approx(100 * statistics.median(run.metrics["train_mfu"] for run in runs), abs=0.06)


def test_quality_is_the_loss_of_the_same_model_on_the_same_held_out_pairs_in_float32(bench):
    lines, (ours,) = bench("--quality=3")
    assert len(ours.calls) == 3 and ours.rates == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    run = PretrainConfig(**ours.setup["run"])
    model = D2lBertForPreTraining(D2lBertConfig(**ours.setup["architecture"])).eval()
    model.load_state_dict(ours.worker.contestant.model.state_dict())
    loss = pair_loss = tokens = pairs = 0
    for batch in batching.make_held_out(run, prepare(run)):
        with torch.no_grad():
            outputs = model(**batch)
        count, rows = int((batch["labels"] != -100).sum()), len(batch["input_ids"])
        loss, pair_loss = loss + count * outputs.mlm_loss.item(), pair_loss + rows * outputs.nsp_loss.item()
        tokens, pairs = tokens + count, pairs + rows
    said = numbers([line for line in lines if "ours, rate falls" in line][-1])
    assert said[0] == 3
    assert [said[1], said[3]] == pytest.approx([loss / tokens, pair_loss / pairs], abs=6e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--contestants", "d2l"], "no contestant is left"),
        (["--dropout", "2"], "--dropout 2: a share from 0 to less than 1"),
        (["--lengths", "16", "--plot", "cost.png", "--pairing", "segments", "sentences"], "one size and pairing"),
    ],
)
def test_options_that_cannot_be_measured_are_refused_at_once(options, reason, bench, capsys):
    with pytest.raises(SystemExit):
        bench(*options)
    assert reason in capsys.readouterr().err and not InThisProcess.made


# ---------------------------------------------------------------------------------------------------------------------
# A contestant's process


@pytest.mark.slow
def test_a_contestant_works_in_a_process_of_its_own_and_reports_its_errors(task, tmp_path):
    step = task.write_steps(tmp_path, 1)[0]
    with task.contestant("ours") as ours:
        assert ours.process.pid and ours.description.startswith("d2l-bert ")
        assert ours.call("steps", *turns.step_arguments([step, step])) > 0
        held, more = ours.call("memory", step.file)
        assert held > 1e8 and more >= 0
        with pytest.raises(RuntimeError, match="ours failed:(.|\n)*nowhere"):
            ours.call("memory", "nowhere")
