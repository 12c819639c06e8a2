"""A step gives the same gradient however it is split: into micro-batches, over processes, across a resume.

    python -m benchmarks.one_step [--corpus PATH...]
    python -m benchmarks.one_step --labels [--repetitions 15] [--corpus PATH...]

The first command trains the recipe tiny for 20 steps of 64 pairs, in float32, at a learning rate of 1e-4, with a limit
on the gradient norm that every step exceeds. The step is split into micro-batches of 64, 16 and 1 pairs, over one
process and two; two runs are resumed after step 10 with another number of processes. Two results are compared with
those of the step in one piece: the gradient that the optimizer gets in the first step, and the parameters after the
last step. AdamW makes rounding errors larger: at this learning rate, correct runs may end 1e-5 apart.

For comparison, stock BERT trains under Transformers' Trainer with gradient accumulation, from the same weights, on the
same pairs and masks in the same order. Its first row has our loss and gradient norm, so the task is the same. Its
other rows are expected to differ: each micro-batch's loss is a mean of its own, and the sum of these is not divided.

The exit code is the sum of 1 if our splits differ, and 2 if stock BERT's agree.

`--labels` times one step of d2l's small BERT in bf16, on the same 512 pairs, all padded to 64 tokens. Three variants
take turns: with `masked_positions`, as in `d2l-bert pretrain`; with labels of every position in a plain loop; with
labels of every position under Transformers' Trainer and `PretrainingLoss`. All clip the gradient and use AdamW.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.mlm_head import heading, positive
from benchmarks.peers import whole_step


STEPS, BATCH, LENGTH, RATE, LONGEST_GRADIENT, SEED = 20, 64, 64, 1e-4, 0.1, 42
OPTIONS = (
    f"--max_steps={STEPS} --save_steps={STEPS // 2} --save_total_limit=9 --eval_steps={STEPS} --logging_steps=1 "
    f"--global_batch_size={BATCH} --max_seq_length={LENGTH} --length_schedule=none --max_documents=400 "
    f"--learning_rate={RATE} --warmup_ratio=0 --max_grad_norm={LONGEST_GRADIENT} --seed={SEED} --mixed_precision=no "
    "--hidden_dropout_prob=0 --attention_probs_dropout_prob=0 --dataloader_num_workers=0"
).split()
SPLITS = ((64, 1), (16, 1), (1, 1), (32, 2), (16, 2))  # (pairs in a micro-batch, processes); the first is one piece
GRADIENT_LIMIT, PARAMETER_LIMIT = 1e-5, 1e-4  # relative to the gradient's norm; largest absolute difference
CAPTURE = "D2L_BERT_BENCHMARK_GRADIENT"  # environment variable: the file for the first step's gradient


@dataclass
class Result:
    """Results of one way to split the run: from its first step, and the parameters after its last."""

    label: str
    loss: float
    norm: float  # of the gradient, before clipping
    gradient: torch.Tensor | None  # flat, after clipping; None for a resumed run, which does not take the first step
    parameters: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", nargs="+", default=["python-docs"], metavar="PATH")
    parser.add_argument("--labels", action="store_true", help="time steps with labels of every position")
    parser.add_argument("--repetitions", type=positive, default=15, help="with --labels: turns of each variant")
    arguments = parser.parse_args()
    corpus = arguments.corpus
    if arguments.labels:
        print(heading("cpu", "bf16"))
        time_labels(corpus, arguments.repetitions)
        return
    print(heading("cpu", "float32"))
    print(f"{STEPS} steps of {BATCH} pairs, rate {RATE:g}, gradients of norm {LONGEST_GRADIENT:g} at most\n")
    print(f"{'':>50} {'first step':>31} {'after the last':>15}")
    print(f"{'':>50} {'loss':>9} {'norm':>9} {'gradient':>11} {'parameters':>15}")
    with tempfile.TemporaryDirectory() as folder:
        agrees = same_step(ours(Path(folder), corpus))
        peer_agrees = same_step(peer(Path(folder), corpus))
    print(f"\nours: {'one step, however it is split' if agrees else 'NOT ONE STEP'}")
    print(f"the peer's: {'ONE STEP TOO' if peer_agrees else 'another step for each split, as expected'}")
    sys.exit((not agrees) + 2 * peer_agrees)


def same_step(results) -> bool:
    """Print the distance of each result from the first one; returns whether all are within the limits."""
    whole, agree = None, True
    for result in results:
        whole = whole or result
        parameters = float((result.parameters - whole.parameters).abs().max())
        agree &= parameters <= PARAMETER_LIMIT
        gradient = None
        if result.gradient is not None:
            gradient = float((result.gradient - whole.gradient).norm() / whole.gradient.norm())
            agree &= gradient <= GRADIENT_LIMIT
        shown = "" if gradient is None else f"{gradient:.1e}"
        print(
            f"{result.label:<50} {result.loss:>9.4f} {result.norm:>9.4f} {shown:>11} {parameters:>15.1e}",
            flush=True,
        )
    return agree


# ---------------------------------------------------------------------------------------------------------------------
# Ours


def ours(folder: Path, corpus: list[str]):
    """Our results for every split, then for runs resumed with another number of processes."""
    for size, processes in SPLITS:
        label = f"d2l-bert, micro-batches of {size}, {_processes(processes)}"
        yield train(folder / f"{size}x{processes}", corpus, size, processes, label)
    for (size, processes), then in (((32, 2), 1), ((64, 1), 2)):
        label = f"d2l-bert, {_processes(processes)}, {then} after step {STEPS // 2}"
        start = folder / f"{size}x{processes}" / f"checkpoint-{STEPS // 2}"
        yield train(folder / f"then-{then}", corpus, BATCH // then, then, label, start)


def train(output: Path, corpus, size, processes, label, start: Path | None = None) -> Result:
    """Train with the command, in one process or several."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "benchmarks.one_step", "pretrain", "--corpus", *corpus]
    command += [f"--output_dir={output}", f"--micro_batch_size={size}", *OPTIONS]
    command += [f"--resume_from_checkpoint={start}"] if start else []
    captured = output.with_suffix(".gradient")
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", CAPTURE: str(captured)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    log = output if start is None else start.parent
    first = json.loads((log / "training_log.jsonl").read_text().splitlines()[0])
    gradient = load_file(captured)["gradient"] if start is None else None
    parameters = load_file(output / "model.safetensors")
    flat = torch.cat([parameters[name].flatten() for name in sorted(parameters)])
    return Result(label, first["loss"], first["grad_norm"], gradient, flat)


