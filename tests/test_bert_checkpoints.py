"""Conversion of stock BERT in both directions."""

import json

import pytest
import torch
import transformers
from conftest import HEADS
from conversions import stock
from huggingface_hub import HfApi

import d2l_bert
from d2l_bert.__main__ import main
from d2l_bert.modeling.conversion import read_model


pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same_outputs(first, second, shape=(2, 9)):
    ids, segments = torch.randint(0, 60, shape), torch.randint(0, 2, shape)
    mask = torch.ones(shape, dtype=torch.long)
    mask[..., 0, -3:] = 0
    with torch.no_grad():
        expected, outputs = (model(ids, mask, segments, output_hidden_states=True) for model in (first, second))
    for name in expected.keys() - {"hidden_states"}:
        torch.testing.assert_close(outputs[name], expected[name], atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.hidden_states, expected.hidden_states, atol=1e-5, rtol=0)


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
    ("drop", "becomes"),
    [
        ("nothing", "ForPreTraining"),
        ("cls.seq_relationship", "ForMaskedLM"),
        ("cls.predictions", "ForNextSentencePrediction"),
        ("cls.", "Model"),
    ],
)
def test_a_converted_checkpoint_has_the_heads_of_its_weights_whatever_its_configuration_says(drop, becomes, tmp_path):
    bert = stock("ForPreTraining")
    state = {name: value for name, value in bert.state_dict().items() if not name.startswith(drop)}
    # As in the configuration of google-bert/bert-base-uncased, whose weights have both heads.
    bert.config.architectures = ["BertForMaskedLM"]
    bert.config.save_pretrained(tmp_path)
    torch.save({**state, "bert.embeddings.position_ids": torch.arange(32)[None]}, tmp_path / "pytorch_model.bin")
    ours, unused = read_model(str(tmp_path))
    assert type(ours).__name__ == f"D2lBert{becomes}"
    assert [name for name in unused if "pooler" not in name] == []
    expected = getattr(transformers, f"Bert{becomes}").from_pretrained(tmp_path)
    assert_same_outputs(expected, ours)


def test_the_decoder_bias_is_found_under_either_name(tmp_path):
    bert = stock("ForPreTraining", tie_word_embeddings=False)
    bert.cls.predictions.bias = bert.cls.predictions.decoder.bias
    for lost in ("cls.predictions.bias", "cls.predictions.decoder.bias"):
        folder = tmp_path / lost
        bert.config.save_pretrained(folder)
        torch.save({n: v for n, v in bert.state_dict().items() if n != lost}, folder / "pytorch_model.bin")
        ours, _ = read_model(str(folder))
        assert_same_outputs(bert, ours)


def test_shards_old_layer_norm_names_and_half_precision_are_read(tmp_path):
    bert = stock("ForPreTraining").half()
    bert.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    ours, _ = read_model(str(tmp_path / "shards"))
    assert ours.dtype == torch.float16
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for n, v in bert.state_dict().items()
    }
    bert.config.save_pretrained(tmp_path / "old")
    torch.save(old, tmp_path / "old" / "pytorch_model.bin")
    again, _ = read_model(str(tmp_path / "old"))
    assert all(torch.equal(again.state_dict()[name], value) for name, value in ours.state_dict().items())


def test_a_head_that_lacks_weights_is_left_out_and_the_others_are_named(tmp_path, capsys):
    bert = stock("ForPreTraining")
    bert.config.save_pretrained(tmp_path / "bert")
    state = {name: value for name, value in bert.state_dict().items() if "transform.dense" not in name}
    torch.save(state, tmp_path / "bert" / "pytorch_model.bin")
    assert main(["convert", str(tmp_path / "bert"), str(tmp_path / "ours"), "--from", "bert"]) == 0
    said = capsys.readouterr().out
    assert "a D2lBertForNextSentencePrediction" in said and "cls.predictions.transform.LayerNorm.weight" in said


def test_all_modules_of_a_sentence_transformer_are_copied_from_a_folder_and_from_the_hub(here, tmp_path):
    source = tmp_path / "encoder"
    stock("Model").save_pretrained(source)
    paths = ["", "1_Pooling", "2_Dense", "3_Normalize"]  # the last has no settings, and no folder
    (source / "modules.json").write_text(json.dumps([{"path": path, "type": "T"} for path in paths]))
    files = ["modules.json", "sentence_bert_config.json", "1_Pooling/config.json"]
    files += ["2_Dense/config.json", "2_Dense/model.safetensors"]
    for name in files[1:]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"of {name}")
    client = HfApi(endpoint=here.endpoint)
    client.create_repo("someone/encoder")
    client.upload_folder(repo_id="someone/encoder", folder_path=source)
    ours = str(tmp_path / "ours")
    ways = {ours: (str(source), "--from"), str(tmp_path / "back"): (ours, "--to")}
    for end, (start, way) in (ways | {str(tmp_path / "from-hub"): ("someone/encoder", "--from")}).items():
        assert main(["convert", start, end, way, "bert"]) == 0
        for name in files:
            assert (tmp_path / end / name).read_text() == (source / name).read_text()
