"""The benches on tiny cases: all do the same work, and the figures that are printed follow from what was measured.

Contestants work in this process, which spares the start of theirs, and say that they took as long as the test wants.
"""

import contextlib
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import inference, mlm_head, one_step, peers, start_up, throughput
from d2l_bert import D2lBertConfig, D2lBertForPreTraining, PretrainConfig
from d2l_bert.cli import main as command_line
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import batching, trials


pytestmark = pytest.mark.usefixtures("one_thread")

PEAK = 1e9  # operations a second
SECONDS = {"ours": (0.5, 0.2, 0.4), "stock": (1.0, 1.2, 0.6)}  # of each one's turns; ratios 2, 6, 1.5
TINY = "--global_batch_size=6 --micro_batch_size=4 --max_seq_length=32".split()


class InThisProcess:
    """A contestant that keeps what it was told; its turns take the seconds that are written down, in their order."""

    made = []

    def __init__(self, name, told, python=sys.executable):
        self.name, self.told, self.orders, self.rates = name, json.loads(json.dumps(told)), [], []
        self.worker = peers.Worker({**self.told, "name": name})
        self.who = str(self.worker.contestant)
        self.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def tell(self, what, *arguments):
        answer = json.loads(json.dumps(getattr(self.worker, what)(*arguments)))
        if what != "steps":
            return answer
        assert answer > 0
        self.orders.append(arguments[0])
        self.rates += arguments[1]
        turn = len(self.orders) - 2  # the first order is for warming up
        return SECONDS[self.name][turn % 3] if turn >= 0 else answer


@pytest.fixture
def bench(books, monkeypatch, capsys):
    """Runs `benchmarks.throughput` on the small size with options; gives the lines and the contestants."""
    monkeypatch.setattr(throughput, "Contestant", InThisProcess)
    monkeypatch.setattr(throughput, "matmul_peak", lambda device, dtype: PEAK)
    monkeypatch.setattr(InThisProcess, "made", [])

    monkeypatch.setattr(throughput, "end_in_order", lambda: None)  # these tests' own process goes on

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["throughput", f"--corpus={books}", *TINY, *options])
        throughput.main()
        return capsys.readouterr().out.splitlines(), InThisProcess.made

    return run


@pytest.fixture
def task(books):
    options = {"corpus": [str(books)], "device": "cpu", "dropout": None, "max_seq_length": 32, "global_batch_size": 6}
    return throughput.make_task("small", "sentences", SimpleNamespace(**options, micro_batch_size=4))


def line_with(lines, start):
    return next(line for line in lines if line.strip().startswith(start))


def numbers(line):
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line)]


def pairs_of(batches, labels_at=None):
    """Each pair as plain numbers, in an order of their own: ids, segments, labels by position, next sentence."""
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
    for number, step in enumerate(task.files(tmp_path, 2)):
        micro_batches, read = steps[number], peers.read_step(step.file)
        assert len(micro_batches) > 1
        for batch, again in zip(micro_batches, read, strict=True):
            assert batch.keys() == again.keys() and all(torch.equal(batch[name], again[name]) for name in batch)
        whole = peers.whole_step(read, 32, 0)
        assert whole["input_ids"].shape == (6, 32)
        assert pairs_of([whole]) == pairs_of(micro_batches)


@pytest.mark.parametrize("variant", ["eager/sdpa/4", "eager/eager/6", "compiled/sdpa/4"])
def test_stock_bert_gets_our_pairs_with_the_labels_at_their_positions(variant, task, monkeypatch):
    monkeypatch.setattr(throughput, "Contestant", InThisProcess)
    stock = task.contestant("stock", variant=variant).worker.contestant
    micro_batches = task.steps(1)[0]
    parts = stock.batches(micro_batches)
    assert [len(part["input_ids"]) for part in parts] == ([4, 2] if variant.endswith("4") else [6])
    assert pairs_of(parts) == pairs_of(micro_batches)
    widths = {part["input_ids"].shape[1] for part in parts}
    assert (widths == {32}) == variant.startswith("compiled")
    for part in parts:
        assert part["labels"].shape == part["input_ids"].shape


