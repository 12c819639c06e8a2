"""What a person sees of a run: a bar or lines while it goes on, the log, trackers such as TensorBoard, the curves."""

import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from tqdm.auto import tqdm

from d2l_bert.errors import GO_ON, UserError, why_unwritable
from d2l_bert.training.pair_tasks import PairTask, pair_task, unit


def watched(
    items: Iterable, what: str, total: int | None = None, size: Callable[[object], int] | None = None
) -> Iterator:
    """Pass items on with a bar on a terminal; elsewhere say how many documents there were, and how long they took.

    Args:
        size: documents in an item, if it is not one.
    """
    start, count = time.monotonic(), 0
    bar = tqdm(total=total, desc=what, unit=" documents", leave=False, disable=not sys.stderr.isatty())
    with bar:
        for item in items:
            yield item
            done = size(item) if size else 1
            count += done
            bar.update(done)
    say(f"{what}: {count:,} documents in {time.monotonic() - start:.0f} s")


def say(line: str) -> None:
    """One line for whoever watches, without breaking a bar."""
    tqdm.write(line, file=sys.stderr)


class Progress:
    """The run's bar on a terminal, plain lines elsewhere: loss, tokens/s, time left."""

    def __init__(self, start: int, total: int, visible: bool):
        self.total, self.visible = total, visible
        self.on_terminal = visible and sys.stderr.isatty()
        self.bar = tqdm(
            total=total,
            initial=start,
            desc="training",
            unit="step",
            disable=not self.on_terminal,
            dynamic_ncols=True,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps, {remaining} left{postfix}",
        )

    def step(self) -> None:
        """One optimizer step is done."""
        self.bar.update()

    def show(self, row: dict) -> None:
        """Show a row of the log."""
        speed = f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}"
        loss = f"loss {row['loss']:.3f}" if "loss" in row else "no loss"
        skipped = f"skipped {row['skipped_steps']}" if "skipped_steps" in row else ""
        if self.on_terminal:
            self.bar.set_postfix_str(", ".join(filter(None, (loss, skipped, speed))))
        elif self.visible:
            task = pair_task(row)
            pair_loss = f", {task.short} {row[f'{task.key}_loss']:.3f}" if task else ""
            losses = f" (MLM {row['mlm_loss']:.3f}{pair_loss})" if "loss" in row else ""
            parts = (
                f"step {row['step']:>{len(str(self.total))}}/{self.total}",
                loss + losses,
                skipped,
                f"rate {row['learning_rate']:.2e}",
                speed,
                f"{_clock(row['seconds_left'])} left",
            )
            say("  ".join(filter(None, parts)))

    def show_event(self, row: dict) -> None:
        """Say what happened in a step."""
        if self.visible:
            say(row["reason"])

    def show_held_out(self, figures: dict) -> None:
        """Show what an evaluation found."""
        if self.visible:
            task = pair_task(figures)
            keys = ("mlm", task.key) if task else ("mlm",)
            losses = (
                f"{key.upper()} loss {figures[f'eval_{key}_loss']:.3f}, accuracy {figures[f'eval_{key}_accuracy']:.1%}"
                for key in keys
            )
            say(f"held out: {'; '.join(losses)}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.bar.close()


def _clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class StepFigures(NamedTuple):
    """
    What one optimizer step did, over all processes.

    Args:
        mlm_loss: nats a masked token.
        pair_loss: nats a pair; 0 without a task of pairs.
        grad_norm: of the gradient, before it was cut to `max_grad_norm`.
        masked_tokens: tokens to predict.
        examples: pairs, or sequences without a task of pairs.
        tokens: real tokens.
        padded_tokens: tokens computed, padding included.
        squared_lengths: the sum over the sequences of their length squared: attention's share of the arithmetic.
        skipped: 1 if the loss or the gradient was not finite and the step was left out, else 0.
    """

    mlm_loss: float
    pair_loss: float
    grad_norm: float
    masked_tokens: float
    examples: float
    tokens: float
    padded_tokens: float
    squared_lengths: float
    skipped: float


class Meter:
    """
    Figures of the steps since the last row, and the time that training proper took.

    Losses and the norm are means over the steps that were not skipped; time, tokens and arithmetic are those of all.
    `padding_share` is the share of padding in the tokens computed, `data_wait_share` that of the time in which the
    step waited for its batches, `mfu` the share of the peak that the arithmetic on real tokens comes to, `memory_mb`
    what `used_memory` says on this process, in megabytes, and `skipped_steps`, where there were some, their number.
    """

    def __init__(
        self,
        state: dict,
        task: PairTask | None,
        arithmetic: Callable[[StepFigures], float],
        peak: float,
        device: torch.device,
    ):
        """
        Go on from the totals in a checkpoint's state, or from nothing.

        Args:
            arithmetic: floating-point operations that a step needs (`training_arithmetic`).
            peak: operations a second of all processes together (the sum of their `matmul_peak`).
            device: where the model is.
        """
        self.task, self.unit = task, unit(task)
        self.arithmetic, self.peak, self.device = arithmetic, peak, device
        names = ("train_seconds", "train_wait_seconds", "train_tokens", "train_padded_tokens", f"train_{self.unit}")
        # The last is what the machines could have done in that time; a resumed run may be on others.
        names += ("train_skipped_steps", "train_arithmetic", "train_possible_arithmetic")
        self.totals = {name: state.get(name, 0.0) for name in (*names, "train_memory_mb")}
        used_memory(device)  # the first row's peak starts here
        self.resume_clock()
        self.steps, self.waited = [], 0.0

    def waiting(self, batches: Iterable) -> Iterator:
        """Pass batches on, and keep the time that they were waited for."""
        batches = iter(batches)
        while True:
            start = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.monotonic() - start
            yield batch

    def add(self, figures: StepFigures) -> None:
        """Take in one step."""
        self.steps.append(figures)

    def row(self, learning_rate: float, steps_left: int) -> dict[str, float]:
        """The figures of a row of the log, all finite; without losses if every step was skipped. The next row starts
        from here."""
        seconds = time.monotonic() - self.since
        tokens, padded_tokens = (
            sum(getattr(step, name) for step in self.steps) for name in ("tokens", "padded_tokens")
        )
        skipped = round(sum(step.skipped for step in self.steps))
        arithmetic, possible = sum(map(self.arithmetic, self.steps)), seconds * self.peak
        memory = used_memory(self.device)
        examples = sum(step.examples for step in self.steps)
        spent = (seconds, self.waited, tokens, padded_tokens, examples, skipped, arithmetic, possible)
        for name, value in zip(self.totals, spent, strict=False):
            self.totals[name] += value
        self.totals["train_memory_mb"] = max(self.totals["train_memory_mb"], memory)
        row = {
            **self._losses(),
            "learning_rate": learning_rate,
            "tokens_per_second": tokens / seconds,
            "padding_share": 1 - tokens / padded_tokens,
            "data_wait_share": self.waited / seconds,
            "seconds_left": steps_left * seconds / len(self.steps),
            "mfu": arithmetic / possible,
            "memory_mb": memory,
            **({"skipped_steps": skipped} if skipped else {}),
        }
        self.steps, self.waited = [], 0.0
        self.resume_clock()
        return row

    def _losses(self):
        taken = [step for step in self.steps if not step.skipped]
        if not taken:
            return {}
        mlm_loss, pair_loss, norm = (
            statistics.fmean(getattr(step, name) for step in taken) for name in ("mlm_loss", "pair_loss", "grad_norm")
        )
        pair_figure = {f"{self.task.key}_loss": pair_loss} if self.task else {}
        return {"loss": mlm_loss + pair_loss, "mlm_loss": mlm_loss, **pair_figure, "grad_norm": norm}

    def speed(self) -> dict[str, float]:
        """Over the whole run: seconds, pairs (or sequences) and real tokens a second, what was lost, the share of the
        peak, steps skipped, and the most memory of any row."""
        seconds = self.totals["train_seconds"]
        return {
            "train_seconds": seconds,
            f"train_{self.unit}_per_second": self.totals[f"train_{self.unit}"] / seconds,
            "train_tokens_per_second": self.totals["train_tokens"] / seconds,
            "train_padding_share": 1 - self.totals["train_tokens"] / self.totals["train_padded_tokens"],
            "train_data_wait_share": self.totals["train_wait_seconds"] / seconds,
            "train_mfu": self.totals["train_arithmetic"] / self.totals["train_possible_arithmetic"],
            "train_skipped_steps": round(self.totals["train_skipped_steps"]),
            "train_memory_mb": self.totals["train_memory_mb"],
        }

    def resume_clock(self) -> None:
        """Training goes on from here: what came before, an evaluation or a save, does not count."""
        self.since = time.monotonic()


def used_memory(device: torch.device) -> float:
    """
    Memory of this process in megabytes (10^6 bytes).

    On a GPU the most that was allocated there since the last call; elsewhere what the process itself holds now: its
    resident memory without the pages shared with others or with files, such as memory-mapped tokens, where the system
    tells them apart (Linux).
    """
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most / 1e6
    held = psutil.Process().memory_info()
    return (held.rss - getattr(held, "shared", 0)) / 1e6


class SpikeWatch:
    """
    Says when a step's loss stands far above those before it: the sign of a rate that is too high, or of broken text.

    The mean and the mean absolute deviation of the loss run along with it. In 600 steps of the recipe `tiny`, its
    change of length included, no loss stood more than 2.6 deviations above the mean; of normally distributed noise,
    ten deviations are eight standard deviations.
    """

    DECAY = 0.98  # a memory of some 50 steps
    QUIET_STEPS = 50  # for so long, at the start and after a spike, mean and deviation are not known well enough
    FAR = 10  # deviations

    def __init__(self, state: dict | None = None):
        """Go on from what `state` returned, or from nothing."""
        state = state or {"mean": None, "deviation": 0.0, "quiet": self.QUIET_STEPS}
        self.mean, self.deviation, self.quiet = state["mean"], state["deviation"], state["quiet"]

    def state(self) -> dict[str, float | None]:
        """What a checkpoint keeps, as JSON: with it a resumed run warns where one that was never stopped does."""
        return {"mean": self.mean, "deviation": self.deviation, "quiet": self.quiet}

    def rest(self) -> None:
        """Be quiet for a while: from here on losses are of another kind."""
        self.quiet = self.QUIET_STEPS

    def see(self, step: int, loss: float) -> str | None:
        """
        Take in a step's loss; returns a line about it if it stands out.

        A loss that is not finite is passed over: its step is skipped, and that is said elsewhere.
        """
        if not math.isfinite(loss):
            return None
        mean = loss if self.mean is None else self.mean
        distance = loss - mean
        spike = self.quiet == 0 and distance > self.FAR * self.deviation
        line = None
        if spike:
            line = (
                f"step {step}: the loss jumped to {loss:.3f} from about {mean:.3f}, where {self.deviation:.3f} up or "
                f"down is usual; if it does not come back, start again with a lower learning_rate"
            )
        self.quiet = self.QUIET_STEPS if spike else max(0, self.quiet - 1)
        self.mean = mean + (1 - self.DECAY) * distance
        self.deviation += (1 - self.DECAY) * (abs(distance) - self.deviation)
        return line


def kind_of(row: dict) -> str:
    """What a row of the log tells of its step: `train`, `held_out`, or the name of an event, such as `loss_spike`."""
    if "event" in row:
        return row["event"]
    return "held_out" if any(name.startswith("eval_") for name in row) else "train"


class TrainingLog:
    """
    `training_log.jsonl`: a row for every logged step, every evaluation and every event.

    It is only ever added to. A run that was resumed makes again what it had done since its checkpoint; what is in the
    log of that stays, and is not written twice.

    Raises:
        UserError: from `start_at` and `write`, if the file cannot be written; from `write`, for a figure that is not
            finite, which JSON cannot hold.
    """

    def __init__(self, path: Path):
        self.path, self.written = path, set()

    def start_at(self, step: int) -> None:
        """Begin a new log in the place of an earlier run's, or, after some steps, go on with the one that is there.

        A last line that was broken in the middle of a write is cut off.
        """
        with self._writing():
            if step == 0:
                partial = self.path.with_name(f".{self.path.name}.part")
                partial.write_bytes(b"")
                partial.replace(self.path)
            elif self.path.exists():
                os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        self.written = {(row["step"], kind_of(row)) for row in self.rows()}

    def write(self, row: dict) -> bool:
        """Append one row, unless there is one of its step and kind; returns whether there was none."""
        key = (row["step"], kind_of(row))
        if key in self.written:
            return False
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(
                    f"{name} is {value} at step {row['step']}: training has diverged; lower learning_rate and start "
                    f"again"
                )
        line = json.dumps(row, allow_nan=False) + "\n"
        with self._writing(), self.path.open("a") as file:
            file.write(line)  # a single write to the disk, on closing
        self.written.add(key)
        return True

    def rows(self) -> list[dict]:
        """All rows, as they were written; a line that was broken in the middle of a write is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path}: {why_unwritable(error, f', and {GO_ON}')}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Trackers

# What trackers call the project, and the folder of TensorBoard's files in the run's.
PROJECT = "d2l-bert"

# Where the package to install has another name, or not any version will do.
TRACKER_PACKAGES = {"comet_ml": "comet-ml", "aim": "'aim<4'"}


def check_trackers(names: list[str]) -> list[str] | None:
    """
    The trackers to report to, as `Accelerator(log_with=...)` takes them; None for `[]` and for `["none"]`.

    Raises:
        UserError: a name that Accelerate does not know, or a tracker that is not installed, which Accelerate would
            leave out without a word.
    """
    if names in ([], ["none"]):
        return None
    known = sorted(set(LoggerType.list()) - {"all"})
    for name in names:
        if name == "none":
            raise UserError("report_to: none stands alone; leave it out, or the others")
        if name not in known:
            raise UserError(f"report_to takes {', '.join(known)}, or none, got {name!r}")
        if LoggerType(name) not in get_available_trackers():
            raise UserError(
                f"report_to {name}: it is not installed; pip install {TRACKER_PACKAGES.get(name, name)}, or leave it "
                f"out"
            )
    return names


def start_trackers(accelerator: Accelerator, folder: Path, record: dict, start: int) -> None:
    """
    Start the trackers that the accelerator was made with, on the main process.

    TensorBoard's files lie in `d2l-bert` under the accelerator's `project_dir`; those of an earlier start stay, and
    TensorBoard drops their points from step `start` + 1 on, which are about to come again. In the other trackers every
    start is a run of its own, which goes on at its step.

    Args:
        folder: the run's; its name is the run's in the trackers that name their runs.
        record: what run_config.json holds.
        start: steps done before.

    Raises:
        UserError: a tracker does not start; the message has its own words.
    """
    name = folder.resolve().name
    arguments = {
        "tensorboard": {"purge_step": start + 1},
        "wandb": {"name": name, "dir": str(folder)},
        "trackio": {"name": name},
        "mlflow": {"run_name": name},
    }
    try:
        accelerator.init_trackers(PROJECT, flat(record), arguments)
    except Exception as error:
        names = ", ".join(map(str, accelerator.log_with))
        raise UserError(
            f"report_to {names}: does not start ({_one_line(error)}); mend that, or leave it out"
        ) from error


def flat(record: dict, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested numbers and words as one level, `run/learning_rate`; lists become words, and what is None is left out."""
    found = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        elif value is not None:
            whole = isinstance(value, (bool, int, float, str))
            found[f"{prefix}{name}"] = value if whole else " ".join(map(str, value))
    return found


def report(accelerator: Accelerator, row: dict) -> None:
    """
    Give a row of the log to the trackers, as `train/loss`, `eval/mlm_loss` and so on; events are not reported.

    A tracker that fails is said, and does not end the run: every row is in the log.
    """
    if "event" in row:
        return
    group = {"train": "train", "held_out": "eval"}[kind_of(row)]
    figures = {f"{group}/{name.removeprefix('eval_')}": value for name, value in row.items() if name != "step"}
    for tracker in accelerator.trackers:
        try:
            tracker.log(figures, step=row["step"])
        except Exception as error:
            say(f"step {row['step']}: {tracker.name} did not take the figures ({_one_line(error)}); the log has them")


def _one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# ---------------------------------------------------------------------------------------------------------------------
# Curves

STAGE_LABEL_POINTS = 7  # the size of the type in which changes of length or batch size are labelled


def plot_curves(rows: list[dict], path: Path) -> None:
    """
    Draw the losses, a panel each, and accuracy over the steps into a PNG.

    Steps left out are marked in red, and changes of length or batch size by a dashed line with a label above it.
    """
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: row["step"])  # after resuming with another logging_steps they may not be
    train = [row for row in rows if kind_of(row) == "train"]
    held_out = [row for row in rows if "eval_mlm_loss" in row]
    skipped = [row["step"] for row in train if "skipped_steps" in row]
    # The axis counts steps done: a stage begins when all those before its first one are.
    stages = {row["step"] - 1: _stage_label(row) for row in rows if kind_of(row) == "stage"}
    losses = [("mlm", "masked language model", "masked tokens")]
    if task := pair_task(name for row in rows for name in row):
        losses.append((task.key, task.name, task.name.removesuffix(" prediction")))
    figure = Figure(figsize=(11 / 3 * (len(losses) + 1), 4), layout="constrained")
    panels = figure.subplots(1, len(losses) + 1)
    *loss_panels, accuracies = panels
    for panel, (task_key, name, examples) in zip(loss_panels, losses, strict=True):
        key = f"{task_key}_loss"
        # A row without a loss breaks the line.
        panel.plot([r["step"] for r in train], [r.get(key, math.nan) for r in train], color="0.7", label="training")
        panel.plot([r["step"] for r in held_out], [r[f"eval_{key}"] for r in held_out], "o-", label="held out")
        if skipped:
            # At the foot of the panel: x counts steps, y goes from 0 to 1.
            panel.plot(
                skipped, [0.02] * len(skipped), "r^", transform=panel.get_xaxis_transform(), label="steps left out"
            )
        panel.set_title(f"{name}: loss (nats)", fontsize=10)
        right = [100 * r[f"eval_{task_key}_accuracy"] for r in held_out]
        accuracies.plot([r["step"] for r in held_out], right, "o-", label=examples)
    for panel in loss_panels[1:]:
        panel.axhline(0.6931, linestyle=":", color="0.5")  # ln 2: a coin does as well
    accuracies.set_title("held-out accuracy (%)", fontsize=10)
    accuracies.set_ylim(0, 100)
    for panel in panels:
        _mark_stages(panel, stages)
        panel.legend(facecolor="white", edgecolor="none")  # a stage's line does not run through its words
        panel.set_xlabel("optimizer step")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _stage_label(row):
    parts = []
    if row["length"] != row["length_before"]:
        parts.append(f"{row['length_before']} → {row['length']} tokens")
    if row["batch"] != row["batch_before"]:
        parts.append(f"batch {row['batch_before']} → {row['batch']}")
    return ", ".join(parts)


def _mark_stages(panel, stages):
    """A line at each step of `stages`, and its label between panel and title, in as many rows as keep them apart."""
    for step in stages:
        panel.axvline(step, color="0.4", linestyle="--", linewidth=0.8)
    first, last = panel.get_xlim()
    ends = []  # of the last label in each row, as a share of the panel's width
    for step, label in stages.items():
        # A character is some 0.6 of its size wide, a panel at least 3 inches. A label stays within the panel's width.
        width = 0.6 * STAGE_LABEL_POINTS * len(label) / 72 / 3
        centre = min(max((step - first) / (last - first), width / 2), 1 - width / 2)
        row = next((row for row, end in enumerate(ends) if end < centre - width / 2), len(ends))
        ends[row : row + 1] = [centre + width / 2]
        panel.annotate(
            label,
            (centre, 1),
            xycoords="axes fraction",
            xytext=(0, 2 + 1.3 * STAGE_LABEL_POINTS * row),
            textcoords="offset points",
            horizontalalignment="center",
            fontsize=STAGE_LABEL_POINTS,
            color="0.3",
        )
    panel.set_title(panel.get_title(), fontsize=10, pad=6 + 1.3 * STAGE_LABEL_POINTS * len(ends))
