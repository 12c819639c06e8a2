"""Every head keeps Transformers' contract: stock BERT's losses, saving, loading, compiling, exporting."""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from conftest import HEADS, SIZES
from head_models import every_head, make_rows, ours, stacked
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import BertConfig

import d2l_bert
from d2l_bert import D2lBertConfig, D2lBertForPreTraining, D2lBertForSequenceClassification
from d2l_bert.modeling import configuration_d2l_bert, modeling_d2l_bert
from d2l_bert.modeling.bert_checkpoints import from_bert
from d2l_bert.modeling.conversion import AUTO_MAP


pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------------------------------------------------------
# Stock BERT's outputs and losses


def stock_pair(head, **options):
    """A stock BERT with random weights, and our model converted from it."""
    torch.manual_seed(0)
    bert = getattr(transformers, f"Bert{head}")(BertConfig(**{**SIZES, **options})).eval()
    return bert, from_bert(copy.deepcopy(bert))


@every_head
def test_outputs_and_loss_are_those_of_stock_bert(head):
    options = {"num_labels": 3} if head in ("ForSequenceClassification", "ForTokenClassification") else {}
    bert, model = stock_pair(head, **options)
    batch = stacked(make_rows(head))
    expected, outputs = bert(**batch), model(**batch)
    assert set(expected.keys()) <= set(outputs.keys())
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value, atol=1e-6, rtol=1e-5)
    plain = model(**batch, return_dict=False)
    assert isinstance(plain, tuple) and torch.equal(plain[0], outputs[0])
    model.config.return_dict = False
    plain = model(**batch)
    assert isinstance(plain, tuple) and torch.equal(plain[0], outputs[0])
    assert torch.equal(model(**batch, return_dict=True)[0], outputs[0])


@pytest.mark.parametrize(
    ("problem_type", "num_labels", "labels", "inferred"),
    [
        (None, 3, [0, 2, 1], "single_label_classification"),
        ("single_label_classification", 3, [0, -100, 1], None),
        (None, 3, [[0.0, 1, 1], [1, 0, 0], [0, 0, 1]], "multi_label_classification"),
        ("multi_label_classification", 1, [[1.0], [0], [1]], None),
        (None, 1, [0.5, -2.0, 1.0], "regression"),
        (None, 1, [[0.5], [-2.0], [1.0]], "regression"),
        ("regression", 3, [[0.5, 1, 2], [3, -1, 0], [0, 0, 1.5]], None),
    ],
)
def test_every_problem_type_has_the_loss_of_stock_bert(problem_type, num_labels, labels, inferred):
    bert, model = stock_pair("ForSequenceClassification", num_labels=num_labels, problem_type=problem_type)
    batch = {"input_ids": torch.arange(30).view(3, 10), "labels": torch.tensor(labels)}
    torch.testing.assert_close(model(**batch).loss, bert(**batch).loss)
    assert model.config.problem_type == bert.config.problem_type == (inferred or problem_type)


def test_binary_cross_entropy_of_one_class_takes_labels_with_or_without_a_column():
    model = ours("ForSequenceClassification", num_labels=1, problem_type="multi_label_classification")
    ids, labels = torch.arange(30).view(3, 10), torch.tensor([1.0, 0.0, 1.0])
    logits = model(ids).logits
    by_hand = -(labels * logits[:, 0].sigmoid().log() + (1 - labels) * (1 - logits[:, 0].sigmoid()).log()).mean()
    for shape in ((3,), (3, 1)):
        torch.testing.assert_close(model(ids, labels=labels.view(shape)).loss, by_hand)


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 3), (1, 3)])
def test_labels_that_do_not_fit_the_logits_are_refused(shape):
    model = ours("ForSequenceClassification", num_labels=4, problem_type="multi_label_classification")
    with pytest.raises(ValueError, match=r"labels of shape .* do not fit logits of shape \(3, 4\)"):
        model(torch.arange(30).view(3, 10), labels=torch.zeros(shape))


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"])
@pytest.mark.parametrize(("classifier_dropout", "share"), [(None, 0.4), (0.7, 0.7), (0.0, 0.0)])
def test_classifiers_apply_dropout_to_their_input(head, classifier_dropout, share):
    model = ours(head, hidden_dropout_prob=0.4, classifier_dropout=classifier_dropout, hidden_size=96).train()
    seen = []
    last = model.scorer if head == "ForMultipleChoice" else model.classifier
    last.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    shape = (4, 2, 16) if head == "ForMultipleChoice" else (4, 16)
    model(torch.randint(0, 40, shape))
    assert (seen[0] == 0).float().mean().item() == pytest.approx(share, abs=0.1)


