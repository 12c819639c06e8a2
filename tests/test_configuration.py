"""The configuration of the model: its defaults, its files, and the values and arguments that are refused."""

import pytest
import torch
from fast_models import loss_and_gradients
from small_models import every_setting, make_config, make_sequences, padded

from d2l_bert import (
    D2lBertConfig,
    D2lBertForPreTraining,
)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_default_configuration_is_the_books_small_bert():
    config = D2lBertConfig()
    sizes = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    assert [getattr(config, name) for name in sizes] == [20256, 2, 128, 2, 256]
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.2, 0.2)
    assert (config.max_position_embeddings, config.type_vocab_size) == (512, 2)
    assert (config.hidden_act, config.embedding_layer_norm, config.tie_word_embeddings) == ("relu", False, False)
    assert (config.layer_norm_eps, config.initializer_range, config.pad_token_id) == (1e-5, 0.02, 0)


@every_setting
def test_a_configuration_is_the_same_after_saving_and_loading(setting, tmp_path):
    config = make_config(setting, initializer_range=0.3, type_vocab_size=3)
    config.save_pretrained(tmp_path)
    loaded = D2lBertConfig.from_pretrained(tmp_path)
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert loaded.initializer_range == 0.3 and loaded.type_vocab_size == 3


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


def test_common_transformers_arguments_are_accepted():
    config = D2lBertConfig(num_labels=3, output_hidden_states=True, architectures=["D2lBertForMaskedLM"])
    assert config.num_labels == 3 and config.output_hidden_states
