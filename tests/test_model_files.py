"""Initial weights of the model, and the code that is saved beside it."""

import ast
import math
import sys

import pytest
import torch
from small_models import every_setting, make_config
from transformers.dynamic_module_utils import get_relative_imports

from d2l_bert import (
    D2lBertForPreTraining,
)


pytestmark = pytest.mark.usefixtures("one_thread")


def seeded_weights(setting, seed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 500, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    return D2lBertForPreTraining(make_config(setting, **sizes, initializer_range=0.05)).state_dict()


@every_setting
def test_initial_weights_follow_from_the_seed(setting):
    first, again, other = (seeded_weights(setting, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].ndim == 2)


@every_setting
def test_initial_weights_have_the_standard_deviation_initializer_range(setting):
    for name, tensor in seeded_weights(setting, 1).items():
        if name.endswith("LayerNorm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif tensor.ndim == 1:
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
        else:
            if name.endswith("word_embeddings.weight") or (setting == "bert" and name == "mlm.decoder.weight"):
                assert tensor[0].abs().max() == 0, "the padding token's embedding starts at zero"
                tensor = tensor[1:]
            # For n normal numbers the standard error of the standard deviation is sigma / sqrt(2n), that of the mean
            # sigma / sqrt(n).
            n = tensor.numel()
            assert abs(tensor.std().item() - 0.05) < 4 * 0.05 / math.sqrt(2 * n), name
            assert abs(tensor.mean().item()) < 4 * 0.05 / math.sqrt(n), name


# ---------------------------------------------------------------------------------------------------------------------
# The code in a model folder


def test_the_copied_code_imports_only_what_every_reader_has(trained):
    files = {file.stem: file for file in trained.glob("*.py")}
    assert set(files) == {"configuration_d2l_bert", "modeling_d2l_bert"}
    for file in files.values():
        siblings = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in files, ast.unparse(node)  # `from .sibling import name`
                siblings.add(node.module)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                for top in {name.partition(".")[0] for name in names}:
                    # NumPy is a requirement of Transformers itself.
                    assert top in {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub", "numpy"}, top
        # For `trust_remote_code`, Transformers finds the files to copy by a pattern, which also matches docstrings.
        assert set(get_relative_imports(file)) == siblings
