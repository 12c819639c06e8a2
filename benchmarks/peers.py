"""The contestants of `benchmarks.throughput`: ours, the book's, stock BERT. Each is a process that works when told to.

It reads orders from its standard input and answers on its standard output, in lines of JSON: the first answer says who
it is, then come `steps`, `memory`, `evaluate`, until the input ends. Batches come in files, one for each step, which
hold our micro-batches; the peers make their own of them: the same pairs with the same ids, segments, masks and labels.
This file is run by its path, with the Python of an environment that has the peer, and imports only what that has.
"""

import copy
import ctypes
import json
import math
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
    tensors = enumerate(micro_batches)
    save_file({f"{number} {name}": tensor for number, batch in tensors for name, tensor in batch.items()}, path)
    return path


def read_step(path: str) -> list[dict[str, torch.Tensor]]:
    micro_batches = {}
    with safe_open(path, "pt") as file:
        for key in file.keys():
            number, name = key.split()
            micro_batches.setdefault(int(number), {})[name] = file.get_tensor(key)
    return [micro_batches[number] for number in sorted(micro_batches)]


def whole_step(micro_batches, length: int, pad: int) -> dict[str, torch.Tensor]:
    """All pairs of a step, each padded to `length` and with as many slots; no longer sorted by length."""
    slots = max(round(0.15 * length), *(batch["labels"].shape[1] for batch in micro_batches))
    wanted = {"input_ids": (length, pad), "token_type_ids": (length, 0), "attention_mask": (length, 0)}
    wanted |= {"masked_positions": (slots, 0), "labels": (slots, -100)}
    step = {
        name: torch.cat([F.pad(b[name], (0, width - b[name].shape[1]), value=value) for b in micro_batches])
        for name, (width, value) in wanted.items()
    }
    step["next_sentence_label"] = torch.cat([batch["next_sentence_label"] for batch in micro_batches])
    order = torch.randperm(len(step["input_ids"]), generator=torch.Generator().manual_seed(0))
    return {name: tensor[order] for name, tensor in step.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Contestants


def full_batch(run, vocab_size: int) -> dict[str, torch.Tensor]:
    """A micro-batch of random tokens without padding, as large as any of the run."""
    from d2l_bert.training.batching import micro_batch_pairs

    rows, length, slots = micro_batch_pairs(run), run.max_seq_length, math.ceil(0.15 * run.max_seq_length)
    ids = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    batch |= {"masked_positions": torch.arange(slots).expand(rows, slots), "labels": ids[:, :slots].clone()}
    return {**batch, "next_sentence_label": ids[:, 0] % 2}


class Ours:
    """The step of `d2l-bert pretrain`, as the command and `loop.train` put it together."""

    def __init__(self, told):
        from dataclasses import replace

        from d2l_bert import D2lBertConfig, PretrainConfig
        from d2l_bert.commands import keep_freed_memory
        from d2l_bert.training import distributed
        from d2l_bert.training.device import faster_attention
        from d2l_bert.training.initialize import make_model
        from d2l_bert.training.optim import make_optimizers
        from d2l_bert.training.step import train_step
        from d2l_bert.training.trials import compile_now, micro_batches_of_every_kind

        keep_freed_memory()
        self.train_step = train_step
        self.accelerator = distributed.make_accelerator(None)
        run = PretrainConfig(**told["run"])
        architecture = D2lBertConfig(**told["architecture"])
        attention = faster_attention(architecture, run, self.accelerator.device.type)
        self.run = replace(run, mixed_precision=self.accelerator.mixed_precision, attn_implementation=attention)
        model = make_model(architecture, self.run, None, None)
        betas = (run.adam_beta1, run.adam_beta2)
        optimizers = make_optimizers(model, run.optim, run.learning_rate, run.weight_decay, betas, run.adam_epsilon)
        self.model, *self.optimizers = self.accelerator.prepare(model, *optimizers)
        self.model.train()
        if run.torch_compile == "true":
            kinds = micro_batches_of_every_kind(full_batch(run, model.config.vocab_size))
            if error := compile_now(model, lambda: self.step(kinds, 0.0)):
                raise RuntimeError(error)
        compiled = "compiled" if run.torch_compile == "true" else "not compiled"
        self.is_ours = f"{self.run.mixed_precision}, attention {attention}, {compiled}"

    def __str__(self):
        return f"d2l-bert {version('d2l-bert')}, {self.is_ours}"

    def batches(self, micro_batches):
        return micro_batches

    def step(self, micro_batches, rate):
        run = self.run
        self.train_step(self.accelerator, self.model, self.optimizers, micro_batches, rate, run.max_grad_norm)

    def scores(self, batch):
        outputs = type(self.model).forward(self.model, **batch)  # Accelerate's own would compute in bf16
        return outputs.prediction_logits, outputs.seq_relationship_logits


class Book:
    """d2l 1.0.3's model, loss and step (section 15.10): Adam, float32, every row as long, 1 for the next sentence."""

    def __init__(self, told):
        for name in ("torchvision", "torchvision.transforms"):  # it imports them, and its BERT has no use for them
            sys.modules.setdefault(name, type(sys)(name))
        sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]
        from d2l import torch as d2l

        numbers = told["architecture"]
        self.vocab_size, self.pad = numbers["vocab_size"], numbers["pad_token_id"]
        self.length, self.device = told["run"]["max_seq_length"], told["device"]
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
        self.model(ids, ids, torch.ones(1, device=self.device), ids)  # its layers learn their sizes
        self.batch_loss, self.loss = d2l._get_batch_loss_bert, torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def __str__(self):
        return f"d2l {version('d2l')}, float32, Adam"

    def batches(self, micro_batches):
        step = whole_step(micro_batches, self.length, self.pad)
        known = step["labels"] != -100
        lengths = step["attention_mask"].sum(1).float()
        slots = (step["masked_positions"], known.float(), step["labels"].where(known, 0))
        return step["input_ids"], step["token_type_ids"], lengths, *slots, 1 - step["next_sentence_label"]

    def step(self, batch, rate):
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        batch = [tensor.to(self.device) for tensor in batch]
        *_, loss = self.batch_loss(self.model, self.loss, self.vocab_size, *batch)
        loss.backward()
        self.optimizer.step()
        loss.item()  # the book sums its losses up as numbers

    def scores(self, batch):
        lengths, slots = batch["attention_mask"].sum(1).float(), batch["masked_positions"]
        _, mlm, nsp = self.model(batch["input_ids"], batch["token_type_ids"], lengths, slots)
        return mlm, nsp.flip(-1)


