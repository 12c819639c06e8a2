"""The command line: every mistake is one clear line and exit code 2, and loses nothing."""

import gzip
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import SMALL, write_books
from huggingface_hub import HfApi
from local_hub import TOKEN, environment
from transformers import BertConfig, BertForMaskedLM

from d2l_bert.cli import main
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.run_folder import output_folder


@pytest.fixture
def fails(capsys, tmp_path):
    """Run a command that must fail; returns its one line."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's way
            code = stop.code
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if "error:" in line]
        assert code == 2 and len(lines) == 1, captured.err
        assert "Traceback" not in captured.err
        return lines[0]

    return run


@pytest.fixture
def fails_to_pretrain(fails, tmp_path):
    """Pretrain on a corpus that must be refused; nothing may be left behind."""

    def run(corpus, *options):
        folder = tmp_path / "out"
        source = [f"--corpus={corpus}"] if corpus else []
        line = fails("pretrain", *source, f"--output_dir={folder}", "--max_steps=2", *SMALL, *options)
        assert not folder.exists()
        return line

    return run


def test_utf_16_is_named(fails_to_pretrain, tmp_path):
    (tmp_path / "wide.txt").write_text("Some text.", encoding="utf-16")
    assert "UTF-16" in fails_to_pretrain(tmp_path / "wide.txt")


def test_a_cache_that_cannot_be_written(fails_to_pretrain, books, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "file"))
    assert "HF_HOME" in fails_to_pretrain(books)


def test_an_empty_folder(fails_to_pretrain, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no text file in this folder" in fails_to_pretrain(tmp_path / "empty")


def test_an_empty_file(fails_to_pretrain, tmp_path):
    (tmp_path / "empty.txt").touch()
    line = fails_to_pretrain(tmp_path / "empty.txt")
    assert "empty.txt" in line and "too little text" in line


def test_only_white_space(fails_to_pretrain, tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n\t\n" * 50)
    assert "too little text" in fails_to_pretrain(tmp_path / "blank.txt")


def test_one_sentence(fails_to_pretrain, tmp_path):
    (tmp_path / "one.txt").write_text("A single sentence is all there is.")
    line = fails_to_pretrain(tmp_path / "one.txt")
    assert "one.txt" in line and "too little text" in line


def test_a_missing_path(fails_to_pretrain, tmp_path):
    line = fails_to_pretrain(tmp_path / "nowhere")
    assert "nowhere" in line and "no such file or folder" in line


def test_a_binary_file(fails_to_pretrain, tmp_path):
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00")
    line = fails_to_pretrain(tmp_path / "picture.txt")
    assert "picture.txt" in line and "binary" in line


def test_another_encoding(fails_to_pretrain, tmp_path):
    write_books(tmp_path / "books", count=3)
    (tmp_path / "books" / "latin.txt").write_bytes("Zürich liegt am See.".encode("latin-1"))
    line = fails_to_pretrain(tmp_path / "books")
    assert "latin.txt" in line and "UTF-8" in line and "0xfc" in line and "offset 1" in line


def test_a_gzip_file_cut_short(fails_to_pretrain, tmp_path):
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"Some text. " * 200)[:-20])
    assert "cut.txt.gz" in fails_to_pretrain(tmp_path / "cut.txt.gz")


def test_a_vocabulary_below_the_alphabet(fails_to_pretrain, books):
    line = fails_to_pretrain(books, "--vocab_size=20")
    assert "vocab_size 20 is below the alphabet" in line


def test_sequences_beyond_the_positions(fails_to_pretrain, books):
    line = fails_to_pretrain(books, "--max_seq_length=65")
    assert "max_seq_length (65)" in line and "64" in line


def test_a_dataset_that_is_not_there(fails_to_pretrain, tmp_path):
    assert "cannot be loaded" in fails_to_pretrain(None, f"--dataset={tmp_path / 'nowhere'}")


def test_a_split_that_is_not_there(fails_to_pretrain, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "Some text."}\n')
    for options in ([], ["--streaming"]):
        line = fails_to_pretrain(None, f"--dataset={tmp_path / 'data'}", "--dataset_split=dev", *options)
        assert "dev" in line and "['train']" in line


def test_a_damaged_row_far_down_in_a_stream(fails_to_pretrain, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "Some text."}\n' * 2000)
    (tmp_path / "data" / "b.jsonl").write_text('{"text": "Some text."\n')
    line = fails_to_pretrain(None, f"--dataset={tmp_path / 'data'}", "--streaming")
    assert f"dataset {tmp_path / 'data'}: broke off after 2,000 rows" in line


def test_a_corpus_of_files_without_text(fails_to_pretrain, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "b.csv", "c.parquet"):
        (tmp_path / "data" / name).touch()
    assert "data: too little text" in fails_to_pretrain(tmp_path / "data")


def test_a_dataset_without_the_column(fails_to_pretrain, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"content": "Some text."}\n')
    line = fails_to_pretrain(None, f"--dataset={tmp_path / 'data'}")
    assert "no column 'text'" in line and "content" in line and "--text_column" in line


def test_a_tokenizer_that_is_not_there(fails_to_pretrain, books, tmp_path):
    assert "tokenizer" in fails_to_pretrain(books, f"--tokenizer={tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    "option, mend",
    [
        ("--hidden_size=33", "multiple of num_attention_heads"),
        ("--hidden_act=gelu_new", "relu, gelu"),
        ("--mlm_probability=0", "mlm_probability"),
        ("--mlm_probability=0.3->1.5", "at most 1"),
        ("--mlm_probability=0.3-0.15", "0.30->0.15"),
        ("--masking=words", "whole_word"),
        ("--learning_rate=-1", "learning_rate"),
        ("--max_steps=0", "max_steps"),
        ("--seed=99999999999999999999999", "seed must be"),
        ("--mlm_probability=nan", "mlm_probability must be"),
        ("--initializer_range=nan", "initializer_range must be a finite number above 0, got nan"),
        ("--initializer_range=1e300", "initializer_range must be between 1.2e-38 and 100, got 1e+300"),
        ("--layer_norm_eps=inf", "layer_norm_eps must be a finite number above 0, got inf"),
        ("--hidden_dropout_prob=nan", "hidden_dropout_prob must be a probability"),
        ("--type_vocab_size=1", "type_vocab_size must be at least 2"),
        ("--learning_rate=1e30", "diverged"),
        ("--length_schedule 32", "LENGTH:SHARE"),
        ("--length_schedule 32:0.5 40:0.5", "must leave some steps"),
        ("--length_schedule 48:0.5", "at least 8 and below max_seq_length (48)"),
        ("--length_schedule 40:0.2 32:0.5", "32 must be more than the 40 before it"),
        ("--batch_size_schedule 4", "BATCH:SHARE"),
        ("--batch_size_schedule 0:0.1", "0 must be at least 1 and below global_batch_size (8)"),
        ("--batch_size_schedule 8:0.1", "8 must be at least 1 and below global_batch_size (8)"),
        ("--batch_size_schedule 4:0.1 2:0.1", "2 must be more than the 4 before it"),
        ("--batch_size_schedule 2:0.5 4:0.5", "must leave some steps for global_batch_size"),
        ("--optim=sgd", "invalid choice: 'sgd'"),
        ("--lr_scheduler_type=constant", "invalid choice: 'constant'"),
        ("--decay_ratio=0.1", "lr_scheduler_type is linear; leave it out"),
        ("--lr_scheduler_type=warmup_stable_decay --decay_ratio=0", "decay_ratio must be above 0"),
        ("--lr_scheduler_type=warmup_stable_decay --decay_ratio=0.96", "(0.05) and decay_ratio (0.96) are more"),
        ("--lr_scheduler_type=warmup_stable_decay --warmup_ratio=0.9", "(0.9) and decay_ratio (0.2) are more"),
        ("--adam_beta1=1", "adam_beta1 must be at least 0 and below 1"),
        ("--micro_batch_size=some", "micro_batch_size must be a whole number or auto, got 'some'"),
        ("--ema_decay=0", "ema_decay must be above 0 and below 1"),
        ("--ema_decay=1", "ema_decay must be above 0 and below 1"),
        ("--max_minutes=1 --max_steps=3", "exactly one of"),
        ("--min_frequency=0", "min_frequency must be at least 1"),
        ("--limit_alphabet=0", "limit_alphabet must be at least 2"),
        ("--extend_vocab=-1", "extend_vocab must be at least 0"),
        ("--extend_vocab=5", "give one, or raise vocab_size"),
        ("--strip_accents=maybe", "true or false, not 'maybe'"),
        ("--max_documents=0", "max_documents must be at least 1"),
        ("--streaming", "none is given; leave it out"),
        ("--pairing=sentences --short_seq_prob=0.5", "short_seq_prob is for segments"),
        ("--preprocessing_num_workers=0", "preprocessing_num_workers must be at least 1"),
        ("--source_weights 1 two", "numbers such as 2 or 0.5, got 'two'"),
        ("--source_weights 0", "give one source at least some weight"),
        ("--source_weights 1 2", "2 of them for 1 source"),
        ("--language=english", "ISO 639 code such as en"),
        ("--language=e1", "ISO 639 code such as en"),
        ("--language=EN", "ISO 639 code such as en"),
        ("--dataset_config=a", "a single dataset"),
        ("--dataset x/a x/b --dataset_config=a", "write each as ID:CONFIG"),
        ("--dataset x/a:b --dataset_config=a", "one configuration for each"),
        ("--dataset x/a:", "ID or ID:CONFIG"),
        ("--dataset :b", "ID or ID:CONFIG"),
    ],
)
def test_values_out_of_range(fails, books, tmp_path, option, mend):
    length = [] if "max_" in option else ["--max_steps=2"]
    line = fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, *length, *option.split())
    assert mend in line and not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["pretrain", "--learning_rat=1"], "unknown option --learning_rat; did you mean --learning_rate?"),
        (["pretrain", "--max_steps=many"], "invalid int value: 'many'"),
        (["pretrain", "--recipe=huge"], "invalid choice: 'huge'"),
        (["pretrain", "--lowercase=maybe"], "true or false, not 'maybe'"),
        (["bake"], "invalid choice: 'bake'"),
        ([], "required"),
        (["fill-mask"], "required"),
    ],
)
def test_mistakes_on_the_command_line(fails, arguments, message):
    assert message in fails(*arguments)


@pytest.mark.parametrize("existing", ["tokenizer", "init_from"])
@pytest.mark.parametrize(
    "option", ["--vocab_size=100", "--lowercase", "--strip_accents", "--limit_alphabet=9", "--min_frequency=3"]
)
def test_an_existing_tokenizer_is_not_trained(fails, books, trained, tmp_path, existing, option):
    out = (f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", f"--{existing}={trained}", option)
    for command in ("pretrain", "prepare")[: 1 if existing == "init_from" else 2]:
        line = fails(command, *out)
        assert (
            f"{option.partition('=')[0][2:]} is for training a tokenizer" in line and f"{existing} gives one" in line
        )
    assert os.listdir(tmp_path) == []


@pytest.fixture
def fails_to_start_from(fails, books, tmp_path):
    """Start from a model that must be refused; nothing may be left behind."""

    def run(model, *options):
        short = ("--max_seq_length=48", "--max_steps=1", "--dataloader_num_workers=0")
        out = (f"--corpus={books}", f"--output_dir={tmp_path / 'out'}")
        line = fails("pretrain", f"--init_from={model}", *out, *short, *options)
        assert not (tmp_path / "out").exists()
        return line

    return run


def test_what_the_model_to_start_from_settles_is_refused_by_name(fails_to_start_from, trained):
    for option in ("--hidden_size=64", "--num_hidden_layers=3", "--tie_word_embeddings", "--layer_norm_eps=1e-12"):
        assert f"{option.partition('=')[0][2:]} is settled by the model" in fails_to_start_from(trained, option)
    assert "attention_init neighbours" in fails_to_start_from(trained, "--attention_init=neighbours")
    line = fails_to_start_from(trained, "--max_seq_length=65")
    assert "max_seq_length (65)" in line and "64" in line and "raise" not in line


def test_models_that_no_run_can_start_from(fails_to_start_from, books, trained, tmp_path):
    from transformers import BertConfig

    assert "nowhere: cannot be loaded: no folder here" in fails_to_start_from(tmp_path / "nowhere")
    BertConfig().save_pretrained(tmp_path / "stock")
    assert "d2l-bert convert" in (line := fails_to_start_from(tmp_path / "stock")) and "--from bert" in line
    bare = shutil.copytree(
        trained / "checkpoint-20", tmp_path / "bare", ignore=shutil.ignore_patterns("*tok*", "vocab*")
    )
    assert "it brings no tokenizer; give --tokenizer" in fails_to_start_from(bare)
    shutil.copytree(trained, tmp_path / "wide", ignore=shutil.ignore_patterns("checkpoint-*"))
    config = json.loads((trained / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps({**config, "vocab_size": 9999}))
    assert "its vocabulary has 9999 entries" in fails_to_start_from(tmp_path / "wide")
    other = ["prepare", f"--corpus={books}", f"--output_dir={tmp_path / 'other'}", "--vocab_size=60"]
    assert main(other) == 0
    line = fails_to_start_from(trained, f"--tokenizer={tmp_path / 'other'}")
    assert "must begin with the model's vocabulary" in line and "its own tokenizer serves" in line
    line = fails_to_start_from(trained, f"--corpus={tmp_path / 'other'}")
    assert "must begin with the model's vocabulary" in line
    shutil.copytree(trained, tmp_path / "cut", ignore=shutil.ignore_patterns("checkpoint-*"))
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"")
    assert "cannot be loaded" in fails_to_start_from(tmp_path / "cut")


def test_the_model_to_start_from_is_not_overwritten(fails, books, trained):
    before = (trained / "model.safetensors").read_bytes()
    for start in (trained, trained / "checkpoint-20"):
        options = (f"--init_from={start}", f"--tokenizer={trained}", "--overwrite_output_dir", "--max_seq_length=48")
        line = fails("pretrain", f"--corpus={books}", f"--output_dir={trained}", *options)
        assert "holds the model to start from" in line
    assert (trained / "model.safetensors").read_bytes() == before


def test_a_folder_with_other_things_is_left_alone(fails, books, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    line = fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path}", "--max_steps=2", *SMALL)
    assert "holds other things (thesis.txt)" in line
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert "holds other things" in fails(
        "pretrain", f"--corpus={books}", f"--output_dir={tmp_path}", "--overwrite_output_dir", *SMALL
    )


def test_a_folder_with_a_run_names_both_mends(fails, books, trained):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    line = fails("pretrain", f"--corpus={books}", f"--output_dir={trained}", "--max_steps=2", *SMALL)
    assert "--resume_from_checkpoint latest" in line and "--overwrite_output_dir" in line
    # A mistake beside --overwrite_output_dir must not cost the old run either.
    fails("pretrain", "--corpus=nowhere", f"--output_dir={trained}", "--overwrite_output_dir", "--max_steps=2", *SMALL)
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_a_folder_that_cannot_be_written(fails, books, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'file' / 'out'}")
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        assert "cannot be written" in fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'locked'}")


def test_a_folder_where_another_run_is_writing(fails, books, tmp_path):
    with output_folder(PretrainConfig(output_dir=str(tmp_path / "out"))):
        line = fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", "--max_steps=2", *SMALL)
    assert "another run is writing there" in line and not (tmp_path / "out").exists()


def test_resuming_does_not_overwrite_what_cannot_be_resumed(fails, books, trained, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    options = (f"--corpus={books}", f"--output_dir={other}", "--max_steps=40", "--mixed_precision=no", *SMALL)
    line = fails("pretrain", *options, f"--resume_from_checkpoint={trained / 'checkpoint-20'}")
    assert "holds another run" in line
    for checkpoint in other.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert "no checkpoint to go on from" in fails("pretrain", *options, "--resume_from_checkpoint=latest")
    assert (other / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_a_damaged_model_folder(fails, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be loaded" in fails("fill-mask", tmp_path / "cut", "a [MASK]")
    shutil.copytree(trained, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "vocab.txt"))
    assert "cannot be loaded" in fails("next-sentence", tmp_path / "bare", "a", "b")


RUN_ALL = """
import json, sys
from d2l_bert.cli import main
codes = []
for command in json.loads(sys.argv[1]):
    codes.append(main(command))
    print("-", file=sys.stderr)  # between the lines of two commands
