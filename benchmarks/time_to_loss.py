"""
Minutes from token ids to a held-out MLM loss: ours, beside stock BERT of the same shape under Transformers' Trainer.

    python -m benchmarks.time_to_loss ours --books DIR --steps 150 300 600 1200 --record found.jsonl
    python -m benchmarks.time_to_loss trainer --books DIR --rows grouped blocks lines --rate 1e-3 2e-3 --batch 32 64 \
        --steps 2000 --record found.jsonl
    python -m benchmarks.time_to_loss steps --books DIR --rows grouped blocks lines --batch 32 64 --record found.jsonl
    python -m benchmarks.time_to_loss show --record found.jsonl --targets 4.5 4.0 3.75 --picture time_to_loss.png

DIR/train and DIR/valid are folders of text files. They are tokenized before the first run, which takes minutes of no
contestant. Both read the same token ids, and are measured on the same held-out sentences with the same masks. Each run
is a whole one, whose rate has fallen to 0 when its loss is taken: the middle of a long schedule is not a result. A
contestant reaches a loss in the minutes of its shortest run that has it. Runs are added to the record; those in it are
not made again, and a run of `trainer` that was cut goes on from its checkpoint.

`ours` is the recipe `tiny-sentences`; its time is that of the whole run, with the start from bigrams and all
evaluations, so the machine must be quiet. `trainer` is `BertForMaskedLM` with `DataCollatorForLanguageModeling` (15 %
of the tokens), as Transformers' example `run_mlm.py` trains, with AdamW and a linear decay. Dropout is 0: the text is
not repeated. Its rows are made in three ways:

    blocks     all sentences one after the other, cut into blocks of 128 tokens (run_mlm's default)
    lines      a sentence a row, padded to 128 tokens (--line_by_line --pad_to_max_length)
    grouped    a sentence a row, in batches of similar lengths, padded to the longest

The minutes of `trainer` are its steps times the mean seconds of a step, which `steps` measures on a quiet machine. So
its runs, which take hours, may have other work beside them. Preparing rows, evaluating and saving count nothing. Runs
of `lines` pad a batch to its longest row, which changes no gradient; `steps` pads to 128.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib import figure
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from d2l_bert import RECIPES, pretrain
from d2l_bert.training.held_out import HeldOutPairs
from d2l_bert.training.initialize import prepare_with_tokenizer


RECIPE, LENGTH = "tiny-sentences", 128
ROWS = ("blocks", "lines", "grouped")

# `grouped` sorts its rows within 50 batches: these steps are four such sets.
UNTIMED_STEPS, TIMED_STEPS = 20, 200


def options_of(books: Path):
    """The architecture and the options of the recipe on these books, and their text."""
    architecture, run = RECIPES[RECIPE]()
    texts = {"corpus": [str(books / "train")], "validation_corpus": [str(books / "valid")], "language": "en"}
    run = dataclasses.replace(run, torch_compile=False, **texts)
    prepared = prepare_with_tokenizer(run)
    return architecture, dataclasses.replace(run, **prepared.token_options), prepared


# ---------------------------------------------------------------------------------------------------------------------
# Contestants


def run_ours(books: Path, steps: int, seed: int, **changes) -> dict:
    """The minutes and the loss of one run."""
    architecture, run, _ = options_of(books)
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_steps": steps, "seed": seed, "eval_steps": steps, "save_steps": steps, **changes}
        run = dataclasses.replace(run, output_dir=f"{folder}/model", **options)
        begun = time.monotonic()
        pretrain(architecture, run)
        seconds = time.monotonic() - begun
        metrics = json.loads(Path(folder, "model", "metrics.json").read_text())
    return {"minutes": seconds / 60, "loss": metrics["eval_mlm_loss"]}


def rows_of(text, kind: str, are_padded: bool) -> list[dict]:
    """
    The training rows: sentences in [CLS] and [SEP], or blocks of them; with what may not be masked, as run_mlm.

    Args:
        are_padded: a row of `lines` has 128 tokens.
    """
    corpus, tokenizer = text.train, text.tokenizer
    cls, sep, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    starts, most = np.asarray(corpus.sentence_starts), LENGTH - 2
    sentences = (
        [cls, *corpus.ids[first : min(first + most, end)].tolist(), sep]
        for begin, end in itertools.pairwise(starts.tolist())
        for first in range(begin, end, most)
    )
    if kind == "blocks":
        ids = np.fromiter(itertools.chain.from_iterable(sentences), dtype=np.int64)
        sentences = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH).tolist()
    rows = []
    for sentence in sentences:
        if kind == "lines" and are_padded:
            sentence = sentence + [pad] * (LENGTH - len(sentence))
        row = np.array(sentence, dtype=np.int32)
        special = np.isin(row, (cls, sep, pad)).astype(np.int8)
        rows.append({"input_ids": row, "attention_mask": (row != pad).astype(np.int8), "special_tokens_mask": special})
    return rows


class StepTimes(TrainerCallback):
    """The time at which each step ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        self.ends.append(time.monotonic())


