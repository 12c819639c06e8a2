"""Drives d2l-bert from outside: by the command's entry point, in processes, and by watching public model classes."""

import contextlib
import functools
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import torch


# A model small enough to train in a second or two, in float32 without random noise.
SMALL = (
    "--num_hidden_layers=1 --hidden_size=32 --num_attention_heads=2 --intermediate_size=64 --vocab_size=300 "
    "--max_position_embeddings=64 --max_seq_length=48 --length_schedule=none --global_batch_size=8 "
    "--dataloader_num_workers=0 --mixed_precision=no --optim=adamw --learning_rate=3e-3 --attention_init=normal "
    "--hidden_act=relu"
).split()

PEOPLE = "anna boris clara daniel emma felix greta hugo".split()
THINGS = "apple basket candle drum engine feather glove hammer".split()
PLACES = "garden kitchen harbour library market station tower valley".split()


def command(*words) -> int:
    """Run the command in this process, by the entry point that pip installs; returns the exit code."""
    (entry,) = entry_points(group="console_scripts", name="d2l-bert")
    try:
        return entry.load()([str(word) for word in words])
    except SystemExit as stop:
        return stop.code


def write_books(folder: Path, count: int, seed: int) -> Path:
    """Text files of six paragraphs of four sentences, in which the same people and things come again."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    for number in range(count):
        who, what = rng.choice(PEOPLE), rng.choice(THINGS)
        paragraphs = []
        for _ in range(6):
            where = rng.choice(PLACES)
            sentences = [
                f"{who} walked to the {where} with the {what}.",
                f"There {who} met {rng.choice(PEOPLE)}.",
                f"They left the {what} in the {where}.",
                f"Nobody saw the {rng.choice(THINGS)} again.",
            ]
            paragraphs.append(" ".join(sentence[0].upper() + sentence[1:] for sentence in sentences))
        (folder / f"book-{number:02d}.txt").write_text("\n\n".join(paragraphs) + "\n")
    return folder


def weights_of(folder: Path) -> str:
    """The SHA-256 of a folder's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def read_json(path: Path) -> dict:
    return json.loads(path.read_text())


def error_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "error:" in line]


@contextlib.contextmanager
def watched(model_class):
    """Within the block, the batches that the class trains on and evaluates: lists of its arguments, cloned."""
    forward, trained, evaluated = model_class.forward, [], []

    @functools.wraps(forward)
    def watch(self, *arguments, **named):
        tensors = {name: value.clone() for name, value in named.items() if torch.is_tensor(value)}
        (trained if self.training else evaluated).append(tensors)
        return forward(self, *arguments, **named)

    model_class.forward = watch
    try:
        yield trained, evaluated
    finally:
        model_class.forward = forward


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def start(words, *, script=None, environment=None, processes=1, said=None):
    """
    Start the command in a process of its own, or `processes` ranks of one run, as torchrun starts them.

    Args:
        script: a Python file of this folder that runs the command with a fault; by default the command itself.
        said: the file for stdout and stderr of rank 0; those of rank n go to a file beside it, with the suffix `.n`.

    Returns:
        The processes.
    """
    started, port = [], _free_port()
    for rank in range(processes):
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        if processes > 1:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
            variables |= {name: str(value) for name, value in {**ranks, **address}.items()}
        file = open(said if rank == 0 else f"{said}.{rank}", "w") if said else subprocess.DEVNULL
        program = (
            [sys.executable, "-m", "d2l_bert"] if script is None else [sys.executable, Path(__file__).parent / script]
        )
        started.append(
            subprocess.Popen(
                [*map(str, program), *map(str, words)],
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
    return started


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def end(processes, seconds=120) -> list[int]:
    """Wait for processes; returns their exit codes. Kills what still runs after some seconds, and fails."""
    limit = time.monotonic() + seconds
    try:
        return [process.wait(max(0.1, limit - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def seconds_since_fault(said: str) -> float:
    """The seconds from the fault of a process that ran `faulty.py` until now, by what it said."""
    return time.time() - float(re.search(r"fault at ([\d.]+)", said)[1])


def wait_for(condition, processes, seconds=120):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        assert all(process.poll() is None for process in processes), "a process has ended"
        time.sleep(0.02)


def python(code, environment=None, **variables):
    """Run Python code in a fresh process; returns the finished process."""
    variables = {**(environment or os.environ), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300)


# ---------------------------------------------------------------------------------------------------------------------
# A text of words that stand in it once, so that a batch shows which places of the text it is made of

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_numbered(folder: Path, documents: int, seed=0, first=0) -> int:
    """
    Text files of sentences of 3 to 30 words `w0 w1 w2 ...`, each word once in the whole text, in reading order.

    Returns:
        The number after the last word.
    """
    folder.mkdir(parents=True)
    rng, word = random.Random(seed), first
    for number in range(documents):
        paragraphs = []
        for _ in range(rng.randint(1, 6)):
            sentences = []
            for _ in range(rng.randint(1, 8)):
                length = rng.randint(3, 30)
                sentences.append(f"W{word} {' '.join(f'w{n}' for n in range(word + 1, word + length))}.")
                word += length
            paragraphs.append(" ".join(sentences))
        (folder / f"{number:05d}.txt").write_text("\n\n".join(paragraphs) + "\n")
    return word


def write_numbered_tokenizer(folder: Path, words: int) -> Path:
    """A stock tokenizer with an entry for each word; the full stop is one more, the last."""
    from transformers import BertTokenizer

    vocabulary = {piece: number for number, piece in enumerate([*SPECIALS, *(f"w{n}" for n in range(words)), "."])}
    BertTokenizer(vocab=vocabulary, do_lower_case=True).save_pretrained(folder)
    return folder


def whole_ids(batch) -> torch.Tensor:
    """The token ids (B, T) of a training batch as they were before they were masked."""
    ids, labels = batch["input_ids"].clone(), batch["labels"]
    rows, slots = (labels != -100).nonzero(as_tuple=True)
    ids[rows, batch["masked_positions"][rows, slots]] = labels[rows, slots]
    return ids


def segments_of(batch) -> list[tuple[list[int], list[int]]]:
    """The token ids of segments A and B of each row, without special tokens; B is empty in a single segment."""
    found = []
    for ids, real, segments in zip(whole_ids(batch), batch["attention_mask"], batch["token_type_ids"], strict=True):
        ordinary = (real == 1) & (ids >= len(SPECIALS))
        found.append((ids[ordinary & (segments == 0)].tolist(), ids[ordinary & (segments == 1)].tolist()))
    return found
