"""The contestants of `benchmarks.throughput`: ours, d2l's and stock BERT. Each works in a process of its own.

The process reads lines of JSON from stdin and answers each with a line of JSON on stdout. The first line is the setup,
answered with a description of the contestant. All further lines are calls of `steps`, `memory` or `evaluate`.
A file holds our micro-batches of one step. Every contestant makes its batches of them: the same pairs, with the same
ids, segments, masks and labels. This file is started by its path with the Python of a contestant's environment, so it
imports at its top only packages that every such environment has.
"""

import contextlib
import copy
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn import functional as F


COUNTS = ("mlm_loss", "mlm_correct", "masked_tokens", "nsp_loss", "nsp_correct", "pairs")


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def write_step(micro_batches: list[dict[str, torch.Tensor]], path: Path) -> Path:
    tensors = {}
    for number, batch in enumerate(micro_batches):
        for name, tensor in batch.items():
            tensors[f"{number} {name}"] = tensor
    save_file(tensors, path)
    return path


def read_step(path: str) -> list[dict[str, torch.Tensor]]:
    micro_batches = {}
    with safe_open(path, "pt") as file:
        for key in file.keys():
            number, name = key.split()
            micro_batches.setdefault(int(number), {})[name] = file.get_tensor(key)
    return [micro_batches[number] for number in sorted(micro_batches)]


def whole_step(micro_batches, length: int, pad: int) -> dict[str, torch.Tensor]:
    """All pairs of a step in one batch: each padded to `length`, with the same number of slots, in random order."""
    slots = max(round(0.15 * length), *(batch["labels"].shape[1] for batch in micro_batches))
    step = {
        "input_ids": padded([batch["input_ids"] for batch in micro_batches], length, pad),
        "token_type_ids": padded([batch["token_type_ids"] for batch in micro_batches], length, 0),
        "attention_mask": padded([batch["attention_mask"] for batch in micro_batches], length, 0),
        "masked_positions": padded([batch["masked_positions"] for batch in micro_batches], slots, 0),
        "labels": padded([batch["labels"] for batch in micro_batches], slots, -100),
    }
    step["next_sentence_label"] = torch.cat([batch["next_sentence_label"] for batch in micro_batches])
    order = torch.randperm(len(step["input_ids"]), generator=torch.Generator().manual_seed(0))
    return {name: tensor[order] for name, tensor in step.items()}


def padded(tensors: list[torch.Tensor], width: int, value: int) -> torch.Tensor:
    """Tensors (B, T) of several T as one (all B, `width`), filled up on the right."""
    return torch.cat([F.pad(tensor, (0, width - tensor.shape[1]), value=value) for tensor in tensors])


# ---------------------------------------------------------------------------------------------------------------------
# Contestants


class Ours:
    """The step of `d2l-bert pretrain`, set up as the command and `pretrain` do."""

    def __init__(self, setup):
        from d2l_bert import D2lBertConfig, PretrainConfig
        from d2l_bert.commands import keep_freed_memory
        from d2l_bert.training.compiling import compiled_blocks
        from d2l_bert.training.data.batches import counts_of
        from d2l_bert.training.devices import make_accelerator, with_defaults
        from d2l_bert.training.initialize import make_model
        from d2l_bert.training.learner import Learner

        keep_freed_memory()
        self.opened = contextlib.ExitStack()  # never closed: the process computes until it ends
        self.counts_of = counts_of
        accelerator = make_accelerator(None)
        architecture = D2lBertConfig(**setup["architecture"])
        run = with_defaults(PretrainConfig(**setup["run"]), architecture, accelerator)
        self.learner = Learner(accelerator, make_model(architecture, run, None, is_resumed=False), run)
        self.model = self.learner.wrapped_model.train()
        self.opened.enter_context(compiled_blocks(self.learner.model, run.torch_compile))
        compiled = "compiled" if run.torch_compile else "not compiled"
        self.settings = f"{run.mixed_precision}, attention {run.attn_implementation}, {compiled}"

    def __str__(self):
        return f"d2l-bert {version('d2l-bert')}, {self.settings}"

    def batches(self, micro_batches):
        return micro_batches, self.counts_of(micro_batches)

    def step(self, batches, rate):
        return self.learner.update(*batches, rate)[:2]

    def scores(self, batch):
        outputs = type(self.model).forward(self.model, **batch)  # Accelerate's own `forward` would compute in bf16
        return outputs.prediction_logits, outputs.seq_relationship_logits


