"""Compares ours with stock BERT, call by call: `python tests/compare_with_stock.py [--fast] [AREA ...]`.

Each function below makes one call, on either side, and returns what is compared; what it refuses is compared, too.
`@compared` names the area and the values to try. `KNOWN`, at the end, are the differences that stand on a page.
"""

import argparse
import collections
import contextlib
import copy
import io
import json
import logging
import pickle
import subprocess
import sys
import tempfile
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import transformers
from conftest import HEADS
from small_models import make_rows, stacked
from torch import nn
from transformers import Trainer, TrainingArguments, pipeline
from two_sides import (
    ALIKE,
    BETTER,
    BY_PAGE,
    LONGEST,
    TABLE,
    VOCABULARY,
    WIDTH,
    WRONG,
    Known,
    compare,
    compared,
    make_sides,
)


WITH_LOSS = tuple(head for head in HEADS if head != "Model")
OF_MLM = ("ForPreTraining", "ForMaskedLM")
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
FEW_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification")
MODES = ("eval", "train")
EXACT = (torch.float32, torch.float64)
HALF = (torch.bfloat16, torch.float16)
KERNELS = ("sdpa", "eager")
SENTENCES = ["Raise a ValueError [MASK] the value is not found.", "Return the [MASK] of a list.", "A file is open."]


# ---------------------------------------------------------------------------------------------------------------------
# Batches, and what is read of outputs


def batch_of(head, labels=True):
    batch = stacked(make_rows(head))
    if not labels:
        for name in ("labels", "next_sentence_label", "start_positions", "end_positions"):
            batch.pop(name, None)
    return batch


def read(outputs, dtype=torch.float32):
    """The entries of outputs, without what stock BERT lacks; the loss in this dtype, as its own has a row."""
    entries = {name: value for name, value in outputs.items() if name not in ("mlm_loss", "nsp_loss")}
    entries.pop("cross_attentions", None)
    if "loss" in entries:
        entries["loss"] = entries["loss"].to(dtype)
    return entries


