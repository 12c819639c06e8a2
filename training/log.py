"""The log of a run: training_log.jsonl, the terminal, trackers such as TensorBoard, events, speed."""

import contextlib
import datetime
import itertools
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tqdm.auto import tqdm

from d2l_bert import folders
from d2l_bert.messages import GO_ON, READ_ERRORS, UserError, explained, launched_rank, shows_bars, writing
from d2l_bert.model_cards.figures import INITIAL_LOSS
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.pair_tasks import PAIR_TASKS, pair_task, unit
from d2l_bert.records import check_type
from d2l_bert.training.checkpoint import Progress, checkpoints
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.devices import MATMUL_DTYPES, matmul_peak
from d2l_bert.training.learner import StepStats
from d2l_bert.training.processes import on_main


logger = logging.getLogger(__name__)


LOG_FILE = "training_log.jsonl"

# Healthy runs skip single steps too. After ten skipped steps in a row the weights themselves are bad.
MAX_SKIPPED_IN_A_ROW = 10


# ---------------------------------------------------------------------------------------------------------------------
# Rows, and how a person reads them


def kind_of(row: dict) -> str:
    """The kind of a row of the training log: `train`, `held_out`, or the name of its event, such as `skipped`."""
    if row.get("event"):
        return row["event"]
    return "held_out" if any(name.startswith("eval_") for name in row) else "train"


class Row(TypedDict):
    """The entries that are read of any row of the training log; all but `step` are of events alone."""

    step: int
    event: NotRequired[str]
    reason: NotRequired[str]
    label: NotRequired[str]


class TrainRow(Row):
    """The entries that are read of a row of training when a run goes on, but for `pairs` or `sequences`."""

    seconds: float
    tokens_per_second: float
    padding_share: float
    data_wait_share: float
    mfu: float
    memory_mb: float
    skipped_steps: NotRequired[int]


def check_row(row: object, unit: str) -> None:
    """
    Check a row that was read from the log.

    Args:
        unit: what the run counts in a row, `pairs` or `sequences`.

    Raises:
        ValueError: the row is none that a run writes.
    """
    check_type(row, Row)
    if kind_of(row) == "train":
        check_type(row, TrainRow)
        check_type(row.get(unit), int, unit)
        if row["seconds"] <= 0 or not 0 <= row["padding_share"] < 1:
            raise ValueError(f"step {row['step']} has numbers that no run has")
    if "event" not in row:
        for name, value in row.items():
            check_type(value, float, name)
            if not math.isfinite(value):
                raise ValueError(f"step {row['step']}: {name} is not finite")
    elif "reason" not in row:
        raise ValueError(f"step {row['step']}: an event without a reason")


def line_of(row: dict, total: int) -> str:
    """
    A row of the training log as a line for a person.

    Args:
        total: the number of steps of the run.
    """
    kind = kind_of(row)
    if kind == "held_out":
        return _held_out_line(row)
    if kind == "train":
        return _train_line(row, total)
    return row["reason"]


def _held_out_line(row):
    figures = [f"MLM loss {row['eval_mlm_loss']:.3f}, accuracy {row['eval_mlm_accuracy']:.1%}"]
    task = pair_task(row)
    if task:
        loss = row[f"eval_{task.key}_loss"]
        accuracy = row[f"eval_{task.key}_accuracy"]
        one_segment = row[f"eval_{task.key}_one_segment_accuracy"]
        figures.append(
            f"{task.key.upper()} loss {loss:.3f}, accuracy {accuracy:.1%} (one segment alone: {one_segment:.1%})"
        )
    return f"held out: {'; '.join(figures)}"


def _train_line(row, total):
    parts = [f"step {row['step']:>{len(str(total))}}/{total}"]
    task = pair_task(row)
    if "loss" not in row:
        parts.append("no loss")  # each of its steps was left out, or had no token to predict
    elif task:
        pair_loss = row[f"{task.key}_loss"]
        parts.append(f"loss {row['loss']:.3f} (MLM {row['mlm_loss']:.3f}, {task.short} {pair_loss:.3f})")
    else:
        parts.append(f"loss {row['loss']:.3f} (MLM {row['mlm_loss']:.3f})")
    if "skipped_steps" in row:
        parts.append(f"skipped {row['skipped_steps']}")
    parts.append(f"rate {row['learning_rate']:.2e}")
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}")
    parts.append(f"{datetime.timedelta(seconds=round(row['seconds_left']))} left")
    return "  ".join(parts)


