"""Wrong input, one case a row: one line with the value, its place and the way out; exit code 2; no file changed."""

import contextlib
import json
import shlex
import shutil

import pytest
import torch
from conftest import SMALL, write_books
from promises.driving import command
from text_sources import write_files
from transformers import AutoTokenizer, BertConfig, BertForPreTraining, GPT2Config, GPT2Model
from wrong_commands import AFTER_READING, AT_ONCE

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForSequenceClassification
from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.publish import publish
from d2l_bert.modeling.conversion import save_model
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.existing_tokenizers import load_tokenizer
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.log import check_trackers


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of texts, models and damaged copies of them, under the names that the rows use."""
    folder = tmp_path_factory.mktemp("world")
    make_texts(folder)
    with contextlib.chdir(folder):
        make_models(folder)
    return folder


def make_texts(folder):
    write_books(folder / "books", count=12)
    (folder / "empty").mkdir()
    pair = {"sentence_good": "Anna left.", "sentence_bad": "Anna leave."}
    line = json.dumps(pair)
    umlaut = json.dumps({**pair, "sentence_bad": "Zürich."}, ensure_ascii=False)
    contents = {
        "full/thesis.txt": b"precious",
        "shapes/train.jsonl": b'{"title": "no text"}\n',
        "parts/train.jsonl": b'{"text": "Some text."}\n',
        "file.txt": b"Some text.\n",
        "latin.txt": "Zürich".encode("latin-1"),
        "wide.md": "Some text.".encode("utf-16-le"),
        "nul.txt": b"Some\0text.",
        "words.json": b'{"a": 1}',
        "twice.json": b'["<pad>", "<pad>"]',
        "empty.vocab": b"",
        "there.npy": b"precious",
        "there.png": b"precious",
        "list.jsonl": b'["a"]\n',
        "number.jsonl": b'{"text": 3}\n',
        "cut.jsonl": b'{"text": "a\n',
        "title.csv": b"title\nx\n",
        "long.csv": b"text\nx,y\n",
        "cut.parquet": b"PAR1",
        "cut.txt.zst": b"abc",
        "cut.txt.gz": b"abc",
        "broken.params": b"PK nonsense",
        "blank.txt": b" \n",
        "private.txt": "\ue000\ue001 \ue000\n".encode(),
        "pairs/pairs.jsonl": f"{line}\n".encode(),
        "halves/pairs.jsonl": (line + "\n" + json.dumps({**pair, "sentence_bad": 1}) + "\n").encode(),
        "torn-pairs/pairs.jsonl": f"{line[:-1]}\n".encode(),
        "hollow-pairs/pairs.jsonl": b"\n",
        "long-pairs/pairs.jsonl": json.dumps({**pair, "sentence_good": "Anna left. " * 40}).encode(),
        "latin-pairs/pairs.jsonl": f"{umlaut}\n".encode("latin-1"),
    }
    write_files(folder, contents)
    (folder / "dangling.png").symlink_to("no such file")
    torch.save({"a": torch.zeros(2)}, folder / "other.params")
    torch.save([1, 2], folder / "list.params")


def make_models(folder):
    assert main(["prepare", "--corpus=books", "--output_dir=tokens", "--vocab_size=300"]) == 0
    assert main(["prepare", "--corpus=books", "--output_dir=unrecorded", "--vocab_size=300"]) == 0
    (folder / "unrecorded" / "prepared.json").unlink()
    shutil.copytree("tokens", "flipped")
    ids = folder / "flipped" / "train" / "ids.bin"
    ids.write_bytes(bytes([*ids.read_bytes()[:-1], 255]))
    shutil.copytree("tokens", "former")  # a record as earlier versions wrote it
    former = {"settled": {"language": "en"}, "corpus_name": "books", "hub_datasets": []}
    (folder / "former" / "prepared.json").write_text(json.dumps(former))
    run = ["--corpus=books", "--output_dir=run", "--max_steps=2", "--save_steps=1", "--license=mit"]
    assert main(["pretrain", *run, *SMALL]) == 0
    tokenizer = AutoTokenizer.from_pretrained("run")
    config = D2lBertConfig.from_pretrained("run")
    stock = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    for name, model in {
        "mlm": D2lBertForMaskedLM(config),
        "classifier": D2lBertForSequenceClassification(config),
        "bert": BertForPreTraining(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **stock)),
        "decoder": BertForPreTraining(BertConfig(vocab_size=len(tokenizer), is_decoder=True, **stock)),
        "gpt2": GPT2Model(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=1, n_positions=8)),
    }.items():
        (folder / name).mkdir()
        if name in ("mlm", "classifier"):
            save_model(model, folder / name)
            save_tokenizer(tokenizer, folder / name)
        else:
            model.save_pretrained(folder / name)
    for name, settings in {"unmasked": {"mask_token": None}, "wordy": {}}.items():
        shutil.copytree("mlm", name)
        odd_tokenizer = AutoTokenizer.from_pretrained("mlm", **settings)
        odd_tokenizer.add_tokens([] if settings else ["onemore"])
        odd_tokenizer.save_pretrained(name)
    for name, source, file, damage in [
        ("cut", "run", "model.safetensors", lambda content: content[:-100]),
        ("weightless", "run", "model.safetensors", None),
        ("hollow", "run", "model.safetensors", lambda content: b""),
        ("nameless", "run", "config.json", None),
        ("torn", "run", "config.json", lambda content: b"{"),
        ("listed", "run", "config.json", lambda content: b"[]"),
        ("negative", "run", "config.json", lambda content: changed(content, hidden_size=-1)),
        ("wider", "run", "config.json", lambda content: changed(content, hidden_size=64)),
        ("mute", "run", "tokenizer.json", lambda content: b"{"),
        ("odd", "run", "tokenizer.json", lambda content: b"[]"),
        ("uncarded", "run", "README.md", lambda content: b"no metadata"),
        ("uncoded", "run", "modeling_d2l_bert.py", None),
        ("recoded", "run", "modeling_d2l_bert.py", lambda content: content + b"\n"),
        ("loud", "bert", "config.json", lambda content: changed(content, hidden_act="silu")),
        ("overcounted", "run", "config.json", lambda content: changed(content, vocab_size=999)),
        ("bert-cut", "bert", "model.safetensors", lambda content: content[:-100]),
        ("bert-nameless", "bert", "config.json", None),
        ("bert-pickled", "bert", "model.safetensors", None),
    ]:
        shutil.copytree(source, name, ignore=shutil.ignore_patterns("checkpoint-*"))
        path = folder / name / file
        path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
    (folder / "bert-pickled" / "pytorch_model.bin").write_bytes(b"nonsense")
    shutil.copytree("run/checkpoint-1", "checkpoint-torn")
    (folder / "checkpoint-torn" / "optimizer.safetensors").write_bytes(b"")


def changed(content, **entries):
    return json.dumps({**json.loads(content), **entries}).encode()


def arguments_of(line):
    """The arguments of a row, after the options that the command also needs for a short run."""
    command, *options = shlex.split(line)
    given = {option.partition("=")[0] for option in options}
    beside = []
    if command in ("prepare", "pretrain"):
        beside += [] if given & {"--corpus", "--dataset", "--check"} else ["--corpus=books"]
        beside += [] if given & {"--output_dir", "--check"} else ["--output_dir=out"]
    if command == "pretrain":
        settled = ("--vocab_size", "--hidden", "--num", "--inter", "--max_pos") if "--init_from" in given else ()
        settled += ("--vocab_size",) if given & {"--tokenizer"} or {"tokens", "former"} & {*options} else ()
        beside += [] if given & {"--num_train_epochs", "--max_minutes"} else ["--max_steps=1"]
        beside += [option for option in SMALL if not option.startswith(settled)]
    # The row's options come last: if an option is given twice, the last value counts.
    return [command, *beside, *options]


def snapshot(folder):
    """Every path below a folder, with the size and the modification time of each file."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (path.is_dir() or (entry.st_size, entry.st_mtime_ns)) for path, entry in found.items()}