class Stock:
    """`BertForPreTraining`: bf16, fused AdamW, as `told["variant"]` says: COMPILED/ATTENTION/PAIRS at once."""

    def __init__(self, told):
        from transformers import BertConfig, BertForPreTraining

        shared = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        shared += ("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings")
        shared += ("tie_word_embeddings", "pad_token_id")
        config = BertConfig(**{name: told["architecture"][name] for name in shared})
        self.variant, self.device = told["variant"], told["device"]
        how, attention, pairs = self.variant.split("/")
        self.length, self.pairs, self.fixed = told["run"]["max_seq_length"], int(pairs), how == "compiled"
        self.model = BertForPreTraining._from_config(config, attn_implementation=attention).to(self.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        if self.fixed:
            self.model.compile()

    def __str__(self):
        return f"stock BERT, transformers {version('transformers')}, bf16, fused AdamW, {self.variant}"

    def batches(self, micro_batches):
        step = whole_step(micro_batches, self.length, self.model.config.pad_token_id)
        known, slots = step.pop("labels"), step.pop("masked_positions")
        rows, columns = (known != -100).nonzero(as_tuple=True)
        step["labels"] = torch.full_like(step["input_ids"], -100)
        step["labels"][rows, slots[rows, columns]] = known[rows, columns]
        starts = range(0, len(known), self.pairs)
        parts = [{name: tensor[start : start + self.pairs] for name, tensor in step.items()} for start in starts]
        for part in parts if not self.fixed else ():  # a compiled model wants one shape
            longest = int(part["attention_mask"].sum(1).max())
            for name in ("input_ids", "token_type_ids", "attention_mask", "labels"):
                part[name] = part[name][:, :longest].contiguous()
        return parts

    def step(self, parts, rate):
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for part in parts:
            part = {name: tensor.to(self.device, non_blocking=True) for name, tensor in part.items()}
            with torch.autocast(self.device, torch.bfloat16):
                loss = self.model(**part).loss / len(parts)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


CONTESTANTS = {"ours": Ours, "d2l": Book, "stock": Stock}


# ---------------------------------------------------------------------------------------------------------------------
# Orders


class Worker:
    """What a contestant's process does when it is told to."""

    def __init__(self, told):
        torch.manual_seed(0)
        self.device = told["device"]
        self.contestant = CONTESTANTS[told["name"]](told)

    def steps(self, files, rates):
        """Seconds of some steps together; reading them does not count."""
        batches = [self.contestant.batches(read_step(file)) for file in files]
        self.synchronize()
        start = time.perf_counter()
        for batch, rate in zip(batches, rates, strict=True):
            self.contestant.step(batch, rate)
        self.synchronize()
        return time.perf_counter() - start

    def memory(self, file):
        """Bytes held before a step, and those it takes on top, at its peak."""
        batches = self.contestant.batches(read_step(file))
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL(None).malloc_trim(0)  # what is free already is not held
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            before = memory("VmRSS")
        self.contestant.step(batches, 0.0)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else memory("VmHWM")
        return before, peak - before

    @torch.no_grad()
    def evaluate(self, file):
        """Sums over held-out pairs, in the order of `COUNTS`, of predicted tokens only, in float32."""
        sums = torch.zeros(len(COUNTS), dtype=torch.float64)
        self.contestant.model.eval()
        for batch in read_step(file):
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            mlm, nsp = self.contestant.scores(batch)
            sums += torch.stack([*added_up(mlm, batch["labels"]), *added_up(nsp, batch["next_sentence_label"])])
        self.contestant.model.train()
        return sums.tolist()

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()


def added_up(logits, labels):
    known = labels != -100
    logits, labels = logits[known].float(), labels[known]
    found = F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(-1) == labels).sum(), known.sum()
    return [number.double().cpu() for number in found]


def memory(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def obey():
    """Answer orders until there are none; what libraries print goes elsewhere."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker(json.loads(sys.stdin.readline()))
    print(json.dumps(str(worker.contestant)), file=answers)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, what)(*arguments)), file=answers)


def environment(device):
    """What a process is started with, so that it computes on `device` even where there are others."""
    if device == "cpu":
        return os.environ | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    return {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}


class Contestant:
    """A contestant's process, seen from the one that gives the orders."""

    def __init__(self, name, told, python=sys.executable):
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors, "text": True}
        self.process = subprocess.Popen([python, __file__], env=environment(told["device"]), **pipes)
        self.who = self._ask({**copy.deepcopy(told), "name": name})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def tell(self, what, *arguments):
        return self._ask([what, *arguments])

    def _ask(self, order):
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
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
    obey()
