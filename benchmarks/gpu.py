"""A run on a GPU: is it right, how fast is it beside stock BERT, where does the time go, does it resume.

    python -m benchmarks.gpu [--corpus PATH...] [--only NAME...] [--budget 560] [--dry]

Prints a line of JSON for each result, and a table at the end. The steps go in the order of their value; each is a
process of its own with a time limit, so that a crash or a hang leaves the others alone. Those that no longer fit into
`--budget` seconds are skipped, and say so. `--only` takes the beginnings of names. `--dry` runs all steps on the CPU
with tiny sizes, to see that they work.

    environment   the machine: versions, and its speed in matrix products and copies
    reference     30 steps of the recipe tiny in float32 on the CPU, with padded and with packed rows
    losses        the same steps on the GPU, by precision, layout, compiled or not; how far their losses are from those
                  of the CPU
    speed         BERT-base on pairs of 128 or 512 tokens: ours padded, packed and without padding, and stock BERT
    profile       the same, with the kernels that take most time, and the share of a step in which none runs
    resume        a run that is killed and goes on has the losses of one that was not
    launched      torchrun with one process: DDP, FSDP2, and FSDP2 with Muon
"""

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch

from benchmarks.peers import CONTESTANTS, ContestantProcess, Ours
from benchmarks.turns import BASE, Task, heading, positive
from d2l_bert import RECIPES, D2lBertConfig
from d2l_bert.__main__ import main as d2l_bert
from d2l_bert.training.data.unpadded import VARLEN, without_padding
from d2l_bert.training.devices import MATMUL_DTYPES, default_precision, matmul_peak, with_defaults


# Dense products in bf16, on T4 and V100 in fp16, in operations a second.
NOMINAL = {
    "T4": 65e12,
    "L4": 121e12,
    "V100": 125e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}

COMPILED = "bf16-padded-compiled bf16-packed-compiled bf16-packed-compiled-varlen"
EAGER = "fp32-padded fp32-packed bf16-padded bf16-packed fp16-padded"

# Name: seconds at most, and the arguments of the function that the name's first word names. In the order of value.
STEPS = {
    "environment": (60, {}),
    "reference": (150, {"variants": "fp32-padded fp32-packed"}),
    "losses-eager": (120, {"variants": EAGER}),
    "losses-compiled": (150, {"variants": COMPILED}),
    "speed-128-padded": (100, {"length": 128}),
    "speed-128-varlen": (100, {"length": 128, "kind": "varlen"}),
    "speed-128-stock": (100, {"length": 128, "kind": "stock"}),
    "profile-128-padded": (90, {"length": 128}),
    "resume": (100, {}),
    "speed-512-padded": (100, {"length": 512}),
    "speed-512-packed": (100, {"length": 512, "packing": True}),
    "speed-512-varlen": (100, {"length": 512, "kind": "varlen"}),
    "speed-512-stock": (100, {"length": 512, "kind": "stock"}),
    "profile-512-varlen": (90, {"length": 512, "kind": "varlen"}),
    "launched": (150, {}),
    "speed-128-packed": (100, {"length": 128, "packing": True}),
}

# Options of all runs of the command; `main` adds the corpus.
RUN = (
    "pretrain --recipe tiny --optim adamw --attention_init normal --length_schedule none --learning_rate 1e-3 "
    "--max_seq_length 64 --hidden_dropout_prob 0 --attention_probs_dropout_prob 0 --logging_steps 1 "
    "--global_batch_size 64 --max_eval_pairs 32"
).split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", nargs="+", default=["python-docs"], metavar="PATH")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="beginnings of the names of steps")
    parser.add_argument("--budget", type=positive, default=560, help="seconds for all steps together")
    parser.add_argument(
        "--tokens", type=positive, help="in a micro-batch of BERT-base; by default what fits, as in a run"
    )
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.device = "cpu" if arguments.dry else "cuda"
    if arguments.step:
        function = globals()[arguments.step.partition("-")[0]]
        for row in function(arguments, **STEPS[arguments.step][1]):
            print("JSON " + json.dumps({"step": arguments.step, **row}), flush=True)
    else:
        run_steps(arguments)


# ---------------------------------------------------------------------------------------------------------------------
# The steps, each in a process


def run_steps(arguments):
    print(heading(arguments.device))
    end = time.monotonic() + arguments.budget
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (seconds, _) in STEPS.items():
            if not name.startswith(tuple(arguments.only)):
                continue
            left = end - time.monotonic()
            if left <= 25:
                found = [{"skipped": "no time left"}]
            else:
                limit = left if arguments.dry else min(seconds, left)  # a CPU may be busy with other work
                found = run_step(name, limit, folder, arguments.dry or name == "reference")
            for row in found:
                rows.append({"step": name, **row})
                print(json.dumps(rows[-1]), flush=True)
    print_table(rows)