def test_the_book_gets_our_pairs_with_its_own_polarity_and_weights(task):
    book = object.__new__(peers.Book)
    book.length, book.pad = 32, 0
    micro_batches = task.steps(1)[0]
    ids, segments, lengths, positions, weights, labels, follows = book.batches(micro_batches)
    mask = (torch.arange(32) < lengths[:, None]).long()
    known = labels.where(weights == 1, -100)
    batch = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask, "masked_positions": positions}
    assert pairs_of([batch | {"labels": known, "next_sentence_label": 1 - follows}]) == pairs_of(micro_batches)
    assert weights.sum() == sum((batch["labels"] != -100).sum() for batch in micro_batches)


def arithmetic_by_hand(architecture, pairs):
    """Two operations for each weight a token meets, and for attention's products; three times, for the gradients."""
    H, FF, V = architecture.hidden_size, architecture.intermediate_size, architecture.vocab_size
    total = 0
    for ids, _, labels, _ in pairs:
        T = len(ids)
        for layer in range(architecture.num_hidden_layers):
            is_last = layer == architecture.num_hidden_layers - 1
            Q = len(labels) + 1 if is_last else T  # what is predicted, and [CLS]
            total += T * 2 * (H * H * 2) + Q * 2 * (H * H * 2 + H * FF * 2) + 2 * (2 * Q * T * H)
        total += len(labels) * 2 * (H * H + H * V) + 2 * (H * H + 2 * H)
    return 3 * total


# ---------------------------------------------------------------------------------------------------------------------
# The figures


def test_the_table_of_a_step_follows_from_its_turns(bench):
    settings = ("--torch_compile=false", "--stock", "eager/sdpa/4")
    lines, contestants = bench("--contestants", "ours", "stock", *settings, "--repetitions=3")
    ours, stock = contestants
    assert ours.orders == stock.orders and ours.orders[1:] == [[file] for file in ours.orders[0][:3]]
    assert stock.told["variant"] == "eager/sdpa/4"
    assert {name: ours.told["architecture"][name] for name in ("hidden_size", "vocab_size")} == {
        "hidden_size": 128,
        "vocab_size": 20256,
    }
    assert ours.told["architecture"] == stock.told["architecture"]
    assert ours.told["run"] == {**stock.told["run"], "torch_compile": "false"}
    said = {name: numbers(line_with(lines, f"{name}   ")) for name in SECONDS}
    for name, seconds in SECONDS.items():
        taken = sorted(1000 * second for second in seconds)
        assert said[name][:3] == [taken[1], taken[0], taken[2]]
        speeds = sorted(6 / second for second in seconds)
        assert said[name][3:6] == pytest.approx([speeds[1], speeds[0], speeds[2]], abs=0.05)
    assert numbers(line_with(lines, "ours is")) == [2, 1.5, 6]
    assert numbers(line_with(lines, "peak"))[-3:] == [1, 1, 1]


def test_speed_and_mfu_of_a_step_are_those_of_its_real_tokens(bench, task, tmp_path):
    lines, _ = bench("--contestants", "ours", "--torch_compile=false", "--repetitions=1")
    step = task.files(tmp_path, 1)[0]
    pairs = pairs_of(task.steps(1)[0])
    # Of the last block's attention our count knows the average of a step only.
    assert step.arithmetic == pytest.approx(arithmetic_by_hand(task.architecture, pairs), rel=1e-4)
    assert (step.pairs, step.tokens) == (6, sum(len(ids) for ids, *_ in pairs))
    said = numbers(line_with(lines, "ours   "))
    assert said[6] == round(step.tokens / 0.5)
    assert said[9] == pytest.approx(100 * step.arithmetic / 0.5 / PEAK, abs=0.06)
    assert said[10] > 0  # what is held


