"""Initial weights of the model, its files, and Transformers' Auto classes."""

import math

import pytest
import torch
from safetensors.torch import load_file
from small_models import every_setting, make_config, make_model, make_sequences, padded
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
)

from d2l_bert import (
    D2lBertConfig,
    D2lBertForMaskedLM,
    D2lBertForNextSentencePrediction,
    D2lBertForPreTraining,
    D2lBertModel,
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


@every_setting
def test_a_saved_pretraining_model_loads_completely_into_every_head(setting, tmp_path):
    config = make_config(setting)
    model = make_model(D2lBertForPreTraining, config)
    model.save_pretrained(tmp_path)
    assert ("mlm.decoder.weight" in load_file(tmp_path / "model.safetensors")) is not config.tie_word_embeddings
    batch = padded(make_sequences())
    inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    expected = model(**inputs)
    for model_class, names in (
        (D2lBertForPreTraining, {"prediction_logits": "prediction_logits"}),
        (D2lBertForMaskedLM, {"logits": "prediction_logits"}),
        (D2lBertForNextSentencePrediction, {"logits": "seq_relationship_logits"}),
    ):
        loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values()), (model_class, info)
        assert not loaded.training
        outputs = loaded(**inputs)
        for name, wanted in names.items():
            assert torch.equal(outputs[name], expected[wanted]), model_class
        if hasattr(loaded, "mlm"):
            shared = loaded.mlm.decoder.weight is loaded.get_input_embeddings().weight
            assert shared is config.tie_word_embeddings


def test_weights_missing_from_a_checkpoint_are_reported(tmp_path):
    make_model(D2lBertForMaskedLM, make_config()).save_pretrained(tmp_path)
    _, info = D2lBertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    layers = ("bert.pooler.dense", "nsp.output")
    assert set(info["missing_keys"]) == {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}


def test_auto_classes_give_our_classes(tmp_path):
    make_model(D2lBertForPreTraining, make_config()).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is D2lBertConfig
    assert type(AutoConfig.for_model("d2l-bert")) is D2lBertConfig
    for auto_class, ours in (
        (AutoModel, D2lBertModel),
        (AutoModelForPreTraining, D2lBertForPreTraining),
        (AutoModelForMaskedLM, D2lBertForMaskedLM),
        (AutoModelForNextSentencePrediction, D2lBertForNextSentencePrediction),
    ):
        assert type(auto_class.from_pretrained(tmp_path)) is ours
