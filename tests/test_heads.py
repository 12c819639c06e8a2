"""Every head: stock BERT's outputs and losses, weights of any other head, compiling, flex attention."""

import copy
import warnings

import pytest
import torch
import transformers
from conftest import HEADS, SIZES
from head_models import every_head, make_rows, ours, stacked
from safetensors.torch import load_file
from transformers import BertConfig

import d2l_bert
from d2l_bert.modeling.conversion import from_bert


pytestmark = pytest.mark.usefixtures("one_thread")


@every_head
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_outputs_and_loss_are_those_of_stock_bert(head, attention, act):
    """Hidden states and attentions, too. (Without LayerNorm on the embeddings, tests/promises has the equations.)"""
    torch.manual_seed(0)
    options = {"num_labels": 3} if head in ("ForSequenceClassification", "ForTokenClassification") else {}
    options |= {"initializer_range": 0.3, "layer_norm_eps": 0.03, "hidden_act": act}
    config = BertConfig(**SIZES, **options, tie_word_embeddings=act == "gelu", attn_implementation=attention)
    bert = getattr(transformers, f"Bert{head}")(config).eval()
    model = from_bert(copy.deepcopy(bert))
    model.set_attn_implementation(attention)
    batch = stacked(make_rows(head))
    asked = {"output_hidden_states": True, "output_attentions": attention == "eager"}
    expected, outputs = bert(**batch, **asked), model(**batch, **asked)
    expected = {name: value for name, value in expected.items() if name != "cross_attentions"}
    torch.testing.assert_close({name: outputs[name] for name in expected}, expected, atol=1e-5, rtol=1e-4)
    usual, plain = model(**batch), model(**batch, return_dict=False)
    assert isinstance(plain, tuple) and torch.equal(plain[0], usual[0])
    model.config.return_dict = False
    assert isinstance(model(**batch), tuple)
    assert torch.equal(model(**batch, return_dict=True)[0], usual[0])


@every_head
def test_any_head_loads_from_any_other_and_only_missing_weights_are_new(head, tmp_path):
    ours(head).save_pretrained(tmp_path)
    stored = {name.removeprefix("bert."): value for name, value in load_file(tmp_path / "model.safetensors").items()}
    for other in HEADS:
        loaded, report = getattr(d2l_bert, f"D2lBert{other}").from_pretrained(tmp_path, output_loading_info=True)
        weights = {name.removeprefix("bert."): value for name, value in loaded.state_dict().items()}
        missing = {name.removeprefix("bert.") for name in report.pop("missing_keys")}
        assert missing == weights.keys() - stored.keys() and not any(report.values()), other
        for name in weights.keys() & stored.keys():
            assert torch.equal(weights[name], stored[name]), (other, name)


# ---------------------------------------------------------------------------------------------------------------------
# Compiling, flex attention

PACKED = {
    "input_ids": torch.arange(5, 19).view(2, 7),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 0]] * 2),
    "sequence_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 0]] * 2),
    "cls_positions": torch.tensor([[0, 3]] * 2),
    "masked_positions": torch.tensor([[1, 2], [4, 5]]),
    "labels": torch.tensor([[7, 8], [9, -100]]),
    "next_sentence_label": torch.tensor([[0, 1], [1, 0]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_training_step_compiles_without_a_graph_break(backend):
    model = ours("ForPreTraining", num_hidden_layers=1).train()
    eager = model(**PACKED)
    eager.loss.backward()
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend=backend)(**PACKED).loss
    loss.backward()
    torch.testing.assert_close(loss, eager.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[name], atol=1e-5, rtol=1e-4)
    torch.compiler.reset()


@pytest.mark.slow
def test_flex_attention_equals_eager_attention_on_packed_rows():
    model, inputs = ours("ForPreTraining", num_hidden_layers=1, attn_implementation="eager"), PACKED
    real = (inputs["sequence_ids"] != 0)[..., None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex attention warns if it is not compiled
        expected = model(**inputs, output_hidden_states=True)
        model.set_attn_implementation("flex_attention")
        outputs = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(outputs.hidden_states[-1] * real, expected.hidden_states[-1] * real)