@pytest.mark.parametrize("option", ["--vocab_sizes", "--lengths"])
def test_the_table_of_costs_expects_what_the_arithmetic_says(option, bench):
    values = (20256, 40512) if option == "--vocab_sizes" else (16, 32)
    lines, contestants = bench(option, *map(str, values), "--repetitions=1")
    speeds, operations = [], []
    for value, contestant in zip(values, contestants, strict=True):
        architecture = SimpleNamespace(**contestant.told["architecture"])
        assert (
            architecture.vocab_size if option == "--vocab_sizes" else contestant.told["run"]["max_seq_length"]
        ) == value
        assert contestant.told["run"]["global_batch_size"] == (6 if option == "--vocab_sizes" else 6 * 32 // value)
        speeds.append(numbers(line_with(lines, f"{value:,} "))[2])
        operations.append(numbers(line_with(lines, f"{value:,} "))[1])
    expected = [numbers(line_with(lines, f"{value:,} "))[5] for value in values]
    assert expected[0] == speeds[0]
    assert expected[1] == pytest.approx(speeds[0] * operations[0] / operations[1], rel=0.01)
    if option == "--vocab_sizes":  # the same pairs
        assert speeds[0] == speeds[1]
        assert operations[1] > 1.5 * operations[0]


def test_the_line_under_the_table_of_costs_goes_through_what_a_token_takes(bench, monkeypatch):
    sizes = [20256, 40512, 81024]
    speeds = iter([1 / (3e-6 + 0.5e-9 * size) for size in sizes for _ in ("tokens", "arithmetic")])
    monkeypatch.setattr(throughput, "rates", lambda *_: [next(speeds)])
    options = ("--torch_compile=false", "--repetitions=1", "--steps=4")
    lines, contestants = bench("--vocab_sizes", *map(str, sizes), *options)
    architectures = [contestant.told["architecture"] for contestant in contestants]
    assert [architecture["vocab_size"] for architecture in architectures] == sizes
    own, thousand, more, arithmetic, share, off = numbers(line_with(lines, "a token takes"))
    a_token = [numbers(line_with(lines, f"{size:,} "))[1] for size in sizes]
    assert (own, thousand, more, off) == (3, 1000, 0.5, 0)
    assert arithmetic == pytest.approx((a_token[2] - a_token[0]) / (sizes[2] - sizes[0]) * 1000, abs=0.006)
    assert share == pytest.approx(100 * arithmetic * 1e6 / 0.5e-6 / PEAK, rel=0.05)


class PlayedBack:
    """A run of the command line that is over when it starts, and whose log comes to be while it is watched.

    It keeps the signals it was sent, and for how long it was watched. Its own clock goes on while it is stopped, as a
    real one's does.
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
        """One more look at it, so much later."""
        self.watched.append(seconds)
        if (count := next(self.rows_there, None)) is not None:
            self.log.write_text("".join(f"{line}\n" for line in self.lines[:count]))
            raise subprocess.TimeoutExpired("pretrain", seconds)
        seconds = self.metrics["train_seconds"]
        slower = (seconds + self.clock[0] - self.since) / seconds
        told = {name: self.metrics[name] / slower for name in self.measured}
        self.file.write_text(json.dumps({**told, "train_seconds": seconds * slower}))
        self.returncode = self.code


@pytest.mark.parametrize("compiled", ["auto", pytest.param("true", marks=pytest.mark.slow)])
def test_a_whole_run_is_compared_with_the_bare_step_that_works_while_it_is_stopped(compiled, bench, monkeypatch):
    runs, tokens, stands = [], [], []

    def begin(*arguments, **options):
        runs.append(PlayedBack(*arguments, **options))
        return runs[-1]

    def tell(self, what, *arguments):
        """A step takes 0.8 s at first, then half a second, in which the clock of the run that is stopped goes on."""
        told(self, what, *arguments)
        tokens.append([sum(int(b["attention_mask"].sum()) for b in peers.read_step(file)) for file in arguments[0]])
        stands.append(bool(runs) and runs[-1].signals[-1] == signal.SIGSTOP)
        seconds = (0.5 if stands[-1] else 0.8) * len(arguments[0])
        clock[0] += seconds
        return seconds

    def signal_group(pid, number):
        assert pid == runs[-1].pid
        runs[-1].signals.append(number)

    clock, told = [0.0], InThisProcess.tell
    monkeypatch.setattr(InThisProcess, "tell", tell)
    monkeypatch.setattr(PlayedBack, "clock", clock)
    monkeypatch.setattr(throughput, "ROWS", 3)
    monkeypatch.setattr(throughput, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": begin}))
    monkeypatch.setattr(throughput, "os", SimpleNamespace(killpg=signal_group))
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(trials, "compile_now", lambda model, work: None)
    lines, (ours,) = bench("--end_to_end=6", "--repetitions=7", f"--torch_compile={compiled}")
    record = runs[0].record
    decided = ("corpus", "recipe", "pairing", "max_seq_length", "mlm_probability", "global_batch_size")
    decided += ("torch_compile",)
    assert {name: record["run"][name] for name in decided} == {name: ours.told["run"][name] for name in decided}
    assert (record["run"]["max_steps"], record["run"]["micro_batch_size"]) == (6, 4)
    assert record["run"]["torch_compile"] == {"auto": "false", "true": "true"}[compiled]
    assert {name: record["architecture"][name] for name in ours.told["architecture"]} == ours.told["architecture"]

    assert [run.signals for run in runs] == [[signal.SIGSTOP, signal.SIGCONT] * 4] * 3
    # Seven to know them, and two turns of about three seconds: none before the log's first row, or after its last.
    assert [len(turn) for turn in tokens] == [7, 4, 6] * 3 and stands == [False, True, True] * 3
    assert [run.watched for run in runs] == [pytest.approx([3, 3, 2, 3, 3])] * 3
    a_step = tokens[0][:6]  # of the run too, which takes the same six
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


COUNTING = """
import json, os, sys, time
from pathlib import Path
folder, start = Path(sys.argv[1]), time.monotonic()
(folder / "pid").write_text(str(os.getpid()))
with (folder / "counted").open("ab", 0) as counted:
    (folder / "training_log.jsonl").write_text(json.dumps({"step": 1, "tokens_per_second": 1}) + "\\n")
    while not (folder / "enough").exists() and time.monotonic() < start + 60:
        counted.write(b".")
"""


def test_a_run_stands_still_while_the_bare_step_works_and_goes_on_afterwards(tmp_path, monkeypatch):
    """With a process of its own, that counts as fast as it can until the bare step has worked twice."""
    seen, counted = [], tmp_path / "counted"

    def work(seconds):
        before = counted.stat().st_size
        time.sleep(seconds)
        seen.append((before, counted.stat().st_size))
        if len(seen) == 2:
            (tmp_path / "enough").touch()
        return 2 * seconds  # so long may the run work now

    monkeypatch.setattr(throughput, "TURN", 0.2)
    command = [sys.executable, "-c", COUNTING, str(tmp_path)]
    stopped = throughput.train_in_turns(command, "cpu", tmp_path, 4, SimpleNamespace(work=work))
    (first, still), (later, still_then) = seen
    assert first == still < later == still_then
    assert 0.4 <= stopped < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_ends_with_the_bench_though_it_is_stopped(number, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "TURN", 0.2)
    command = [sys.executable, "-c", COUNTING, str(tmp_path)]
    bare = SimpleNamespace(work=lambda seconds: signal.raise_signal(number))
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background may ignore it
    try:
        throughput.end_in_order()
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            throughput.train_in_turns(command, "cpu", tmp_path, 4, bare)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pass", "give --end_to_end more"),
        ("raise SystemExit('first\\nno text')", "exit code 1: no text$"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: $"),
    ],
)
def test_a_run_that_is_over_too_soon_or_fails_is_refused(program, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "TURN", 0.01)
    with pytest.raises(ValueError, match=reason):
        throughput.train_in_turns([sys.executable, "-c", program], "cpu", tmp_path, 4, None)


def test_quality_is_what_the_same_model_says_of_the_same_held_out_pairs_in_float32(bench):
    lines, (ours,) = bench("--quality=3")
    assert len(ours.orders) == 3 and ours.rates == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    run = PretrainConfig(**ours.told["run"])
    model = D2lBertForPreTraining(D2lBertConfig(**ours.told["architecture"])).eval()
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
def test_what_cannot_be_measured_is_refused_at_once(options, reason, bench, capsys):
    with pytest.raises(SystemExit):
        bench(*options)
    assert reason in capsys.readouterr().err and not InThisProcess.made


# ---------------------------------------------------------------------------------------------------------------------
# A contestant's process


@pytest.mark.slow
def test_a_contestant_works_in_a_process_of_its_own_and_says_why_it_cannot(task, tmp_path):
    step = task.files(tmp_path, 1)[0]
    with task.contestant("ours") as ours:
        assert ours.process.pid and ours.who.startswith("d2l-bert ")
        assert ours.tell("steps", *throughput.orders([step, step])) > 0
        held, more = ours.tell("memory", step.file)
        assert held > 1e8 and more >= 0
        with pytest.raises(RuntimeError, match="ours failed:(.|\n)*nowhere"):
            ours.tell("memory", "nowhere")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("bench_of", [throughput, inference, mlm_head])
def test_a_gpu_that_is_not_there_is_refused_in_one_line(bench_of, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--device=cuda"])
    with pytest.raises(SystemExit, match="--device cuda: PyTorch sees no GPU here.*") as refused:
        bench_of.main()
    assert "\n" not in refused.value.code and not capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Losses


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="PyTorch has it from 2.13 on")
def test_losses_are_compared_with_float64_in_error_time_and_memory(monkeypatch, capsys):
    options = "--loss --vocab_sizes 300 --hidden_sizes 16 --rows 40 --repetitions 1"
    monkeypatch.setattr(sys, "argv", ["mlm_head", *options.split()])
    mlm_head.main()
    printed = capsys.readouterr().out
    in_float32, in_bf16 = printed.split("bfloat16, H = 16, V = 300")
    errors = [re.findall(r"\d\.\de[-+]\d\d", text) for text in (in_float32, in_bf16)]
    assert [len(found) for found in errors] == [3 * 6] * 2  # of loss and two gradients, for labels of two kinds
    assert max(map(float, errors[0])) < 1e-5 < 1e-4 < max(map(float, errors[1])) < 0.2
    assert printed.count("ms, ") == printed.count("MiB") == 2 * 3


def test_likely_labels_have_the_probabilities_that_are_said():
    arguments = SimpleNamespace(rows=[10], device="cpu")
    states, weight, bias, labels = mlm_head.loss_inputs(torch.float32, 64, 500, True, arguments)
    chances = (states @ weight.T + bias).softmax(1)[torch.arange(len(labels)), labels]
    wanted = torch.tensor([0.02, 0.5, 0.9, 0.99, 0.998]).repeat(len(labels) // 5)
    torch.testing.assert_close(chances, wanted, rtol=0.02, atol=0.002)


def test_labels_of_every_position_are_those_of_the_masked_ones():
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "labels": torch.tensor([[7, 8, -100], [9, -100, -100]])}
    plain = one_step.labels_of_every_position(batch | {"masked_positions": torch.tensor([[4, 1, 0], [0, 0, 0]])})
    assert plain["labels"].tolist() == [[-100, 8, -100, -100, 7, -100], [9, *[-100] * 5]]
    assert "masked_positions" not in plain


# ---------------------------------------------------------------------------------------------------------------------
# Inference


@pytest.fixture
def options(books):
    return SimpleNamespace(
        corpus=[str(books)], device="cpu", dtype="float32", repetitions=1, texts=7, batch_size=3, vocab_size=400
    )


def test_inference_of_both_models_is_timed_on_texts_with_one_mask_each(options, capsys, monkeypatch):
    taken = iter([10, 1, 2, 4] * 100)
    monkeypatch.setattr(inference, "seconds", lambda work, device: work() is None or next(taken))
    inference.measure("small", options)
    lines = capsys.readouterr().out.splitlines()
    assert "7 texts" in lines[1]
    assert numbers(line_with(lines, "pipeline"))[6:9] == [0.1] * 3  # ours took 10 s and stock BERT 1
    # ours: eager in min(2, 4), sdpa in min(10, 1); stock: the same; then 2 and 4 seconds
    assert numbers(line_with(lines, "fill-mask"))[6:9] == [2] * 3
    assert line_with(lines, "fill-mask").endswith("sdpa and sdpa attention")


def test_inference_gives_what_each_text_gives_alone(options):
    config = D2lBertConfig(**inference.BERT, vocab_size=400, initializer_range=0.3)
    models = inference.make_models(config, options)
    texts, tokenizer = inference.masked_texts(options.corpus, 400, 16, 7)
    assert len(set(texts)) == 7 and all(text.count("[MASK]") == 1 for text in texts)
    assert len({len(tokenizer(text)["input_ids"]) for text in texts}) > 1
    batches = inference.make_batches(texts, tokenizer, options)
    assert [len(positions) for _, positions in batches] == [3, 3, 1]
    with torch.no_grad():
        for model in models.values():
            alone = [tokenizer(text, return_tensors="pt") for text in texts]
            states = [model.bert(**one).last_hidden_state[0].mean(0) for one in alone]
            masks = [one["input_ids"][0] == tokenizer.mask_token_id for one in alone]
            best = [model(**one).logits[0, mask].max() for one, mask in zip(alone, masks, strict=True)]
            embedded = inference.answer_all(inference.embed, model, batches)
            torch.testing.assert_close(embedded, torch.stack(states), atol=1e-4, rtol=1e-4)
            filled = inference.answer_all(inference.fill_masks, model, batches)
            torch.testing.assert_close(filled, torch.stack(best), atol=1e-4, rtol=1e-4)
            said = inference.pipeline_work(model, tokenizer, texts, options)()
            expected = [model(**one).logits[0, mask].softmax(-1).max() for one, mask in zip(alone, masks, strict=True)]
            torch.testing.assert_close(said, torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_models_that_disagree_are_not_timed():
    same = torch.randn(7, 5)
    assert inference.check(same, same, "float32") == 0
    with pytest.raises(AssertionError, match="disagree by 1.0e-03"):
        inference.check(1.001 * same, same, "float32")
    assert inference.check(1.001 * same, same, "bfloat16") == pytest.approx(1e-3, rel=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# The start


def test_processes_are_timed_from_their_start_to_their_end():
    commands = {"nothing": ["-S", "-c", ""], "a nap": ["-S", "-c", "import time; time.sleep(0.3)"]}
    taken = start_up.take_turns(commands, 2)
    assert {what: len(seconds) for what, seconds in taken.items()} == {"nothing": 2, "a nap": 2}
    assert 0 < min(taken["nothing"]) < 0.3 < min(taken["a nap"])


@pytest.mark.parametrize(
    ("imported", "helped", "reached"), [((4.2, 2.1, 4.0), (2.1, 2.3, 2.2), 2), ((4.8, 2.3, 4.4), (2.6, 2.4, 2.5), 0)]
)
def test_what_is_added_is_added_within_a_turn(imported, helped, reached, monkeypatch, capsys):
    seconds = dict(zip(start_up.COMMANDS, [(4.0, 2.0, 4.0), imported, (2.0, 2.0, 2.0), helped], strict=True))
    monkeypatch.setattr(start_up, "take_turns", lambda commands, repetitions: seconds)
    monkeypatch.setattr(sys, "argv", ["start_up"])
    start_up.main()
    lines = capsys.readouterr().out.splitlines()
    shares = sorted(100 * (both / alone - 1) for both, alone in zip(imported, (4, 2, 4), strict=True))
    assert re.findall(r"[\d.]+%", lines[-2])[:3] == [f"{shares[at]:.1f}%" for at in (1, 0, 2)]
    assert f"--help adds {sorted(helped)[1] - 2:.2f} s" in lines[-1]
    assert sum("reached" in line for line in lines) == reached
    assert sum("MISSED" in line for line in lines) == 2 - reached
