"""The model is the book's and BERT's: equations, weights there and back, Transformers' tools, with and without us."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForNextSentencePrediction,
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    Trainer,
    TrainingArguments,
    pipeline,
)

import d2l_bert
from d2l_bert import D2lBertConfig, D2lBertForPreTraining, PretrainingLoss

from .driving import command, python, read_json


HEADS = 3


def book_state(vocabulary=18, hidden=12, inner=20, blocks=2, positions=32):
    """Random weights with the names and shapes of d2l 1.0.3's BERTModel (section 15.8)."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "encoder.pos_embedding": (1, positions, hidden),
        "encoder.token_embedding.weight": (vocabulary, hidden),
        "encoder.segment_embedding.weight": (2, hidden),
    }
    linears = {"hidden.0": (hidden, hidden), "mlm.mlp.0": (hidden, hidden)}
    linears |= {"mlm.mlp.3": (vocabulary, hidden), "nsp.output": (2, hidden)}
    norms = ["mlm.mlp.2"]
    for n in range(blocks):
        block = f"encoder.blks.{n}"
        linears |= {f"{block}.attention.{name}": (hidden, hidden) for name in ("W_q", "W_k", "W_v", "W_o")}
        linears |= {f"{block}.ffn.dense1": (inner, hidden), f"{block}.ffn.dense2": (hidden, inner)}
        norms += [f"{block}.addnorm1.ln", f"{block}.addnorm2.ln"]
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return {name: 0.4 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def book_outputs(state, tokens, segments, valid, positions):
    """The book's equations for one sequence: encodings (T, H), MLM logits (P, V), NSP logits (2,), 1 for "is next"."""

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"]
            + state[f"{name}.bias"]
        )

    x = state["encoder.token_embedding.weight"][tokens] + state["encoder.segment_embedding.weight"][segments]
    x = x + state["encoder.pos_embedding"][0, : len(tokens)]
    for n in range(2):
        block = f"encoder.blks.{n}"
        q, k, v = (linear(x, f"{block}.attention.W_{name}") for name in "qkv")
        width, heads = x.shape[1] // HEADS, []
        for head in range(HEADS):
            here = slice(head * width, (head + 1) * width)
            scores = q[:, here] @ k[:, here].T / width**0.5
            scores[:, valid:] = -1e6
            heads.append(scores.softmax(-1) @ v[:, here])
        x = norm(x + linear(torch.cat(heads, -1), f"{block}.attention.W_o"), f"{block}.addnorm1.ln")
        x = norm(x + linear(linear(x, f"{block}.ffn.dense1").relu(), f"{block}.ffn.dense2"), f"{block}.addnorm2.ln")
    mlm = linear(norm(linear(x[positions], "mlm.mlp.0").relu(), "mlm.mlp.2"), "mlm.mlp.3")
    return x, mlm, linear(linear(x[0], "hidden.0").tanh(), "nsp.output")


@pytest.fixture(scope="module")
def from_the_book(tmp_path_factory):
    """A state dict of the book's model, and the folder that `convert --from d2l` makes of it."""
    folder = tmp_path_factory.mktemp("book")
    state = book_state()
    torch.save(state, folder / "book.params")
    words = ["convert", folder / "book.params", folder / "ours", "--from", "d2l", "--num_attention_heads", HEADS]
    assert command(*words) == 0
    return state, folder / "ours"


