"""Checkpoints there and back: the book's model restated in plain tensors, stock BERT itself, and what is refused."""

import json
import os
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from conftest import HEADS
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import AutoTokenizer, BertConfig, BertTokenizer, pipeline

import d2l_bert
from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForPreTraining, D2lBertModel
from d2l_bert.cli import main
from d2l_bert.modeling.bert_checkpoints import from_bert, read_bert, to_bert
from d2l_bert.modeling.conversion import read_ours
from d2l_bert.modeling.d2l_checkpoints import d2l_tokenizer, from_d2l, to_d2l


pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = ["a", "came", "crane", "driver", "flying", "he", "is", "just", "left", "the", ".", "@-@", "'s"]
VOCABULARY = sorted([*WORDS, "<pad>", "<unk>", "<cls>", "<sep>", "<mask>"])


# ---------------------------------------------------------------------------------------------------------------------
# The book's model


def book_state(vocab_size=18, hidden=12, ffn=20, blocks=2, max_len=32, seed=0):
    """Random weights under the names and in the shapes that d2l 1.0.3's BERTModel gives them."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "encoder.pos_embedding": (1, max_len, hidden),
        "encoder.token_embedding.weight": (vocab_size, hidden),
        "encoder.segment_embedding.weight": (2, hidden),
    }
    for n in range(blocks):
        block = f"encoder.blks.{n}"
        for name in ("W_q", "W_k", "W_v", "W_o"):
            shapes |= {
                f"{block}.attention.{name}.weight": (hidden, hidden),
                f"{block}.attention.{name}.bias": (hidden,),
            }
        for name, size in (("addnorm1.ln", ()), ("ffn.dense1", (ffn, hidden)), ("ffn.dense2", (hidden, ffn))):
            shapes |= {f"{block}.{name}.weight": size or (hidden,), f"{block}.{name}.bias": (size or (hidden,))[:1]}
        shapes |= {f"{block}.addnorm2.ln.weight": (hidden,), f"{block}.addnorm2.ln.bias": (hidden,)}
    shapes |= {"hidden.0.weight": (hidden, hidden), "hidden.0.bias": (hidden,)}
    shapes |= {"mlm.mlp.0.weight": (hidden, hidden), "mlm.mlp.0.bias": (hidden,)}
    shapes |= {"mlm.mlp.2.weight": (hidden,), "mlm.mlp.2.bias": (hidden,)}
    shapes |= {"mlm.mlp.3.weight": (vocab_size, hidden), "mlm.mlp.3.bias": (vocab_size,)}
    shapes |= {"nsp.output.weight": (2, hidden), "nsp.output.bias": (2,)}
    return {name: 0.4 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def book_outputs(state, tokens, segments, valid_len, positions, heads):
    """Sections 11.5 to 11.7 and 15.8 for one sequence: encodings (T, H), MLM (P, V), NSP (2,), 1 for 'is next'."""

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
            scores[:, valid_len:] = -1e6  # the book's masked softmax
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


@pytest.mark.parametrize(("hidden", "heads", "blocks"), [(12, 3, 2), (8, 1, 1), (32, 4, 3)])
def test_the_books_model_computes_the_same_here_and_comes_back_whole(hidden, heads, blocks):
    state = book_state(hidden=hidden, blocks=blocks)
    model = from_d2l(state, heads)
    assert_computes_the_same(model, state, heads)
    back = to_d2l(model)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


def test_the_book_itself_agrees(monkeypatch):
    for name in ("torchvision", "torchvision.transforms"):  # it imports them, and its BERT has no use for them
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


def test_older_and_wrapped_state_dicts_map_too():
    state = book_state()
    wrapped = from_d2l({f"module.{name}": value for name, value in state.items()}, 3)
    assert_computes_the_same(wrapped, state, 3)
    without_bias = {name: value for name, value in state.items() if "attention" not in name or "weight" in name}
    assert_computes_the_same(from_d2l(without_bias, 3), without_bias, 3)


def test_the_command_converts_the_books_folder_and_converts_it_back(tmp_path, capsys):
    source = tmp_path / "bert.small.torch"
    source.mkdir()
    torch.save(book_state(), source / "pretrained.params")
    (source / "vocab.json").write_text(json.dumps(VOCABULARY))
    ours, back = tmp_path / "ours", tmp_path / "new" / "back"
    assert main(["convert", str(source), str(ours), "--from", "d2l", "--num-attention-heads", "3"]) == 0
    assert "D2lBertForPreTraining" in capsys.readouterr().out
    assert (ours / "modeling_d2l_bert.py").exists() and oct(ours.stat().st_mode)[-3:] == "755"
    assert D2lBertConfig.from_pretrained(ours).pad_token_id == VOCABULARY.index("<pad>")
    assert_computes_the_same(D2lBertForPreTraining.from_pretrained(ours), book_state(), 3)
    filled = pipeline("fill-mask", model=str(ours))("a crane is <mask> .")
    assert {row["token_str"] for row in filled} <= set(VOCABULARY)
    assert main(["next-sentence", str(ours), "a crane is flying .", "he left ."]) == 0
    assert main(["convert", str(ours), str(back), "--to", "d2l"]) == 0
    again = torch.load(back / "pretrained.params", weights_only=True)
    assert all(torch.equal(again[name], value) for name, value in book_state().items())
    assert json.loads((back / "vocab.json").read_text()) == VOCABULARY
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert.small.torch", "new", "ours"]


def test_the_vocabulary_becomes_a_tokenizer_with_the_books_ids(tmp_path):
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


def test_upper_case_in_the_vocabulary_is_kept_apart():
    tokenizer = d2l_tokenizer([*VOCABULARY, "Crane"], max_length=32)
    assert tokenizer("Crane crane")["input_ids"][1:3] == [len(VOCABULARY), VOCABULARY.index("crane")]


@pytest.mark.parametrize("name", ["tokens.txt", "ids.json"])
def test_a_vocabulary_may_be_lines_or_an_object(name, tmp_path):
    text = (
        "\n".join(VOCABULARY) + "\n" if name == "tokens.txt" else json.dumps({t: i for i, t in enumerate(VOCABULARY)})
    )
    (tmp_path / name).write_text(text)
    torch.save(book_state(), tmp_path / "state.pt")
    arguments = ["--from=d2l", "--num_attention_heads=3", f"--vocab={tmp_path / name}"]
    assert main(["convert", str(tmp_path / "state.pt"), str(tmp_path / "ours"), *arguments]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "ours").convert_ids_to_tokens([0, 9]) == [
        VOCABULARY[0],
        VOCABULARY[9],
    ]


def test_a_tied_model_is_written_for_the_book_with_its_matrix_twice():
    model = D2lBertForPreTraining(D2lBertConfig(vocab_size=30, hidden_size=12, tie_word_embeddings=True)).eval()
    assert_computes_the_same(model, to_d2l(model), 2)


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
def test_every_head_of_stock_bert_goes_there_and_back_bit_for_bit(head, options, tmp_path):
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
        if not (untied and name == "cls.predictions.bias"):  # which nothing reads in an untied BERT
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
def test_a_checkpoint_keeps_the_heads_it_has_whatever_it_calls_itself(head, drop, becomes, tmp_path):
    bert = stock(head)
    state = {name: value for name, value in bert.state_dict().items() if not name.startswith(drop)}
    bert.config.architectures = ["BertForMaskedLM"]  # as google-bert/bert-base-uncased says, which has both heads
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


def test_a_head_that_nobody_knows_is_left_behind_and_said(tmp_path, capsys):
    bert = stock("Model")
    bert.save_pretrained(tmp_path / "bert")
    bert.config.architectures = ["SomebodysBert"]
    bert.config.save_pretrained(tmp_path / "bert")
    state = {**bert.state_dict(), "linear.weight": torch.zeros(3, 24)}
    (tmp_path / "bert" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "bert" / "pytorch_model.bin")
    assert main(["convert", str(tmp_path / "bert"), str(tmp_path / "ours"), "--from", "bert"]) == 0
    assert "left behind, having no place in a D2lBertModel: linear.weight" in capsys.readouterr().out
    assert_same_outputs(bert, D2lBertModel.from_pretrained(tmp_path / "ours"))


def test_an_encoder_without_a_pooler_stays_without(tmp_path):
    bert = transformers.BertModel(stock("Model").config, add_pooling_layer=False).eval()
    bert.save_pretrained(tmp_path / "bert")
    assert main(["convert", str(tmp_path / "bert"), str(tmp_path / "ours"), "--from", "bert"]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "bert"]) == 0
    ours, back = read_ours(str(tmp_path / "ours")).eval(), read_bert(str(tmp_path / "back"))[0]
    assert ours.pooler is None and back.pooler is None
    assert_same_outputs(bert, ours)
    assert_same_outputs(bert, back)


def test_a_classifiers_labels_and_problem_come_along(tmp_path):
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    bert = stock("ForSequenceClassification", problem_type="multi_label_classification", **names)
    ours = from_bert(bert)
    back = to_bert(ours)
    for config in (ours.config, back.config):
        assert config.problem_type == "multi_label_classification"
        assert config.id2label == names["id2label"] and config.label2id == names["label2id"]


def test_a_decoder_apart_stays_apart_whatever_the_configuration_says(tmp_path):
    bert = stock("ForMaskedLM", tie_word_embeddings=False)
    bert.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    ours = from_bert(read_bert(str(tmp_path))[0])
    assert ours.config.tie_word_embeddings is False
    assert_same_outputs(bert, ours)


def test_one_bias_under_one_name_will_do(tmp_path):
    bert = stock("ForPreTraining", tie_word_embeddings=False)
    bert.cls.predictions.bias = bert.cls.predictions.decoder.bias
    for lost in ("cls.predictions.bias", "cls.predictions.decoder.bias"):
        folder = tmp_path / lost
        bert.config.save_pretrained(folder)
        torch.save({n: v for n, v in bert.state_dict().items() if n != lost}, folder / "pytorch_model.bin")
        ours = from_bert(read_bert(str(folder))[0])
        assert type(ours) is D2lBertForPreTraining
        assert_same_outputs(bert, ours)


def test_shards_old_norm_names_and_half_precision_are_read(tmp_path):
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


def test_an_id_on_the_hub_is_read_from_the_cache(tmp_path, trained):
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


def test_pooling_of_a_sentence_transformer_comes_along(tmp_path):
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


def test_written_weights_are_for_everybody_to_read(tmp_path):
    stock("Model").save_pretrained(tmp_path / "bert")
    for start, end, way in (("bert", "ours", "--from"), ("ours", "back", "--to")):
        assert main(["convert", str(tmp_path / start), str(tmp_path / end), way, "bert"]) == 0
        assert oct((tmp_path / end / "model.safetensors").stat().st_mode)[-3:] == "644"


def test_a_vocabulary_below_the_models_is_filled_up_for_the_book(tmp_path, trained):
    model = D2lBertForPreTraining(D2lBertConfig(vocab_size=len(AutoTokenizer.from_pretrained(trained)) + 3))
    model.save_pretrained(tmp_path / "ours")
    AutoTokenizer.from_pretrained(trained).save_pretrained(tmp_path / "ours")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "book"), "--to", "d2l"]) == 0
    back = ["convert", str(tmp_path / "book"), str(tmp_path / "back"), "--from", "d2l", "--num_attention_heads", "2"]
    assert main(back) == 0
    tokens = json.loads((tmp_path / "book" / "vocab.json").read_text())
    assert len(tokens) == model.config.vocab_size and tokens[:5] == ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>"]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused: one line, exit code 2, nothing written


class Trap:
    """Unpickled freely, this would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def refusal(capsys, *arguments):
    assert main(["convert", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err, printed.err
    assert "; " in printed.err, "the mend"
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
        (changed(hidden__0__weight=None), ["hidden.0.weight", "not in the state dict"]),
        (changed(output__weight=torch.zeros(3, 12)), ["output.weight", "no weight of this name"]),
        (changed(encoder__blks__1__attention__W_q__bias=None), ["encoder.blks.1.attention.W_q.bias"]),
        (changed(mlm__mlp__0__weight=torch.zeros(12, 7)), ["shape (12, 7)", "(12, 12)"]),
        (changed(encoder__pos_embedding=torch.zeros(32, 12)), ["encoder.pos_embedding", "(32, 12)"]),
        ({"layer.weight": torch.zeros(2)}, ["not one of a d2l BERTModel"]),
        ({}, ["not one of a d2l BERTModel"]),
        ([torch.zeros(2)], ["no state dict"]),
        ({0: torch.zeros(2)}, ["not one of a d2l BERTModel"]),
        ({name: value.to(torch.int8) for name, value in book_state().items()}, ["int8"]),
        (changed(encoder__segment_embedding__weight=torch.tensor(1.0)), ["segment_embedding", "2 dimensions"]),
        (changed(encoder__token_embedding__weight=torch.zeros(18)), ["token_embedding", "2 dimensions"]),
        (changed(hidden__0__weight=torch.eye(12).to_sparse()), ["hidden.0.weight", "sparse"]),
    ],
)
def test_a_state_dict_of_another_model_is_refused_by_name(state, words, tmp_path, capsys):
    torch.save(state, tmp_path / "state.pt")
    said = refusal(capsys, tmp_path / "state.pt", tmp_path / "out", "--from=d2l", "--num_attention_heads=3")
    assert all(word in said for word in words), said
    assert os.listdir(tmp_path) == ["state.pt"]


