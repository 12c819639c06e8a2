"""Likely mistakes, by class: exit code 2, one line that names what is wrong, no traceback, and nothing written."""

import shlex
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2Model

from .driving import SMALL, command, error_lines


@pytest.fixture(scope="module")
def place(texts, model, tmp_path_factory):
    """A folder with what the commands below name."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(texts, folder / "books")
    shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("checkpoint-*"))
    shutil.copytree(folder / "model", folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_bytes(b"\0" * 100)
    GPT2Model(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=1, n_positions=8)).save_pretrained(folder / "gpt2")
    for file in (folder / "model").glob("tokenizer*"):
        shutil.copy(file, folder / "gpt2")
    for path in shutil.copytree(texts, folder / "greek").iterdir():
        path.write_text("".join("λ" if letter.isalpha() else " " for letter in path.read_text()))
    (folder / "empty").mkdir()
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes("Café au lait. ".encode("latin-1") * 50)
    (folder / "binary.txt").write_bytes(b"\0\1\2" * 200)
    (folder / "rows.jsonl").write_text('{"text": "Anna left."}\n{"text": \n')
    (folder / "labels.csv").write_text("text,label\n" + "".join(f"anna left {n},{n % 2}\n" for n in range(20)))
    (folder / "more.csv").write_text("text,label\nanna left,7\n")
    (folder / "ragged.csv").write_text("text,label\nanna left,1,2\n")
    assert command("prepare", "--corpus", folder / "books", "--output_dir", folder / "tokens", "--vocab_size=200") == 0
    return folder


PRETRAIN = f"pretrain --output_dir out --max_steps 1 {' '.join(SMALL)} "
GO_ON = "pretrain --output_dir out --max_steps 1 --max_seq_length 48 --length_schedule none --init_from model "
FINETUNE = "finetune model --task classification --output_dir out "
MISTAKES = [
    # options: unknown, misspelt, of another type, out of range, contradicting each other
    (PRETRAIN + "--corpus books --learning_rat 1", "--learning_rat"),
    (PRETRAIN + "--corpus books --learning_rate fast", "learning_rate"),
    (PRETRAIN + "--corpus books --learning_rate -1", "learning_rate"),
    (PRETRAIN + "--corpus books --mlm_probability 1.5", "mlm_probability"),
    (PRETRAIN + "--corpus books --hidden_size 33", "hidden_size"),
    (PRETRAIN + "--corpus books --num_train_epochs 1", "max_steps"),
    (PRETRAIN + "--corpus books --hidden_act swish", "hidden_act"),
    (PRETRAIN + "--corpus books --max_seq_length 999", "max_seq_length"),
    (PRETRAIN + "--corpus books --license mine", "license"),
    ("pretrain --recipe huge", "recipe"),
    # texts: not there, empty, another encoding, binary, damaged rows, prepared
    (PRETRAIN + "--corpus nowhere", "nowhere"),
    (PRETRAIN + "--corpus empty", "empty"),
    (PRETRAIN + "--corpus empty.txt", "empty.txt"),
    (PRETRAIN + "--corpus latin.txt", "latin.txt"),
    (PRETRAIN + "--corpus binary.txt", "binary.txt"),
    (PRETRAIN + "--corpus rows.jsonl", "rows.jsonl"),
    (PRETRAIN + "--corpus rows.jsonl --text_column words", "rows.jsonl"),
    ("evaluate model --corpus tokens", "tokens"),
    # a text of nothing but [UNK]
    (GO_ON + "--corpus greek", "greek"),
    (GO_ON + "--corpus greek --validation_corpus books", "greek"),
    (GO_ON + "--corpus books --validation_corpus greek", "greek"),
    ("evaluate model --corpus greek", "greek"),
    ("prepare --check books", "books"),
    # models: not there, damaged, of another kind, without what the command needs
    ("fill-mask nowhere 'a [MASK]'", "nowhere"),
    ("fill-mask damaged 'a [MASK]'", "damaged"),
    ("fill-mask gpt2 'a [MASK]'", "gpt2"),
    ("fill-mask model 'no mask here'", "MASK"),
    ("embed gpt2 empty.txt --output v.npy", "gpt2"),
    ("convert gpt2 out --from bert", "gpt2"),
    (PRETRAIN + "--corpus books --tokenizer nowhere", "nowhere"),
    ("pretrain --corpus books --output_dir out --max_steps 1 --max_seq_length 48 --init_from damaged", "damaged"),
    # tables and tasks
    (FINETUNE + "--train_file nowhere.csv", "nowhere.csv"),
    (FINETUNE + "--train_file ragged.csv", "ragged.csv"),
    (FINETUNE + "--train_file labels.csv --label_column mood", "mood"),
    (FINETUNE + "--train_file labels.csv --validation_file more.csv", "more.csv"),
    ("finetune model --task sorting --train_file labels.csv --output_dir out", "sorting"),
    (FINETUNE + "--train_file labels.csv --save_steps 5", "save_steps"),
    # folders that hold something, and publishing
    ("pretrain --corpus books --output_dir books --max_steps 1", "books"),
    ("pretrain --corpus books --output_dir model --max_steps 1", "model"),
    (PRETRAIN.replace("_dir out", "_dir greek") + "--corpus books", "greek"),
    (FINETUNE.replace("_dir out", "_dir greek") + "--train_file labels.csv --validation_share 0", "greek"),
    ("convert model books --to d2l", "books"),
    ("publish books me/bert --dry_run", "books"),
    ("publish model 'not a name' --dry_run", "not a name"),
]


@pytest.mark.parametrize("words, named", MISTAKES)
def test_a_likely_mistake_gets_one_line(place, monkeypatch, capsys, words, named):

    monkeypatch.chdir(place)
    before = {path: path.is_file() and path.stat().st_mtime_ns for path in place.rglob("*")}
    assert command(*shlex.split(words)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    (line,) = error_lines(captured.err)
    assert line.startswith("d2l-bert") and named in line and len(line) < 600
    assert {path: path.is_file() and path.stat().st_mtime_ns for path in place.rglob("*")} == before


@pytest.mark.parametrize(
    "words",
    [
        "fill-mask spoilt 'a [MASK]'",
        "next-sentence spoilt a b",
        "embed spoilt books/book-00.txt --output v.npy",
        "evaluate spoilt --corpus books",
        "convert spoilt out --to d2l",
        "finetune spoilt --task classification --train_file labels.csv --validation_share 0 --output_dir out",
        "pretrain --init_from spoilt --corpus books --output_dir out --max_steps 1 --max_seq_length 48 "
        "--attention_init normal --length_schedule none",
    ],
)
def test_weights_that_are_not_finite_are_refused(place, tmp_path, monkeypatch, capsys, words):

    folder = shutil.copytree(place, tmp_path / "place")
    shutil.copytree(folder / "model", folder / "spoilt")
    state = load_file(folder / "model" / "model.safetensors")
    state["bert.encoder.layer.0.attention.query.weight"][3, 5] = float("nan")
    save_file(state, folder / "spoilt" / "model.safetensors", {"format": "pt"})
    monkeypatch.chdir(folder)
    assert command(*shlex.split(words)) == 2
    (line,) = error_lines(capsys.readouterr().err)
    assert "spoilt" in line and "not finite" in line and not list(folder.glob("out*"))