class Book:
    """
    The model, loss and step of d2l 1.0.3 (section 15.10): Adam, float32, rows of one length, label 1 for "is next".

    `setup["book"]` may have `max_grad_norm`, to which the gradient is clipped.
    """

    def __init__(self, setup):
        for name in ("torchvision", "torchvision.transforms"):  # d2l imports them, but its BERT does not use them
            sys.modules.setdefault(name, type(sys)(name))
        sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]
        from d2l import torch as d2l

        numbers = setup["architecture"]
        self.vocab_size = numbers["vocab_size"]
        self.pad = numbers["pad_token_id"]
        self.length = setup["run"]["max_seq_length"]
        self.device = setup["device"]
        self.model = d2l.BERTModel(
            self.vocab_size,
            numbers["hidden_size"],
            numbers["intermediate_size"],
            numbers["num_attention_heads"],
            numbers["num_hidden_layers"],
            numbers["hidden_dropout_prob"],
            max_len=numbers["max_position_embeddings"],
        ).to(self.device)
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        # A first call lets its lazy layers learn their sizes.
        self.model(ids, ids, torch.ones(1, device=self.device), ids)
        self.changes = setup.get("book") or {}
        self.batch_loss = d2l._get_batch_loss_bert
        self.loss = torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def __str__(self):
        return f"d2l {version('d2l')}, float32, Adam"

    def batches(self, micro_batches):
        step = whole_step(micro_batches, self.length, self.pad)
        known = step["labels"] != -100
        lengths = step["attention_mask"].sum(1).float()
        # d2l gives padded slots the label 0, and its mean counts them; the loss ignores slots with the label -100.
        labels = step["labels"].where(known, 0)
        pair_label = step["next_sentence_label"]  # -100 for a row without a pair
        is_next = torch.where(pair_label < 0, pair_label, 1 - pair_label)
        # In the order of the arguments of d2l's loss.
        positions = step["masked_positions"]
        return step["input_ids"], step["token_type_ids"], lengths, positions, known.float(), labels, is_next

    def step(self, batch, rate):
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        batch = [tensor.to(self.device) for tensor in batch]
        mlm_loss, nsp_loss, loss = self.batch_loss(self.model, self.loss, self.vocab_size, *batch)
        loss.backward()
        if norm := self.changes.get("max_grad_norm"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        self.optimizer.step()
        return mlm_loss.item(), nsp_loss.item()  # the book reads each loss as a number

    def scores(self, batch):
        lengths = batch["attention_mask"].sum(1).float()
        _, mlm, nsp = self.model(batch["input_ids"], batch["token_type_ids"], lengths, batch["masked_positions"])
        return mlm, nsp.flip(-1)


# The entries of our configuration that stock BERT's has, too.
SHARED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "tie_word_embeddings",
    "pad_token_id",
)