def test_lazy_layers_that_saw_no_batch_are_refused(tmp_path, capsys):
    torch.save({**book_state(), "hidden.0.weight": torch.nn.LazyLinear(3).weight}, tmp_path / "state.pt")
    assert "one batch" in refusal(
        capsys, tmp_path / "state.pt", tmp_path / "o", "--from=d2l", "--num_attention_heads=3"
    )


@pytest.mark.parametrize("name", ["whole.pt", "mxnet.params", "cut.pt", "text.pt"])
def test_files_that_are_no_state_dict_are_refused_and_never_run(name, tmp_path, capsys):
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
        (json.dumps([*VOCABULARY[:-1], "he"]), ["'he'", "twice"]),
        (json.dumps([*VOCABULARY[:-1], ""]), ["none of them empty"]),
        (json.dumps([t.replace("<mask>", "mask") for t in VOCABULARY]), ["<mask>", "leave it out"]),
        (json.dumps(3), ["list of tokens"]),
        (json.dumps([*VOCABULARY[:-1], "\ud800"]), ["half of a character"]),
        ("[" * 100_000, ["neither JSON nor UTF-8"]),
        ("{", ["neither JSON nor UTF-8"]),
    ],
)
def test_a_vocabulary_that_makes_no_tokenizer_is_refused_with_the_reason(vocabulary, words, tmp_path, capsys):
    torch.save(book_state(), tmp_path / "state.pt")
    (tmp_path / "v.json").write_text(vocabulary)
    options = ("--from=d2l", "--num_attention_heads=3", f"--vocab={tmp_path / 'v.json'}")
    said = refusal(capsys, tmp_path / "state.pt", tmp_path / "out", *options)
    assert all(word in said for word in words), said
    assert sorted(os.listdir(tmp_path)) == ["state.pt", "v.json"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_act": "gelu_new"}, ["hidden_act", "relu, gelu", "gelu_new"]),
        ({"hidden_act": "silu"}, ["silu"]),
        ({"is_decoder": True}, ["decoder"]),
        ({"position_embedding_type": "relative_key"}, ["relative_key"]),
    ],
)
def test_a_bert_that_we_cannot_be_is_refused_by_name(options, words, tmp_path, capsys):
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
        (lambda state: state, {"num_hidden_layers": 1}, ["encoder.layer.1", "another model's"]),
        (lambda state: state, {"hidden_size": 48}, ["another shape", "config.json"]),
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


