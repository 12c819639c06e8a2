"""Text to batch: memory, time, padding, order of the pairs, shares of masked tokens, speed of making batches.

    python -m benchmarks.text_to_batch memory --books BOOKS [--words 10 100]
    python -m benchmarks.text_to_batch padding --books BOOKS
    python -m benchmarks.text_to_batch order --books BOOKS
    python -m benchmarks.text_to_batch shares --books BOOKS
    python -m benchmarks.text_to_batch producer

BOOKS is a folder of text files.

    memory     repeats the books up to a number of million words, each time with other noise (every twentieth word is
               made up); runs `d2l-bert prepare` and 20 steps of `d2l-bert pretrain`; samples the anonymous memory
               (RssAnon) of all their processes ten times a second
    padding    the share of padding in 50 steps of 256 pairs at 128 tokens
    order      whether 200 steps hold the same pairs with other numbers of processes and workers, and after a resume
    shares     the shares of masked, random and kept tokens in 100,000 sequences of each objective and masking
    producer   the speed at which one worker makes the batches of the recipe tiny, and the speed of training
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import torch

from benchmarks.mlm_head import machine, positive
from d2l_bert import RECIPES, PretrainConfig
from d2l_bert.commands import keep_freed_memory
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.training import batching, data, packing, pretrain
from d2l_bert.training.batch_loader import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("benchmark", choices=("memory", "padding", "order", "shares", "producer"))
    parser.add_argument("--books", metavar="FOLDER", help="text files")
    parser.add_argument(
        "--words", type=positive, nargs="+", default=[10, 100], help="sizes of the text in million words"
    )
    arguments = parser.parse_args()
    print(f"python {' '.join(sys.orig_argv[1:])}    {date.today()}")
    print(f"{machine('cpu')}, {os.cpu_count()} cores, torch {torch.__version__}")
    globals()[arguments.benchmark](arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Memory and time


def memory(arguments):
    print(f"{'':>10} {'million words':>13} {'MB of text':>10} {'seconds':>8} {'MB/s':>6} {'peak RssAnon, MB':>17}")
    for words in arguments.words:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            size = repeat_with_noise(Path(arguments.books), folder / "text", words * 1_000_000) / 1e6
            environment = {**os.environ, "HF_HOME": str(folder / "cache")}
            command = [sys.executable, "-m", "d2l_bert"]
            prepared = [*command, "prepare", "--corpus", folder / "text", "--output_dir", folder / "tokens"]
            prepared += ["--vocab_size", "30522"]
            seconds, peak, said = run_and_watch(prepared, environment)
            print(
                f"{'prepare':>10} {words:>13} {size:>10.0f} {seconds:>8.0f} {size / seconds:>6.1f} {peak:>17.0f}",
                flush=True,
            )
            for line in said.splitlines():
                if " documents in " in line or "tokenizer of at most" in line or "trained it" in line:
                    print(f"{'':>10}   {line}")
            trained = [*command, "pretrain", "--corpus", folder / "tokens", "--output_dir", folder / "model"]
            trained += ["--max_steps", "20", "--eval_steps", "20", "--save_steps", "20"]
            seconds, peak, _ = run_and_watch(trained, environment)
            print(f"{'pretrain':>10} {words:>13} {'':>10} {seconds:>8.0f} {'':>6} {peak:>17.0f}", flush=True)


def repeat_with_noise(books, folder, words):
    """Write the books again and again, up to a number of words; returns the bytes written."""
    rng = random.Random(0)
    folder.mkdir()
    letters = "abcdefghijklmnopqrstuvwxyz"
    written = size = 0
    for turn in itertools.count():
        for book in sorted(books.glob("*.txt")):
            if written >= words:
                return size
            paragraphs = []
            for paragraph in book.read_text().split("\n\n"):
                found = paragraph.split()
                for place in range(rng.randrange(20), len(found), 20):
                    found[place] = "".join(rng.choices(letters, k=rng.randint(2, 9)))
                written += len(found)
                paragraphs.append(" ".join(found))
            text = "\n\n".join(paragraphs)
            size += (folder / f"{turn:03d}-{book.name}").write_bytes(text.encode())


def run_and_watch(command, environment):
    """Run a command; returns its seconds, the peak RssAnon (MB) of the command and its children, and its stderr."""
    start = time.monotonic()
    process = subprocess.Popen(
        [str(part) for part in command], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    peak, done = 0, threading.Event()

    def sample():
        nonlocal peak
        while not done.wait(0.1):
            peak = max(peak, sum(rss_anon(pid) for pid in process_tree(process.pid)))

    watcher = threading.Thread(target=sample)
    watcher.start()
    _, said = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        sys.exit(said)
    return time.monotonic() - start, peak / 1000, said


def process_tree(pid):
    """The ids of a process and of all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from process_tree(int(child))