def run_command() -> int:
    """Run the command in this process, and write the gradient of its first step to a file."""
    from d2l_bert.cli import main as command_line

    captured = capture_first_gradient()
    code = command_line(sys.argv[1:])
    if os.environ.get("RANK", "0") == "0" and captured:
        save_file({"gradient": captured[0]}, os.environ[CAPTURE])
    return code


def capture_first_gradient() -> list[torch.Tensor]:
    """A list that will hold the gradient, flat and clipped, with which an optimizer takes its next step."""
    captured = []

    def keep(optimizer, *_):
        if not captured:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            captured.append(torch.cat([parameter.grad.flatten().clone() for parameter in parameters]))
            handle.remove()

    handle = register_optimizer_step_pre_hook(keep)
    return captured


def _processes(count):
    return "1 process" if count == 1 else f"{count} processes"


# ---------------------------------------------------------------------------------------------------------------------
# Stock BERT


def peer(folder: Path, corpus: list[str]):
    """Stock BERT's results under Trainer, with micro-batches of each size."""
    model, pairs = stock_bert(corpus)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for size in (64, 16, 1):
        model.load_state_dict(start)
        yield train_stock(model, pairs, size, folder / f"trainer-{size}")


def stock_bert(corpus):
    """A stock BERT with our initial weights, and the pairs of our run, in its order, in stock BERT's format."""
    from d2l_bert.modeling.bert_checkpoints import to_bert
    from d2l_bert.tokenization.prepare import prepare
    from d2l_bert.training import batching
    from d2l_bert.training.initialize import make_model

    architecture, run = recipe_with_options(corpus)
    text = prepare(run)
    architecture.vocab_size = len(text.tokenizer)
    torch.manual_seed(SEED)
    model = to_bert(make_model(architecture, run, text.tokenizer, None))
    steps = batching.make_steps(run, text, STEPS)
    pairs = [pair for step in range(STEPS) for batch in steps[step] for pair in stock_pairs(batch)]
    return model, pairs


def recipe_with_options(corpus):
    """
    The architecture and the run of the recipe tiny with the `OPTIONS` that change the data or the initial weights.
    """
    from d2l_bert import RECIPES

    architecture, run = RECIPES["tiny"]()
    given = dict(option.removeprefix("--").split("=") for option in OPTIONS)
    whole = {field.name: int(given[field.name]) for field in fields(run) if given.get(field.name, "").isdecimal()}
    return architecture, replace(run, corpus=corpus, length_schedule=[], micro_batch_size=BATCH, **whole)


def stock_pairs(batch):
    """The pairs of a micro-batch, each padded; the labels (T,) are -100 where no token is predicted."""
    width = batch["input_ids"].shape[1]
    labels = torch.full_like(batch["input_ids"], -100)
    for row, column in (batch["labels"] != -100).nonzero().tolist():
        labels[row, batch["masked_positions"][row, column]] = batch["labels"][row, column]
    tokens = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")} | {"labels": labels}
    for row in range(len(labels)):
        pair = {
            name: torch.nn.functional.pad(tensor[row], (0, LENGTH - width), value=-100 if name == "labels" else 0)
            for name, tensor in tokens.items()
        }
        yield pair | {"next_sentence_label": batch["next_sentence_label"][row]}


