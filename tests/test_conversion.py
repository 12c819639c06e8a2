"""Conversion of stock BERT and of the book's BERTModel, in both directions: equal outputs, weights; refusals."""

import json
import os
import pickle
import sys
import types
import zipfile

import pytest
import torch
import transformers
from conftest import HEADS
from huggingface_hub import HfApi
from promises.test_models import book_state
from safetensors.torch import save_file
from transformers import AutoTokenizer, BertConfig

import d2l_bert
from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.model_cards.card import render_card
from d2l_bert.modeling.conversion import read_model
from d2l_bert.modeling.d2l_checkpoints import d2l_tokenizer, from_d2l, read_d2l, to_d2l
from d2l_bert.modeling.modeling_d2l_bert import D2lBertPooler
from d2l_bert.records import read_record


# ---------------------------------------------------------------------------------------------------------------------
# Stock BERT


def stock(head, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 20, "max_position_embeddings": 32}
    model = getattr(transformers, f"Bert{head}")(BertConfig(**{**sizes, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save(bert, folder, state):
    """Write a checkpoint as older versions do, with these weights in a `pytorch_model.bin`."""
    bert.config.save_pretrained(folder)
    torch.save(state, folder / "pytorch_model.bin")
    return str(folder)


def convert(source, folder, way):
    assert main(["convert", str(source), str(folder), way]) == 0


def assert_same_outputs(first, second, shape=(2, 9)):
    ids = torch.randint(0, 60, shape)
    segments = torch.randint(0, 2, shape)
    mask = torch.ones(shape, dtype=torch.long)
    mask[..., 0, -3:] = 0
    with torch.no_grad():
        expected, outputs = (model(ids, mask, segments, output_hidden_states=True) for model in (first, second))
    torch.testing.assert_close({name: outputs[name] for name in expected}, dict(expected), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False, "hidden_act": "relu", "type_vocab_size": 3}])
def test_every_head_of_stock_bert_survives_both_conversions_bit_for_bit(head, options, tmp_path):
    labels = {} if head == "ForQuestionAnswering" else {"num_labels": 4, "classifier_dropout": 0.3}
    bert = stock(head, **options, **labels)
    bert.save_pretrained(tmp_path / "bert")
    convert(tmp_path / "bert", tmp_path / "ours", "--from=bert")
    convert(tmp_path / "ours", tmp_path / "back", "--to=bert")
    ours, info = getattr(d2l_bert, f"D2lBert{head}").from_pretrained(tmp_path / "ours", output_loading_info=True)
    back, info_of_back = type(bert).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any([*info.values(), *info_of_back.values()])
    assert_same_outputs(bert, ours, (2, 3, 9) if head == "ForMultipleChoice" else (2, 9))
    untied = options.get("tie_word_embeddings") is False
    for name, value in bert.state_dict().items():
        if not (untied and name == "cls.predictions.bias"):  # an untied BERT does not read this bias
            assert torch.equal(back.state_dict()[name], value), name
    for name in ("id2label", "problem_type", "classifier_dropout", "hidden_act", "layer_norm_eps", "pad_token_id"):
        if not (name == "id2label" and head == "ForNextSentencePrediction"):
            assert getattr(back.config, name) == getattr(ours.config, name) == getattr(bert.config, name), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drop", "becomes"),
    [
        ("nothing", "ForPreTraining"),
        ("cls.seq_relationship", "ForMaskedLM"),
        ("cls.predictions", "ForNextSentencePrediction"),
        ("cls.predictions.transform.dense", "ForNextSentencePrediction"),
        ("cls.", "Model"),
    ],
)
def test_a_converted_checkpoint_has_the_heads_of_its_weights_whatever_its_configuration_says(
    drop, becomes, tmp_path, capsys
):
    bert = stock("ForPreTraining")
    state = {name: value for name, value in bert.state_dict().items() if not name.startswith(drop)}
    # As in the configuration of google-bert/bert-base-uncased, whose weights have both heads.
    bert.config.architectures = ["BertForMaskedLM"]
    source = save(bert, tmp_path / "bert", {**state, "bert.embeddings.position_ids": torch.arange(32)[None]})
    convert(source, tmp_path / "ours", "--from=bert")
    said = capsys.readouterr().out
    assert f"a D2lBert{becomes} " in said
    is_in_part = drop == "cls.predictions.transform.dense"  # what is left of the head is named
    assert ("cls.predictions.transform.LayerNorm.weight" in said) == ("cls." in said) == is_in_part
    ours = getattr(d2l_bert, f"D2lBert{becomes}").from_pretrained(tmp_path / "ours")
    assert_same_outputs(getattr(transformers, f"Bert{becomes}").from_pretrained(source), ours)


