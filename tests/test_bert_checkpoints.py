"""Conversion of stock BERT in both directions."""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from conftest import HEADS
from conversions import stock
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import AutoTokenizer, BertTokenizer

import d2l_bert
from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining, D2lBertModel
from d2l_bert.cli import main
from d2l_bert.modeling.bert_checkpoints import from_bert, read_bert, to_bert
from d2l_bert.modeling.conversion import read_ours


pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same_outputs(first, second, shape=(2, 9)):
    ids, segments = torch.randint(0, 60, shape), torch.randint(0, 2, shape)
    mask = torch.ones(shape, dtype=torch.long)
    mask[..., 0, -3:] = 0
    with torch.no_grad():
        expected, outputs = (model(ids, mask, segments, output_hidden_states=True) for model in (first, second))
    for name in expected.keys() - {"hidden_states"}:
        torch.testing.assert_close(outputs[name], expected[name], atol=1e-5, rtol=0)
    for one, other in zip(expected.hidden_states, outputs.hidden_states, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False, "hidden_act": "relu", "type_vocab_size": 3}])
def test_every_head_of_stock_bert_survives_both_conversions_bit_for_bit(head, options, tmp_path):
    labels = {} if head == "ForQuestionAnswering" else {"num_labels": 4, "classifier_dropout": 0.3}
    bert = stock(head, **options, **labels)
    bert.save_pretrained(tmp_path / "bert")
    assert main(["convert", str(tmp_path / "bert"), str(tmp_path / "ours"), "--from", "bert"]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "bert"]) == 0
    ours, info = getattr(d2l_bert, f"D2lBert{head}").from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    back, info = type(bert).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    shape = (2, 3, 9) if head == "ForMultipleChoice" else (2, 9)
    assert_same_outputs(bert, ours, shape)
    assert_same_outputs(bert, back, shape)
    untied = options.get("tie_word_embeddings") is False
    for name, value in bert.state_dict().items():
        if not (untied and name == "cls.predictions.bias"):  # an untied BERT does not read this bias
            assert torch.equal(back.state_dict()[name], value), name
    for name in ("id2label", "problem_type", "classifier_dropout", "hidden_act", "layer_norm_eps", "pad_token_id"):
        if not (name == "id2label" and head == "ForNextSentencePrediction"):
            assert getattr(back.config, name) == getattr(ours.config, name) == getattr(bert.config, name), name


@pytest.mark.parametrize(
    ("head", "drop", "becomes"),
    [
        ("ForPreTraining", "nothing", "ForPreTraining"),
        ("ForPreTraining", "cls.seq_relationship", "ForMaskedLM"),
        ("ForPreTraining", "cls.predictions", "ForNextSentencePrediction"),
        ("ForPreTraining", "cls.", "Model"),
    ],
)
def test_a_converted_checkpoint_has_the_heads_of_its_weights_whatever_its_configuration_says(
    head, drop, becomes, tmp_path
):
    bert = stock(head)
    state = {name: value for name, value in bert.state_dict().items() if not name.startswith(drop)}
    # As in the configuration of google-bert/bert-base-uncased, whose weights have both heads.
    bert.config.architectures = ["BertForMaskedLM"]
    bert.config.save_pretrained(tmp_path)
    torch.save({**state, "bert.embeddings.position_ids": torch.arange(32)[None]}, tmp_path / "pytorch_model.bin")
    model, unplaced = read_bert(str(tmp_path))
    assert type(model).__name__ == f"Bert{becomes}"
    ours = from_bert(model)
    assert type(ours).__name__ == f"D2lBert{becomes}"
    assert [name for name in unplaced if "pooler" not in name] == []
    for name, value in model.state_dict().items():
        if name in state:
            assert torch.equal(value, state[name])


def test_an_unknown_head_is_left_out_and_reported(tmp_path, capsys):
    bert = stock("Model")
    bert.save_pretrained(tmp_path / "bert")
    bert.config.architectures = ["SomebodysBert"]
    bert.config.save_pretrained(tmp_path / "bert")
    state = {**bert.state_dict(), "linear.weight": torch.zeros(3, 24)}
    (tmp_path / "bert" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "bert" / "pytorch_model.bin")
    assert main(["convert", str(tmp_path / "bert"), str(tmp_path / "ours"), "--from", "bert"]) == 0
    assert "left out, as a D2lBertModel has no such weights: linear.weight" in capsys.readouterr().out
    assert_same_outputs(bert, D2lBertModel.from_pretrained(tmp_path / "ours"))


