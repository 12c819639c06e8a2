"""Conversion of the book's BERTModel and of its vocabulary, in both directions."""

import json
import sys
import types

import pytest
import torch
from conversions import VOCABULARY, book_state
from transformers import AutoTokenizer

import d2l_bert
from d2l_bert import D2lBertConfig, D2lBertModel
from d2l_bert.modeling.d2l_checkpoints import d2l_tokenizer, from_d2l, to_d2l


pytestmark = pytest.mark.usefixtures("one_thread")


def book_outputs(state, tokens, segments, valid_len, positions, heads):
    """The book's model in plain tensors, for one sequence (sections 11.5 to 11.7 and 15.8).

    Returns encodings (T, H), MLM logits (P, V) and NSP logits (2,), where entry 1 means "is next".
    """

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / spread * state[f"{name}.weight"] + state[f"{name}.bias"]

    x = state["encoder.token_embedding.weight"][tokens] + state["encoder.segment_embedding.weight"][segments]
    x = x + state["encoder.pos_embedding"][0, : len(tokens)]
    for n in range(sum(name.endswith("W_q.weight") for name in state)):
        block = f"encoder.blks.{n}"
        q, k, v = (linear(x, f"{block}.attention.W_{name}") for name in "qkv")
        width = x.shape[1] // heads
        parts = []
        for head in range(heads):
            here = slice(head * width, (head + 1) * width)
            scores = q[:, here] @ k[:, here].T / width**0.5
            scores[:, valid_len:] = -1e6  # masked softmax, as in the book
            parts.append(scores.softmax(-1) @ v[:, here])
        x = norm(x + linear(torch.cat(parts, -1), f"{block}.attention.W_o"), f"{block}.addnorm1.ln")
        inner = linear(x, f"{block}.ffn.dense1").relu()
        x = norm(x + linear(inner, f"{block}.ffn.dense2"), f"{block}.addnorm2.ln")
    mlm = linear(norm(linear(x[positions], "mlm.mlp.0").relu(), "mlm.mlp.2"), "mlm.mlp.3")
    return x, mlm, linear(linear(x[0], "hidden.0").tanh(), "nsp.output")


def assert_computes_the_same(model, state, heads):
    vocab_size, max_len = model.config.vocab_size, model.config.max_position_embeddings
    for seed, valid_len in enumerate((max_len, 9, 4)):
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, vocab_size, (max_len,), generator=draw)
        segments, positions = (torch.arange(max_len) > 3).long(), torch.tensor([1, 3, 2])
        expected = book_outputs(state, tokens, segments, valid_len, positions, heads)
        with torch.no_grad():
            outputs = model(
                tokens[None],
                attention_mask=(torch.arange(max_len) < valid_len).long()[None],
                token_type_ids=segments[None],
                masked_positions=positions[None],
                output_hidden_states=True,
            )
        close = {"atol": 1e-5, "rtol": 0}
        torch.testing.assert_close(outputs.hidden_states[-1][0, :valid_len], expected[0][:valid_len], **close)
        torch.testing.assert_close(outputs.prediction_logits[0], expected[1], **close)
        torch.testing.assert_close(outputs.seq_relationship_logits[0].flip(-1), expected[2], **close)


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


def test_older_and_wrapped_state_dicts_are_mapped_too():
    state = book_state()
    wrapped = from_d2l({f"module.{name}": value for name, value in state.items()}, 3)
    assert_computes_the_same(wrapped, state, 3)
    without_bias = {name: value for name, value in state.items() if "attention" not in name or "weight" in name}
    assert_computes_the_same(from_d2l(without_bias, 3), without_bias, 3)


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