def test_the_decoder_bias_is_found_under_either_name(tmp_path):
    bert = stock("ForPreTraining", tie_word_embeddings=False)
    bert.cls.predictions.bias = bert.cls.predictions.decoder.bias
    for lost in ("cls.predictions.bias", "cls.predictions.decoder.bias"):
        state = bert.state_dict()
        del state[lost]
        ours, _ = read_model(save(bert, tmp_path / lost, state))
        assert_same_outputs(bert, ours)


def test_shards_old_layer_norm_names_and_half_precision_are_read(tmp_path):
    bert = stock("ForPreTraining").half()
    bert.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    ours, _ = read_model(str(tmp_path / "shards"))
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = bert.state_dict()
    for new, former in old.items():
        state = {name.replace(new, former): value for name, value in state.items()}
    again, _ = read_model(save(bert, tmp_path / "old", state))
    assert ours.dtype == torch.float16
    assert_same_weights(again.state_dict(), ours.state_dict())


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_numbers_that_are_no_weights_are_refused(kind, name, tmp_path):
    bert = stock("ForPreTraining")
    bert.config.save_pretrained(tmp_path)
    for weight in ("bert.encoder.layer.0.output.LayerNorm.weight", "cls.predictions.decoder.bias"):
        state = {n: v.clone() for n, v in bert.state_dict().items()}
        state[weight] = state[weight].to(kind)
        for old, new in (("", ""), ("LayerNorm.weight", "LayerNorm.gamma")):
            named = {n.replace(old, new): v for n, v in state.items()}
            if name.endswith(".bin"):
                torch.save(named, tmp_path / name)
            else:
                save_file(named, tmp_path / name, {"format": "pt"})
            with pytest.raises(UserError, match="float32"):
                read_model(str(tmp_path))


@pytest.mark.slow
def test_whole_numbers_that_are_no_weights_are_passed_over(tmp_path):
    """Transformers 3 saved the numbers of positions."""
    bert = stock("ForPreTraining")
    positions = {"bert.embeddings.position_ids": torch.arange(bert.config.max_position_embeddings)[None]}
    ours, _ = read_model(save(bert, tmp_path / "old", {**bert.state_dict(), **positions}))
    assert_same_outputs(bert, ours)


@pytest.mark.slow
def test_all_modules_of_a_sentence_transformer_are_copied_from_a_folder_and_from_the_hub(here, tmp_path):
    source = tmp_path / "encoder"
    stock("Model").save_pretrained(source)
    paths = ["", "1_Pooling", "2_Dense", "3_Normalize"]  # the last has no settings, and no folder
    content = {"modules.json": json.dumps([{"path": path, "type": "T"} for path in paths])}
    content |= dict.fromkeys(["sentence_bert_config.json", "1_Pooling/config.json"], "{}")
    content |= dict.fromkeys(["2_Dense/config.json", "2_Dense/model.safetensors"], "of a layer")
    for name, text in content.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    client = HfApi(endpoint=here.endpoint)
    client.create_repo("someone/encoder")
    client.upload_folder(repo_id="someone/encoder", folder_path=source)
    ours = tmp_path / "ours"
    for start, end, way in ((source, ours, "from"), (ours, "back", "to"), ("someone/encoder", "from-hub", "from")):
        convert(start, tmp_path / end, f"--{way}=bert")
        assert {name: (tmp_path / end / name).read_text() for name in content} == content