@pytest.mark.parametrize("path", ["../victim", "/tmp", ".", "**", "a/../../victim", 3, None])
def test_modules_that_are_not_below_the_folder_are_refused_and_nothing_is_overwritten(path, tmp_path, capsys):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    stock("Model").save_pretrained(tmp_path / "bert")
    entry = {"idx": 1} if path is None else {"idx": 1, "path": path}
    (tmp_path / "bert" / "modules.json").write_text(json.dumps([entry]))
    said = refusal(capsys, tmp_path / "bert", tmp_path / "new" / "out", "--from=bert")
    assert "modules.json" in said
    assert (tmp_path / "victim" / "file").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["bert", "victim"]


def test_a_tokenizer_that_is_another_models_is_refused(tmp_path, trained, capsys):
    stock("Model").save_pretrained(tmp_path / "bert")  # of 60 tokens
    BertTokenizer.from_pretrained(trained).save_pretrained(tmp_path / "bert")
    assert "tokens and the model 60" in refusal(capsys, tmp_path / "bert", tmp_path / "out", "--from=bert")


def test_a_refusal_of_a_model_on_the_hub_says_why(tmp_path, capsys):
    repository = Path(HF_HUB_CACHE) / "models--someone--tanh-bert"
    snapshot = repository / "snapshots" / ("b" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("b" * 40)
    bert = stock("Model")
    bert.config.hidden_act = "gelu_new"
    bert.save_pretrained(snapshot)
    assert "gelu_new" in refusal(capsys, "someone/tanh-bert", tmp_path / "out", "--from=bert")


def test_a_head_that_a_folder_lacks_gives_no_answer(tmp_path, trained, capsys):
    D2lBertForMaskedLM.from_pretrained(trained).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(trained).save_pretrained(tmp_path)
    assert main(["next-sentence", str(tmp_path), "anna", "hugo"]) == 2
    assert "no weights for bert.pooler.dense.bias" in capsys.readouterr().err
    D2lBertModel.from_pretrained(trained).save_pretrained(tmp_path)
    assert main(["fill-mask", str(tmp_path), "anna [MASK]"]) == 2
    assert "no weights for mlm." in capsys.readouterr().err


def test_other_models_and_empty_folders_are_refused(tmp_path, trained, capsys):
    (tmp_path / "empty").mkdir()
    assert "TensorFlow" in refusal(capsys, tmp_path / "empty", tmp_path / "out", "--from=bert")
    assert "d2l-bert model, not a bert one" in refusal(capsys, trained, tmp_path / "out", "--from=bert")
    stock("Model").save_pretrained(tmp_path / "bert")
    assert "bert model, not a d2l-bert one" in refusal(capsys, tmp_path / "bert", tmp_path / "out", "--to=bert")
    assert "it is a file" in refusal(capsys, tmp_path / "bert" / "config.json", tmp_path / "out", "--from=bert")
    assert "nobody/nothing: cannot be loaded: no folder here" in refusal(
        capsys, "nobody/nothing", tmp_path / "out", "--from=bert"
    )
    (tmp_path / "bert" / "model.safetensors").unlink()
    (tmp_path / "bert" / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Trap(tmp_path / "sprung")}))
    refusal(capsys, tmp_path / "bert", tmp_path / "out", "--from=bert")
    assert sorted(os.listdir(tmp_path)) == ["bert", "empty"]