def run_step(name, seconds, folder, on_cpu) -> list[dict]:
    """The results of a step; where it fails, or takes longer, also how, with the last lines that it printed."""
    command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--step", name, "--folder", folder]
    variables = dict(os.environ)
    if on_cpu:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    begin = time.monotonic()
    log = Path(folder) / f"{name}.txt"
    with open(log, "w") as file:
        process = psutil.Popen(command, stdout=file, stderr=file, env=variables)
        try:
            code = process.wait(seconds)
        except psutil.TimeoutExpired:
            code = f"killed after {seconds:.0f} s"
            for member in [*process.children(recursive=True), process]:  # torchrun starts workers in other sessions
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    rows = [json.loads(line[5:]) for line in lines if line.startswith("JSON ")]
    if code or not rows:
        rows.append({"failed": code, "last_lines": [line[:200] for line in lines[-8:]]})
    rows[-1]["seconds"] = round(time.monotonic() - begin, 1)
    return rows


def print_table(rows):
    """The results in short: all but lists and dicts, a line each."""
    for row in rows:
        shown = []
        for name, value in row.items():
            if name != "step" and not isinstance(value, (list, dict)):
                shown.append(f"{name} {value}")
        print(f"{row['step']:24}" + "  ".join(shown))


# ---------------------------------------------------------------------------------------------------------------------
# The machine


def environment(arguments):
    yield {"python": sys.version.split()[0], "torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    if arguments.device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        memory = round(gpu.total_memory / 1e9, 1)
        cudnn = torch.backends.cudnn.version()
        yield {"gpu": gpu.name, "memory_gb": memory, "cuda": torch.version.cuda, "cudnn": cudnn}
    yield {"product_tflops": round(peak(arguments) / 1e12, 2)}


def peak(arguments):
    dtype = MATMUL_DTYPES[half_precision(arguments)]
    return matmul_peak(torch.device(arguments.device), dtype, 0.01 if arguments.dry else 0.3)


def half_precision(arguments) -> str:
    """The `mixed_precision` of the measured steps: `bf16`, or on GPUs before Ampere `fp16`."""
    is_before_ampere = arguments.device == "cuda" and default_precision(torch.device("cuda")) == "fp16"
    return "fp16" if is_before_ampere else "bf16"


# ---------------------------------------------------------------------------------------------------------------------
# Losses beside the CPU's


def losses(arguments, variants):
    """Runs of the command in this process; each variant is PRECISION-LAYOUT, and more words."""
    for variant in variants.split():
        precision, layout, *more = variant.split("-")
        if arguments.dry and (precision == "fp16" or "compiled" in more):
            yield {"variant": variant, "skipped": "not on a CPU, or too slow there"}
            continue
        if precision == "bf16" and half_precision(arguments) == "fp16":  # nor varlen
            yield {"variant": variant, "skipped": "not on a GPU before Ampere"}
            continue
        options = ["--packing", str(layout == "packed"), "--torch_compile", str("compiled" in more)]
        options += ["--mixed_precision", "no" if precision == "fp32" else precision]
        options += ["--attn_implementation", VARLEN if VARLEN in more else "sdpa"]
        options += ["--max_steps", "4" if arguments.dry else "30", "--micro_batch_size", "32"]
        folder = arguments.folder / f"{arguments.step}-{variant}"
        code = d2l_bert([*RUN, "--corpus", *arguments.corpus, *options, "--output_dir", str(folder)])
        rows = logged(folder)
        of_cpu = logged(arguments.folder / f"reference-fp32-{layout}")
        yield {
            "variant": variant,
            "exit_code": code,
            "last": rows[-1]["mlm_loss"] if rows else None,
            "largest_difference_from_cpu": largest_difference(rows, of_cpu),
        }


reference = losses  # the same, on the CPU


def logged(folder: Path) -> list[dict]:
    """The rows of training steps in a run's log; none if there is no log."""
    log = folder / "training_log.jsonl"
    rows = map(json.loads, log.read_text().splitlines()) if log.exists() else []
    return [row for row in rows if "mlm_loss" in row]


def largest_difference(rows, known):
    """Of the MLM losses of two logs; None if one lacks a step, and infinity if a loss is not finite."""
    if [row["step"] for row in rows] != [row["step"] for row in known]:
        return None
    differences = [abs(row["mlm_loss"] - other["mlm_loss"]) for row, other in zip(rows, known, strict=True)]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)


# ---------------------------------------------------------------------------------------------------------------------
# Speed


class WithoutPadding(Ours):
    """Our step, with all sequences of a micro-batch in one row."""

    def __init__(self, setup):
        super().__init__(setup)
        self.learner.model.set_attn_implementation(VARLEN)

    def batches(self, micro_batches):
        counts = super().batches(micro_batches)[1]
        return [without_padding(batch, self.learner.run.max_seq_length) for batch in micro_batches], counts


CONTESTANTS["varlen"] = WithoutPadding


def speed(arguments, **case):
    yield measure(arguments, **case)[-1]


def profile(arguments, **case):
    """The kernels that take most of a step, and the share of its time in which none runs."""
    process, file, row = measure(arguments, **case)
    busy, top = process.profile(file)
    top = {name: round(share, 4) for name, share, _ in top}
    yield {"idle_share": round(1 - busy / row["ms_a_step"], 3), "kernel_ms": round(busy, 1), "top": top}