# ---------------------------------------------------------------------------------------------------------------------
# The book's BERTModel


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_d2ls_own_code_agrees(monkeypatch):
    for name in ("torchvision", "torchvision.transforms"):  # d2l imports them, but its BERT does not use them
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]
    d2l = pytest.importorskip("d2l.torch", reason="the book's own package: pip install --no-deps d2l==1.0.3")
    net = d2l.BERTModel(50, 24, 40, 4, 2, 0.2, max_len=20).eval()
    tokens = torch.randint(0, 50, (2, 20))
    segments = torch.randint(0, 2, (2, 20))
    valid_lens = torch.tensor([20, 13])
    positions = torch.tensor([[1, 2, 9], [4, 12, 1]])
    net(tokens, segments, valid_lens, positions)
    model = from_d2l(net.state_dict(), 4)
    mask = (torch.arange(20) < valid_lens[:, None]).long()
    with torch.no_grad():
        encoded, mlm, nsp = net(tokens, segments, valid_lens, positions)
        outputs = model(tokens, mask, segments, masked_positions=positions, output_hidden_states=True)
    found = outputs.hidden_states[-1], outputs.prediction_logits, outputs.seq_relationship_logits.flip(-1)
    torch.testing.assert_close(found, (encoded, mlm, nsp), atol=1e-5, rtol=0)
    d2l.BERTModel(50, 24, 40, 4, 2, 0.2, max_len=20).load_state_dict(to_d2l(model))


def test_older_and_wrapped_state_dicts_are_read_too(tmp_path):
    state = book_state()
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "wrapped.params")
    assert_same_weights(to_d2l(from_d2l(read_d2l(tmp_path / "wrapped.params"), 3)), state)
    biases = [name for name in state if "attention" in name and name.endswith("bias")]
    with_zeros = {**state, **{name: state[name] * 0 for name in biases}}
    for name in biases:
        del state[name]
    assert_same_weights(to_d2l(from_d2l(state, 3)), with_zeros)


def test_the_books_vocabulary_becomes_a_tokenizer_with_the_same_ids(tmp_path):
    words = "a came crane driver flying he is just left the . @-@ 's <pad> <unk> <cls> <sep> <mask>".split()
    tokenizer = d2l_tokenizer(words, max_length=32)
    first = "A crane is flying ."
    second = "the crane driver @-@ came unseen ."
    pair = ["<cls>", *first.lower().split(), "<sep>", *second.split(), "<sep>"]
    expected = [words.index(word if word in words else "<unk>") for word in pair]
    d2l_bert.D2lBertForMaskedLM(d2l_bert.D2lBertConfig(vocab_size=len(words))).save_pretrained(tmp_path)
    d2l_bert.tokenization.wordpiece.save_tokenizer(tokenizer, tmp_path)
    assert read_record(tmp_path / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert 'fill("Paris is the <mask> of France.")' in render_card(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        encoded = each(first, second)
        assert encoded["input_ids"] == expected
        assert encoded["token_type_ids"] == [0] * 7 + [1] * 8
        assert each.mask_token == "<mask>"


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def changed(**changes):
    """The state of the book's model with other values of some weights; None: without the weight."""
    state = dict(book_state())
    for name, value in changes.items():
        name = name.replace("__", ".")
        state.pop(name, None)
        if value is not None:
            state[name] = value
    return state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (changed(hidden__0__weight=None), "bert.pooler.dense.weight"),
        (changed(output__weight=torch.zeros(3, 12)), "output.weight"),
        (changed(encoder__blks__1__attention__W_q__bias=None), "bert.encoder.layer.1.attention.query.bias"),
        (changed(mlm__mlp__0__weight=torch.zeros(12, 7)), "mlm.dense.weight"),
        (changed(encoder__pos_embedding=torch.zeros(32, 12)), "not those of a d2l BERTModel"),
        ({"layer.weight": torch.zeros(2)}, "not those of a d2l BERTModel"),
        ({}, "not those of a d2l BERTModel"),
        ([torch.zeros(2)], "not a PyTorch state dict"),
        ({0: torch.zeros(2)}, "not those of a d2l BERTModel"),
        (changed(encoder__segment_embedding__weight=torch.tensor(1.0)), "not those of a d2l BERTModel"),
        (changed(encoder__token_embedding__weight=torch.zeros(18)), "not those of a d2l BERTModel"),
        (changed(hidden__0__weight=torch.eye(12).to_sparse()), "bert.pooler.dense.weight"),
        (changed(nsp__output__bias=torch.tensor([0.1, 0.2], dtype=torch.float64)), "nsp.output.bias"),
    ],
)
def test_a_state_dict_of_another_model_is_refused_with_the_names_of_its_weights(state, words, tmp_path, fails):
    torch.save(state, tmp_path / "state.pt")
    assert words in fails("convert", tmp_path / "state.pt", tmp_path / "out", "--from=d2l", "--num_attention_heads=3")
    assert os.listdir(tmp_path) == ["state.pt"]