def test_a_converted_model_computes_the_equations_of_the_book(from_the_book):
    state, folder = from_the_book
    model = D2lBertForPreTraining.from_pretrained(folder).eval()
    for seed, valid in enumerate((32, 9, 4)):
        draw = torch.Generator().manual_seed(seed)
        tokens, positions = torch.randint(0, 18, (32,), generator=draw), torch.tensor([1, 3, 2])
        segments = (torch.arange(32) > 3).long()
        encoded, mlm, nsp = book_outputs(state, tokens, segments, valid, positions)
        mask = (torch.arange(32) < valid).long()
        with torch.no_grad():
            named = {"input_ids": tokens[None], "attention_mask": mask[None], "token_type_ids": segments[None]}
            outputs = model(**named, masked_positions=positions[None])
            hidden = model.bert(**named).last_hidden_state[0]
        torch.testing.assert_close(hidden[:valid], encoded[:valid], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(outputs.prediction_logits[0], mlm, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(outputs.seq_relationship_logits[0], nsp.flip(0), rtol=1e-4, atol=1e-5)


def test_the_book_s_weights_come_back_as_they_were(from_the_book, tmp_path):
    state, folder = from_the_book
    vocabulary = ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", *(f"word{n}" for n in range(13))]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    torch.save(state, tmp_path / "book.params")
    words = ["convert", tmp_path / "book.params", tmp_path / "ours", "--from", "d2l", "--num_attention_heads", HEADS]
    assert command(*words, "--vocab", tmp_path / "vocab.json") == 0
    assert command("convert", tmp_path / "ours", tmp_path / "back", "--to", "d2l") == 0
    back = torch.load(tmp_path / "back" / "pretrained.params", weights_only=True)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A stock BERT with both heads and random weights, on disk with a tokenizer."""
    folder = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    bert = BertForPreTraining(BertConfig(**sizes, intermediate_size=20, max_position_embeddings=32)).eval()
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    bert.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{n}" for n in range(35))]
    transformers.BertTokenizer(vocab={word: n for n, word in enumerate(words)}).save_pretrained(folder)
    return bert, folder


def test_bert_s_weights_compute_the_same_here_and_come_back(stock, tmp_path):
    bert, folder = stock
    assert command("convert", folder, tmp_path / "ours", "--from", "bert") == 0
    ours = D2lBertForPreTraining.from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(5, 40, (4, 32), generator=torch.Generator().manual_seed(1))
    named = {"input_ids": ids, "attention_mask": (torch.arange(32) < torch.tensor([[32], [20], [9], [3]])).long()}
    named["token_type_ids"] = (torch.arange(32) > 7).long().expand(4, -1)
    with torch.no_grad():
        expected, found = bert(**named), ours(**named)
    real = named["attention_mask"] == 1
    torch.testing.assert_close(found.prediction_logits[real], expected.prediction_logits[real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.seq_relationship_logits, expected.seq_relationship_logits, rtol=1e-4, atol=1e-5)
    assert command("convert", tmp_path / "ours", tmp_path / "back", "--to", "bert") == 0
    back = BertForPreTraining.from_pretrained(tmp_path / "back").state_dict()
    for name, tensor in bert.state_dict().items():
        assert torch.equal(back[name], tensor), name


def test_what_bert_cannot_express_is_refused(from_the_book, tmp_path, capsys):
    assert command("convert", from_the_book[1], tmp_path / "out", "--to", "bert") == 2
    assert "embedding_layer_norm" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_and_packing_change_no_output(attention):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = D2lBertConfig(**sizes, intermediate_size=20, max_position_embeddings=32, initializer_range=0.2)
    model = D2lBertForPreTraining._from_config(config, attn_implementation=attention).eval()
    rows = [torch.randint(5, 40, (length,)) for length in (9, 14)]
    with torch.no_grad():
        alone = [model(row[None]) for row in rows]
        padded = torch.zeros(2, 16, dtype=torch.long)
        for number, row in enumerate(rows):
            padded[number, : len(row)] = row
        together = model(padded, attention_mask=(padded != 0).long())
        packed = torch.cat(rows)[None]
        numbers = torch.tensor([[1] * 9 + [2] * 14])
        places = torch.tensor([[*range(9), *range(14)]])
        in_a_row = model(packed, position_ids=places, sequence_ids=numbers, cls_positions=torch.tensor([[0, 9]]))
    for number, (row, one) in enumerate(zip(rows, alone, strict=True)):
        first = 9 * number
        for logits in (
            together.prediction_logits[number, : len(row)],
            in_a_row.prediction_logits[0, first : first + len(row)],
        ):
            torch.testing.assert_close(logits, one.prediction_logits[0], rtol=1e-4, atol=1e-5)
        for logits in (together.seq_relationship_logits[number], in_a_row.seq_relationship_logits[0, number]):
            torch.testing.assert_close(logits, one.seq_relationship_logits[0], rtol=1e-4, atol=1e-5)


def test_each_auto_class_loads_the_trained_weights(model):
    reference = D2lBertForPreTraining.from_pretrained(model).state_dict()
    kinds = "MaskedLM NextSentencePrediction PreTraining SequenceClassification TokenClassification".split()
    kinds += ["QuestionAnswering", "MultipleChoice"]
    for auto in (AutoModel, *(getattr(transformers, f"AutoModelFor{kind}") for kind in kinds)):
        loaded = auto.from_pretrained(model)
        assert type(loaded).__module__.startswith("d2l_bert")
        shared = 0
        for name, tensor in loaded.state_dict().items():
            name = name if name in reference else f"bert.{name}"
            if name in reference:
                assert torch.equal(tensor, reference[name]), name
                shared += 1
        assert shared > 10


def test_pipelines_say_what_the_model_computes(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "Then anna walked to the [MASK] with the apple."
    encoded = tokenizer(text, return_tensors="pt")
    place = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0, 0]
    with torch.no_grad():
        logits = AutoModelForMaskedLM.from_pretrained(model).eval()(**encoded).logits[0, place]
    best = logits.softmax(-1).topk(5)
    filled = pipeline("fill-mask", model=str(model))(text)
    assert [entry["token"] for entry in filled] == best.indices.tolist()
    assert [entry["score"] for entry in filled] == pytest.approx(best.values.tolist(), rel=1e-4)
    pair = {"text": "Anna walked to the garden with the apple.", "text_pair": "There anna met boris."}
    answer = pipeline("next-sentence-prediction", model=str(model))(pair)
    encoded = tokenizer(pair["text"], pair["text_pair"], return_tensors="pt")
    with torch.no_grad():
        shares = AutoModelForNextSentencePrediction.from_pretrained(model).eval()(**encoded).logits[0].softmax(-1)
    assert answer["label"] == ("IsNext", "NotNext")[int(shares.argmax())]
    assert answer["score"] == pytest.approx(float(shares.max()), rel=1e-4)


def test_fill_mask_and_next_sentence_print_the_same(model, capsys):
    text = "Then anna walked to the [MASK] with the apple."
    assert command("fill-mask", model, text, "--top_k=3") == 0
    lines = capsys.readouterr().out.splitlines()
    filled = pipeline("fill-mask", model=str(model), top_k=3)(text)
    assert [line.split()[1] for line in lines[1:]] == [entry["token_str"] for entry in filled]
    assert [line.split()[0] for line in lines[1:]] == [f"{entry['score']:.1%}" for entry in filled]
    assert command("next-sentence", model, "Anna left.", "Boris came.") == 0
    answer = pipeline("next-sentence-prediction", model=str(model))({"text": "Anna left.", "text_pair": "Boris came."})
    assert f"{answer['score']:.1%}" in capsys.readouterr().out


def test_the_loss_under_trainer_does_not_depend_on_gradient_accumulation(model, texts, tmp_path):
    """8 rows at once, 4 x 2 and 8 x 1, with unequal numbers of labels; SGD, so that rounding stays small."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    draw, rows = torch.Generator().manual_seed(0), []
    lines = (texts / "book-00.txt").read_text().replace("\n\n", " ").split(". ")[:16]
    for number in range(8):
        encoded = tokenizer(lines[2 * number], lines[2 * number + 1], padding="max_length", max_length=48)
        ids = torch.tensor(encoded["input_ids"])
        labels = ids.masked_fill((torch.rand(48, generator=draw) > 0.1 * (number + 1)) | (ids < 5), -100)
        rows.append({**encoded, "labels": labels, "next_sentence_label": number % 2})
    ends = []
    for size in (8, 2, 1):
        loaded = D2lBertForPreTraining.from_pretrained(
            model, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
            max_steps=1, learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0,
            report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(loaded, arguments, train_dataset=rows)
        trainer.compute_loss_func = PretrainingLoss(trainer)
        trainer.train()
        ends.append(loaded.state_dict())
    for state in ends[1:]:
        for name, tensor in ends[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_label_that_is_no_token_is_refused_in_training(model):
    loaded = D2lBertForPreTraining.from_pretrained(model).train()
    with pytest.raises(IndexError):
        loaded(torch.tensor([[2, 7, 3]]), labels=torch.tensor([[-100, -1, -100]]))
    with pytest.raises(IndexError):
        F.cross_entropy(torch.zeros(1, 5), torch.tensor([-1]))


@pytest.mark.slow
def test_a_compiled_model_is_one_program_and_computes_the_same(model):
    loaded = D2lBertForPreTraining.from_pretrained(model).train()
    ids = torch.randint(5, 60, (4, 24), generator=torch.Generator().manual_seed(0))
    for places in ({"masked_positions": torch.tensor([[1, 5, 9]] * 4), "labels": ids[:, [1, 5, 9]]}, {"labels": ids}):
        places["labels"] = places["labels"].clone()
        places["labels"][1, 1:] = -100
        programs = CompileCounterWithBackend("aot_eager")
        compiled, found = torch.compile(loaded, backend=programs), []
        for run in (loaded, compiled):
            loaded.zero_grad()
            torch.manual_seed(3)
            outputs = run(ids, next_sentence_label=torch.tensor([0, 1, 0, 1]), **places)
            outputs.loss.backward()
            found.append([outputs.loss.detach(), *(p.grad.clone() for p in loaded.parameters())])
        assert programs.frame_count == 1
        for expected, tensor in zip(*found, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)
        torch.compiler.reset()


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["d2l_bert"] = None  # an import would fail
import torch
from transformers import AutoModelForMaskedLM, AutoModelForNextSentencePrediction, AutoTokenizer
folder = sys.argv[1] if len(sys.argv) > 1 else {folder!r}
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
encoded = tokenizer("Then anna walked to the [MASK].", "There anna met boris.", return_tensors="pt")
outputs = []
for auto in (AutoModelForMaskedLM, AutoModelForNextSentencePrediction):
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    outputs.append(model(**encoded).logits.flatten().tolist()[:50])
print(outputs)
"""


@pytest.mark.slow
def test_the_folder_computes_the_same_without_the_package(model):
    done = python(WITHOUT_THE_PACKAGE.format(folder=str(model)))
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded = tokenizer("Then anna walked to the [MASK].", "There anna met boris.", return_tensors="pt")
    found = json.loads(done.stdout.splitlines()[-1])
    for auto, logits in zip((AutoModelForMaskedLM, AutoModelForNextSentencePrediction), found, strict=True):
        with torch.no_grad():
            expected = auto.from_pretrained(model).eval()(**encoded).logits.flatten()[:50]
        assert logits == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


def test_the_package_changes_nothing_of_a_program_that_imports_it():
    code = (
        "import torch; before = torch.get_num_threads(), torch.initial_seed(); import d2l_bert; "
        "assert (torch.get_num_threads(), torch.initial_seed()) == before; import os; print(dict(os.environ))"
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP", "GOMP"))}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0 and "GOMP_SPINCOUNT" not in done.stdout and "OMP_WAIT_POLICY" not in done.stdout
    assert d2l_bert.__version__ and set(d2l_bert.__all__) <= set(dir(d2l_bert))


def test_a_finished_folder_holds_what_readers_need(model):
    names = {path.name for path in model.iterdir() if path.is_file()}
    needed = (
        "config.json model.safetensors tokenizer.json tokenizer_config.json vocab.txt README.md run_config.json "
        "configuration_d2l_bert.py modeling_d2l_bert.py metrics.json training_log.jsonl training_curves.png"
    )
    assert set(needed.split()) <= names
    assert not any(name.endswith((".bin", ".pt", ".pkl", ".pth")) for name in names)
    config = read_json(model / "config.json")
    assert config["model_type"] == "d2l-bert" and config["architectures"] == ["D2lBertForPreTraining"]
    assert "AutoModelForMaskedLM" in config["auto_map"]