def gradients(side, model):
    """By weight; without biases of keys and of choices' scores, which softmax does not see: rounding errors."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None and not name.endswith("key.bias") and weight.numel() > 1:
            found[name] = weight.grad
    return side.by_weight(found)


def first_logits(side, model, head="ForMaskedLM", **changes):
    """The first tensor of the outputs in evaluation mode: logits, or the last hidden states."""
    batch = {**batch_of(head, labels=False), **changes}
    with torch.no_grad():
        return model.eval()(**batch)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Outputs


@compared("outputs", head=HEADS, mode=MODES, dtype=(*EXACT, *HALF), kernel=KERNELS)
def of_a_batch_without_labels(side, head, mode, dtype, kernel):
    return read(side.model(head, mode, dtype, kernel)(**batch_of(head, labels=False)))


@compared("outputs", head=WITH_LOSS, mode=MODES, dtype=(*EXACT, *HALF), kernel=KERNELS)
def of_a_batch_with_labels(side, head, mode, dtype, kernel):
    return read(side.model(head, mode, dtype, kernel)(**batch_of(head)), dtype)


@compared("outputs", head=HEADS, asked=("output_hidden_states", "output_attentions"), by=("argument", "config"))
def with_inner_states(side, head, asked, by):
    changes = {asked: True} if by == "config" else {}
    model = side.model(head, attention="eager", **changes)
    return read(model(**batch_of(head), **({asked: True} if by == "argument" else {})))


@compared("outputs", head=HEADS, asked=("output_hidden_states", "output_attentions"))
def with_inner_states_under_sdpa(side, head, asked):
    return read(side.model(head)(**batch_of(head, labels=False), **{asked: True}))


@compared("outputs", head=OF_MLM, asked=("output_hidden_states", "output_attentions"))
def inner_states_in_training(side, head, asked):
    outputs = side.model(head, "train", attention="eager")(**batch_of(head), **{asked: True})
    return outputs[asked.removeprefix("output_")]


@compared("outputs", head=HEADS, mode=MODES, labels=(False, True))
def as_a_tuple(side, head, mode, labels):
    return side.model(head, mode)(**batch_of(head, labels), return_dict=False)


@compared("outputs", head=HEADS, labels=(False, True))
def as_the_configuration_says(side, head, labels):
    outputs = side.model(head, return_dict=False)(**batch_of(head, labels))
    return isinstance(outputs, tuple), outputs[:2]


@compared("outputs", head=HEADS)
def to_tuple(side, head):
    return side.model(head)(**batch_of(head, labels=False)).to_tuple()


@compared("outputs", head=WITH_LOSS, mode=MODES)
def loss_by_place(side, head, mode):
    return float(side.model(head, mode)(**batch_of(head))[0])


@compared("outputs", head=OF_MLM)
def logits_by_place_in_training(side, head):
    return side.model(head, "train")(**batch_of(head))[1]


@compared("outputs", head=WITH_LOSS, dtype=HALF, mode=MODES, right=torch.float32)
def dtype_of_the_loss(side, head, dtype, mode):
    return side.model(head, mode, dtype)(**batch_of(head)).loss.dtype


@compared("outputs", head=HEADS, mode=MODES)
def under_autocast(side, head, mode):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = side.model(head, mode)(**batch_of(head, labels=False))
    return outputs[0]


@compared("outputs", head=WITH_LOSS)
def loss_under_autocast(side, head):
    with torch.autocast("cpu", torch.bfloat16):
        return round(float(side.model(head, "train")(**batch_of(head)).loss), 1)


@compared("outputs", mode=MODES)
def dropout_drops(side, mode):
    """Whether dropout changes a batch: another seed, another output."""
    model = side.model("ForSequenceClassification", mode, hidden_dropout_prob=0.3)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(model(**batch_of("ForSequenceClassification")).logits)
    return torch.equal(*found)


@compared("outputs", probability=(0.1, 0.5), scale=(1.0, 4.0))
def share_that_dropout_drops(side, probability, scale):
    model = side.model("Model", hidden_dropout_prob=probability)
    layer = model.encoder.layer[0]
    place = layer.addnorm1 if side.name == "ours" else layer.attention.output
    values = place.dropout.train()(torch.full((500, 500), scale))
    return round(float((values == 0).float().mean()), 2), round(float(values.max() / scale), 3)


# ---------------------------------------------------------------------------------------------------------------------
# Inputs

INPUTS = {
    "no mask": lambda batch: batch.pop("attention_mask"),
    "a mask of ones": lambda batch: batch["attention_mask"].fill_(1),
    "a bool mask": lambda batch: batch.update(attention_mask=batch["attention_mask"].bool()),
    "a float mask": lambda batch: batch.update(attention_mask=batch["attention_mask"].float()),
    "a mask (B, T, T)": lambda batch: batch.update(attention_mask=batch["attention_mask"][:, None].expand(-1, 12, -1)),
    "a mask (B, 1, 1, T)": lambda batch: batch.update(attention_mask=batch["attention_mask"][:, None, None].bool()),
    "a mask (B, 1, T, T)": lambda batch: batch.update(
        attention_mask=batch["attention_mask"][:, None, None].expand(-1, 1, 12, -1).bool()
    ),
    "a mask of scores": lambda batch: batch.update(
        attention_mask=(1.0 - batch["attention_mask"][:, None, None].expand(-1, 1, 12, -1)) * -1e9
    ),
    "a mask too short": lambda batch: batch.update(attention_mask=batch["attention_mask"][:, :5]),
    "a row of padding": lambda batch: batch["attention_mask"][0].fill_(0),
    "padding on the left": lambda batch: batch.update(attention_mask=batch["attention_mask"].flip(1)),
    "no segments": lambda batch: batch.pop("token_type_ids"),
    "segments too many": lambda batch: batch["token_type_ids"].fill_(2),
    "int32 ids": lambda batch: batch.update(input_ids=batch["input_ids"].int()),
    "float ids": lambda batch: batch.update(input_ids=batch["input_ids"].float()),
    "an id too large": lambda batch: batch["input_ids"].fill_(VOCABULARY),
    "an id below 0": lambda batch: batch["input_ids"].fill_(-1),
    "positions": lambda batch: batch.update(position_ids=torch.arange(12).flip(0)[None]),
    "positions of each row": lambda batch: batch.update(position_ids=torch.arange(12).expand(8, -1) + 3),
    "positions too large": lambda batch: batch.update(position_ids=torch.arange(12)[None] + LONGEST - 2),
    "vectors for ids": lambda batch: batch.update(
        inputs_embeds=torch.linspace(-1, 1, 8 * 12 * WIDTH).view(8, 12, WIDTH), input_ids=None
    ),
    "ids and vectors": lambda batch: batch.update(inputs_embeds=torch.zeros(8, 12, WIDTH)),
    "nothing": lambda batch: batch.clear(),
    "no rows": lambda batch: batch.update({name: value[:0] for name, value in batch.items()}),
    "no tokens": lambda batch: batch.update({name: value[:, :0] for name, value in batch.items()}),
    "one row": lambda batch: batch.update({name: value[:1] for name, value in batch.items()}),
    "one token": lambda batch: batch.update({name: value[:, :1] for name, value in batch.items()}),
    "a row too long": lambda batch: batch.update(dict.fromkeys(batch, torch.ones(1, LONGEST + 1, dtype=torch.long))),
    "the longest row": lambda batch: batch.update(dict.fromkeys(batch, torch.ones(1, LONGEST, dtype=torch.long))),
    "ids (T,)": lambda batch: batch.update(input_ids=batch["input_ids"][0]),
    "an unknown argument": lambda batch: batch.update(no_such_argument=1),
    "a head mask": lambda batch: batch.update(head_mask=torch.ones(2, 4)),
    "states of an encoder": lambda batch: batch.update(encoder_hidden_states=torch.zeros(8, 12, WIDTH)),
    "use_cache": lambda batch: batch.update(use_cache=True),
    "past key values": lambda batch: batch.update(past_key_values=None),
}


@compared("inputs", inputs=INPUTS, head=FEW_HEADS, kernel=KERNELS)
def logits(side, inputs, head, kernel):
    batch = batch_of(head, labels=False)
    INPUTS[inputs](batch)
    with torch.no_grad():
        outputs = side.model(head, attention=kernel)(**batch)
    real = batch.get("attention_mask")
    found = outputs[0]
    is_plain_mask = real is not None and real.dim() == 2 and real.shape == found.shape[:2]
    if is_plain_mask and head != "ForSequenceClassification":
        found = found * real.unsqueeze(-1)  # what stands at padding is read by nothing
    return found


@compared("inputs", head=HEADS)
def by_place(side, head):
    batch = batch_of(head, labels=False)
    return side.model(head)(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])[0]


@compared("inputs", head=WITH_LOSS)
def labels_by_place(side, head):
    """The sixth argument and the seventh."""
    batch = batch_of(head)
    names = ("start_positions", "end_positions") if head == "ForQuestionAnswering" else ("labels",)
    arguments = [batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")]
    labels = [batch[name] for name in names]
    return float(side.model(head)(*arguments, None, None, *labels)[0])


LABELS = {
    "int32": lambda labels: labels.int(),
    "a column": lambda labels: labels.unsqueeze(-1),
    "flat": lambda labels: labels.flatten(),
    "ignored everywhere": lambda labels: labels.fill_(-100),
    "too large": lambda labels: labels.fill_(10**6),
    "minus one": lambda labels: labels.fill_(-1),
    "floats": lambda labels: labels.float(),
    "for fewer rows": lambda labels: labels[:4],
}


@compared("inputs", labels=LABELS, head=tuple(h for h in WITH_LOSS if h != "ForQuestionAnswering"), mode=MODES)
def loss_of_labels(side, labels, head, mode):
    batch = batch_of(head)
    batch["labels"] = LABELS[labels](batch["labels"])
    return float(side.model(head, mode)(**batch)[0])


@compared("inputs", start=(-1, 0, 11, 12, 500), shape=("(B,)", "(B, 1)"))
def loss_of_answers_at(side, start, shape):
    batch = batch_of("ForQuestionAnswering")
    for name in ("start_positions", "end_positions"):
        batch[name] = torch.tensor([start, 3, 4, 1, 2, 5, 6, 7])
        if shape == "(B, 1)":
            batch[name] = batch[name].unsqueeze(-1)
    return float(side.model("ForQuestionAnswering")(**batch).loss)


PROBLEMS = {
    "classes": (3, None, torch.arange(8) % 3),
    "classes, a column": (3, None, (torch.arange(8) % 3)[:, None]),
    "several classes": (3, None, torch.eye(3)[torch.arange(8) % 3]),
    "several classes in whole numbers": (3, "multi_label_classification", torch.eye(3).long()[torch.arange(8) % 3]),
    "a number": (1, None, torch.linspace(0, 1, 8)),
    "a number in a column": (1, None, torch.linspace(0, 1, 8)[:, None]),
    "three numbers": (3, "regression", torch.linspace(0, 1, 24).view(8, 3)),
    "whole numbers": (1, "regression", torch.arange(8)),
    "numbers of the wrong shape": (1, "regression", torch.linspace(0, 1, 16).view(8, 2)),
    "three numbers for one score": (3, "regression", torch.linspace(0, 1, 8)),
}


@compared("inputs", problem=PROBLEMS, mode=MODES)
def loss_and_kind_of_problem(side, problem, mode):
    num_labels, kind, labels = PROBLEMS[problem]
    torch.manual_seed(0)
    model = side.class_of("ForSequenceClassification").from_pretrained(
        side.folder / "ForPreTraining", num_labels=num_labels, problem_type=kind
    )
    with torch.no_grad():
        model.classifier.weight.copy_(torch.linspace(-1, 1, num_labels * WIDTH).view(num_labels, WIDTH))
    loss = model.train(mode == "train")(**batch_of("ForSequenceClassification", labels=False), labels=labels).loss
    return float(loss), model.config.problem_type


@compared("inputs", head=tuple(head for head in WITH_LOSS if head != "ForPreTraining"), right=2.0)
def loss_divided_by_a_number_of_items(side, head):
    """As Trainer asks for: half of the loss for twice the items."""
    model = side.model(head)
    one = model(**batch_of(head), num_items_in_batch=torch.tensor(10)).loss
    two = model(**batch_of(head), num_items_in_batch=torch.tensor(20)).loss
    return round(float(one / two), 3)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@compared("gradients", head=WITH_LOSS, mode=MODES, dtype=EXACT, kernel=KERNELS)
def of_all_weights(side, head, mode, dtype, kernel):
    model = side.model(head, mode, dtype, kernel)
    model(**batch_of(head)).loss.backward()
    return gradients(side, model)


@compared("gradients", head=WITH_LOSS, dtype=HALF)
def norm_of_all(side, head, dtype):
    model = side.model(head, "train", dtype)
    model(**batch_of(head)).loss.backward()
    return torch.stack([value.float().norm() for value in gradients(side, model).values()]).norm().to(dtype)


@compared("gradients", head=WITH_LOSS, reentrant=(True, False))
def with_gradient_checkpointing(side, head, reentrant):
    model = side.model(head, "train")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model(**batch_of(head)).loss.backward()
    return model.is_gradient_checkpointing, gradients(side, model)


@compared("gradients", head=WITH_LOSS)
def without_checkpointing_again(side, head):
    model = side.model(head, "train")
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model(**batch_of(head)).loss.backward()
    return model.is_gradient_checkpointing, gradients(side, model)


@compared("gradients", head=WITH_LOSS)
def under_autocast_to_bfloat16(side, head):
    model = side.model(head, "train")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch_of(head)).loss
    loss.backward()
    found = gradients(side, model)["bert.encoder.layer.0.attention.self.query.weight"]
    return found.dtype, found.to(torch.bfloat16).norm()


@compared("gradients", head=WITH_LOSS, frozen=("bert", "embeddings"))
def of_a_model_partly_frozen(side, head, frozen):
    model = side.model(head, "train")
    (model.bert if frozen == "bert" else model.bert.embeddings).requires_grad_(False)
    model(**batch_of(head)).loss.backward()
    return gradients(side, model)


@compared("gradients", head=WITH_LOSS)
def for_vectors(side, head):
    model = side.model(head, "train")
    batch = batch_of(head)
    vectors = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    (found,) = torch.autograd.grad(model(**batch, inputs_embeds=vectors).loss, vectors)
    return found


@compared("gradients", head=WITH_LOSS, mode=MODES)
def of_the_norm_of_gradients(side, head, mode):
    model = side.model(head, mode, torch.float64, "eager")
    weight = side.module(model, "bert.encoder.layer.1.attention.query").weight
    (once,) = torch.autograd.grad(model(**batch_of(head)).loss, weight, create_graph=True)
    (twice,) = torch.autograd.grad(once.square().sum(), weight)
    return twice


@compared("gradients", head=WITH_LOSS)
def twice_through_one_graph(side, head):
    model = side.model(head, "train")
    loss = model(**batch_of(head)).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(side, model)


@compared("gradients", head=WITH_LOSS, right=True)
def of_micro_batches_add_up(side, head):
    """With the number of items of the whole step, as Trainer passes it, two halves are one batch."""
    model = side.model(head, "train", torch.float64)
    names = ("start_positions",) if head == "ForQuestionAnswering" else ("labels",)
    batch = batch_of(head)
    if "next_sentence_label" in batch:
        del batch["next_sentence_label"]
    items = (batch[names[0]] != -100).sum()
    whole = float(model(**batch).loss)
    parts = 0
    for rows in (slice(0, 2), slice(2, 8)):
        part = {name: value[rows] for name, value in batch.items()}
        parts += float(model(**part, num_items_in_batch=items).loss)
    return abs(parts - whole) < 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# Hooks

LAST = "bert.encoder.layer.1"
PLACES = (
    "bert.embeddings",
    "bert.embeddings.word_embeddings",
    "bert.encoder.layer.0",
    "bert.encoder.layer.0.attention.key",
    LAST,
    f"{LAST}.attention.query",
    f"{LAST}.attention.value",
    f"{LAST}.attention.output",
    f"{LAST}.addnorm1.LayerNorm",
    f"{LAST}.ffn.dense1",
    f"{LAST}.ffn.dense2",
    f"{LAST}.addnorm2.LayerNorm",
    "bert.pooler",
    "bert.pooler.dense",
    "mlm",
    "mlm.dense",
    "mlm.LayerNorm",
    "mlm.decoder",
    "nsp.output",
)


def first_of(value):
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value


@compared("hooks", place=PLACES, kind=("forward", "forward pre", "backward", "backward pre"), mode=MODES)
def reads(side, place, kind, mode):
    """What a hook gets in a step with labels."""
    model = side.model("ForPreTraining", mode)
    module = side.module(model, place)
    seen = []
    registered = {
        "forward": lambda: module.register_forward_hook(lambda _, given, output: seen.append(first_of(output))),
        "forward pre": lambda: module.register_forward_pre_hook(lambda _, given: seen.append(first_of(given))),
        "backward": lambda: module.register_full_backward_hook(lambda _, i, o: seen.append(first_of(o))),
        "backward pre": lambda: module.register_full_backward_pre_hook(lambda _, o: seen.append(first_of(o))),
    }
    registered[kind]()
    model(**batch_of("ForPreTraining")).loss.backward()
    return seen


@compared("hooks", place=PLACES, mode=MODES)
def replaces_the_output(side, place, mode):
    model = side.model("ForPreTraining", mode)

    def halve(module, given, output):
        return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2

    side.module(model, place).register_forward_hook(halve)
    return float(model(**batch_of("ForPreTraining")).loss)


@compared("hooks", mode=MODES)
def of_all_modules_count_the_linear_layers(side, mode):
    counts = collections.Counter()

    def count(module, given, output):
        if isinstance(module, nn.Linear):
            counts[tuple(output.shape)] += 1

    handle = nn.modules.module.register_module_forward_hook(count)
    try:
        side.model("ForPreTraining", mode)(**batch_of("ForPreTraining"))
    finally:
        handle.remove()
    return sorted(counts.items())


@compared("hooks", mode=MODES, head=OF_MLM)
def of_a_weight(side, mode, head):
    """A hook on the gradient of the decoder's weight, and of its bias."""
    model = side.model(head, mode)
    seen = []
    decoder = side.module(model, "mlm.decoder")
    decoder.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    decoder.bias.register_hook(lambda gradient: seen.append(gradient.clone()))
    model(**batch_of(head)).loss.backward()
    return sorted(seen, key=lambda gradient: gradient.dim())