class Trap:
    """An object that writes a file when it is unpickled without checks."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def test_weights_that_few_bytes_stand_for_are_refused_before_they_are_copied(tmp_path, fails):
    """A view that repeats one number is a matrix of any size; the file holds the number."""
    few = torch.zeros(1).expand(10**6, 10**6)
    changed_weight = changed(encoder__token_embedding__weight=few)
    torch.save(changed_weight, tmp_path / "state.pt")
    said = fails("convert", tmp_path / "state.pt", tmp_path / "out", "--from=d2l", "--num_attention_heads=3")
    assert "encoder.token_embedding.weight has more numbers than" in said


def test_weights_that_share_their_bytes_many_times_are_refused(tmp_path, fails):
    state = book_state()
    state |= {f"more.{number}": state["encoder.token_embedding.weight"] for number in range(100)}
    torch.save(state, tmp_path / "state.pt")
    said = fails("convert", tmp_path / "state.pt", tmp_path / "out", "--from=d2l", "--num_attention_heads=3")
    assert "more numbers than" in said


def test_a_packed_file_of_weights_is_refused_before_it_is_unpacked(tmp_path, fails):
    torch.save(changed(encoder__token_embedding__weight=torch.zeros(10_000, 12)), tmp_path / "whole.pt")
    packing = {"mode": "w", "compression": zipfile.ZIP_DEFLATED}
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "a.pt", **packing) as packed:
        for entry in whole.infolist():
            packed.writestr(entry.filename, whole.read(entry))
    said = fails("convert", tmp_path / "a.pt", tmp_path / "out", "--from=d2l", "--num_attention_heads=3")
    assert "it is packed" in said


@pytest.mark.parametrize("name", ["whole.pt", "mxnet.params", "cut.pt", "text.pt"])
def test_files_that_are_no_state_dict_are_refused_and_no_code_in_them_is_run(name, tmp_path, fails):
    torch.save(book_state(), tmp_path / name)
    content = {
        "whole.pt": pickle.dumps({"hidden.0.weight": Trap(tmp_path / "sprung")}),
        "cut.pt": (tmp_path / name).read_bytes()[:-300],
        "mxnet.params": b"\x12\x01\0\0\0\0\0\0" * 40,
        "text.pt": b"some text\n",
    }
    (tmp_path / name).write_bytes(content[name])
    said = fails("convert", tmp_path / name, tmp_path / "out", "--from=d2l", "--num_attention_heads=3")
    assert name in said and "torch.save(net.state_dict(), path)" in said and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("drop", "config", "words"),
    [
        ("none", {"hidden_act": "gelu_new"}, ["hidden_act", "relu or gelu", "gelu_new"]),
        ("none", {"is_decoder": True}, ["decoder"]),
        ("none", {"position_embedding_type": "relative_key"}, ["relative_key"]),
        ("layer.1.output", {}, ["encoder.layer.1.output"]),
        ("none", {"num_hidden_layers": 1}, ["encoder.layer.1", "does not exist in the model of config.json"]),
        ("none", {"hidden_size": 48}, ["does not have the shape", "config.json"]),
    ],
)
def test_a_bert_that_ours_cannot_express_or_that_does_not_fit_its_config_is_refused(
    drop, config, words, tmp_path, fails
):
    bert = stock("ForPreTraining")
    state = {name: value for name, value in bert.state_dict().items() if drop not in name}
    save(bert, tmp_path / "bert", state)
    file = tmp_path / "bert" / "config.json"
    file.write_text(json.dumps({**read_record(file), **config}))
    said = fails("convert", tmp_path / "bert", tmp_path / "out", "--from=bert")
    assert all(word in said for word in words), said
    assert os.listdir(tmp_path) == ["bert"]


@pytest.mark.parametrize("way", ["from", "to"])
def test_a_conversion_that_changes_what_the_model_computes_is_refused(way, tmp_path, monkeypatch, fails):
    stock("ForPreTraining").save_pretrained(tmp_path / "from")
    convert(tmp_path / "from", tmp_path / "to", "--from=bert")
    monkeypatch.setattr(D2lBertPooler, "forward", lambda self, states: self.dense(states))  # without its tanh
    assert "outputs" in fails("convert", tmp_path / way, tmp_path / "out", f"--{way}=bert")
    assert not (tmp_path / "out").exists()