def stage_changes(run: PretrainConfig) -> dict[int, dict]:
    """
    For each change of sequence length or batch size, the event to write to the training log.

    Returns:
        Events by the first step of the new stage, counted from 1. The `label` is for the curves: tokens a row, and
        pairs of full length a step.
    """
    changes = {}
    for before, after in itertools.pairwise(run.stages(run.max_steps)):
        step = after.first_step + 1  # stages count from 0
        pairs_a_step = run.pairs_a_step(after.batch_size, after.length)
        units = f"{pairs_a_step:,} {unit(PAIR_TASKS.get(run.objective))}"
        reason = f"step {step}: from here on, a step has {units} of {after.length} tokens"
        labels = []
        if after.length != before.length:
            reason += f"; the evaluation always uses {run.max_seq_length} tokens"
            labels.append(f"{before.length} → {after.length} tokens")
        if after.batch_size != before.batch_size:
            labels.append(f"batch {before.batch_size} → {after.batch_size}")
        changes[step] = {"step": step, "event": "stage", "reason": reason, "label": ", ".join(labels)}
    return changes


class RunLog:
    """
    Collects the losses and counts of every step; writes rows of the log, and reports events: a change of sequence
    length or batch size, a skipped step.

    A row is of one kind (`kind_of`): a row of training sums up the steps since the last such row; a held-out row has
    the figures of an evaluation; an event has a reason, in words.

    Every process must call each method at the same point of the run; only the main process writes. A resumed run
    repeats the steps after its checkpoint, so it deletes their rows.

    Args:
        folder: the run's folder.
        run: the options, with the number of steps (`max_steps`).
        progress: how far the run has come. At step 0 the log of an earlier run is replaced.
        rows_of_checkpoint: how many rows the log had when the checkpoint was saved that the run goes on from.
        callbacks: functions that get each row as it is written, in the main process.

    Attributes:
        rows: the rows of the log.
        bar: the progress bar.

    Raises:
        UserError: from any method, if the log cannot be read or written; or a number is not finite, as JSON has no
            such numbers.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        run: PretrainConfig,
        architecture: D2lBertConfig,
        progress: Progress,
        rows_of_checkpoint: int = 0,
        callbacks: Sequence[Callable[[dict], object]] = (),
    ):
        self.accelerator = accelerator
        self.path = folder / LOG_FILE
        self.architecture = architecture
        self.progress = progress
        self.callbacks = callbacks
        self.max_steps = run.max_steps
        self.task = PAIR_TASKS.get(run.objective)
        self.unit = unit(self.task)
        self.changes = stage_changes(run)
        peak = matmul_peak(accelerator.device, MATMUL_DTYPES[accelerator.mixed_precision])
        # Of all processes together, in operations a second.
        self.peak = float(accelerator.gather(torch.tensor(peak, device=accelerator.device)).sum())
        # What the next row is made of: the figures of each step since the last row, the rate of the last step, and for
        # how many seconds training waited for batches. `start_clock` sets when the row began.
        self.stats_of_row: list[StepStats] = []
        self.learning_rate = 0.0
        self.seconds_waited = 0.0
        self.rows = on_main(self._open, rows_of_checkpoint)
        used_memory(accelerator.device)  # resets the peak: the first row is without the memory of the setup
        self.start_clock()
        self.bar = tqdm(
            total=self.max_steps,
            initial=progress.step,
            desc="training",
            unit="step",
            disable=not shows_bars() or bool(launched_rank()),
            dynamic_ncols=True,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left",
        )

    def start_clock(self) -> None:
        """Count the time of the next row from now on."""
        self.row_began = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which the training waits for a batch."""
        began = time.monotonic()
        yield
        self.seconds_waited += time.monotonic() - began

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """A block that does not count as training, such as an evaluation: as if the row had begun so much later."""
        began = time.monotonic()
        yield
        self.row_began += time.monotonic() - began

    def add_step(self, stats: StepStats, learning_rate: float) -> None:
        """
        Add the losses and counts of the step that `progress` has just counted, and report its events.

        Raises:
            UserError: training has diverged: too many steps in a row were skipped.
        """
        step = self.progress.step
        self.stats_of_row.append(stats)
        self.learning_rate = learning_rate
        self.bar.update()
        if step in self.changes:
            self.record(self.changes[step])
        if stats.skipped:
            loss = stats.mlm_loss + stats.pair_loss
            reason = f"step {step} is left out, as it is not finite: loss {loss:g}, gradient norm {stats.grad_norm:g}"
            self.record({"step": step, "event": "skipped", "reason": reason})
        if self.progress.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            on_main(self._refuse_to_go_on)

    def write_row(self) -> None:
        """
        Write a row over the steps since the last row, if there were any.

        Means over the steps that were not skipped and had a token to predict, absent if there was no such step:
        `loss`, `mlm_loss`, with a pair task `nsp_loss` or `sop_loss`, and `grad_norm`. Over all steps: `seconds`;
        `pairs`, or without a pair task `sequences`; `tokens_per_second` without padding; `padding_share`, the padding
        as a share of the tokens including padding; `data_wait_share`, the share of the time that training waited for
        batches; `mfu`, the operations on real tokens as a share of the peak; `memory_mb`, from `used_memory` on this
        process; `seconds_left`; `skipped_steps`, only if above 0. And `learning_rate`.
        """
        if not self.stats_of_row:
            return
        seconds = time.monotonic() - self.row_began
        # Of these sums only the counts are read; losses of skipped steps may be NaN.
        total = StepStats(*(sum(figures) for figures in zip(*self.stats_of_row, strict=True)))
        operations = training_arithmetic(self.architecture, total, self.task is not None)
        row = {"step": self.progress.step, **self._mean_losses()}
        row["learning_rate"] = self.learning_rate
        row["seconds"] = seconds
        row[self.unit] = round(total.examples)
        row["tokens_per_second"] = total.tokens / seconds
        row["padding_share"] = 1 - total.tokens / total.padded_tokens
        row["data_wait_share"] = self.seconds_waited / seconds
        row["seconds_left"] = (self.max_steps - self.progress.step) * seconds / len(self.stats_of_row)
        row["mfu"] = operations / (seconds * self.peak)
        row["memory_mb"] = used_memory(self.accelerator.device)
        if total.skipped:
            row["skipped_steps"] = round(total.skipped)
        self.stats_of_row = []
        self.seconds_waited = 0.0
        self.start_clock()
        self.record(row)

    def evaluation_of_this_step(self) -> dict[str, float]:
        """The figures of the evaluation after the step that was done last; nothing if it was not evaluated."""
        figures = {}
        for row in self.rows:
            if kind_of(row) == "held_out" and row["step"] == self.progress.step:
                figures = {name: value for name, value in row.items() if name != "step"}
        return figures

    def initial_metrics(self) -> dict[str, float]:
        """The MLM loss before the first step, by its name in metrics.json, if it was measured."""
        for row in self.rows:
            if kind_of(row) == "held_out" and row["step"] == 0:
                return {INITIAL_LOSS: row["eval_mlm_loss"]}
        return {}

    def speed(self) -> dict[str, float]:
        """
        The `train_...` entries of metrics.json, over all rows of the run.

        Seconds, examples and real tokens a second, the shares of padding and of waiting, MFU, the number of skipped
        steps, and the largest `memory_mb` of a row.

        Raises:
            UserError: there is no row: the run has resumed from its last step, and its log is gone.
        """
        rows = [row for row in self.rows if kind_of(row) == "train"]
        if not rows:
            raise UserError(
                f"{self.path}: no row of training; put back the log of the run, or go on from an earlier checkpoint"
            )
        seconds = sum(row["seconds"] for row in rows)
        tokens = 0.0
        tokens_with_padding = 0.0
        for row in rows:
            tokens_of_row = row["tokens_per_second"] * row["seconds"]
            tokens += tokens_of_row
            tokens_with_padding += tokens_of_row / (1 - row["padding_share"])
        speed = {"train_seconds": seconds}
        speed[f"train_{self.unit}_per_second"] = sum(row[self.unit] for row in rows) / seconds
        speed["train_tokens_per_second"] = tokens / seconds
        speed["train_padding_share"] = 1 - tokens / tokens_with_padding
        speed["train_data_wait_share"] = sum(row["data_wait_share"] * row["seconds"] for row in rows) / seconds
        speed["train_mfu"] = sum(row["mfu"] * row["seconds"] for row in rows) / seconds
        speed["train_skipped_steps"] = sum(row.get("skipped_steps", 0) for row in rows)
        speed["train_memory_mb"] = max(row["memory_mb"] for row in rows)
        return speed

    def record(self, row: dict) -> None:
        """Send a row with its `step` to the log file, the trackers and the terminal."""
        on_main(self._append, row)
        self.rows.append(row)
        if "event" not in row:
            send_to_trackers(self.accelerator, row)  # processes but the main one have no trackers
        level = logging.WARNING if kind_of(row) == "skipped" else logging.INFO
        logger.log(level, line_of(row, self.max_steps))
        if self.callbacks:
            on_main(self._call_back, row)

    def _call_back(self, row):
        for callback in self.callbacks:
            callback(dict(row))

    def _mean_losses(self):
        """The entries of a row that are means over its steps; none if no step counts."""
        counted = [stats for stats in self.stats_of_row if not stats.skipped and stats.masked_tokens]
        if not counted:
            return {}
        mlm_loss = statistics.fmean(stats.mlm_loss for stats in counted)
        pair_loss = statistics.fmean(stats.pair_loss for stats in counted)
        means = {"loss": mlm_loss + pair_loss, "mlm_loss": mlm_loss}
        if self.task:
            means[f"{self.task.key}_loss"] = pair_loss
        means["grad_norm"] = statistics.fmean(stats.grad_norm for stats in counted)
        return means

    def _refuse_to_go_on(self):
        way_out = ""
        saved = checkpoints(self.path.parent)
        if saved:
            way_out = f", or lower the rate from --init_from {saved[-1]}"
        raise UserError(
            f"training has diverged: loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} steps in a row, up to "
            f"step {self.progress.step}; start again with a lower --learning_rate or --max_grad_norm{way_out}"
        )

    def _open(self, rows_of_checkpoint):
        """
        Begin the file, and return its rows: none in a new run. In a resumed run the file loses the rows after the step
        that the run goes on from, and a last line whose write was interrupted.
        """
        kept = []
        if self.progress.step and self.path.exists():
            with explained(f"{self.path}: damaged", "put it back, or take it away", *READ_ERRORS, RecursionError):
                kept = [row for row in self._rows_of_file() if row["step"] <= self.progress.step]
        if len(kept) < rows_of_checkpoint:
            logger.warning(f"{self.path}: rows of earlier steps are gone; the run's speed is that of the other rows")
        with writing(self.path, f", and {GO_ON}"), folders.atomic_file(self.path) as partial:
            partial.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
        return kept

    def _rows_of_file(self):
        """The rows of the file, checked. Raises `ValueError` if one is none that a run writes."""
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                rows.append(json.loads(line, parse_constant=_refuse_constant))
        for row in rows:
            check_row(row, self.unit)
        return rows

    def _append(self, row):
        """Write a row at the end of the file."""
        way_out = "training has diverged: lower learning_rate and start again"
        with explained(f"step {row['step']}: a figure is not finite", way_out, ValueError):
            line = json.dumps(row, allow_nan=False)
        with writing(self.path, f", and {GO_ON}"), self.path.open("a") as file:
            file.write(line + "\n")  # one write, when the file is closed


