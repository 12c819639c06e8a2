"""What a person sees of a run: a bar or lines while it goes on, the log, and trackers such as TensorBoard."""

import contextlib
import json
import logging
import math
import os
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from tqdm.auto import tqdm

from d2l_bert.errors import GO_ON, UserError, why_unwritable
from d2l_bert.pair_tasks import pair_task


logger = logging.getLogger(__name__)


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
            logger.info("  ".join(filter(None, parts)))

    def show_event(self, row: dict) -> None:
        """Say what happened in a step."""
        if self.visible:
            logger.log(logging.INFO if row["event"] == "stage" else logging.WARNING, row["reason"])

    def show_held_out(self, figures: dict) -> None:
        """Show what an evaluation found."""
        if self.visible:
            task = pair_task(figures)
            keys = ("mlm", task.key) if task else ("mlm",)
            losses = (
                f"{key.upper()} loss {figures[f'eval_{key}_loss']:.3f}, accuracy {figures[f'eval_{key}_accuracy']:.1%}"
                for key in keys
            )
            logger.info(f"held out: {'; '.join(losses)}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.bar.close()


def _clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


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


def send_to_trackers(accelerator: Accelerator, row: dict) -> None:
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
            logger.warning(
                f"step {row['step']}: {tracker.name} did not take the figures ({_one_line(error)}); the log has them"
            )


def _one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