class Stock:
    """
    `BertForPreTraining` with fused AdamW; `setup["variant"]` is MODE/ATTENTION/PAIRS, as eager/sdpa/64.

    It computes in bf16, or in the dtype that `setup["half"]` names; then without a scaler, which costs little.
    """

    def __init__(self, setup):
        from transformers import BertConfig, BertForPreTraining

        config = BertConfig(**{name: setup["architecture"][name] for name in SHARED})
        self.variant = setup["variant"]
        self.half = getattr(torch, setup.get("half", "torch.bfloat16").removeprefix("torch."))
        self.device = setup["device"]
        mode, attention, pairs = self.variant.split("/")
        self.length = setup["run"]["max_seq_length"]
        self.pairs = int(pairs)
        self.fixed = mode == "compiled"
        self.model = BertForPreTraining._from_config(config, attn_implementation=attention).to(self.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        if self.fixed:
            self.model.compile()

    def __str__(self):
        return f"stock BERT, transformers {version('transformers')}, {self.half}, fused AdamW, {self.variant}"

    def batches(self, micro_batches):
        step = whole_step(micro_batches, self.length, self.model.config.pad_token_id)
        labels_of_slots = step.pop("labels")
        slots = step.pop("masked_positions")
        rows, columns = (labels_of_slots != -100).nonzero(as_tuple=True)
        step["labels"] = torch.full_like(step["input_ids"], -100)
        step["labels"][rows, slots[rows, columns]] = labels_of_slots[rows, columns]
        parts = []
        for start in range(0, len(slots), self.pairs):
            part = {name: tensor[start : start + self.pairs] for name, tensor in step.items()}
            if not self.fixed:  # a compiled model would be compiled for every shape
                longest = int(part["attention_mask"].sum(1).max())
                for name in ("input_ids", "token_type_ids", "attention_mask", "labels"):
                    part[name] = part[name][:, :longest].contiguous()
            parts.append(part)
        return parts

    def step(self, parts, rate):
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for part in parts:
            part = {name: tensor.to(self.device, non_blocking=True) for name, tensor in part.items()}
            with torch.autocast(self.device, self.half):
                loss = self.model(**part).loss / len(parts)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


CONTESTANTS = {"ours": Ours, "d2l": Book, "stock": Stock}


# ---------------------------------------------------------------------------------------------------------------------
# Calls


class ContestantProcess:
    """The contestant inside its process, and the methods that another process can call."""

    def __init__(self, setup):
        torch.manual_seed(0)
        self.device = setup["device"]
        self.contestant = CONTESTANTS[setup["name"]](setup)

    def steps(self, files, rates):
        """Train on the steps in `files`, with these learning rates; returns the seconds without reading the files."""
        batches = [self.contestant.batches(read_step(file)) for file in files]
        self.synchronize()
        start = time.perf_counter()
        for batch, rate in zip(batches, rates, strict=True):
            self.contestant.step(batch, rate)
        self.synchronize()
        return time.perf_counter() - start

    def losses(self, file, rate):
        """Train on the step in a file; returns its MLM and its NSP loss, before the step and with dropout."""
        return self.contestant.step(self.contestant.batches(read_step(file)), rate)

    def memory(self, file):
        """Train on one step; returns the bytes held before, and the extra bytes at the peak."""
        batches = self.contestant.batches(read_step(file))
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL(None).malloc_trim(0)  # freed memory must not count as held
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
            before = process_memory("VmRSS")
        self.contestant.step(batches, 0.0)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else process_memory("VmHWM")
        return before, peak - before

    def profile(self, file, most=15):
        """
        Train on one step under PyTorch's profiler.

        Returns:
            The milliseconds in all operations (on a GPU: kernels); and of those that take most their name, their share
            of that time, and how often they run.
        """
        batches = self.contestant.batches(read_step(file))
        with torch.profiler.profile() as recorded:
            self.contestant.step(batches, 1e-4)
            self.synchronize()

        def milliseconds(event):
            return (event.self_device_time_total if self.device == "cuda" else event.self_cpu_time_total) / 1e3

        kind = torch.autograd.DeviceType.CUDA if self.device == "cuda" else torch.autograd.DeviceType.CPU
        events = [event for event in recorded.key_averages() if event.device_type == kind]
        events.sort(key=milliseconds, reverse=True)
        total = sum(map(milliseconds, events))
        return total, [(event.key[:80], milliseconds(event) / total, event.count) for event in events[:most]]

    @torch.no_grad()
    def evaluate(self, file):
        """Loss and correct predictions on held-out pairs, summed in float32 in the order of `COUNTS`."""
        sums = torch.zeros(len(COUNTS), dtype=torch.float64)
        self.contestant.model.eval()
        for batch in read_step(file):
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            mlm, nsp = self.contestant.scores(batch)
            sums += torch.stack([*sums_of(mlm, batch["labels"]), *sums_of(nsp, batch["next_sentence_label"])])
        self.contestant.model.train()
        return sums.tolist()

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()


def sums_of(logits, labels):
    """The summed loss, the number of right predictions, and that of labels."""
    known = labels != -100
    logits = logits[known].float()
    labels = labels[known]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(-1) == labels).sum()
    return [number.double().cpu() for number in (loss, correct, known.sum())]


def process_memory(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def answer_calls():
    """Answer calls until stdin ends. Output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    process = ContestantProcess(json.loads(sys.stdin.readline()))
    print(json.dumps(str(process.contestant)), file=answers)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(process, method)(*arguments)), file=answers)


def environment(device):
    """The environment variables of a process that has to compute on `device`, even if there are other devices."""
    if device == "cpu":
        return os.environ | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    return {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}


class Contestant:
    """A handle on a contestant's process: starts the process, calls its methods, ends it."""

    def __init__(self, name, setup, python=sys.executable):
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors, "text": True}
        self.process = subprocess.Popen([python, __file__], env=environment(setup["device"]), **pipes)
        self.description = self._exchange({**copy.deepcopy(setup), "name": name})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def call(self, method, *arguments):
        return self._exchange([method, *arguments])

    def _exchange(self, message):
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{self.name} failed:\n" + "".join(self.errors.readlines()[-15:]))
        return json.loads(answer)


if __name__ == "__main__":
    answer_calls()