def train_stock_bert(
    books: Path, folder: Path, kind: str, rate: float, batch: int, steps: int, seed: int, in_bf16: bool, is_timed: bool
):
    """
    Train stock BERT under Trainer, from the checkpoint in the folder if one is there.

    Returns:
        The model, the text and the options to measure it, and `StepTimes`.
    """
    architecture, run, prepared = options_of(books)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(prepared.tokenizer),
        hidden_size=architecture.hidden_size,
        num_hidden_layers=architecture.num_hidden_layers,
        num_attention_heads=architecture.num_attention_heads,
        intermediate_size=architecture.intermediate_size,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=prepared.tokenizer.pad_token_id,
    )
    model, times = BertForMaskedLM(config), StepTimes()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=rate,
        warmup_steps=round(0.05 * steps),
        weight_decay=0.01,
        bf16=in_bf16,
        use_cpu=True,
        seed=seed,
        train_sampling_strategy="group_by_length" if kind == "grouped" else "random",
        save_steps=1000,
        save_total_limit=1,
        report_to="none",
        logging_steps=500,
        disable_tqdm=True,
    )
    collator = DataCollatorForLanguageModeling(prepared.tokenizer, mlm_probability=0.15)
    rows = rows_of(prepared, kind, are_padded=is_timed)
    trainer = Trainer(model, arguments, data_collator=collator, train_dataset=rows, callbacks=[times])
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return model, prepared, run, times


def run_trainer(books: Path, folder: Path, **settings) -> dict:
    """The loss of one run."""
    name = "-".join(str(value) for value in settings.values())
    model, prepared, run, _ = train_stock_bert(books, folder / name, is_timed=False, **settings)
    shutil.rmtree(folder / name, ignore_errors=True)
    return {"loss": held_out_loss(model, prepared, run)}


def time_steps(books: Path, **settings) -> dict:
    """The mean seconds of a step."""
    settings |= {"rate": 1e-3, "steps": UNTIMED_STEPS + TIMED_STEPS, "seed": 1}
    with tempfile.TemporaryDirectory() as folder:
        ends = train_stock_bert(books, Path(folder), is_timed=True, **settings)[3].ends
    return {"seconds_per_step": (ends[-1] - ends[UNTIMED_STEPS - 1]) / TIMED_STEPS}