def train_stock(model, pairs, size, output) -> Result:
    """Train a stock BERT with our options, in micro-batches of one size."""
    arguments = transformers.TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=BATCH // size,
        train_sampling_strategy="sequential",
        max_steps=STEPS,
        learning_rate=RATE,
        weight_decay=0.01,
        adam_beta2=0.98,
        adam_epsilon=1e-6,
        max_grad_norm=LONGEST_GRADIENT,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    captured = capture_first_gradient()
    trainer = transformers.Trainer(model, arguments, train_dataset=pairs)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    first = trainer.state.log_history[0]
    parameters = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    label = f"BertForPreTraining under Trainer, {size} x {BATCH // size}"
    return Result(label, float(first["loss"]), float(first["grad_norm"]), captured[0], parameters)


# ---------------------------------------------------------------------------------------------------------------------
# Labels of every position


def time_labels(corpus: list[str], repetitions: int):
    """Print the time of a step with labels of every position, relative to one with `masked_positions`."""
    from d2l_bert import RECIPES, PretrainingLoss
    from d2l_bert.tokenization.prepare import prepare
    from d2l_bert.training import batching, distributed
    from d2l_bert.training.initialize import make_model
    from d2l_bert.training.learner import train_step
    from d2l_bert.training.optim import make_optimizers

    architecture, run = RECIPES["d2l"]()
    run = replace(run, corpus=corpus, vocab_size=architecture.vocab_size, attn_implementation="eager")
    step = batching.make_steps(run, prepare(run), 1, batching.make_sharding(architecture, run))[0]
    ours = whole_step(step, run.max_seq_length, architecture.pad_token_id)
    plain = labels_of_every_position(ours)
    models = [make_model(architecture, run, None, None).train()]
    for _ in range(2):
        models.append(copy.deepcopy(models[0]))
        models[-1].set_attn_implementation("sdpa")  # the attention that `from_pretrained` chooses
    betas = (run.adam_beta1, run.adam_beta2)
    optimizers = [
        make_optimizers(model, "adamw", run.learning_rate, run.weight_decay, betas, run.adam_epsilon)[0]
        for model in models[:2]
    ]
    accelerator = distributed.make_accelerator("bf16")

    def masked_positions():
        train_step(accelerator, models[0], optimizers[:1], [ours], 1e-4, run.max_grad_norm)

    def every_position():
        with torch.autocast("cpu", torch.bfloat16):
            loss = models[1](**plain).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(models[1].parameters(), run.max_grad_norm)
        optimizers[1].step()
        optimizers[1].zero_grad()

    names = ("masked_positions", "labels of every position", "under Trainer")
    seconds = {name: [] for name in names}

    class Turns(transformers.TrainerCallback):
        """
        Times Trainer's steps from their first micro-batch on; after each, the two other variants take their turns.
        """

        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds["under Trainer"].append(time.perf_counter() - self.start)
            for name, function in zip(names, (masked_positions, every_position), strict=False):
                start = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - start)

    pairs = [{name: tensor[row] for name, tensor in plain.items()} for row in range(len(plain["labels"]))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=len(pairs),
            train_sampling_strategy="sequential",
            max_steps=repetitions + 2,  # the first two steps allocate memory, and are left out
            learning_rate=1e-4,
            max_grad_norm=run.max_grad_norm,
            bf16=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(models[2], arguments, train_dataset=pairs, callbacks=[Turns()])
        trainer.compute_loss_func = PretrainingLoss(trainer)
        trainer.train()
    our_seconds = seconds[names[0]][2:]
    for name, taken in seconds.items():
        ratios = [one / other for one, other in zip(taken[2:], our_seconds, strict=True)]
        print(
            f"  {name:26} {1000 * statistics.median(taken[2:]):7.0f} ms, {statistics.median(ratios):.2f} times the "
            f"first ({min(ratios):.2f} to {max(ratios):.2f}), turn by turn"
        )


def labels_of_every_position(batch):
    """A batch with labels (B, T), made of one with `masked_positions` and labels (B, P)."""
    batch = dict(batch)
    positions, given = batch.pop("masked_positions"), batch["labels"]
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    rows, slots = (given != -100).nonzero(as_tuple=True)
    batch["labels"][rows, positions[rows, slots]] = given[rows, slots]
    return batch


if __name__ == "__main__":
    sys.exit(run_command() if CAPTURE in os.environ else main())
