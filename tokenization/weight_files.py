"""The files of a model's weights, a stranger's too: which they are, and what they hold; no weight is read."""

import re
from pathlib import Path
from typing import NamedTuple, TypedDict

from d2l_bert.messages import READ_ERRORS, UserError, explained
from d2l_bert.records import read_record
from d2l_bert.tokenization.model_files import find_file


def weight_files(name: str | Path, pickles: bool = True) -> list[Path]:
    """
    The files that Transformers reads a model's weights from, in the order in which it looks for them.

    Args:
        name: a folder or an id on the Hub.
        pickles: whether it may read pytorch_model.bin.

    Raises:
        UserError: an index names a file outside of the folder, one that is missing, or none.
    """
    singles = ["model.safetensors"]
    if pickles:
        singles.append("pytorch_model.bin")
    for single in singles:
        if file := find_file(name, single):
            return [file]
        if index := find_file(name, f"{single}.index.json"):
            shards = sorted(set(read_record(index, IndexFile)["weight_map"].values()))
            if not shards:
                raise UserError(f"{index}: names no file; save the model again")
            return [_shard(name, index, shard) for shard in shards]
    return []


class IndexFile(TypedDict):
    """The entries of model.safetensors.index.json that are read: any object, and the file of each weight."""

    metadata: dict
    weight_map: dict[str, str]


def _shard(name, index, shard):
    """A file of weights that an index names."""
    if not re.fullmatch(r"[\w-][\w.-]*", shard, re.ASCII):
        raise UserError(f"{index}: names {shard!r:.200}, which is no file of weights beside it; do not use this model")
    file = find_file(name, shard)
    if file is None:
        raise UserError(f"{index}: names {shard}, which is missing; save the model again, or fetch it whole")
    return file


class StoredWeight(NamedTuple):
    """
    What a file of weights says of one.

    Args:
        shape: its shape.
        kind: the type of its numbers, as PyTorch (`torch.float32`) or safetensors (`F32`) names it.
    """

    shape: tuple[int, ...]
    kind: str


# The kinds of numbers that a weight may have: the others cannot be trained, and would be turned into these unsaid.
KINDS_OF_WEIGHTS = ("F64", "F32", "F16", "BF16", "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16")


# Tensors in the files of weights: BERT-large has 400. The libraries take their time for each, an empty one, too.
MOST_WEIGHTS = 2**15

# In bytes, of the header of a file of weights, which has some 100 for each.
LARGEST_HEADER = 4 << 20


def stored_weights(name: str | Path, pickles: bool = True) -> dict[str, StoredWeight]:
    """
    What a model's files say of its weights, by their names, in the headers of the files: no weight is read.

    Args:
        name, pickles: as in `weight_files`.

    Raises:
        UserError: a file is damaged, is no file of weights, or holds pickled code.
    """
    stored = {}
    for file in weight_files(name, pickles):
        stored |= _stored_in_pickle(file) if file.suffix == ".bin" else _stored_in_safetensors(file)
        if len(stored) > MOST_WEIGHTS:
            raise UserError(f"{file}: names {len(stored):,} weights, more than any model has; do not use this model")
    return stored


def _stored_in_safetensors(file):
    from safetensors import SafetensorError, safe_open

    with explained(f"{file}: cannot be read", "save the model again, or fetch it again", OSError):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
        if LARGEST_HEADER < size <= file.stat().st_size:  # of a larger size, which is damage, the library says so
            raise UserError(f"{file}: its header has {size:,} bytes, more than any model's; do not use this model")
    with (
        explained(f"{file}: cannot be read", "save the model again, or fetch it again", SafetensorError, *READ_ERRORS),
        safe_open(file, "np") as opened,
    ):
        stored = {}
        for name in opened.keys():
            weight = opened.get_slice(name)
            stored[name] = StoredWeight(tuple(weight.get_shape()), str(weight.get_dtype()))
        return stored


def _stored_in_pickle(file):
    """Of a file of `torch.save`, whose tensors are not read: they go to the device `meta`."""
    import torch

    with file.open("rb") as opened:
        is_zip = opened.read(2) == b"PK"
    try:
        state = torch.load(file, map_location="meta", weights_only=True, mmap=is_zip)
        stored = {}
        larger = []  # than their data
        for name, weight in state.items():
            stored[str(name)] = StoredWeight(tuple(weight.shape), str(weight.dtype))
            if weight.numel() * weight.element_size() > weight.untyped_storage().nbytes():
                larger.append(name)
    except Exception:  # each kind of damage raises another one; PyTorch advises to run the code in the file
        raise UserError(
            f"{file.name}: is damaged, or holds other objects than tensors; code in a pickle is never run; give a "
            f"model with model.safetensors"
        ) from None
    if larger:
        raise UserError(f"{file.name}: the weight {larger[0]!r:.100} is larger than its data; do not use this model")
    return stored