@torch.no_grad()
def held_out_loss(model, text, run) -> float:
    """The MLM loss of stock BERT on the sentences and masks of our evaluations."""
    model.eval()
    loss, count = 0.0, 0
    for batch in HeldOutPairs(text.held_out, text.tokenizer, run, run.most_tokens(), "held out"):
        names = ("input_ids", "token_type_ids", "attention_mask")
        scores = model(**{name: batch[name] for name in names}).logits
        scores = scores.gather(1, batch["masked_positions"][..., None].expand(-1, -1, scores.shape[2]))
        loss += float(F.cross_entropy(scores.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum"))
        count += int((batch["labels"] != -100).sum())
    return loss / count


# ---------------------------------------------------------------------------------------------------------------------
# The record


def known_runs(record: Path) -> list[dict]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def make(record: Path, contestant: str, settings: dict, function, books: Path) -> None:
    """Make a run unless the record has it, and add it."""
    key = {"contestant": contestant, **settings}
    if any(key.items() <= known.items() for known in known_runs(record)):
        return
    found = function(books, **settings)
    with record.open("a") as file:
        file.write(json.dumps({**key, **found}) + "\n")
    print(contestant, *(f"{name} {value}" for name, value in settings.items()), found, flush=True)


def add_minutes(runs: list[dict]) -> list[dict]:
    """The runs with a loss, each with its minutes; runs of Trainer only if a step of theirs has been timed."""
    seconds = {}
    for each in runs:
        if each["contestant"] == "steps":
            seconds[each["kind"], each["batch"], each["in_bf16"]] = each["seconds_per_step"]
    found = []
    for each in runs:
        if each["contestant"] == "ours":
            found.append(each)
        elif each["contestant"] == "trainer" and (each["kind"], each["batch"], each["in_bf16"]) in seconds:
            minutes = each["steps"] * seconds[each["kind"], each["batch"], each["in_bf16"]] / 60
            found.append({**each, "minutes": minutes})
    return found


def fronts(runs: list[dict]) -> dict[str, list[dict]]:
    """For each contestant, and each way of making rows, the runs that no shorter run has a lower loss than."""
    by_name = {}
    for each in sorted(add_minutes(runs), key=lambda one: one["minutes"]):
        name = "d2l-bert" if each["contestant"] == "ours" else f"Trainer, {each['kind']}"
        front = by_name.setdefault(name, [])
        if not front or each["loss"] < front[-1]["loss"]:
            front.append(each)
    return by_name


def show(runs: list[dict], targets: list[float], picture: Path | None) -> None:
    by_name = fronts(runs)
    print("| | " + " | ".join(f"{target:g} nats" for target in targets) + " |")
    print("|---|" + "---|" * len(targets))
    ours = {}
    for name, front in sorted(by_name.items(), key=lambda item: item[0] != "d2l-bert"):
        cells = []
        for target in targets:
            first = next((each for each in front if each["loss"] <= target), None)
            if name == "d2l-bert":
                ours[target] = first
            ratio = f" ({first['minutes'] / ours[target]['minutes']:.0f}x)" if first and ours.get(target) else ""
            cells.append(f"{first['minutes']:.1f} min{ratio}" if first else "not reached")
        print(f"| {name} | {' | '.join(cells)} |")
    if picture:
        drawing = figure.Figure(figsize=(6, 4), layout="constrained")
        panel = drawing.subplots()
        for name, front in by_name.items():
            panel.plot([each["minutes"] for each in front], [each["loss"] for each in front], "o-", ms=4, label=name)
        panel.set(xscale="log", xlabel="minutes of two cores", ylabel="held-out MLM loss, nats")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
        drawing.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n")[0])
    parser.add_argument("contestant", choices=("ours", "trainer", "steps", "show"))
    parser.add_argument("--books", type=Path, metavar="DIR")
    parser.add_argument("--record", type=Path, required=True, help="a JSONL file of all runs")
    parser.add_argument("--steps", type=int, nargs="+", default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attention_init", default="bigrams", help="of ours")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--rate", type=float, nargs="+", default=[1e-3])
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="of Trainer")
    parser.add_argument("--targets", type=float, nargs="+", default=[4.5, 4.0, 3.75])
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    if given.contestant == "ours":
        for steps in given.steps:
            settings = {"steps": steps, "seed": given.seed, "attention_init": given.attention_init}
            make(given.record, "ours", settings, run_ours, given.books)
    elif given.contestant == "trainer":
        for kind, rate, batch, steps in itertools.product(given.rows, given.rate, given.batch, given.steps):
            settings = {"kind": kind, "rate": rate, "batch": batch, "steps": steps, "seed": given.seed}
            run = functools.partial(run_trainer, folder=given.record.with_suffix(".runs"))
            make(given.record, "trainer", {**settings, "in_bf16": given.bf16}, run, given.books)
    elif given.contestant == "steps":
        for kind, batch in itertools.product(given.rows, given.batch):
            settings = {"kind": kind, "batch": batch, "in_bf16": given.bf16}
            make(given.record, "steps", settings, time_steps, given.books)
    else:
        show(known_runs(given.record), given.targets, given.picture)


if __name__ == "__main__":
    main()
