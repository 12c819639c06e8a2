"""Conversion of the book's BERTModel and of its vocabulary, in both directions."""

import json
import sys
import types

import pytest
import torch
from conversions import VOCABULARY
from promises.test_models import book_state
from transformers import AutoTokenizer

import d2l_bert
from d2l_bert import D2lBertConfig, D2lBertModel
from d2l_bert.modeling.d2l_checkpoints import d2l_tokenizer, from_d2l, read_d2l, to_d2l


pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_d2ls_own_code_agrees(monkeypatch):
    for name in ("torchvision", "torchvision.transforms"):  # d2l imports them, but its BERT does not use them
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]
    d2l = pytest.importorskip("d2l.torch", reason="the book's own package: pip install --no-deps d2l==1.0.3")
    net = d2l.BERTModel(50, 24, 40, 4, 2, 0.2, max_len=20).eval()
    tokens, segments = torch.randint(0, 50, (2, 20)), torch.randint(0, 2, (2, 20))
    valid_lens, positions = torch.tensor([20, 13]), torch.tensor([[1, 2, 9], [4, 12, 1]])
    net(tokens, segments, valid_lens, positions)
    model = from_d2l(net.state_dict(), 4)
    mask = (torch.arange(20) < valid_lens[:, None]).long()
    with torch.no_grad():
        encoded, mlm, nsp = net(tokens, segments, valid_lens, positions)
        outputs = model(tokens, mask, segments, masked_positions=positions, output_hidden_states=True)
    torch.testing.assert_close(outputs.hidden_states[-1], encoded, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.prediction_logits, mlm, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs.seq_relationship_logits.flip(-1), nsp, atol=1e-5, rtol=0)
    again = d2l.BERTModel(50, 24, 40, 4, 2, 0.2, max_len=20)
    again.load_state_dict(to_d2l(model))


def test_older_and_wrapped_state_dicts_are_read_too(tmp_path):
    state = book_state()
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "wrapped.params")
    assert_same_weights(to_d2l(from_d2l(read_d2l(tmp_path / "wrapped.params"), 3)), state)
    with_zeros = {n: value * 0 if "attention" in n and n.endswith("bias") else value for n, value in state.items()}
    without = {n: value for n, value in state.items() if "attention" not in n or n.endswith("weight")}
    assert_same_weights(to_d2l(from_d2l(without, 3)), with_zeros)


def test_the_books_vocabulary_becomes_a_tokenizer_with_the_same_ids(tmp_path):
    tokenizer = d2l_tokenizer(VOCABULARY, max_length=32)
    first, second = "A crane is flying .", "the crane driver @-@ came unseen ."
    words = ["<cls>", *first.lower().split(), "<sep>", *second.split(), "<sep>"]
    expected = [VOCABULARY.index(word if word in VOCABULARY else "<unk>") for word in words]
    encoded = tokenizer(first, second)
    assert encoded["input_ids"] == expected
    assert encoded["token_type_ids"] == [0] * 7 + [1] * 8
    D2lBertModel(D2lBertConfig(vocab_size=len(VOCABULARY))).save_pretrained(tmp_path)
    d2l_bert.tokenization.wordpiece.save_tokenizer(tokenizer, tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(first, second)["input_ids"] == expected and loaded.mask_token == "<mask>"