@compared("hooks", mode=MODES)
def flops(side, mode):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        side.model("ForMaskedLM", mode)(**batch_of("ForMaskedLM")).loss.backward()
    return counter.get_total_flops()


def untied(side, mode):
    """A model for masks whose decoder has a weight of its own, with the values of the embeddings."""
    model = side.model("ForMaskedLM", mode)
    side.module(model, "mlm.decoder").weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    return model


@compared("hooks", name=("weight_norm", "spectral_norm"))
def parametrized_decoder(side, name):
    model = untied(side, "train")
    decoder = side.module(model, "mlm.decoder")
    getattr(torch.nn.utils.parametrizations, name)(decoder)
    return float(model(**batch_of("ForMaskedLM")).loss)


@compared("hooks", layer=("mlm.decoder", "bert.encoder.layer.1.attention.query"), mode=MODES)
def replaced_forward(side, layer, mode):
    """A function in place of a layer's `forward`, as some libraries put there."""
    model = side.model("ForMaskedLM", mode)
    module = side.module(model, layer)
    usual = module.forward
    module.forward = lambda states: 0.5 * usual(states)
    return float(model(**batch_of("ForMaskedLM")).loss)


# ---------------------------------------------------------------------------------------------------------------------
# Saving and loading


def state(side, model):
    return {name: value for name, value in side.by_weight(model.state_dict()).items() if "position_ids" not in name}


@compared("saving", head=HEADS, dtype=(torch.float32, *HALF))
def and_loading_again(side, head, dtype):
    side.model(head, dtype=dtype).save_pretrained(side.place)
    loaded, report = side.class_of(head).from_pretrained(side.place, output_loading_info=True)
    said = {name: sorted(map(str, value)) for name, value in report.items() if value}
    return loaded.dtype, state(side, loaded), said


@compared("saving", head=FEW_HEADS)
def in_shards(side, head):
    side.model(head).save_pretrained(side.place, max_shard_size="20KB")
    is_sharded = (side.place / "model.safetensors.index.json").exists()
    return is_sharded, state(side, side.class_of(head).from_pretrained(side.place))


@compared("saving", head=FEW_HEADS)
def a_variant(side, head):
    side.model(head).save_pretrained(side.place, variant="half")
    return state(side, side.class_of(head).from_pretrained(side.place, variant="half"))


@compared("saving", head=FEW_HEADS)
def another_state(side, head):
    model = side.model(head)
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.save_pretrained(side.place, state_dict=zeros)
    return state(side, side.class_of(head).from_pretrained(side.place))


@compared("saving", head=HEADS)
def entries_of_the_configuration(side, head):
    side.model(head).save_pretrained(side.place)
    config = json.loads((side.place / "config.json").read_text())
    config["architectures"] = [name.removeprefix("D2l") for name in config["architectures"]]
    for of_ours in ("embedding_layer_norm", "auto_map", "model_type"):
        config.pop(of_ours, None)
    for of_stock in ("position_embedding_type", "use_cache", "is_decoder", "add_cross_attention", "bos_token_id"):
        config.pop(of_stock, None)
    config.pop("eos_token_id", None)
    return config


@compared("saving", saved=HEADS, head=HEADS)
def a_head_loaded_as_another(side, saved, head):
    """Which weights are new, and which values the others have."""
    model, report = side.class_of(head).from_pretrained(side.folder / saved, output_loading_info=True)
    missing = side.by_weight(dict.fromkeys(report["missing_keys"]))
    kept = {name: value for name, value in state(side, model).items() if name not in missing}
    return sorted(missing), kept


