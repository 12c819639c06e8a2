"""Initial weights of the model, and the code that is saved beside it."""

import ast
import math
import shutil
import subprocess
import sys

import pytest
import torch
from fast_models import assert_same, loss_and_gradients, make_batch, make_model
from small_models import every_setting, make_config
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_relative_imports

from d2l_bert import (
    D2lBertForPreTraining,
)
from d2l_bert.modeling.conversion import save_model


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


ODD_NAMES = [
    "a b",
    "a[1]",
    "(a)",
    "a+b",
    "a@b",
    "a=b",
    "it's",
    'a"b',
    "a,b",
    "{a}",
    "a:b",
    "a::b",
    "1",
    "größe",
    "模型",
]


@pytest.fixture
def oddly_named(tmp_path):
    """A model, and a folder of it for each of the names."""
    model = make_model(dropout=0.3)
    save_model(model, tmp_path / "plain")
    return model, [shutil.copytree(tmp_path / "plain", tmp_path / name) for name in ODD_NAMES]


def test_the_code_of_folders_with_odd_names_trains_in_one_process(oddly_named):
    """Transformers names a module of code after its folder. Each module is imported twice."""
    model, folders = oddly_named
    name, models = "modeling_d2l_bert.D2lBertForPreTraining", [model]
    for folder in folders:
        for _ in range(2):
            model_class = get_class_from_dynamic_module(name, str(folder), force_download=True)
            models.append(model_class.from_pretrained(folder, attn_implementation="eager").train())
    assert len({type(model).__module__ for model in models}) == 1 + len(folders), "each folder has a module of its own"
    found = []
    for other in models:  # after all imports, none of which may take the operators of an earlier one
        torch.manual_seed(5)
        found.append(loss_and_gradients(other, **make_batch(model)))
    for copied in found[1:]:
        assert_same(copied, found[0], rtol=0, atol=0)


LOAD = """
import sys, transformers
folders = sys.argv[1:]
classes = [type(transformers.AutoModel.from_pretrained(f, trust_remote_code=True)) for f in folders + folders]
assert len({c.__module__ for c in classes}) == len(folders) and "d2l_bert" not in sys.modules
"""


@pytest.mark.slow
def test_folders_with_odd_names_load_without_our_package(oddly_named):
    subprocess.run([sys.executable, "-c", LOAD, *map(str, oddly_named[1])], check=True, timeout=120)