def _refuse_constant(constant):
    raise ValueError(f"{constant} is no number of JSON")


def used_memory(device: torch.device) -> float:
    """
    Memory of this process in megabytes (10^6 bytes).

    On an NVIDIA GPU, the most memory that was allocated on the GPU since the last call. On other devices, the resident
    memory of the process now; on Linux without shared pages and memory-mapped files, such as the tokens.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e6
    memory = psutil.Process().memory_info()
    return (memory.rss - getattr(memory, "shared", 0)) / 1e6


# ---------------------------------------------------------------------------------------------------------------------
# Trackers


def check_trackers(names: list[str], installed: Iterable[str]) -> list[str] | None:
    """
    The trackers that the option `report_to` asks for; None for `[]` and for `["none"]`.

    Raises:
        UserError: a tracker is unknown, or not installed; Accelerate and Transformers would ignore it.
    """
    if names == ["none"]:
        names = []
    for name in names:
        if name not in installed:
            there = ", ".join(installed) or "none is"
            known = f"; pip install {name}" if name in LOGGER_TYPE_TO_CLASS else ""
            raise UserError(
                f"report_to takes none, or trackers that are installed here ({there}), got {name!r}{known}"
            )
    return names or None


def start_trackers(accelerator: Accelerator, folder: Path, record: dict, start: int) -> None:
    """
    Start the trackers of `accelerator.log_with`, on the main process.

    TensorBoard writes to the folder `d2l-bert` in the accelerator's `project_dir`. When a run is resumed, the files of
    the earlier start remain, and TensorBoard drops their points after step `start`, as the resumed run reports these
    steps again. In other trackers a resumed run becomes a new run that begins at step `start` + 1.

    Args:
        folder: the run's folder; its name becomes the name of the run in trackers that have names for runs.
        record: the content of run_config.json.
        start: the number of steps done before.

    Raises:
        UserError: a tracker does not start; the message quotes the tracker's error.
    """
    name = folder.resolve().name
    arguments = {
        "tensorboard": {"purge_step": start + 1},
        "wandb": {"name": name, "dir": str(folder)},
        "trackio": {"name": name},
        "mlflow": {"run_name": name},
    }
    what = f"report_to {' '.join(map(str, accelerator.log_with))}: a tracker does not start"
    with explained(what, "fix the error, or leave the tracker out", Exception):
        options = {**record.get("architecture", {}), **record["run"]}  # some trackers take plain values alone
        plain = {name: value for name, value in options.items() if isinstance(value, (bool, int, float, str))}
        accelerator.init_trackers("d2l-bert", plain, arguments)


def send_to_trackers(accelerator: Accelerator, row: dict) -> None:
    """
    Send a row of the training log to the trackers, as `train/loss`, `eval/mlm_loss` and so on.

    If a tracker fails, a warning is logged and the run continues: the training log has every row.
    """
    group = {"train": "train", "held_out": "eval"}[kind_of(row)]
    values = {f"{group}/{name.removeprefix('eval_')}": value for name, value in row.items() if name != "step"}
    for tracker in accelerator.trackers:
        try:
            tracker.log(values, step=row["step"])
        except Exception as error:
            logger.warning(
                f"step {row['step']}: {tracker.name} did not take the metrics ({error!r:.300}); "
                f"training_log.jsonl has them"
            )


def training_arithmetic(config: D2lBertConfig, counts, pair_task: bool) -> float:
    """
    Floating-point operations that training needs; a multiplication and an addition count as two operations.

    Only matrix products for real tokens and for tokens to predict count. Work on padding or unused slots, recomputing
    to save memory, and the last block's work on tokens that no head reads do not count. So dividing by the device's
    peak gives the "model FLOPs utilization" (MFU) of PaLM (Chowdhery et al., 2022, appendix B). The backward pass has
    two matrix products for each product of the forward pass, one for the gradient of each factor.

    In the last block, the cost of attention is an estimate: every token of a sequence is assumed to be equally often
    one of those that a head reads.

    Args:
        counts: of the examples trained on, over any number of steps: `tokens`, `squared_lengths` (the sum of the
            squared lengths of the sequences), `masked_tokens` and `examples` (pairs, or sequences if there is no pair
            task).
        pair_task: whether the model has a pooler and a head for pairs.
    """
    hidden = config.hidden_size
    tokens = counts.tokens
    tokens_read = counts.masked_tokens + (counts.examples if pair_task else 0)  # by a head: masked tokens, and [CLS]
    # Numbers of tokens, over all blocks. In the last one only the tokens that a head reads have a query.
    keys = config.num_hidden_layers * tokens
    queries = (config.num_hidden_layers - 1) * tokens + tokens_read
    # Multiplications: of keys and values; of queries, attention's output and the feed-forward network; and
    # Q K^T and the probabilities times V, over all heads.
    products_of_keys = 2 * hidden**2 * keys
    products_of_queries = (2 * hidden**2 + 2 * hidden * config.intermediate_size) * queries
    attention = 2 * hidden * counts.squared_lengths * queries / max(1, tokens)
    mlm = (hidden**2 + hidden * config.vocab_size) * counts.masked_tokens
    pairs = (hidden**2 + 2 * hidden) * counts.examples if pair_task else 0
    return 3.0 * 2 * (products_of_keys + products_of_queries + attention + mlm + pairs)
