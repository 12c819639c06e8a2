"""What a person sees of a run: lines or a bar while it goes on, the log, and the curves."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm.auto import tqdm

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
        if self.on_terminal:
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s")
        elif self.visible:
            task = pair_task(row)
            pair_loss = f", {task.short} {row[f'{task.key}_loss']:.3f}" if task else ""
            say(
                f"step {row['step']:>{len(str(self.total))}}/{self.total}  loss {row['loss']:.3f} "
                f"(MLM {row['mlm_loss']:.3f}{pair_loss})  rate {row['learning_rate']:.2e}  "
                f"{row['tokens_per_second']:,.0f} tokens/s  {_clock(row['seconds_left'])} left"
            )

    def show_event(self, row: dict) -> None:
        """Say what happened in a step."""
        if self.visible:
            say(f"step {row['step']}: {row['event']}: {row['reason']}")

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
    """Provisional."""

    mlm_loss: float
    pair_loss: float
    grad_norm: float
    masked_tokens: float
    examples: float
    tokens: float
    padded_tokens: float
    squared_lengths: float
    skipped: float = 0.0


class Meter:
    """Averages of what `train_step` returns since the last row, and the time that training proper took.

    `padding_share` is the share of padding in the tokens computed, `data_wait_share` that of the time in which the
    step waited for its batches.
    """

    def __init__(self, state: dict, task: PairTask | None):
        """Go on from the totals in a checkpoint's state, or from nothing."""
        self.task, self.unit = task, unit(task)
        names = ("train_seconds", "train_wait_seconds", "train_tokens", "train_padded_tokens", f"train_{self.unit}")
        self.totals = {name: state.get(name, 0.0) for name in names}
        self.resume_clock()
        self.values, self.waited = [], 0.0

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

    def add(self, values: torch.Tensor) -> None:
        """Take in one step."""
        v = values
        if not v.skipped:
            self.values.append(
                torch.tensor([v.mlm_loss, v.pair_loss, v.grad_norm, v.tokens, v.padded_tokens, v.examples])
            )

    def row(self, learning_rate: float, steps_left: int) -> dict[str, float]:
        """The figures of a row of the log; the next row starts from here."""
        values = torch.stack(self.values).double().cpu()
        seconds = time.monotonic() - self.since
        mlm_loss, pair_loss, norm = values[:, :3].mean(0).tolist()
        tokens, padded_tokens, examples = values[:, 3:].sum(0).tolist()
        spent = (seconds, self.waited, tokens, padded_tokens, examples)
        for name, value in zip(self.totals, spent, strict=True):
            self.totals[name] += value
        row = {
            "loss": mlm_loss + pair_loss,
            "mlm_loss": mlm_loss,
            **({f"{self.task.key}_loss": pair_loss} if self.task else {}),
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "tokens_per_second": tokens / seconds,
            "padding_share": 1 - tokens / padded_tokens,
            "data_wait_share": self.waited / seconds,
            "seconds_left": steps_left * seconds / len(values),
        }
        self.values, self.waited = [], 0.0
        self.resume_clock()
        return row

    def speed(self) -> dict[str, float]:
        """Seconds, pairs (or sequences) and real tokens a second, and what was lost, over the whole run."""
        seconds = self.totals["train_seconds"]
        return {
            "train_seconds": seconds,
            f"train_{self.unit}_per_second": self.totals[f"train_{self.unit}"] / seconds,
            "train_tokens_per_second": self.totals["train_tokens"] / seconds,
            "train_padding_share": 1 - self.totals["train_tokens"] / self.totals["train_padded_tokens"],
            "train_data_wait_share": self.totals["train_wait_seconds"] / seconds,
        }

    def resume_clock(self) -> None:
        """Training goes on from here: what came before, an evaluation or a save, does not count."""
        self.since = time.monotonic()


class TrainingLog:
    """`training_log.jsonl`: a row for every logged step and every evaluation, append-only."""

    def __init__(self, path: Path):
        self.path = path

    def start_at(self, step: int) -> None:
        """Keep the rows up to `step`: those after it are about to be made again."""
        rows = [row for row in self.rows() if row["step"] <= step]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(self, row: dict) -> None:
        """Append one row."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return True

    def rows(self) -> list[dict]:
        """All rows; a last line that was cut off in the middle is left out."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows


def plot_curves(rows: list[dict], path: Path) -> None:
    """Draw the losses, a panel each, and accuracy over the steps into a PNG."""
    from matplotlib.figure import Figure

    train = [row for row in rows if "loss" in row]
    held_out = [row for row in rows if "eval_mlm_loss" in row]
    losses = [("mlm", "masked language model", "masked tokens")]
    if task := pair_task(name for row in rows for name in row):
        losses.append((task.key, task.name, task.name.removesuffix(" prediction")))
    figure = Figure(figsize=(11 / 3 * (len(losses) + 1), 4), layout="constrained")
    panels = figure.subplots(1, len(losses) + 1)
    *loss_panels, accuracies = panels
    for panel, (task_key, name, examples) in zip(loss_panels, losses, strict=True):
        key = f"{task_key}_loss"
        panel.plot([r["step"] for r in train], [r[key] for r in train], color="0.7", label="training")
        panel.plot([r["step"] for r in held_out], [r[f"eval_{key}"] for r in held_out], "o-", label="held out")
        panel.set_title(f"{name}: loss (nats)", fontsize=10)
        panel.legend(frameon=False)
        right = [100 * r[f"eval_{task_key}_accuracy"] for r in held_out]
        accuracies.plot([r["step"] for r in held_out], right, "o-", label=examples)
    for panel in loss_panels[1:]:
        panel.axhline(0.6931, linestyle=":", color="0.5")  # ln 2: a coin does as well
    accuracies.set_title("held-out accuracy (%)", fontsize=10)
    accuracies.set_ylim(0, 100)
    accuracies.legend(frameon=False)
    for panel in panels:
        panel.set_xlabel("optimizer step")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