def rss_anon(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


# ---------------------------------------------------------------------------------------------------------------------
# The contents of a step


def base_run(arguments, **changes):
    return PretrainConfig(corpus=[arguments.books], vocab_size=8192, global_batch_size=256, max_steps=200, **changes)


def padding(arguments):
    print(f"{'pairing':>10} {'objective':>10} {'packing':>8} {'padding':>8} {'micro-batches a step':>21}")
    for pairing, objective, packed in itertools.product(
        ("segments", "sentences"), ("nsp", "sop", "none"), (False, True)
    ):
        run = base_run(arguments, pairing=pairing, objective=objective, packing=packed)
        sharding = batching.make_sharding(RECIPES["tiny"]()[0], run)
        steps = batching.make_steps(run, prepare(run), run.max_steps, sharding)
        real = computed = count = 0
        for step in range(50):
            for batch in steps[step]:
                real += int(batch["attention_mask"].sum())
                computed += batch["attention_mask"].numel()
                count += 1
        share = 1 - real / computed
        print(f"{pairing:>10} {objective:>10} {str(packed).lower():>8} {share:>8.2%} {count / 50:>21.1f}", flush=True)


def contents(micro_batches):
    """A hash of the sequences of a step (ids, segments, masks, labels), and their number.

    The hash is a sum over the sequences: it does not depend on their order, and equal sequences do not cancel out.
    """
    total = count = 0
    for batch in micro_batches:
        for row in range(len(batch["input_ids"])):
            known = batch["labels"][row] != -100
            if not known.any():
                continue
            real = batch["attention_mask"][row] == 1
            parts = [batch["input_ids"][row][real], batch["token_type_ids"][row][real]]
            parts += [batch["masked_positions"][row][known], batch["labels"][row][known]]
            parts += [batch["next_sentence_label"][row].reshape(1)]
            digest = hashlib.sha256(b"|".join(part.numpy().tobytes() for part in parts)).digest()
            total, count = (total + int.from_bytes(digest[:8], "big")) % 2**64, count + 1
    return total, count


def order(arguments):
    run = replace(base_run(arguments), global_batch_size=64, length_schedule=["32:0.4"])
    text = prepare(run)
    steps = batching.make_steps(run, text, 200)
    expected = [contents(steps[step]) for step in range(200)]
    print(f"200 steps by one process, {len(set(expected))} of them different")
    for world_size in (1, 2, 4, 8, 1024):
        ranks = [
            data.PretrainingSteps(steps.phases, steps.share_at, packing.Sharding(world_size, rank))
            for rank in range(world_size)
        ]
        same = 0
        for step in range(200):
            totals, counts = zip(*(contents(rank[step]) for rank in ranks), strict=True)
            same += (sum(totals) % 2**64, sum(counts)) == expected[step]
        print(f"  {world_size:>5} processes: {same} of 200 steps the same", flush=True)
    for workers in (0, 1, 3):
        same = 0
        for start in range(200):
            end = 200 if start == 0 else min(start + 5, 200)  # the run from step 0 goes through all steps
            again = load(batching.make_steps(run, text, 200), start, end, workers)
            same += list(map(contents, again)) == expected[start:end]
        print(f"  {workers} workers: {same} of 200 runs that begin at another step the same", flush=True)


def shares(arguments):
    print("100,000 sequences each; deviations from what was asked, in standard errors")
    print(
        f"{'objective':>10} {'masking':>11} {'chosen':>16} {'[MASK]':>16} {'random':>16} {'kept':>16} {'label 1':>16}"
    )
    for objective, how, rate in (
        ("nsp", "token", 0.15),
        ("sop", "whole_word", 0.15),
        ("none", "span", 0.15),
        ("nsp", "token", 0.4),
    ):
        run = base_run(arguments, objective=objective, masking=how, mlm_probability=rate)
        text = prepare(run)
        steps = batching.make_steps(run, text, 400)
        excess, replaced, labels = [], np.zeros(3), []
        for step in range(-(-100_000 // 256)):
            for batch in steps[step]:
                excess.append(chosen_beyond(batch, rate))
                replaced += replacements(batch, text.tokenizer.mask_token_id)
                labels += batch.get("next_sentence_label", torch.zeros(0)).tolist()
        excess, chosen = np.concatenate(excess, axis=1), replaced.sum()
        (more, tokens), sequences = excess.mean(1), excess.shape[1]
        columns = [(rate + more / tokens, more / (excess[0].std() / np.sqrt(sequences)))]
        for share, asked in zip(replaced / chosen, (0.8, 0.1, 0.1), strict=True):
            columns.append((share, (share - asked) / np.sqrt(asked * (1 - asked) / chosen)))
        if labels:
            columns.append((np.mean(labels), (np.mean(labels) - 0.5) / (0.5 / np.sqrt(len(labels)))))
        shown = " ".join(f"{share:>8.4%} ({error:+.1f})" for share, error in columns)
        print(f"{objective:>10} {how:>11} {shown}", flush=True)


def chosen_beyond(batch, rate):
    """For each sequence: chosen tokens beyond the expected number, and the number of candidates: (2, B)."""
    specials = 2 + batch["token_type_ids"].any(1).long()
    candidates = batch["attention_mask"].sum(1) - specials
    return torch.stack([(batch["labels"] != -100).sum(1) - rate * candidates, candidates]).numpy()


def replacements(batch, mask):
    """The number of chosen tokens that became [MASK], that became another token, and that stayed: (3,)."""
    known = batch["labels"] != -100
    seen, truth = batch["input_ids"].gather(1, batch["masked_positions"])[known], batch["labels"][known]
    return np.array([(seen == mask).sum(), ((seen != mask) & (seen != truth)).sum(), (seen == truth).sum()])


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def producer(arguments):
    architecture, run = RECIPES["tiny"]()
    text = prepare(run)
    steps = batching.make_steps(run, text, run.max_steps, batching.make_sharding(architecture, run))
    for first, name in ((0, "32 tokens"), (1200, "128 tokens")):
        speeds = []
        for repetition in range(5):
            start = first + 300 * repetition
            batches = load(steps, start, start + 301, num_workers=1)
            next(batches)  # wait until the worker has started
            begin, tokens = time.monotonic(), 0
            for micro_batches in batches:
                tokens += sum(int(batch["attention_mask"].sum()) for batch in micro_batches)
            speeds.append(tokens / (time.monotonic() - begin))
        print(f"one worker, pairs of {name}: {statistics.median(speeds):,.0f} tokens/s, median of 5 times 300 steps")
    with tempfile.TemporaryDirectory() as folder:
        run = replace(run, max_steps=500, eval_steps=500, save_steps=500, output_dir=f"{folder}/model")
        keep_freed_memory()  # as the command does
        pretrain.pretrain(architecture, run)
        metrics = json.loads((Path(folder) / "model" / "metrics.json").read_text())
    print(
        f"training: {metrics['train_tokens_per_second']:,.0f} tokens/s; {metrics['train_padding_share']:.1%} of the "
        f"tokens computed were padding, {metrics['train_data_wait_share']:.2%} of the time it waited for batches"
    )


if __name__ == "__main__":
    main()