@compared("saving", head=HEADS)
def by_torch(side, head):
    model = side.model(head)
    torch.save(model.state_dict(), side.place / "weights.pt")
    other = side.class_of(head)(model.config)
    report = other.load_state_dict(torch.load(side.place / "weights.pt"))
    return list(map(list, report)), first_logits(side, other, head)


@compared("saving", head=HEADS)
def whole_by_torch(side, head):
    torch.save(side.model(head), side.place / "model.pt")
    return first_logits(side, torch.load(side.place / "model.pt", weights_only=False), head)


@compared("saving", head=HEADS, copied=("pickle", "deepcopy"))
def copies(side, head, copied):
    model = side.model(head)
    other = copy.deepcopy(model) if copied == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    return first_logits(side, other, head)


@compared("saving", head=OF_MLM, copied=("pickle", "deepcopy", "save_pretrained"))
def ties_of_a_copy(side, head, copied):
    model = side.model(head)
    if copied == "save_pretrained":
        model.save_pretrained(side.place)
        other = side.class_of(head).from_pretrained(side.place)
    else:
        other = copy.deepcopy(model) if copied == "deepcopy" else pickle.loads(pickle.dumps(model))
    return other.get_output_embeddings().weight is other.get_input_embeddings().weight


@compared("saving", head=HEADS)
def outputs_pickled(side, head):
    outputs = side.model(head)(**batch_of(head, labels=False))
    return read(pickle.loads(pickle.dumps(outputs)))


@compared("saving", head=HEADS, is_slow=True)
def and_loading_where_the_package_is_not_imported(side, head):
    """The head of an Auto class, in another process, of a folder that another head's `save_pretrained` wrote."""
    side.model("ForMaskedLM").save_pretrained(side.place)
    code = (
        f"from transformers import AutoModel{head.removeprefix('Model')} as auto; model = auto.from_pretrained("
        f"{str(side.place)!r}, trust_remote_code=True); print(type(model).__name__.removeprefix('D2l'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.returncode, done.stdout


OPTIONS = {
    "dtype=torch.bfloat16": {"dtype": torch.bfloat16},
    "dtype='float16'": {"dtype": "float16"},
    "dtype='auto'": {"dtype": "auto"},
    "dtype='nonsense'": {"dtype": "nonsense"},
    "torch_dtype": {"torch_dtype": torch.float64},
    "low_cpu_mem_usage": {"low_cpu_mem_usage": True},
    "device_map='cpu'": {"device_map": "cpu"},
    "device_map='auto'": {"device_map": "auto"},
    "device_map of parts": {"device_map": {"": "cpu"}},
    "eager": {"attn_implementation": "eager"},
    "sdpa": {"attn_implementation": "sdpa"},
    "flex_attention": {"attn_implementation": "flex_attention"},
    "flash_attention_2": {"attn_implementation": "flash_attention_2"},
    "no such attention": {"attn_implementation": "nonsense"},
    "output_attentions": {"output_attentions": True, "attn_implementation": "eager"},
    "output_hidden_states": {"output_hidden_states": True},
    "return_dict=False": {"return_dict": False},
    "local_files_only": {"local_files_only": True},
    "use_safetensors": {"use_safetensors": True},
    "use_safetensors=False": {"use_safetensors": False},
    "a variant that is not there": {"variant": "none"},
    "a subfolder that is not there": {"subfolder": "none"},
    "num_labels=5": {"num_labels": 5, "ignore_mismatched_sizes": True},
    "num_labels=5, sizes not ignored": {"num_labels": 5},
    "id2label": {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}},
    "problem_type": {"problem_type": "regression"},
    "a problem_type that is none": {"problem_type": "nonsense"},
    "hidden_dropout_prob": {"hidden_dropout_prob": 0.25},
    "classifier_dropout": {"classifier_dropout": 0.25},
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "num_hidden_layers=1": {"num_hidden_layers": 1},
    "num_hidden_layers=3": {"num_hidden_layers": 3},
    "max_position_embeddings=32": {"max_position_embeddings": 32},
    "max_position_embeddings=32, sizes ignored": {"max_position_embeddings": 32, "ignore_mismatched_sizes": True},
    "vocab_size=200": {"vocab_size": 200},
    "vocab_size=200, sizes ignored": {"vocab_size": 200, "ignore_mismatched_sizes": True},
    "tie_word_embeddings=False": {"tie_word_embeddings": False},
    "num_attention_heads=8": {"num_attention_heads": 8},
    "num_attention_heads=3": {"num_attention_heads": 3},
    "an option that is none": {"no_such_option": 1},
    "add_pooling_layer=False": {"add_pooling_layer": False},
    "trust_remote_code=False": {"trust_remote_code": False},
    "revision": {"revision": "main"},
    "key_mapping": {"key_mapping": {"^encoder": "bert.encoder"}},
    "a stranger's state": {"state_dict": {}},
}
RANDOM_WHERE = ("ignored", "ignore_mismatched", "num_labels=5", "stranger", "num_hidden_layers=3", "pooling")


@compared("from_pretrained", option=OPTIONS, head=FEW_HEADS)
def takes(side, option, head):
    """The dtype, the weights that are new or of another size, some fields, and what is computed with old weights."""
    folder = side.folder / head
    model, report = side.class_of(head).from_pretrained(folder, output_loading_info=True, **OPTIONS[option])
    missing = sorted(side.by_weight(dict.fromkeys(report["missing_keys"])))
    other_sizes = sorted(side.by_weight({name[0]: None for name in report["mismatched_keys"]}))
    fields = ("num_labels", "problem_type", "hidden_act", "hidden_dropout_prob", "classifier_dropout", "id2label")
    values = [getattr(model.config, name) for name in fields]
    values += [model.config._attn_implementation, model.training, str(model.dtype), str(model.device)]
    has_new = bool(missing or other_sizes)
    if has_new:
        return missing, other_sizes, values
    outputs = first_logits(side, model, head)
    return missing, other_sizes, values, outputs


@compared("from_pretrained", head=FEW_HEADS)
def of_a_subfolder(side, head):
    model = side.class_of(head).from_pretrained(side.folder, subfolder=head)
    return first_logits(side, model, head)


@compared("from_pretrained", head=FEW_HEADS)
def of_a_configuration_and_a_state(side, head):
    model = side.model(head)
    other = side.class_of(head).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    return first_logits(side, other, head)


@compared("from_pretrained", what=("empty", "no weights", "no config", "damaged weights", "none"))
def of_a_folder_that_is_none(side, what):
    folder = side.place / "saved"
    if what != "none":
        side.model("ForMaskedLM").save_pretrained(folder)
    removed = {"empty": "*", "no weights": "*.safetensors", "no config": "config.json"}.get(what, "nothing")
    for path in folder.glob(removed):
        path.unlink()
    if what == "damaged weights":
        (folder / "model.safetensors").write_bytes(b"0" * 100)
    return side.class_of("ForMaskedLM").from_pretrained(folder)


AUTO_CLASSES = [name for name in transformers.models.auto.modeling_auto.__all__ if name.startswith("AutoModel")]


@compared("Auto classes", name=AUTO_CLASSES)
def loads(side, name):
    model = getattr(transformers, name).from_pretrained(side.folder / "ForPreTraining")
    return type(model).__name__.removeprefix("D2l")


@compared("Auto classes", head=HEADS)
def from_a_configuration(side, head):
    config = transformers.AutoConfig.from_pretrained(side.folder / head)
    auto = getattr(transformers, f"AutoModel{head.removeprefix('Model')}")
    return type(auto.from_config(config)).__name__.removeprefix("D2l")


FIELDS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings type_vocab_size initializer_range layer_norm_eps "
    "pad_token_id classifier_dropout tie_word_embeddings num_labels id2label label2id return_dict use_return_dict "
    "output_attentions output_hidden_states problem_type is_encoder_decoder chunk_size_feed_forward dtype "
    "torch_dtype is_decoder add_cross_attention use_cache bos_token_id eos_token_id sep_token_id "
    "position_embedding_type head_dim num_key_value_heads attribute_map"
).split()


