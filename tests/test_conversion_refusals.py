"""Conversions that are refused: one line, exit code 2, no file written."""

import json
import os
import pickle

import pytest
import torch
from conversions import stock
from promises.test_models import book_state

from d2l_bert.__main__ import main
from d2l_bert.modeling.modeling_d2l_bert import D2lBertPooler


pytestmark = pytest.mark.usefixtures("one_thread")


class Trap:
    """An object that writes a file when it is unpickled without checks."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def refusal(capsys, *arguments):
    assert main(["convert", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err, printed.err
    assert ", or " not in printed.err.rpartition("; ")[2], "one way out"
    return printed.err


def changed(**changes):
    state = book_state()
    for name, value in changes.items():
        name = name.replace("__", ".")
        state = {k: v for k, v in state.items() if k != name} | ({} if value is None else {name: value})
    return state


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (changed(hidden__0__weight=None), ["bert.pooler.dense.weight"]),
        (changed(output__weight=torch.zeros(3, 12)), ["output.weight"]),
        (changed(encoder__blks__1__attention__W_q__bias=None), ["bert.encoder.layer.1.attention.query.bias"]),
        (changed(mlm__mlp__0__weight=torch.zeros(12, 7)), ["mlm.dense.weight"]),
        (changed(encoder__pos_embedding=torch.zeros(32, 12)), ["not those of a d2l BERTModel"]),
        ({"layer.weight": torch.zeros(2)}, ["not those of a d2l BERTModel"]),
        ({}, ["not those of a d2l BERTModel"]),
        ([torch.zeros(2)], ["not a PyTorch state dict"]),
        ({0: torch.zeros(2)}, ["not those of a d2l BERTModel"]),
        (changed(encoder__segment_embedding__weight=torch.tensor(1.0)), ["not those of a d2l BERTModel"]),
        (changed(encoder__token_embedding__weight=torch.zeros(18)), ["not those of a d2l BERTModel"]),
        (changed(hidden__0__weight=torch.eye(12).to_sparse()), ["bert.pooler.dense.weight"]),
    ],
)
def test_a_state_dict_of_another_model_is_refused_with_the_names_of_its_weights(state, words, tmp_path, capsys):
    torch.save(state, tmp_path / "state.pt")
    said = refusal(capsys, tmp_path / "state.pt", tmp_path / "out", "--from=d2l", "--num_attention_heads=3")
    assert all(word in said for word in words), said
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.mark.parametrize("name", ["whole.pt", "mxnet.params", "cut.pt", "text.pt"])
def test_files_that_are_no_state_dict_are_refused_and_no_code_in_them_is_run(name, tmp_path, capsys):
    file = tmp_path / name
    if name == "whole.pt":
        file.write_bytes(pickle.dumps({"hidden.0.weight": Trap(tmp_path / "sprung")}))
    elif name == "cut.pt":
        torch.save(book_state(), file)
        file.write_bytes(file.read_bytes()[:-300])
    else:
        file.write_bytes(b"\x12\x01\0\0\0\0\0\0" * 40 if name == "mxnet.params" else b"some text\n")
    said = refusal(capsys, file, tmp_path / "out", "--from=d2l", "--num_attention_heads=3")
    assert name in said and "torch.save(net.state_dict(), path)" in said
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_act": "gelu_new"}, ["hidden_act", "relu or gelu", "gelu_new"]),
        ({"hidden_act": "silu"}, ["silu"]),
        ({"is_decoder": True}, ["decoder"]),
        ({"position_embedding_type": "relative_key"}, ["relative_key"]),
    ],
)
def test_a_bert_with_unsupported_settings_is_refused_with_their_names(options, words, tmp_path, capsys):
    bert = stock("ForMaskedLM")
    bert.save_pretrained(tmp_path / "bert")
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps({**config, **options}))
    said = refusal(capsys, tmp_path / "bert", tmp_path / "out", "--from=bert")
    assert all(word in said for word in words), said
    assert os.listdir(tmp_path) == ["bert"]


@pytest.mark.parametrize(
    ("state", "config", "words"),
    [
        (lambda state: {n: v for n, v in state.items() if "layer.1.output" not in n}, {}, ["encoder.layer.1.output"]),
        (
            lambda state: state,
            {"num_hidden_layers": 1},
            ["encoder.layer.1", "does not exist in the model of config.json"],
        ),
        (lambda state: state, {"hidden_size": 48}, ["does not have the shape", "config.json"]),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_refused(state, config, words, tmp_path, capsys):
    bert = stock("ForPreTraining")
    bert.config.save_pretrained(tmp_path / "bert")
    torch.save(state(bert.state_dict()), tmp_path / "bert" / "pytorch_model.bin")
    written = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps({**written, **config}))
    said = refusal(capsys, tmp_path / "bert", tmp_path / "out", "--from=bert")
    assert all(word in said for word in words), said


@pytest.mark.parametrize("way", ["--from", "--to"])
def test_a_conversion_that_changes_what_the_model_computes_is_refused(way, tmp_path, monkeypatch, capsys):
    stock("ForPreTraining").save_pretrained(tmp_path / "bert")
    assert main(["convert", str(tmp_path / "bert"), str(tmp_path / "ours"), "--from=bert"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(D2lBertPooler, "forward", lambda self, states: self.dense(states))  # without its tanh
    source = tmp_path / ("bert" if way == "--from" else "ours")
    assert "outputs" in refusal(capsys, source, tmp_path / "out", f"{way}=bert")
    assert not (tmp_path / "out").exists()


def test_a_model_that_stock_bert_cannot_express_is_refused(tmp_path, capsys):
    torch.save(book_state(), tmp_path / "book.params")
    words = ["convert", str(tmp_path / "book.params"), str(tmp_path / "ours"), "--from=d2l", "--num_attention_heads=3"]
    assert main(words) == 0
    capsys.readouterr()
    assert "embedding_layer_norm" in refusal(capsys, tmp_path / "ours", tmp_path / "out", "--to=bert")


def test_a_state_dict_that_would_not_come_back_is_refused(tmp_path, capsys):
    torch.save(changed(nsp__output__bias=torch.tensor([0.1, 0.2], dtype=torch.float64)), tmp_path / "state.pt")
    said = refusal(capsys, tmp_path / "state.pt", tmp_path / "out", "--from=d2l", "--num_attention_heads=3")
    assert "nsp.output.bias" in said and os.listdir(tmp_path) == ["state.pt"]
