"""What programs written for stock BERT do: hooks, tuples, other output layers, PEFT, a class of their own, saving."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import SIZES
from small_models import assert_same, compute_as_on, every_device, in_training, loss_and_gradients, make_batch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, EncoderDecoderModel

import d2l_bert
from d2l_bert import (
    D2lBertForMaskedLM,
    D2lBertForPreTraining,
    D2lBertForPreTrainingOutput,
    PretrainConfig,
    UserError,
    pretrain,
)
from d2l_bert.modeling import modeling_d2l_bert as modeling


def test_the_names_that_programs_catch_and_annotate_are_public():
    assert issubclass(UserError, ValueError)
    model = in_training()
    assert isinstance(model(**make_batch(model)), D2lBertForPreTrainingOutput)


# ---------------------------------------------------------------------------------------------------------------------
# In training: tuples, hooks, output layers


@pytest.mark.parametrize("of_config", [False, True])
@pytest.mark.parametrize("model_class", [D2lBertForPreTraining, D2lBertForMaskedLM])
def test_a_tuple_has_the_same_entries_in_training_and_in_evaluation(model_class, of_config):
    model = in_training(model_class)
    batch = make_batch(model, everywhere=True)
    how = {} if of_config else {"return_dict": False}
    model.config.return_dict = not of_config
    in_evaluation = model.eval()(**batch, **how)
    found = model.train()(**batch, **how)
    assert isinstance(found, tuple)
    assert len(found) == (3 if model_class is D2lBertForPreTraining else 2)  # as stock BERT's
    assert [value.shape for value in found] == [value.shape for value in in_evaluation]
    assert found[1].shape == (*batch["labels"].shape, model.config.vocab_size)
    torch.testing.assert_close(found[0], model(**batch, return_dict=True).loss)


@every_device
@pytest.mark.parametrize("skip_logits", [False, True])
def test_floats_are_refused_as_numbers_of_tokens(skip_logits, device, monkeypatch):
    """As PyTorch refuses them: probabilities would all become token 0."""
    compute_as_on(device, monkeypatch)
    model = in_training()
    for everywhere in (True, False):
        batch = make_batch(model, everywhere)
        batch["labels"] = batch["labels"] + 0.5
        with pytest.raises(ValueError, match="whole numbers; got torch.float32"):
            model(**batch, skip_logits=skip_logits)


PLACES = {
    "the encoder's output": lambda model: model.bert,
    "all blocks": lambda model: model.bert.encoder,
    "the last block": lambda model: model.bert.encoder.layer[-1],
    "the last attention": lambda model: model.bert.encoder.layer[-1].attention,
    "the MLM head": lambda model: model.mlm,
    "the decoder": lambda model: model.mlm.decoder,
}


def shapes_in_hooks(kind, model, module, batch):
    """The shapes (rows, positions) that a hook on a module gets in a training step."""
    shapes = []

    def forward(hooked, given, output):
        if hooked is module:
            output = output if isinstance(output, torch.Tensor) else output[0]
            shapes.append(output.shape[:2])

    def backward(hooked, of_inputs, of_outputs):
        if hooked is module:
            shapes.append(of_outputs[0].shape[:2])

    register = {
        "forward": lambda: module.register_forward_hook(forward),
        "backward": lambda: module.register_full_backward_hook(backward),
        "of all modules": lambda: nn.modules.module.register_module_forward_hook(forward),
    }[kind]
    handle = register()
    found = loss_and_gradients(model, **batch)
    handle.remove()
    return shapes, found


@every_device
@pytest.mark.parametrize("kind", ["forward", "backward", "of all modules"])
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_is_called_with_all_positions_in_training(place, kind, device, monkeypatch):
    if kind == "backward" and place == "the encoder's output":
        pytest.skip("PyTorch gives no gradient of outputs with names")
    compute_as_on(device, monkeypatch)
    model = in_training(num_hidden_layers=2).double()
    batch = make_batch(model, everywhere=True)
    expected = loss_and_gradients(model, **batch)
    module = PLACES[place](model)
    shapes, found = shapes_in_hooks(kind, model, module, batch)
    assert shapes == [batch["input_ids"].shape]
    assert_same(found, expected, rtol=1e-5, atol=1e-8)
    assert model(**batch).prediction_logits is None


@pytest.mark.parametrize("kind", ["forward", "backward", "of all modules"])
def test_a_hook_on_a_projection_is_called_as_on_a_gpu(kind, monkeypatch):
    compute_as_on("gpu", monkeypatch)
    model = in_training()
    batch = make_batch(model, everywhere=True)
    shapes, _ = shapes_in_hooks(kind, model, model.bert.encoder.layer[0].attention.key, batch)
    assert shapes == [batch["input_ids"].shape]


def test_pytorchs_counter_sees_the_decoders_products():
    model = in_training()
    batch = make_batch(model, everywhere=True)
    counts = []
    for skip_logits in (True, False):
        with FlopCounterMode(display=False) as counter:
            model(**batch, skip_logits=skip_logits).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_hidden_states_that_were_once_requested_do_not_slow_later_steps(monkeypatch):
    """Transformers' hooks for them stay in the model."""
    model = in_training()
    batch = make_batch(model, everywhere=True)
    assert not model.has_watched_states()
    model(**batch, output_hidden_states=True)
    assert model.bert.encoder.layer[-1]._forward_hooks and not model.has_watched_states()