@compared("configuration", field=FIELDS)
def has_the_field(side, field):
    return getattr(side.model("ForSequenceClassification").config, field)


@compared("configuration", field=("num_labels", "hidden_dropout_prob", "output_attentions"), value=(3, 0.5, True, "x"))
def takes_a_new_value(side, field, value):
    config = side.model("ForSequenceClassification").config
    setattr(config, field, value)
    return getattr(config, field), len(config.id2label)


@compared("configuration", head=HEADS)
def round_trip(side, head):
    config = side.model(head).config
    again = type(config).from_dict(config.to_dict())
    return again.to_dict() == config.to_dict(), again == config, json.loads(config.to_json_string())["hidden_size"]


# ---------------------------------------------------------------------------------------------------------------------
# Names and sizes of a model


@compared("model", head=HEADS)
def names_and_shapes_of_weights(side, head):
    weights = side.by_weight(dict(side.model(head).named_parameters()))
    return {name: tuple(weight.shape) for name, weight in weights.items()}


@compared("model", head=HEADS)
def number_of_weights(side, head):
    model = side.model(head)
    return [model.num_parameters(), model.num_parameters(exclude_embeddings=True)]


ATTRIBUTES = (
    "base_model_prefix main_input_name device dtype is_gradient_checkpointing supports_gradient_checkpointing "
    "framework training input_modalities _supports_sdpa _supports_flash_attn _supports_flex_attn "
    "_supports_attention_backend is_parallelizable is_loaded_in_8bit num_labels dummy_inputs"
).split()


@compared("model", attribute=ATTRIBUTES)
def attribute(side, attribute):
    return getattr(side.model("ForSequenceClassification"), attribute)


@compared("model", head=HEADS)
def embeddings(side, head):
    model = side.model(head)
    out = model.get_output_embeddings()
    return model.get_input_embeddings().weight, None if out is None else out.weight


SIZES = (VOCABULARY, VOCABULARY + 8, VOCABULARY - 8, 50)


@compared("model", size=SIZES, head=FEW_HEADS, multiple=(None, 64), mean=(True, False))
def resized(side, size, head, multiple, mean):
    """A vocabulary of another size: the old tokens' logits, the tie, and that it trains."""
    model = side.model(head)
    model.resize_token_embeddings(size, pad_to_multiple_of=multiple, mean_resizing=mean)
    out = model.get_output_embeddings()
    is_tied = out is not None and out.weight is model.get_input_embeddings().weight
    batch = {name: value.clamp(max=39) for name, value in batch_of(head).items()}
    outputs = model(**batch)
    found = outputs["logits" if "logits" in outputs else "last_hidden_state"]
    common = found[..., : min(size, VOCABULARY)] if head == "ForMaskedLM" else found
    return model.config.vocab_size, is_tied, tuple(found.shape), common


@compared("model", head=OF_MLM, mode=MODES)
def resized_and_trained(side, head, mode):
    model = side.model(head, mode)
    model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCABULARY:] = 0.01
    batch = batch_of(head)
    batch["labels"][:, 0] = VOCABULARY + 3
    model(**batch).loss.backward()
    return model.get_output_embeddings().weight.grad, model.get_output_embeddings().bias


@compared("model", head=FEW_HEADS, size=(80, 32))
def other_positions(side, head, size):
    model = side.model(head)
    model.resize_position_embeddings(size)
    return first_logits(side, model, head)


@compared("model", head=("Model", "ForSequenceClassification"))
def pruned(side, head):
    model = side.model(head)
    model.prune_heads({0: [1]})
    return first_logits(side, model, head)


@compared("model", head=FEW_HEADS)
def other_input_embeddings(side, head):
    model = side.model(head)
    torch.manual_seed(0)
    model.set_input_embeddings(nn.Embedding(VOCABULARY, WIDTH))
    return first_logits(side, model, head)


@compared("model", bias=(True, False), head=OF_MLM, mode=MODES)
def other_output_embeddings(side, bias, head, mode):
    model = side.model(head, mode)
    torch.manual_seed(0)
    model.set_output_embeddings(nn.Linear(WIDTH, VOCABULARY, bias=bias))
    loss = model(**batch_of(head)).loss
    loss.backward()
    return float(loss), gradients(side, model)["bert.embeddings.word_embeddings.weight"]


@compared("model", head=OF_MLM)
def tied_again(side, head):
    model = side.model(head, tie_word_embeddings=True)
    torch.manual_seed(0)
    model.set_input_embeddings(nn.Embedding(VOCABULARY, WIDTH))
    model.tie_weights()
    return first_logits(side, model, head)


@compared("model", to=(torch.float64, torch.bfloat16, "meta", "cpu"), head=FEW_HEADS)
def moved(side, to, head):
    model = side.model(head).to(to)
    if to == "meta":
        return {name: str(value.device) for name, value in side.by_weight(dict(model.named_parameters())).items()}
    return str(model.dtype), first_logits(side, model, head)


@compared("model", head=HEADS)
def made_on_no_device(side, head):
    with torch.device("meta"):
        model = side.class_of(head)(side.model(head).config)
    return sum(weight.numel() for weight in model.parameters())


@compared("model", head=HEADS)
def spread_of_new_weights(side, head):
    torch.manual_seed(0)
    model = side.class_of(head)(side.model(head).config)
    found = side.by_weight(dict(model.named_parameters()))
    large = {name: round(float(value.std()), 2) for name, value in found.items() if value.numel() > 500}
    small = {name: round(float(value.mean()), 1) for name, value in found.items() if value.numel() <= 500}
    return large, small


@compared("model", kernel=("eager", "sdpa", "flex_attention", "flash_attention_2", "nonsense"), head=FEW_HEADS)
def another_attention(side, kernel, head):
    model = side.model(head)
    model.set_attn_implementation(kernel)
    return model.config._attn_implementation, first_logits(side, model, head)