print(json.dumps([codes, sys.stdin.read()]))
"""


@pytest.fixture
def with_code(trained, tmp_path):
    """
    Folders with code that would write the file `ran` if it were run.

    `model` and `bert`: of models whose tokenizer is of a class in that code. `tokenizer`: the same tokenizer alone.
    `unknown`: of a model whose configuration is such a class, too. `stock`: of a model of ours whose config.json and
    tokenizer_config.json name that code, beside the stock classes that load it.
    """
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    tokenizer = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    own = {**tokenizer, "tokenizer_class": "MyTokenizer"}
    config = {"auto_map": {"AutoConfig": "code.Config", "AutoModelForMaskedLM": "code.Model"}}
    numbers = json.loads((trained / "config.json").read_text())
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    bert = BertForMaskedLM(BertConfig(**{name: numbers[name] for name in same}))
    folders = {}
    for name, tokenizer_changes, config_changes in (
        ("model", own, {}),
        ("bert", own, {}),
        ("tokenizer", own, {}),
        ("unknown", own, {**config, "model_type": "mine"}),
        ("stock", tokenizer, config),
    ):
        folder = folders[name] = tmp_path / name
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
        for file, changes in (("tokenizer_config.json", tokenizer_changes), ("config.json", config_changes)):
            (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **changes}))
        (folder / "code.py").write_text(code)
    bert.save_pretrained(folders["bert"])
    for file in ("config.json", "model.safetensors"):
        (folders["tokenizer"] / file).unlink()
    return folders


@pytest.mark.slow
def test_code_that_a_folder_brings_is_never_run_and_nothing_is_asked(with_code, here, books, trained, tmp_path):
    """The standard input holds a `y` for each command; at the end all of them must be there still."""
    api = HfApi()
    for name in ("tokenizer", "model"):
        api.create_repo(f"someone/{name}")
        api.upload_folder(repo_id=f"someone/{name}", folder_path=with_code[name])
    out, prepared = str(tmp_path / "out"), tmp_path / "prepared"
    assert main(["prepare", f"--corpus={books}", f"--tokenizer={trained}", f"--output_dir={prepared}"]) == 0
    for name in ("code.py", "tokenizer_config.json"):
        shutil.copy(with_code["tokenizer"] / name, prepared)
    run = [f"--output_dir={out}", "--max_steps=1", "--recipe=tiny"]
    text = [f"--corpus={books}", *run]
    no_code, no_model = "tokenizer_config.json asks for code of its own", "its config.json asks for code of its own"
    refused = [
        (["pretrain", f"--corpus={prepared}", *run], "damaged prepared folder"),
        (["publish", str(with_code["model"]), "someone/new"], "MyTokenizer is no stock class"),
        (["publish", str(with_code["unknown"]), "someone/new"], "a mine model, not a d2l-bert one"),
        (["publish", str(with_code["stock"]), "someone/new"], "auto_map asks for code of its own"),
        (["convert", str(with_code["bert"]), out, "--from=bert"], no_code),
        (["convert", str(with_code["unknown"]), out, "--from=bert"], no_model),
        (["convert", str(with_code["tokenizer"]), out, "--from=d2l", "--num_attention_heads=2"], "pretrained.params"),
    ]
    for name in (str(with_code["tokenizer"]), "someone/tokenizer"):
        refused.append((["pretrain", f"--tokenizer={name}", *text], no_code))
        refused.append((["prepare", f"--tokenizer={name}", f"--corpus={books}", f"--output_dir={out}"], no_code))
    for name in (str(with_code["model"]), "someone/model", str(with_code["unknown"])):
        words = no_model if name.endswith("unknown") else no_code
        refused.append((["pretrain", f"--init_from={name}", *text, "--max_seq_length=48"], words))
        refused.append((["fill-mask", name, "Anna [MASK]."], words))
        refused.append((["next-sentence", name, "Anna walked.", "Anna ran."], words))
        refused.extend((["convert", name, out, f"--to={kind}"], words) for kind in ("bert", "d2l"))
    stock = str(with_code["stock"])
    served = [
        ["fill-mask", stock, "Anna [MASK]."],
        ["next-sentence", stock, "Anna walked.", "Anna ran."],
        ["convert", stock, f"{out}-bert", "--to=bert"],
        ["prepare", f"--tokenizer={stock}", f"--corpus={books}", f"--output_dir={out}-tokens"],
    ]
    commands = [*(command for command, _ in refused), *served]
    answers = "y\n" * len(commands)
    process = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(commands)],
        input=answers,
        env={**environment(here, tmp_path / "home", TOKEN), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    codes, left = json.loads(process.stdout.splitlines()[-1])
    said = process.stderr.split("-\n")
    for (command, words), code, lines in zip(refused, codes, said, strict=False):
        assert code == 2 and len(lines.splitlines()) == 1 and words in lines, (command, code, lines)
        assert "trust_remote_code" not in lines and "Do you wish" not in process.stdout
    assert codes[len(refused) :] == [0] * len(served), process.stderr
    assert left == answers and not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()
    for folder in ("out-bert", "out-tokens"):
        assert "auto_map" not in (tmp_path / folder / "tokenizer_config.json").read_text()


def test_code_that_a_folder_brings_is_not_run_in_this_process(fails, with_code, tmp_path):
    refused = (("model", "tokenizer_config.json asks"), ("unknown", "its config.json asks"))
    for name, words in refused:
        assert f"{words} for code of its own" in fails("fill-mask", with_code[name], "Anna [MASK].")
    assert main(["fill-mask", str(with_code["stock"]), "Anna [MASK]."]) == 0
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_that_is_none(fails, books, tmp_path):
    options = (f"--output_dir={tmp_path / 'out'}", f"--resume_from_checkpoint={tmp_path}", "--max_steps=2", *SMALL)
    assert "not a checkpoint" in fails("pretrain", f"--corpus={books}", *options)


def test_models_and_texts_that_cannot_serve(fails, trained, tmp_path):
    assert "cannot be loaded" in fails("fill-mask", tmp_path / "nowhere", "a [MASK]")
    assert "no [MASK] in" in fails("fill-mask", trained, "Nothing is masked here.")
    assert "64 positions" in fails("fill-mask", trained, "[MASK] " + "Anna walked to the garden. " * 20)
    assert "64 positions" in fails("next-sentence", trained, "Anna walked. " * 20, "The drum was red. " * 10)


def test_dashes_are_underscores(books, tmp_path):
    options = ["--max-steps=1", f"--output-dir={tmp_path / 'out'}", *(option.replace("_", "-") for option in SMALL)]
    assert main(["pretrain", f"--corpus={books}", *options]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_help_names_every_option_and_the_recipes_numbers(capsys):
    import dataclasses

    from d2l_bert.training.config import PretrainConfig

    with pytest.raises(SystemExit) as stop:
        main(["pretrain", "--recipe=d2l", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(PretrainConfig):
        assert f"--{field.name} " in text, field.name
    assert "--hidden_dropout_prob X" in text and "(0.2)" in text
    assert "(20256)" in text and "(sentences)" in text


def test_a_mistake_has_no_traceback_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-m", "d2l_bert", "pretrain", "--corpus", str(tmp_path / "nowhere")]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.startswith("d2l-bert pretrain: error: ") and process.stderr.count("\n") == 1