@every_head
def test_every_head_takes_exactly_one_of_input_ids_and_inputs_embeds(head):
    ids = torch.arange(12).view((2, 2, 3) if head == "ForMultipleChoice" else (4, 3))
    model = ours(head)
    for given in ({}, {"input_ids": ids, "inputs_embeds": torch.zeros(*ids.shape, 24)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**given)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
    for name, value in model(ids).items():
        assert torch.equal(embedded[name], value), name


def test_a_refused_call_does_not_set_the_problem_type():
    model = ours("ForSequenceClassification", num_labels=2)
    with pytest.raises(ValueError, match="do not fit"):
        model(torch.arange(10)[None], labels=torch.tensor([[1.0]]))
    assert model.config.problem_type is None
    assert model(torch.arange(10)[None], labels=torch.tensor([1])).loss > 0


def test_class_labels_may_be_a_column_and_any_integer_type():
    model, ids = ours("ForNextSentencePrediction"), torch.arange(30).view(3, 10)
    expected = model(ids, labels=torch.tensor([0, 1, 1])).loss
    for labels in (torch.tensor([[0], [1], [1]]), torch.tensor([0, 1, 1], dtype=torch.int32)):
        assert torch.equal(model(ids, labels=labels).loss, expected)


def test_masked_positions_need_a_row_for_each_sequence():
    with pytest.raises(ValueError, match=r"\(B, P\)"):
        ours("ForMaskedLM")(torch.arange(10)[None], masked_positions=torch.tensor([1, 2]))


@pytest.mark.parametrize("change", [{"hidden_act": "silu"}, {"num_attention_heads": 5}, {"problem_type": "ranking"}])
def test_changes_to_a_configuration_while_loading_are_checked(change, tmp_path):
    ours("ForSequenceClassification").save_pretrained(tmp_path)
    with pytest.raises((ValueError, StrictDataclassError), match=next(iter(change))):
        D2lBertForSequenceClassification.from_pretrained(tmp_path, **change)


def test_an_answer_beyond_the_sequence_end_does_not_count():
    model = ours("ForQuestionAnswering")
    ids, starts, ends = torch.arange(20).view(2, 10), torch.tensor([3, 10]), torch.tensor([4, 99])
    loss = model(ids, start_positions=starts, end_positions=ends).loss
    alone = model(ids[:1], start_positions=starts[:1], end_positions=ends[:1]).loss
    torch.testing.assert_close(loss, alone)


def test_the_nsp_head_names_its_labels_and_other_heads_keep_theirs(tmp_path):
    config = D2lBertConfig(**SIZES)
    assert d2l_bert.D2lBertForNextSentencePrediction(config).config.id2label == {0: "IsNext", 1: "NotNext"}
    assert D2lBertForSequenceClassification(config).config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
    ours("ForPreTraining").save_pretrained(tmp_path)
    assert D2lBertForSequenceClassification.from_pretrained(tmp_path).config.id2label == {0: "LABEL_0", 1: "LABEL_1"}


# ---------------------------------------------------------------------------------------------------------------------
# Saving and loading


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


@every_head
def test_a_saved_model_has_its_code_beside_it_even_when_saved_again(head, tmp_path):
    model = ours(head)
    model.save_pretrained(tmp_path / "first")
    type(model).from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for folder in (tmp_path / "first", tmp_path / "second"):
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert auto_map["AutoConfig"] == "configuration_d2l_bert.D2lBertConfig"
        assert f"modeling_d2l_bert.D2lBert{head}" in auto_map.values()
        for module in (modeling_d2l_bert, configuration_d2l_bert):
            source = Path(module.__file__)
            assert (folder / source.name).read_bytes() == source.read_bytes()


def test_the_auto_map_names_every_head():
    classes = {name.rsplit(".", 1)[1] for name in AUTO_MAP.values()}
    assert classes == {"D2lBertConfig", *(f"D2lBert{head}" for head in HEADS)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_head
def test_half_precision_loads_and_runs(head, dtype, tmp_path):
    model = ours(head, initializer_range=0.02)
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    batch = stacked(make_rows(head, num_labels=2))
    full, outputs = model(**batch), half(**batch)
    for name, value in outputs.items():
        torch.testing.assert_close(value.float(), full[name], atol=0.05, rtol=0.05)


def test_shards_offloading_and_device_map_give_the_same_outputs(tmp_path):
    model = ours("ForPreTraining")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = torch.arange(20).view(2, 10)
    expected = model(ids).prediction_logits
    assert torch.equal(D2lBertForPreTraining.from_pretrained(tmp_path)(ids).prediction_logits, expected)
    on_cpu = D2lBertForPreTraining.from_pretrained(tmp_path, device_map="cpu")
    assert torch.equal(on_cpu(ids).prediction_logits, expected)
    blocks = {"bert.encoder.layer.1": "disk", "bert.embeddings": "cpu", "bert.encoder.layer.0": "cpu"}
    placed = {**blocks, "bert.pooler": "cpu", "mlm": "cpu", "nsp": "disk"}
    offloaded = D2lBertForPreTraining.from_pretrained(tmp_path, device_map=placed, offload_folder=tmp_path / "disk")
    assert next(offloaded.bert.encoder.layer[1].parameters()).device.type == "meta"
    assert torch.equal(offloaded(ids).prediction_logits, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_keep_their_rows_and_their_tie(tied):
    model = ours("ForMaskedLM", tie_word_embeddings=tied)
    ids = torch.arange(20).view(2, 10)
    before, decoder = model(ids).logits, model.get_output_embeddings().weight.clone()
    model.resize_token_embeddings(45)
    assert model.config.vocab_size == 45 and model(ids).logits.shape == (2, 10, 45)
    torch.testing.assert_close(model(ids).logits[..., :40], before)
    assert torch.equal(model.get_output_embeddings().weight[:40], decoder)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied


# ---------------------------------------------------------------------------------------------------------------------
# Compiling, exporting, flex attention


def packed_batch():
    return {
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
    eager = model(**packed_batch())
    eager.loss.backward()
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend=backend)(**packed_batch()).loss
    loss.backward()
    torch.testing.assert_close(loss, eager.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[name], atol=1e-5, rtol=1e-4)


@every_head
def test_an_exported_head_takes_other_sizes(head):
    model = ours(head)
    batches = [{name: value[:rows] for name, value in stacked(make_rows(head)).items()} for rows in (2, 5)]
    batches = [{k: v for k, v in batch.items() if k in ("input_ids", "attention_mask")} for batch in batches]
    batches[1] = {name: torch.cat([value, value], dim=-1) for name, value in batches[1].items()}
    dynamic = torch.export.Dim.DYNAMIC
    sizes = {name: {0: dynamic, value.dim() - 1: dynamic} for name, value in batches[0].items()}
    exported = torch.export.export(model, (), batches[0], dynamic_shapes=sizes).module()
    for name, value in exported(**batches[1]).items():
        torch.testing.assert_close(value, model(**batches[1])[name])


def test_packed_rows_with_masked_positions_can_be_exported():
    model, batch = ours("ForPreTraining"), packed_batch()
    exported = torch.export.export(model, (), batch).module()
    torch.testing.assert_close(exported(**batch).loss, model(**batch).loss)


@pytest.mark.slow
def test_flex_attention_equals_eager_attention_on_packed_rows():
    model, inputs = ours("ForPreTraining", num_hidden_layers=1, attn_implementation="eager"), packed_batch()
    real = (inputs["sequence_ids"] != 0)[..., None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex attention warns if it is not compiled
        expected = model(**inputs, output_hidden_states=True)
        model.set_attn_implementation("flex_attention")
        outputs = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(outputs.hidden_states[-1] * real, expected.hidden_states[-1] * real)