@compared("model", head=HEADS)
def attention_of_ones_own(side, head):
    """A function of the program's own, registered with Transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def uniform(module, query, key, value, attention_mask, **kwargs):
        mean = value.mean(2, keepdim=True).expand_as(query).transpose(1, 2).contiguous()
        return mean, None

    AttentionInterface.register("uniform", uniform)
    AttentionMaskInterface.register("uniform", sdpa_mask)
    model = side.model(head)
    model.set_attn_implementation("uniform")
    return first_logits(side, model, head)


METHODS = (
    "generate can_generate get_encoder get_decoder is_remote_code get_position_embeddings warnings_issued tie_weights "
    "init_weights add_model_tags share_memory half float bfloat16 eval requires_grad_ "
    "get_expanded_tied_weights_keys estimate_tokens floating_point_ops invert_attention_mask "
    "get_extended_attention_mask create_extended_attention_mask_for_decoder get_head_mask reverse_bettertransformer"
).split()


@compared("model", method=METHODS)
def has_the_method(side, method):
    return callable(getattr(side.model("ForMaskedLM"), method))


@compared("model", head=HEADS, call=("generate", "prepare_inputs_for_generation"))
def refuses_to_write_text(side, head, call):
    return type(getattr(side.model(head), call)(torch.arange(5, 10)[None])).__name__


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines, tokenizers


PIPELINES = {
    "fill-mask": {"top_k": 3},
    "fill-mask targets": {"targets": ["if", "when"]},
    "fill-mask top_k=1": {"top_k": 1},
    "fill-mask truncated": {"tokenizer_kwargs": {"truncation": True, "max_length": 9}},
    "text-classification": {},
    "text-classification top_k": {"top_k": None},
    "text-classification function": {"function_to_apply": "none"},
    "text-classification max_length": {"truncation": True, "max_length": 5},
    "token-classification": {},
    "token-classification simple": {"aggregation_strategy": "simple"},
    "token-classification first": {"aggregation_strategy": "first"},
    "token-classification average": {"aggregation_strategy": "average"},
    "token-classification max": {"aggregation_strategy": "max"},
    "feature-extraction": {},
    "feature-extraction tensors": {"return_tensors": True},
    "zero-shot-classification": {"candidate_labels": ["lists", "files"]},
    "text-generation": {},
    "question-answering": {},
    "document-question-answering": {},
    "summarization": {},
}
OF_PIPELINE = {
    "text-classification": "ForSequenceClassification",
    "zero-shot-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "feature-extraction": "Model",
    "question-answering": "ForQuestionAnswering",
    "fill-mask": "ForMaskedLM",
}


def as_numbers(value):
    """Lists of numbers as tensors, so that they are compared with a tolerance."""
    if isinstance(value, list) and value and isinstance(value[0], (float, list)):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return torch.tensor(value)
    if isinstance(value, (list, tuple)):
        return [as_numbers(entry) for entry in value]
    if isinstance(value, dict):
        return {name: as_numbers(entry) for name, entry in value.items()}
    if hasattr(value, "item") and not isinstance(value, torch.Tensor):
        return value.item()
    return value


@compared("pipelines", task=PIPELINES, texts=("one", "several", "in batches"))
def answers(side, task, texts):
    name = task.split()[0]
    folder = str(side.folder / OF_PIPELINE.get(name, "ForMaskedLM"))
    made = pipeline(name, model=folder)
    given = [text for text in SENTENCES if name != "fill-mask" or "[MASK]" in text]
    options = {**PIPELINES[task], **({"batch_size": 2} if texts == "in batches" else {})}
    return as_numbers(made(given[0] if texts == "one" else given, **options))


@compared("pipelines", task=("fill-mask", "text-classification", "feature-extraction"), dtype=(torch.bfloat16, "auto"))
def takes_a_dtype(side, task, dtype):
    made = pipeline(task, model=str(side.folder / OF_PIPELINE[task]), dtype=dtype)
    made(SENTENCES[0])
    return str(made.model.dtype)


@compared("tokenizers", call=("ids", "pairs", "padded", "decode", "offsets", "words", "class", "length", "masks"))
def gives(side, call):
    tokenizer = side.tokenizer()
    return {
        "ids": lambda: tokenizer(SENTENCES)["input_ids"],
        "pairs": lambda: dict(tokenizer(SENTENCES[0], SENTENCES[1], truncation=True, max_length=12)),
        "padded": lambda: dict(tokenizer(SENTENCES, padding=True, return_tensors="pt")),
        "decode": lambda: tokenizer.batch_decode(tokenizer(SENTENCES)["input_ids"]),
        "offsets": lambda: tokenizer(SENTENCES, return_offsets_mapping=True)["offset_mapping"],
        "words": lambda: tokenizer(SENTENCES).word_ids(0),
        "class": lambda: type(tokenizer).__name__,
        "length": lambda: [len(tokenizer), tokenizer.model_max_length, tokenizer.model_input_names],
        "masks": lambda: tokenizer(SENTENCES, return_special_tokens_mask=True)["special_tokens_mask"],
    }[call]()


# ---------------------------------------------------------------------------------------------------------------------
# Trainer


def trained(side, head, rows=8, micro=4, steps=3, evaluates=False, optimizer="sgd", **options):
    """The weights after some steps of Trainer by plain SGD, the logged losses, and the figures of an evaluation."""
    model = side.model(head)
    settings = {"learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": optimizer, "logging_steps": 1}
    settings |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro}
    settings |= {"max_steps": steps, "report_to": "none", "save_strategy": "no", "use_cpu": True, "seed": 0}
    settings |= {"disable_tqdm": True, "dataloader_num_workers": 0, "max_grad_norm": 0, **options}
    data = make_rows(head, rows)
    trainer = Trainer(model, TrainingArguments(output_dir=str(side.place), **settings), train_dataset=data)
    if evaluates:
        trainer.args.per_device_eval_batch_size = 3
        trainer.eval_dataset = data
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
        figures = trainer.evaluate() if evaluates else {}
        predicted = trainer.predict(data).predictions if evaluates else ()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    predicted = predicted if isinstance(predicted, tuple) else (predicted,)
    return {
        "losses": losses,
        "weights": state(side, trainer.model),
        "eval_loss": figures.get("eval_loss"),
        "predictions": [torch.as_tensor(value) for value in predicted],
    }


TUNED = ("ForMaskedLM", "ForSequenceClassification")


@compared("Trainer", head=WITH_LOSS)
def steps(side, head):
    return trained(side, head, micro=8)


@compared("Trainer", head=WITH_LOSS)
def evaluation_and_predictions(side, head):
    return trained(side, head, micro=8, steps=1, evaluates=True)


@compared("Trainer", head=WITH_LOSS, micro=(1, 2, 4), right=True)
def accumulation_is_one_batch(side, head, micro):
    """Whether the losses of a step do not depend on how it is divided. Rows have different numbers of labels."""

    def whole(size):
        return torch.tensor(trained(side, head, micro=size, steps=2)["losses"])

    return bool(torch.allclose(whole(micro), whole(8), rtol=2e-3))


@compared("Trainer", head=WITH_LOSS, option=("bf16", "gradient_checkpointing", "label_smoothing_factor"))
def with_the_option(side, head, option):
    value = 0.1 if option == "label_smoothing_factor" else True
    losses = trained(side, head, micro=8, steps=2, **{option: value})["losses"]
    return torch.tensor(losses, dtype=torch.bfloat16 if option == "bf16" else torch.float32)


@compared("Trainer", head=TUNED, optimizer=("adamw_torch", "adafactor", "lion_8bit"))
def by_the_optimizer(side, head, optimizer):
    return trained(side, head, micro=8, optimizer=optimizer, learning_rate=1e-3)["losses"]


@compared("Trainer", head=TUNED)
def weights_without_decay(side, head):
    """The groups of weights that Trainer makes: biases and LayerNorms do not decay."""
    model = side.model(head)
    arguments = TrainingArguments(output_dir=str(side.place), weight_decay=0.1, report_to="none", use_cpu=True)
    groups = Trainer(model, arguments).create_optimizer().param_groups
    names = {id(weight): name for name, weight in side.by_weight(dict(model.named_parameters())).items()}
    return [sorted(names[id(weight)] for weight in group["params"]) for group in groups]


@compared("Trainer", head=TUNED)
def resumed(side, head):
    trained(side, head, micro=8, steps=1, save_strategy="steps", save_steps=1)
    model = side.model(head)
    arguments = TrainingArguments(
        output_dir=str(side.place), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = Trainer(model, arguments, train_dataset=make_rows(head, 8))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=str(side.place / "checkpoint-1"))
    return trainer.state.global_step, state(side, trainer.model)


# ---------------------------------------------------------------------------------------------------------------------
# PEFT, sentence-transformers, Accelerate, encoder and decoder

TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS", "Model": "FEATURE_EXTRACTION"}
METHODS_OF_PEFT = {
    "LoraConfig": {"r": 4},
    "LoraConfig dora": {"r": 4, "use_dora": True},
    "LoraConfig all-linear": {"r": 4, "target_modules": "all-linear"},
    "LoraConfig query and value": {"r": 4, "target_modules": ["query", "value"]},
    "LoraConfig with the vocabulary": {"r": 4, "modules_to_save": ["word_embeddings"]},
    "AdaLoraConfig": {"total_step": 10},
    "IA3Config": {},
    "LoHaConfig": {"target_modules": ["query", "value"]},
    "LoKrConfig": {"target_modules": ["query", "value"]},
    "VeraConfig": {"target_modules": ["query", "value"]},
    "OFTConfig": {"target_modules": ["query", "value"]},
    "BOFTConfig": {"target_modules": ["query", "value"]},
    "FourierFTConfig": {"target_modules": ["query", "value"]},
    "LNTuningConfig": {"target_modules": ["LayerNorm"]},
    "PromptTuningConfig": {"num_virtual_tokens": 3},
    "PromptEncoderConfig": {"num_virtual_tokens": 3},
    "PrefixTuningConfig": {"num_virtual_tokens": 3},
}


@compared("PEFT", method=METHODS_OF_PEFT, head=TASKS)
def trains(side, method, head):
    """How many weights, and the losses of some steps."""
    import peft

    config = getattr(peft, method.split()[0])(task_type=TASKS[head], **METHODS_OF_PEFT[method])
    model = peft.get_peft_model(side.model(head, "train"), config)
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], 0.1)
    losses = []
    for _ in range(3):
        outputs = model(**batch_of(head))
        loss = outputs.last_hidden_state.square().mean() if head == "Model" else outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return model.get_nb_trainable_parameters(), losses


@compared("PEFT", head=TASKS, task=(True, False))
def adapter_saved_loaded_and_merged(side, head, task):
    import peft

    config = peft.LoraConfig(task_type=TASKS[head] if task else None, init_lora_weights=False)
    model = peft.get_peft_model(side.model(head), config)
    model.save_pretrained(side.place / "adapter")
    again = peft.PeftModel.from_pretrained(side.model(head), side.place / "adapter")
    return first_logits(side, again, head), first_logits(side, again.merge_and_unload(), head)


@compared("PEFT", head=("ForSequenceClassification", "ForMaskedLM"))
def adapter_by_transformers(side, head):
    import peft

    model = side.model(head)
    model.add_adapter(peft.LoraConfig(init_lora_weights=False))
    with_adapter = first_logits(side, model, head)
    model.disable_adapters()
    return with_adapter, first_logits(side, model, head)


@compared("PEFT", mode=MODES, layers=("all-linear", "decoder"))
def of_the_mlm_head(side, mode, layers):
    import peft

    model = side.model("ForMaskedLM", mode)
    names = {"all-linear": "all-linear", "decoder": ["decoder"]}[layers]
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=names, init_lora_weights=False))
    loss = model.train(mode == "train")(**batch_of("ForMaskedLM")).loss
    loss.backward()
    return float(loss)


@compared("sentence-transformers", pooling=("mean", "cls", "max"), normalized=(False, True))
def encodes(side, pooling, normalized):
    from sentence_transformers import SentenceTransformer, models

    encoder = models.Transformer(str(side.folder / "Model"))
    pool = models.Pooling(WIDTH, pooling_mode=pooling)
    made = SentenceTransformer(modules=[encoder, pool], device="cpu")
    return made.encode(SENTENCES, convert_to_tensor=True, normalize_embeddings=normalized)


@compared("sentence-transformers", head=("Model", "ForPreTraining", "ForMaskedLM"))
def saved_and_loaded(side, head):
    from sentence_transformers import SentenceTransformer

    made = SentenceTransformer(str(side.folder / head), device="cpu")
    made.save(str(side.place / "saved"))
    return SentenceTransformer(str(side.place / "saved"), device="cpu").encode(SENTENCES, convert_to_tensor=True)


@compared("sentence-transformers", labels=(1, 3))
def cross_encoder(side, labels):
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    made = CrossEncoder(str(side.folder / "ForPreTraining"), num_labels=labels, device="cpu")
    with torch.no_grad():
        made.model.classifier.weight.copy_(torch.linspace(-1, 1, labels * WIDTH).view(labels, WIDTH))
    return torch.as_tensor(made.predict([(SENTENCES[0], SENTENCES[1]), (SENTENCES[2], SENTENCES[1])]))


@compared("sentence-transformers", loss=("MultipleNegativesRankingLoss", "CosineSimilarityLoss", "TripletLoss"))
def gradient_of_a_loss(side, loss):
    from sentence_transformers import SentenceTransformer, losses

    made = SentenceTransformer(str(side.folder / "Model"), device="cpu")
    features = [made.preprocess(SENTENCES[:2]), made.preprocess(SENTENCES[1:])]
    value = getattr(losses, loss)(made)(features, torch.tensor([1.0, 0.0]))
    value.backward()
    return float(value)


@compared("Accelerate", what=("cpu_offload", "disk_offload", "init_empty_weights", "prepare", "find_batch_size"))
def computes_under(side, what):
    import accelerate

    model = side.model("ForMaskedLM")
    if what == "cpu_offload":
        model = accelerate.cpu_offload(model, execution_device="cpu")
    elif what == "disk_offload":
        model = accelerate.disk_offload(model, str(side.place / "offloaded"), execution_device="cpu")
    elif what == "init_empty_weights":
        config = model.config
        with accelerate.init_empty_weights():
            model = side.class_of("ForMaskedLM")(config)
        model = accelerate.load_checkpoint_and_dispatch(
            model, str(side.folder / "ForMaskedLM" / "model.safetensors"), device_map={"": "cpu"}
        )
    else:
        model = accelerate.Accelerator(cpu=True).prepare(model)
    return first_logits(side, model)


@compared("Accelerate", size=("20KB", "40KB"))
def infers_a_map_of_devices(side, size):
    from accelerate import infer_auto_device_map

    found = infer_auto_device_map(
        side.model("Model"), {0: size, "cpu": "1GB"}, no_split_module_classes=side.model("Model")._no_split_modules
    )
    return sorted(set(map(str, found.values())))


def encoder_decoder(side):
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**size, intermediate_size=64, is_decoder=True, add_cross_attention=True)
    decoder = transformers.BertLMHeadModel(config)
    model = transformers.EncoderDecoderModel(encoder=side.model("Model"), decoder=decoder)
    model.config.decoder_start_token_id = 2
    model.config.pad_token_id = 0
    return model


@compared("encoder and decoder", what=("loss", "logits", "generate", "saved", "gradients"))
def with_a_stock_decoder(side, what):
    model = encoder_decoder(side).eval()
    batch = batch_of("Model")
    labels = torch.arange(5, 45).view(8, 5)
    if what == "loss":
        return float(model(**batch, labels=labels).loss)
    if what == "logits":
        return model(**batch, decoder_input_ids=labels).logits
    if what == "generate":
        return model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False, num_beams=2)
    if what == "saved":
        model.save_pretrained(side.place)
        again = transformers.EncoderDecoderModel.from_pretrained(side.place).eval()
        return again(**batch, decoder_input_ids=labels).logits
    model(**batch, labels=labels).loss.backward()
    return gradients(side, model.encoder)


@compared("encoder and decoder", what=("encoder", "decoder"))
def from_two_folders(side, what):
    stock_decoder = side.place / "decoder"
    encoder_decoder(side).decoder.save_pretrained(stock_decoder)
    decoder = stock_decoder if what == "encoder" else side.folder / "Model"
    model = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(side.folder / "Model", decoder)
    return type(model.encoder).__name__.removeprefix("D2l")


# ---------------------------------------------------------------------------------------------------------------------
# torch.func, tracing, compiling, ONNX, quantization


@compared("torch.func", head=WITH_LOSS, mode=MODES, what=("functional_call", "grad", "jvp", "vmap of rows"))
def of_a_loss(side, head, mode, what):
    model = side.model(head, mode, torch.float64, "eager")
    batch = batch_of(head)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(given, rows=batch):
        return torch.func.functional_call(model, given, kwargs=rows).loss

    if what == "functional_call":
        return float(loss({name: 0.9 * weight for name, weight in weights.items()}))
    if what == "grad":
        return side.by_weight(torch.func.grad(loss)(weights))
    if what == "jvp":
        return torch.func.jvp(loss, (weights,), ({name: 0.01 * weight for name, weight in weights.items()},))[1]

    def gradient_of_a_row(row):
        one = {name: value.unsqueeze(0) for name, value in row.items()}
        return torch.func.grad(lambda given: loss(given, one))(weights)

    return side.by_weight(torch.vmap(gradient_of_a_row)(batch))


@compared("torch.func", head=FEW_HEADS)
def ensemble(side, head):
    models = [side.model(head, dtype=torch.float64, attention="eager") for _ in range(2)]
    with torch.no_grad():
        for weight in models[1].parameters():
            weight.mul_(0.9)
    weights, buffers = torch.func.stack_module_state(models)
    batch = batch_of(head, labels=False)

    def call(given, held):
        return torch.func.functional_call(models[0], (given, held), kwargs=batch)[0]

    return torch.vmap(call)(weights, buffers)


@compared("tracing", head=HEADS, mode=MODES, labels=(False, True))
def jit_trace(side, head, mode, labels):
    model = side.model(head, mode, return_dict=False)
    batch = batch_of(head, labels)
    traced = torch.jit.trace(model, example_kwarg_inputs=batch, strict=False)
    return traced(**batch)[0]


@compared("tracing", head=FEW_HEADS)
def jit_trace_with_dropout(side, head):
    model = side.model(head, "train", return_dict=False, hidden_dropout_prob=0.1)
    batch = batch_of(head, labels=False)
    return tuple(torch.jit.trace(model, example_kwarg_inputs=batch, strict=False, check_trace=False)(**batch)[0].shape)


@compared("tracing", head=HEADS, is_slow=True)
def export(side, head):
    batch = batch_of(head, labels=False)
    return torch.export.export(side.model(head), (), batch).module()(**batch)[0]


@compared("tracing", head=WITH_LOSS, mode=MODES, is_slow=True)
def export_with_labels(side, head, mode):
    batch = batch_of(head)
    return float(torch.export.export(side.model(head, mode), (), batch).module()(**batch)[0])


@compared("tracing", head=HEADS, mode=MODES, is_slow=True)
def compiled(side, head, mode):
    torch.compiler.reset()
    model = torch.compile(side.model(head, mode), fullgraph=True, backend="aot_eager")
    outputs = model(**batch_of(head))
    return float(outputs.loss) if "loss" in outputs else outputs[0]


@compared("tracing", head=("ForMaskedLM", "ForSequenceClassification"), is_slow=True)
def compiled_by_inductor(side, head):
    torch.compiler.reset()
    model = side.model(head, "train")
    loss = torch.compile(model)(**batch_of(head)).loss
    loss.backward()
    return float(loss), gradients(side, model)["bert.embeddings.word_embeddings.weight"]


@compared("ONNX", head=HEADS, is_slow=True)
def runs_in_onnxruntime(side, head):
    import onnxruntime

    batch = batch_of(head, labels=False)
    file = side.place / "model.onnx"
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(side.model(head), (), str(file), kwargs=batch, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file)
    given = {entry.name: batch[entry.name].numpy() for entry in session.get_inputs()}
    return [torch.as_tensor(value) for value in session.run(None, given)]


@compared("quantization", head=HEADS, kind=("int8", "float16"))
def dynamic(side, head, kind):
    kinds = {"int8": torch.qint8, "float16": torch.float16}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(side.model(head), {nn.Linear}, kinds[kind])
        return first_logits(side, model, head)


@compared("quantization", head=OF_MLM, mode=MODES)
def dynamic_with_labels(side, head, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(side.model(head), {nn.Linear}, torch.qint8)
    loss = model.train(mode == "train")(**batch_of(head)).loss
    return loss.bfloat16()  # int8 rounds by the largest state, and in training not all states are computed


@compared("pruning", mode=MODES)
def of_weights_by_torch(side, mode):
    from torch.nn.utils import prune

    model = untied(side, mode)
    for layer in ("mlm.decoder", "bert.encoder.layer.0.attention.query"):
        prune.l1_unstructured(side.module(model, layer), "weight", amount=0.5)
    return float(model(**batch_of("ForMaskedLM")).loss)


# ---------------------------------------------------------------------------------------------------------------------
# The differences that are known, and the program

PAGE = "docs/loading.md, where it differs from stock BERT"
EMPTY = "empty batches are computed"
KINDS = "whole numbers of any kind are labels"
KNOWN = (
    Known("outputs: of a batch with labels ForPreTraining train *", "ours * stock alone *logits*", BY_PAGE, PAGE),
    Known("outputs: of a batch with labels ForMaskedLM train *", "ours * stock alone *logits*", BY_PAGE, PAGE),
    Known("outputs: logits by place in training *", "*", BY_PAGE, PAGE),
    Known("inputs: logits no rows * eager", "* for refused (RuntimeError: cannot reshape*", BETTER, EMPTY),
    Known("inputs: logits no tokens * eager", "* for refused (RuntimeError: cannot reshape*", BETTER, EMPTY),
    Known("inputs: loss of labels int32 *", "* for refused (RuntimeError: expected target dtype*", BETTER, KINDS),
    Known("inputs: loss * several classes in whole numbers *", "* for refused (RuntimeError: *", BETTER, KINDS),
    Known("inputs: loss of labels a column ForMultipleChoice *", "* for refused *", BETTER, "as for other heads"),
    Known("inputs: loss of labels flat For[PMT]*[gMn] *", "refused (ValueError: labels of shape *", BY_PAGE, PAGE),
    Known("gradients: of the norm of gradients ForPreTraining train", "refused (* skip_logits=False *", BY_PAGE, PAGE),
    Known("gradients: of the norm of gradients ForMaskedLM train", "refused (* skip_logits=False *", BY_PAGE, PAGE),
    Known("hooks: reads bert.embeddings forward pre *", "* for refused (IndexError*", BETTER, "gets the ids"),
    Known("hooks: reads bert.pooler*", "*float32 (8, 1, 32) for float32 (8, *", BY_PAGE, PAGE),
    Known("hooks: of all modules count *", "* 3 entries for 2", BY_PAGE, PAGE),
    Known("saving: * another For[ST]*Classification ForMultipleChoice", "* for refused *", BETTER, "a new head"),
    Known("saving: * another ForMultipleChoice For[ST]*Classification", "* for refused *", BETTER, "a new head"),
    Known("from_pretrained: takes a problem_type that is none *", "refused (ValueError: problem*", BETTER, "told"),
    Known("from_pretrained: takes tie* ForMaskedLM", "?0?: 1 entries for 2", BETTER, "the decoder keeps its bias"),
    Known("Auto classes: loads AutoModelForCausalLM", "refused (ValueError: Unrecognized *", BY_PAGE, PAGE),
    Known("configuration: has the field is_decoder", "refused (AttributeError*", BY_PAGE, PAGE),
    Known("configuration: has the field add_cross_attention", "refused (AttributeError*", BY_PAGE, PAGE),
    Known("configuration: has the field use_cache", "refused (AttributeError*", BY_PAGE, PAGE),
    Known("configuration: has the field ?os_token_id", "refused (AttributeError*", BY_PAGE, PAGE),
    Known("configuration: takes a new value hidden_dropout_prob [Tx]*", "* for refused (Strict*", BY_PAGE, PAGE),
    Known("model: attribute _supports_flash_attn", "False for True", BY_PAGE, PAGE),
    Known("tracing: jit trace with dropout *", "refused (RuntimeError*", BY_PAGE, PAGE),
    Known("PEFT: trains PrefixTuningConfig *", "refused *", BY_PAGE, PAGE),
    Known("encoder and decoder: from two folders decoder", "refused (ValueError: Unrecognized*", BY_PAGE, PAGE),
)


def results(names=(), with_slow=True):
    """Compare the calls of the table whose names begin as one of these patterns, or all, one after the other."""
    with tempfile.TemporaryDirectory() as place:
        ours, stock = make_sides(SENTENCES, Path(place))
        for comparison in TABLE:
            is_asked = not names or any(fnmatchcase(comparison.name, f"{name}*") for name in names)
            if is_asked and (with_slow or not comparison.is_slow):
                with tempfile.TemporaryDirectory() as files:
                    sides = []
                    for side in (ours, stock):
                        own = Path(files) / side.name
                        own.mkdir()
                        sides.append(type(side)(side.name, side.folder, own))
                    yield compare(comparison, *sides, KNOWN)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="how the names begin of what to compare, such as hooks")
    parser.add_argument("--fast", action="store_true", help="without what compiles, exports or starts processes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    counts = collections.defaultdict(collections.Counter)
    for result in results(options.names, not options.fast):
        counts[result.comparison.area][result.verdict] += 1
        remark = f": {result.remark}" if result.remark else ""
        print(f"{result.verdict:8} {result.comparison.name}{remark}", flush=True)
    print()
    total = sum(counts.values(), collections.Counter())
    verdicts = (ALIKE, BETTER, BY_PAGE, WRONG)
    for area, of_area in {**counts, "all": total}.items():
        print(f"{area:24}", *(f"{of_area[verdict]:6} {verdict}" for verdict in verdicts))
    return 1 if total[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