@every_device
def test_an_output_layer_without_a_bias_trains(device, monkeypatch):
    compute_as_on(device, monkeypatch)
    model = in_training(D2lBertForMaskedLM)
    batch = make_batch(model, everywhere=True)
    decoder = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    model.set_output_embeddings(decoder)
    for block in model.bert.encoder.layer:
        block.attention.key = nn.Linear(model.config.hidden_size, model.config.hidden_size, bias=False)
    found = loss_and_gradients(model, **batch)
    assert_same(found, loss_and_gradients(model, **batch, skip_logits=False), rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Making and saving


def test_a_stock_configuration_is_refused_with_the_way_to_convert():
    config = BertConfig(**SIZES)
    with pytest.raises(TypeError, match="takes a D2lBertConfig, got a BertConfig; d2l-bert convert --from bert"):
        D2lBertForPreTraining(config)
    run = PretrainConfig(corpus=["none"], output_dir="none", max_steps=3)
    with pytest.raises(UserError, match=r"is a BertConfig, not a D2lBertConfig.*init_from="):
        pretrain(config, run)


def auto_map_of(folder):
    return json.loads((folder / "config.json").read_text())["auto_map"]


def test_every_save_names_the_classes_of_all_heads(tmp_path):
    in_training(D2lBertForMaskedLM).save_pretrained(tmp_path / "made")
    assert auto_map_of(tmp_path / "made") == modeling.AUTO_MAP
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    for auto_map in ({}, {"AutoModelForMaskedLM": "someone/else--modeling_d2l_bert.D2lBertForMaskedLM"}):
        (tmp_path / "made" / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
        AutoModelForMaskedLM.from_pretrained(tmp_path / "made").save_pretrained(tmp_path / "loaded")
        assert auto_map_of(tmp_path / "loaded") == modeling.AUTO_MAP
    said = python_without_d2l_bert(
        "from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification\n"
        f"model = AutoModelForMaskedLM.from_pretrained({str(tmp_path / 'loaded')!r}, trust_remote_code=True)\n"
        f"model.save_pretrained({str(tmp_path / 'again')!r})\n"
        f"again = {str(tmp_path / 'again')!r}\n"
        "print(type(AutoModelForTokenClassification.from_pretrained(again, trust_remote_code=True)).__name__)\n"
    )
    assert said.split() == ["D2lBertForTokenClassification"]
    assert auto_map_of(tmp_path / "again") == modeling.AUTO_MAP


def python_without_d2l_bert(code):
    """What a program prints that does not import d2l_bert."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


OWN_CLASS = """
from d2l_bert import D2lBertForMaskedLM

class Louder(D2lBertForMaskedLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = 2 * outputs.logits
        return outputs
"""


def test_a_class_of_ones_own_is_loaded_where_its_code_may_run(tmp_path, monkeypatch):
    (tmp_path / "modeling_louder.py").write_text(OWN_CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    from modeling_louder import Louder

    Louder.register_for_auto_class("AutoModelForMaskedLM")
    Louder(in_training(D2lBertForMaskedLM).config).save_pretrained(tmp_path / "saved")
    assert auto_map_of(tmp_path / "saved")["AutoModelForMaskedLM"] == "modeling_louder.Louder"
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        ours = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
        named = D2lBertForMaskedLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
        assert type(ours) is type(named) is D2lBertForMaskedLM
        assert type(loaded).__name__ == "Louder"
        assert torch.equal(loaded(ids).logits, 2 * ours(ids).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert type(again).__name__ == "Louder"


# ---------------------------------------------------------------------------------------------------------------------
# Other classes of Transformers, and PEFT


def test_the_encoder_of_texts_and_of_an_encoder_decoder(tmp_path):
    in_training(d2l_bert.D2lBertModel).save_pretrained(tmp_path / "ours")
    encoder = transformers.AutoModelForTextEncoding.from_pretrained(tmp_path / "ours")
    assert type(encoder) is type(AutoModel.from_pretrained(tmp_path / "ours")) is d2l_bert.D2lBertModel
    decoder = transformers.BertLMHeadModel(BertConfig(**SIZES, is_decoder=True, add_cross_attention=True))
    decoder.save_pretrained(tmp_path / "stock")
    both = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "ours", tmp_path / "stock")
    both.save_pretrained(tmp_path / "both")
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        expected = both.eval()(input_ids=ids, decoder_input_ids=ids).logits
        again = EncoderDecoderModel.from_pretrained(tmp_path / "both").eval()
        torch.testing.assert_close(again(input_ids=ids, decoder_input_ids=ids).logits, expected)


ADAPTED = {
    "LoraConfig": {"query", "value"},
    "AdaLoraConfig": {"query", "value"},
    "IA3Config": {"key", "value", "attention.output", "ffn.dense2"},
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_peft_knows_which_layers_to_adapt(kind):
    peft = pytest.importorskip("peft")
    model = in_training(d2l_bert.D2lBertForSequenceClassification)
    options = {"total_step": 10} if kind == "AdaLoraConfig" else {}
    adapted = peft.get_peft_model(model, getattr(peft, kind)(task_type="SEQ_CLS", **options))
    assert set(adapted.targeted_module_names) == {
        f"bert.encoder.layer.{block}.{layer if '.' in layer else 'attention.' + layer}"
        for block in range(model.config.num_hidden_layers)
        for layer in ADAPTED[kind]
    }