def test_an_encoder_without_a_pooler_stays_without_one(tmp_path):
    bert = transformers.BertModel(stock("Model").config, add_pooling_layer=False).eval()
    bert.save_pretrained(tmp_path / "bert")
    assert main(["convert", str(tmp_path / "bert"), str(tmp_path / "ours"), "--from", "bert"]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "bert"]) == 0
    ours, back = read_ours(str(tmp_path / "ours")).eval(), read_bert(str(tmp_path / "back"))[0]
    assert ours.pooler is None and back.pooler is None
    assert_same_outputs(bert, ours)
    assert_same_outputs(bert, back)


def test_a_classifiers_labels_and_problem_type_are_kept(tmp_path):
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    bert = stock("ForSequenceClassification", problem_type="multi_label_classification", **names)
    ours = from_bert(bert)
    back = to_bert(ours)
    for config in (ours.config, back.config):
        assert config.problem_type == "multi_label_classification"
        assert config.id2label == names["id2label"] and config.label2id == names["label2id"]


def test_an_untied_decoder_stays_untied_whatever_the_configuration_says(tmp_path):
    bert = stock("ForMaskedLM", tie_word_embeddings=False)
    bert.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    ours = from_bert(read_bert(str(tmp_path))[0])
    assert ours.config.tie_word_embeddings is False
    assert_same_outputs(bert, ours)


def test_the_decoder_bias_is_found_under_either_name(tmp_path):
    bert = stock("ForPreTraining", tie_word_embeddings=False)
    bert.cls.predictions.bias = bert.cls.predictions.decoder.bias
    for lost in ("cls.predictions.bias", "cls.predictions.decoder.bias"):
        folder = tmp_path / lost
        bert.config.save_pretrained(folder)
        torch.save({n: v for n, v in bert.state_dict().items() if n != lost}, folder / "pytorch_model.bin")
        ours = from_bert(read_bert(str(folder))[0])
        assert type(ours) is D2lBertForPreTraining
        assert_same_outputs(bert, ours)


def test_shards_old_layer_norm_names_and_half_precision_are_read(tmp_path):
    bert = stock("ForPreTraining").half()
    bert.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    ours = from_bert(read_bert(str(tmp_path / "shards"))[0])
    assert ours.dtype == torch.float16
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for n, v in bert.state_dict().items()
    }
    bert.config.save_pretrained(tmp_path / "old")
    torch.save(old, tmp_path / "old" / "pytorch_model.bin")
    again = from_bert(read_bert(str(tmp_path / "old"))[0])
    assert all(torch.equal(again.state_dict()[name], value) for name, value in ours.state_dict().items())


def test_a_model_id_of_the_hub_is_read_from_the_cache(tmp_path, trained):
    repository = Path(HF_HUB_CACHE) / "models--someone--bert-mini"
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    tokenizer = BertTokenizer.from_pretrained(trained)
    bert = stock("ForMaskedLM", vocab_size=len(tokenizer))
    bert.save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)
    assert main(["convert", "someone/bert-mini", str(tmp_path / "ours"), "--from", "bert"]) == 0
    ours = D2lBertForMaskedLM.from_pretrained(tmp_path / "ours")
    assert_same_outputs(bert, ours)
    text = "Anna walked to the garden."
    assert AutoTokenizer.from_pretrained(tmp_path / "ours")(text) == tokenizer(text)
    assert {"vocab.txt", "tokenizer.json"} <= set(os.listdir(tmp_path / "ours"))


def test_the_pooling_files_of_a_sentence_transformer_are_copied(tmp_path):
    source = tmp_path / "encoder"
    stock("Model").save_pretrained(source)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "T"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "P"},
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    for start, end, way in (("encoder", "ours", "--from"), ("ours", "back", "--to")):
        assert main(["convert", str(tmp_path / start), str(tmp_path / end), way, "bert"]) == 0
        for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
            assert (tmp_path / end / name).read_text() == (source / name).read_text()


def test_written_weights_are_readable_for_all_users(tmp_path):
    stock("Model").save_pretrained(tmp_path / "bert")
    for start, end, way in (("bert", "ours", "--from"), ("ours", "back", "--to")):
        assert main(["convert", str(tmp_path / start), str(tmp_path / end), way, "bert"]) == 0
        assert oct((tmp_path / end / "model.safetensors").stat().st_mode)[-3:] == "644"
