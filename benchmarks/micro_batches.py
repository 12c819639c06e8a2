"""How the steps of a run are cut into micro-batches for one and more processes, and how fast these are made.

    python -m benchmarks.micro_batches [--corpus PATH...] [--recipes tiny base] [--processes 1 8 64] [--steps 20]

Makes what each process of a run on GPUs of 80 GB would compute in the first `--steps` steps of each stage of a recipe,
and counts it; nothing is trained. A line for each stage, attention and number of processes:

    pairs         of a process in a step, on average
    micro-b.      of a process in a step, on average; all processes have as many
    padding       its share of the tokens that are computed
    shapes        of `input_ids`: how many different ones in all steps of all processes
    apart         how many more tokens the fullest process has than the emptiest: on average, and at most
    made          tokens a second of the batches that a process makes for itself, on one core
    H100, ...     tokens a second that such a GPU would take without padding: computed, not measured

A GPU is taken to do its matrix products at 72 % of its peak, and after them the operations between them, which move
122 bytes for each token, block and hidden unit (`devices.BYTES_A_UNIT`); and to take at least 10 ms for each
micro-batch, in which its process starts all that. Making is timed in seconds of the processor, so that a busy machine
changes little.
"""

import argparse
import copy
import itertools
import time
from dataclasses import replace

import numpy as np

from benchmarks.turns import heading, positive
from d2l_bert import RECIPES
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training.data.batches import Counts
from d2l_bert.training.data.rows import Ranks
from d2l_bert.training.data.steps import TrainingSteps
from d2l_bert.training.data.unpadded import VARLEN
from d2l_bert.training.devices import BYTES_A_UNIT, GPU_TOKENS
from d2l_bert.training.log import training_arithmetic


# Operations a second of dense products in bf16, on T4 in fp16; and bytes a second from memory. By their maker.
GPUS = {"H100": (989e12, 3.35e12), "A100": (312e12, 2.04e12), "T4": (65e12, 0.32e12)}
SHARE_OF_PEAK = 0.72
HOST_SECONDS = 0.01  # of a process, to start what a GPU computes for a micro-batch

BASE_TOKENS = 2**15  # in a micro-batch of BERT-base on a GPU of 80 GB, by default; of small models `GPU_TOKENS`

COLUMNS = ["pairs", "micro-b.", "padding", "shapes", "apart", "made", *GPUS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", nargs="+", default=["python-docs"], metavar="PATH")
    parser.add_argument("--recipes", nargs="+", default=["tiny", "base"], choices=RECIPES, metavar="NAME")
    parser.add_argument("--attention", nargs="+", default=["sdpa", VARLEN], metavar="NAME")
    parser.add_argument("--processes", nargs="+", type=positive, default=[1, 8, 64], metavar="N")
    parser.add_argument("--steps", type=positive, default=20, help="of each stage")
    arguments = parser.parse_args()
    print(heading("cpu"))
    print_line("recipe, tokens x pairs, attention, processes", COLUMNS)
    for recipe in arguments.recipes:
        architecture, run = RECIPES[recipe]()
        tokens = BASE_TOKENS if architecture.hidden_size >= 768 else GPU_TOKENS
        objective = "nsp" if run.objective == "auto" else run.objective  # what a run makes of it with paragraphs
        sizes = {"objective": objective, "micro_batch_size": tokens // run.max_seq_length}
        run = replace(run, corpus=arguments.corpus, **sizes)
        text = prepare(run)
        architecture.vocab_size = len(text.tokenizer)
        for attention in arguments.attention:
            run = replace(run, attn_implementation=attention)
            steps = TrainingSteps(run, text, run.max_steps, on_gpu=True)
            for stage in steps.stages:
                for processes in arguments.processes:
                    size = f"{stage.epoch_pairs.length} x {stage.pairs_a_step}"
                    row = count(steps, stage, processes, arguments.steps, architecture)
                    print_line(f"{recipe}, {size}, {attention}, {processes}", row)


def print_line(name, columns):
    print(f"{name:44}" + "".join(f"{column:>14}" for column in columns), flush=True)


def count(steps, stage, processes, number_of_steps, architecture) -> list[str]:
    """The columns of a stage."""
    start = time.thread_time()
    drawn_pairs = list(itertools.islice(steps.draw(stage.first_step), number_of_steps))
    drawing_seconds = time.thread_time() - start  # every process draws the pairs of all
    making_seconds = 0.0
    micro_batches = 0
    shapes = set()
    counts = np.zeros((processes, number_of_steps, len(Counts._fields)))
    for rank in range(processes):
        of_rank = copy.copy(steps)
        of_rank.ranks = Ranks(processes, rank)
        for number, drawn in enumerate(drawn_pairs):
            start = time.thread_time()
            step = of_rank.make(drawn)
            making_seconds += time.thread_time() - start
            micro_batches += len(step.micro_batches)
            shapes |= {tuple(batch["input_ids"].shape) for batch in step.micro_batches}
            counts[rank, number] = step.counts
    total = Counts(*counts.sum((0, 1)))
    tokens = counts[:, :, Counts._fields.index("tokens")]  # (processes, steps)
    apart = tokens.max(0) / tokens.min(0) - 1
    has_labels = steps.run.objective != "none"
    operations = training_arithmetic(architecture, total, has_labels)
    moved = total.tokens * architecture.num_hidden_layers * architecture.hidden_size * BYTES_A_UNIT
    padding = 1 - total.tokens / total.padded_tokens
    row = [f"{stage.pairs_a_step / processes:g}", f"{micro_batches / processes / number_of_steps:.3g}"]
    row += [f"{padding:.1%}", f"{len(shapes)}", f"{apart.mean():.1%}, {apart.max():.1%}"]
    row.append(f"{total.tokens / (making_seconds + processes * drawing_seconds):,.0f}")
    for peak, bandwidth in GPUS.values():
        computing_seconds = operations / (SHARE_OF_PEAK * peak) + moved / bandwidth
        row.append(f"{total.tokens / max(computing_seconds, micro_batches * HOST_SECONDS):,.0f}")
    return row


if __name__ == "__main__":
    main()