ROWS = [*((line, value, True) for line, value in AT_ONCE), *((line, value, False) for line, value in AFTER_READING)]


@pytest.mark.parametrize(("line", "value", "is_at_once"), ROWS, ids=[line[:70] for line, _, _ in ROWS])
def test_a_wrong_input_is_refused_in_one_line_and_no_file_is_changed(
    line, value, is_at_once, world, monkeypatch, capfd
):
    """What is found before the text is read is refused without another line."""
    monkeypatch.chdir(world)
    shutil.rmtree("out", ignore_errors=True)  # a row that was accepted by mistake left it
    arguments = arguments_of(line)
    before = snapshot(world)
    code = command(*arguments)
    captured = capfd.readouterr()
    assert code == 2 and captured.out == "", captured.err
    assert "Traceback" not in captured.err
    *progress, said = captured.err.splitlines()
    assert said.startswith(f"d2l-bert {arguments[0]}: error: ") and value in said, captured.err
    assert not (progress if is_at_once else [line for line in progress if "error" in line])
    assert snapshot(world) == before


FROM_PYTHON = [  # a call, then what the error names
    (lambda: TextConfig(corpus=[""]).check(), "corpus"),
    (lambda: TextConfig(corpus=[True]).check(), "[True]"),
    (lambda: TextConfig(vocab_size=True).check(), "True"),
    (lambda: TextConfig(vocab_size=300.0).check(), "300.0"),
    (lambda: FinetuneConfig(model="m", task="tags", train_file="", seed="x").check(), "train_file"),
    (lambda: PretrainConfig(max_steps=1, tokenizer="a\0b").check(), r"a\x00b"),
    (lambda: PretrainConfig(max_steps=1, torch_compile="auto").check(), "'auto'"),
    (lambda: PretrainConfig(max_steps=1, mlm_probability="1.5").check(), "1.5"),
    (lambda: PretrainConfig(max_steps=1, mlm_probability="nan").check(), "nan"),
    (lambda: PretrainConfig(max_steps=1, mlm_probability="a lot").check(), "'a lot'"),
    # Trackers that Accelerate alone would leave out without a message.
    (lambda: check_trackers(["tensorbord"], ["tensorboard"]), "(tensorboard), got 'tensorbord'"),
    (lambda: check_trackers(["tensorboard", "none"], ["tensorboard"]), "got 'none'"),
    (lambda: check_trackers(["wandb"], ["tensorboard"]), "got 'wandb'; pip install wandb"),
    (lambda: check_trackers(["tensorboard"], []), "none is), got 'tensorboard'; pip install tensorboard"),
    (lambda: publish("run", "me/x", PublishConfig(license="")), "license"),
    (lambda: load_tokenizer("no such name"), "no such name"),
]


@pytest.mark.parametrize(("call", "words"), FROM_PYTHON, ids=[words[:60] for _, words in FROM_PYTHON])
def test_a_wrong_input_from_python_raises_a_user_error(call, words):
    with pytest.raises(UserError) as refusal:
        call()
    assert words in str(refusal.value)
