"""The configuration of the model, its initial weights, and the code that is saved beside it."""

import ast
import math
import shutil
import sys

import pytest
import torch
from small_models import (
    assert_same,
    every_setting,
    in_training,
    loss_and_gradients,
    make_batch,
    make_config,
    make_sequences,
    padded,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_relative_imports

from d2l_bert import D2lBertConfig, D2lBertForPreTraining
from d2l_bert.modeling.conversion import save_model


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


@pytest.mark.slow
def test_the_code_of_folders_with_odd_names_trains_in_one_process(tmp_path):
    """Transformers names a module of code after its folder. Each module is imported twice."""
    model = in_training(dropout=0.3)
    save_model(model, tmp_path / "plain")
    folders = [shutil.copytree(tmp_path / "plain", tmp_path / name) for name in ODD_NAMES]
    name = "modeling_d2l_bert.D2lBertForPreTraining"
    models = [model]
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


# ---------------------------------------------------------------------------------------------------------------------
# The configuration: its defaults, its files, and the values and arguments that are refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", -8),
        ("hidden_size", True),
        ("hidden_size", 12.5),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("intermediate_size", "64"),
        ("max_position_embeddings", 0),
        ("type_vocab_size", 0),
        ("hidden_dropout_prob", 1.0),
        ("hidden_dropout_prob", -0.1),
        ("attention_probs_dropout_prob", 1.5),
        ("initializer_range", 0.0),
        ("initializer_range", 101),
        ("layer_norm_eps", -1e-5),
        ("layer_norm_eps", 1e-45),
        ("embedding_layer_norm", "yes"),
        ("tie_word_embeddings", 1),
        ("pad_token_id", 20256),
        ("pad_token_id", -1),
        ("hidden_act", "gelu_new"),
        ("hidden_act", "swish"),
        ("classifier_dropout", 1.2),
        ("num_labels", 0),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(ValueError, match=field):
        D2lBertConfig(**{field: value})


@every_setting
@pytest.mark.parametrize("field", ["initializer_range", "layer_norm_eps"])
@pytest.mark.parametrize("value", [2.0**-126, 10])
def test_the_smallest_and_largest_allowed_numbers_give_finite_gradients(field, value, setting):
    torch.manual_seed(0)
    model = D2lBertForPreTraining(make_config(setting, **{field: value}))
    outputs, found = loss_and_gradients(model, **padded(make_sequences()))
    assert outputs.loss.isfinite() and all(gradient.isfinite().all() for gradient in found.values())


def test_a_misspelt_field_is_refused_with_a_suggestion():
    for wrong, right in (("hiden_size", "hidden_size"), ("num_layers_hidden", None), ("dropout_prob", None)):
        with pytest.raises(ValueError, match=f"'{wrong}'") as caught:
            D2lBertConfig(**{wrong: 64})
        if right:
            assert f"did you mean '{right}'?" in str(caught.value)
