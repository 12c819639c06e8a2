"""Conversions that are refused: one line, exit code 2, no file written."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from conversions import VOCABULARY, book_state, stock
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import AutoTokenizer, BertTokenizer

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining, D2lBertModel
from d2l_bert.cli import main
from d2l_bert.modeling.d2l_checkpoints import to_d2l


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
    assert "; " in printed.err, "the way out"
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
        (changed(hidden__0__weight=None), ["hidden.0.weight"]),
        (changed(output__weight=torch.zeros(3, 12)), ["output.weight"]),
        (changed(encoder__blks__1__attention__W_q__bias=None), ["encoder.blks.1.attention.W_q.bias"]),
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


def test_lazy_layers_that_never_saw_a_batch_are_refused(tmp_path, capsys):
    torch.save({**book_state(), "hidden.0.weight": torch.nn.LazyLinear(3).weight}, tmp_path / "state.pt")
    assert "one batch" in refusal(
        capsys, tmp_path / "state.pt", tmp_path / "o", "--from=d2l", "--num_attention_heads=3"
    )


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
    ("vocabulary", "words"),
    [
        (json.dumps(VOCABULARY[:-1]), ["17 tokens", "18"]),
        (json.dumps([*VOCABULARY[:-1], "he"]), ["twice"]),
        (json.dumps([*VOCABULARY[:-1], ""]), ["is empty"]),
        (json.dumps([t.replace("<mask>", "mask") for t in VOCABULARY]), ["no <mask>", "convert without a vocabulary"]),
        (json.dumps(3), ["no list of tokens"]),
        (json.dumps([*VOCABULARY[:-1], "\ud800"]), ["no list of tokens"]),
        ("[" * 100_000, ["no list of tokens"]),
        ("{", ["no list of tokens"]),
    ],
)
def test_a_vocabulary_that_gives_no_tokenizer_is_refused_with_the_reason(vocabulary, words, tmp_path, capsys):
    torch.save(book_state(), tmp_path / "state.pt")
    (tmp_path / "v.json").write_text(vocabulary)
    options = ("--from=d2l", "--num_attention_heads=3", f"--vocab={tmp_path / 'v.json'}")
    said = refusal(capsys, tmp_path / "state.pt", tmp_path / "out", *options)
    assert all(word in said for word in words), said
    assert sorted(os.listdir(tmp_path)) == ["state.pt", "v.json"]


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
        (lambda state: {n: v for n, v in state.items() if "transform.dense" not in n}, {}, ["transform.dense.bias"]),
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


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, trained, capsys):
    stock("Model").save_pretrained(tmp_path / "bert")  # 60 tokens
    BertTokenizer.from_pretrained(trained).save_pretrained(tmp_path / "bert")
    assert "tokens and the model 60" in refusal(capsys, tmp_path / "bert", tmp_path / "out", "--from=bert")


def test_refusing_a_model_of_the_hub_gives_the_reason(tmp_path, capsys):
    repository = Path(HF_HUB_CACHE) / "models--someone--tanh-bert"
    snapshot = repository / "snapshots" / ("b" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("b" * 40)
    bert = stock("Model")
    bert.config.hidden_act = "gelu_new"
    bert.save_pretrained(snapshot)
    assert "gelu_new" in refusal(capsys, "someone/tanh-bert", tmp_path / "out", "--from=bert")


def test_asking_for_a_head_without_weights_is_refused(tmp_path, trained, capsys):
    D2lBertForMaskedLM.from_pretrained(trained).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(trained).save_pretrained(tmp_path)
    assert main(["next-sentence", str(tmp_path), "anna", "hugo"]) == 2
    assert "without weights for bert.pooler.dense.bias" in capsys.readouterr().err
    D2lBertModel.from_pretrained(trained).save_pretrained(tmp_path)
    assert main(["fill-mask", str(tmp_path), "anna [MASK]"]) == 2
    assert "without weights for mlm." in capsys.readouterr().err


def test_models_of_other_kinds_and_empty_folders_are_refused(tmp_path, trained, capsys):
    assert "d2l-bert model, not a bert one" in refusal(capsys, trained, tmp_path / "out", "--from=bert")
    stock("Model").save_pretrained(tmp_path / "bert")
    assert "it is a bert model of class" in refusal(capsys, tmp_path / "bert", tmp_path / "out", "--to=bert")
    assert "nobody/nothing: cannot be loaded: no folder here" in refusal(
        capsys, "nobody/nothing", tmp_path / "out", "--from=bert"
    )
    (tmp_path / "bert" / "model.safetensors").unlink()
    (tmp_path / "bert" / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Trap(tmp_path / "sprung")}))
    refusal(capsys, tmp_path / "bert", tmp_path / "out", "--from=bert")
    assert sorted(os.listdir(tmp_path)) == ["bert"]


def test_a_setting_that_the_target_model_lacks_is_refused(tmp_path, trained, capsys):
    D2lBertForPreTraining(D2lBertConfig(vocab_size=9)).save_pretrained(tmp_path / "book")
    assert "embedding_layer_norm is false" in refusal(capsys, tmp_path / "book", tmp_path / "out", "--to=bert")
    assert "normalises the embeddings" in refusal(capsys, trained, tmp_path / "out", "--to=d2l")
    assert os.listdir(tmp_path) == ["book"]
    for options, word in (
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"embedding_layer_norm": True}, "normalises the embeddings"),
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12"),
        ({"type_vocab_size": 3}, "3 segment types"),
    ):
        with pytest.raises(ValueError, match=word):
            to_d2l(D2lBertForPreTraining(D2lBertConfig(vocab_size=9, **options)))
    with pytest.raises(ValueError, match="lacks the MLM head or the NSP head"):
        to_d2l(D2lBertForMaskedLM(D2lBertConfig(vocab_size=9)))


def test_wrong_options_and_output_folders_in_use_are_refused(tmp_path, capsys):
    torch.save(book_state(), tmp_path / "state.pt")
    assert "--num_attention_heads" in refusal(capsys, tmp_path / "state.pt", tmp_path / "out", "--from=d2l")
    assert "num_attention_heads (5)" in refusal(
        capsys, tmp_path / "state.pt", tmp_path / "o", "--from=d2l", "--num_attention_heads=5"
    )
    assert "--from d2l" in refusal(capsys, tmp_path, tmp_path / "out", "--from=bert", "--num_attention_heads=3")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "note").write_text("mine")
    options = ("--from=d2l", "--num_attention_heads=3")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists already" in refusal(capsys, tmp_path / "state.pt", tmp_path / "link", *options)
    refusal(capsys, tmp_path / "nothing.pt", tmp_path / "a" / "b" / "out", *options)
    refusal(capsys, tmp_path / "state.pt", tmp_path / "state.pt" / "out", *options)
    assert sorted(os.listdir(tmp_path)) == ["kept", "link", "state.pt"]
    assert "exists already" in refusal(capsys, tmp_path / "state.pt", tmp_path / "kept", *options)
    assert (tmp_path / "kept" / "note").read_text() == "mine"
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "a", "b"])
    assert stopped.value.code == 2 and "--from" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_refused(tmp_path, fails):
    bert = stock("ForPreTraining")
    bert.bert.embeddings.word_embeddings.weight.data[7, 0] = torch.nan
    bert.save_pretrained(tmp_path / "bert")
    assert "not finite" in fails("convert", tmp_path / "bert", tmp_path / "out", "--from", "bert")
    state = book_state()
    state["hidden.0.weight"][1, 2] = torch.inf
    torch.save(state, tmp_path / "book.params")
    words = ["convert", tmp_path / "book.params", tmp_path / "out", "--from", "d2l", "--num_attention_heads", "3"]
    assert "not finite" in fails(*words)
    assert not (tmp_path / "out").exists()