def measure(arguments, length, kind="ours", packing=False):
    """A contestant, the file of its last step, and what its steps took."""
    torch.backends.cuda.enable_cudnn_sdp(kind == "stock")  # as PyTorch has it; ours runs without
    precision = half_precision(arguments)
    task = make_task(arguments, length, packing, precision)
    steps = task.write_steps(arguments.folder, 3 if arguments.dry else 8)
    architecture = {name: getattr(task.architecture, name) for name in D2lBertConfig.__annotations__}
    variant = f"{'eager' if arguments.dry else 'compiled'}/sdpa/{task.run.micro_batch_size}"
    setup = {"name": kind, "architecture": architecture, "run": asdict(task.run), "device": arguments.device}
    process = ContestantProcess({**setup, "variant": variant, "half": str(MATMUL_DTYPES[precision])})
    # A new shape may cost time; in the second round all are known.
    fresh = [1e3 * process.steps([step.file], [1e-4]) for step in steps]
    again = [1e3 * process.steps([step.file], [1e-4]) for step in steps]
    seconds = sum(again) / 1e3
    operations = sum(step.arithmetic for step in steps) / seconds
    row = {"tokens_per_s": round(sum(step.tokens for step in steps) / seconds)}
    row["mfu"] = round(operations / peak(arguments), 4)
    if arguments.device == "cuda":
        row["mfu_nominal"] = round(operations / nominal_speed(torch.cuda.get_device_name()), 4)
    row["memory_gb"] = round(sum(process.memory(steps[-1].file)) / 1e9, 2)
    row["ms_a_step"] = round(statistics.median(again), 1)
    row["ms_fresh"] = [round(ms, 1) for ms in fresh]
    return process, steps[-1].file, row


def nominal_speed(gpu: str) -> float:
    """Operations a second of the GPU by its maker; NaN for one that is not in the table."""
    for name, operations in NOMINAL.items():
        if name in gpu:
            return operations
    return math.nan


def make_task(arguments, length, packing, precision) -> Task:
    """BERT-base without dropout; four micro-batches in a step."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if arguments.dry:
        architecture = D2lBertConfig(vocab_size=8192, hidden_size=64, **no_dropout)
        _, run = RECIPES["tiny"]()
        length = 64
        pairs = 8
    else:
        architecture = D2lBertConfig(**BASE, **no_dropout)
        _, run = RECIPES["base"]()
        run = replace(run, vocab_size=30522, max_seq_length=length, micro_batch_size=None)
        device = SimpleNamespace(device=torch.device("cuda"), mixed_precision=precision)
        as_in_a_run = with_defaults(run, architecture, device)
        pairs = arguments.tokens // length if arguments.tokens else as_in_a_run.micro_batch_size
    plain = {"length_schedule": [], "batch_size_schedule": [], "mlm_probability": 0.15, "optim": "adamw"}
    plain["mixed_precision"] = precision
    sizes = {"max_seq_length": length, "micro_batch_size": pairs, "global_batch_size": 4 * pairs}
    run = replace(run, corpus=arguments.corpus, **plain, **sizes, packing=packing, attn_implementation="sdpa")
    return Task("base", architecture, run, arguments.device)


# ---------------------------------------------------------------------------------------------------------------------
# Runs of the command in processes


def start(arguments, name, *options, launcher=(), **environment):
    """Start a run of the command; its folder is `arguments.folder / name`."""
    command = [sys.executable, *launcher, "-m", "d2l_bert", *RUN, "--corpus", *arguments.corpus]
    return subprocess.Popen(
        [*command, "--output_dir", arguments.folder / name, *options], env=os.environ | environment
    )


def resume(arguments):
    options = ["--max_steps", "8" if arguments.dry else "60", "--save_steps", "4" if arguments.dry else "20"]
    whole = start(arguments, "whole", *options)
    killed = start(arguments, "killed", *options)
    folder = arguments.folder / "killed"
    while killed.poll() is None and not any(folder.glob("checkpoint-*")):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    was_running = killed.wait() == -signal.SIGKILL
    again = start(arguments, "killed", *options, "--resume_from_checkpoint", "latest")
    codes = [whole.wait(), again.wait()]
    difference = largest_difference(logged(folder), logged(arguments.folder / "whole"))
    yield {"killed_while_running": was_running, "exit_codes": codes, "largest_difference": difference}


def launched(arguments):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    fsdp |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "D2lBertEncoderBlock"}
    cases = {"ddp": ((), {})}  # of a run its options, and its environment
    if not arguments.dry:  # on a CPU Accelerate ignores FSDP
        cases["fsdp2"] = ((), fsdp)
        cases["fsdp2-muon"] = (("--optim", "muon"), fsdp)
    for name, (options, variables) in cases.items():
        options = [*options, "--max_steps", "8", "--save_steps", "4"]
        code = start(arguments, name, *options, launcher=torchrun, **variables).wait()
        losses = [round(row["mlm_loss"], 4) for row in logged(arguments.folder / name)]
        yield {"run": name, "exit_code": code, "last": losses[-1] if losses else None, "losses": losses}


if __name__ == "__main__":
    main()