def test_a_setting_that_the_other_model_lacks_is_refused(tmp_path, trained, capsys):
    D2lBertForPreTraining(D2lBertConfig(vocab_size=9)).save_pretrained(tmp_path / "book")
    assert "embedding_layer_norm is false" in refusal(capsys, tmp_path / "book", tmp_path / "out", "--to=bert")
    assert "normalises its embeddings" in refusal(capsys, trained, tmp_path / "out", "--to=d2l")
    assert os.listdir(tmp_path) == ["book"]
    for options, word in (
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"embedding_layer_norm": True}, "normalises its embeddings"),
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12"),
        ({"type_vocab_size": 3}, "3 segment types"),
    ):
        with pytest.raises(ValueError, match=word):
            to_d2l(D2lBertForPreTraining(D2lBertConfig(vocab_size=9, **options)))
    with pytest.raises(ValueError, match="no next sentence"):
        to_d2l(D2lBertForMaskedLM(D2lBertConfig(vocab_size=9)))


def test_wrong_options_and_folders_in_use_are_refused(tmp_path, capsys):
    torch.save(book_state(), tmp_path / "state.pt")
    assert "--num_attention_heads" in refusal(capsys, tmp_path / "state.pt", tmp_path / "out", "--from=d2l")
    assert "no multiple of 5 heads" in refusal(
        capsys, tmp_path / "state.pt", tmp_path / "o", "--from=d2l", "--num_attention_heads=5"
    )
    assert "--from d2l" in refusal(capsys, tmp_path, tmp_path / "out", "--from=bert", "--num_attention_heads=3")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "note").write_text("mine")
    options = ("--from=d2l", "--num_attention_heads=3")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "something already" in refusal(capsys, tmp_path / "state.pt", tmp_path / "link", *options)
    refusal(capsys, tmp_path / "nothing.pt", tmp_path / "a" / "b" / "out", *options)
    refusal(capsys, tmp_path / "state.pt", tmp_path / "state.pt" / "out", *options)
    assert sorted(os.listdir(tmp_path)) == ["kept", "link", "state.pt"]
    assert "something already" in refusal(capsys, tmp_path / "state.pt", tmp_path / "kept", *options)
    assert (tmp_path / "kept" / "note").read_text() == "mine"
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "a", "b"])
    assert stopped.value.code == 2 and "--from" in capsys.readouterr().err
