"""The command line: every mistake gives one clear line and exit code 2, and destroys nothing."""

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import SMALL, write_books

from d2l_bert.cli import main
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.recipes import architecture_options
from d2l_bert.training.run_folder import output_folder


@pytest.fixture
def fails_to_pretrain(fails, tmp_path):
    """Pretrain on a corpus that must be refused; no file may be left over."""

    def run(corpus, *options):
        folder = tmp_path / "out"
        source = [f"--corpus={corpus}"] if corpus else []
        line = fails("pretrain", *source, f"--output_dir={folder}", "--max_steps=2", *SMALL, *options)
        assert not folder.exists()
        return line

    return run


def test_a_cache_folder_that_cannot_be_written_is_refused(fails_to_pretrain, books, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "file"))
    assert "HF_HOME" in fails_to_pretrain(books)


def test_an_empty_folder_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no text file in this folder" in fails_to_pretrain(tmp_path / "empty")


def test_an_empty_file_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "empty.txt").touch()
    line = fails_to_pretrain(tmp_path / "empty.txt")
    assert "empty.txt" in line and "too little text" in line


def test_a_text_of_white_space_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n\t\n" * 50)
    assert "too little text" in fails_to_pretrain(tmp_path / "blank.txt")


def test_a_text_of_one_sentence_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "one.txt").write_text("A single sentence is all there is.")
    line = fails_to_pretrain(tmp_path / "one.txt")
    assert "one.txt" in line and "too little text" in line


def test_a_corpus_that_does_not_exist_is_refused(fails_to_pretrain, tmp_path):
    line = fails_to_pretrain(tmp_path / "nowhere")
    assert "nowhere" in line and "no text file or folder" in line


def test_a_binary_file_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00")
    line = fails_to_pretrain(tmp_path / "picture.txt")
    assert "picture.txt" in line and "binary" in line


def test_text_that_is_not_utf_8_is_refused(fails_to_pretrain, tmp_path):
    write_books(tmp_path / "books", count=3)
    (tmp_path / "books" / "latin.txt").write_bytes("Zürich liegt am See.".encode("latin-1"))
    line = fails_to_pretrain(tmp_path / "books")
    assert "latin.txt" in line and "UTF-8" in line and "0xfc" in line


def test_a_truncated_gzip_file_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"Some text. " * 200)[:-20])
    assert "cut.txt.gz" in fails_to_pretrain(tmp_path / "cut.txt.gz")


def test_a_vocabulary_smaller_than_the_alphabet_is_refused(fails_to_pretrain, books):
    line = fails_to_pretrain(books, "--vocab_size=20")
    assert "vocab_size 20 is below the alphabet" in line


def test_sequences_longer_than_the_positions_are_refused(fails_to_pretrain, books):
    line = fails_to_pretrain(books, "--max_seq_length=65")
    assert "max_seq_length (65)" in line and "64" in line


def test_a_dataset_that_does_not_exist_is_refused(fails_to_pretrain, tmp_path):
    assert "nowhere: cannot be read" in fails_to_pretrain(None, f"--dataset={tmp_path / 'nowhere'}")


def test_a_split_that_does_not_exist_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "Some text."}\n')
    for options in ([], ["--streaming"]):
        line = fails_to_pretrain(None, f"--dataset={tmp_path / 'data'}", "--dataset_split=dev", *options)
        assert "dev" in line and "['train']" in line


def test_a_damaged_row_late_in_a_stream_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "Some text."}\n' * 2000)
    (tmp_path / "data" / "b.jsonl").write_text('{"text": "Some text."\n')
    line = fails_to_pretrain(None, f"--dataset={tmp_path / 'data'}", "--streaming")
    assert f"dataset {tmp_path / 'data'}: cannot be read" in line


def test_a_corpus_folder_without_text_files_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("a.txt", "b.csv", "c.parquet"):
        (tmp_path / "data" / name).touch()
    assert "data: too little text" in fails_to_pretrain(tmp_path / "data")


def test_a_dataset_without_the_text_column_is_refused(fails_to_pretrain, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"content": "Some text."}\n')
    line = fails_to_pretrain(None, f"--dataset={tmp_path / 'data'}")
    assert "data: cannot be read" in line and "'text'" in line


def test_a_tokenizer_that_does_not_exist_is_refused(fails_to_pretrain, books, tmp_path):
    assert "tokenizer" in fails_to_pretrain(books, f"--tokenizer={tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    "option, way_out",
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
        ("--initializer_range=nan", "initializer_range must be between 1.2e-38 and 10, got nan"),
        ("--initializer_range=1e300", "initializer_range must be between 1.2e-38 and 10, got 1e+300"),
        ("--layer_norm_eps=inf", "layer_norm_eps must be between 1.2e-38 and 10, got inf"),
        ("--hidden_dropout_prob=nan", "hidden_dropout_prob must be a probability"),
        ("--type_vocab_size=1", "type_vocab_size must be at least 2"),
        ("--learning_rate=1e30", "diverged"),
        ("--length_schedule 32", "LENGTH:SHARE"),
        ("--length_schedule 32:0.5 40:0.5", "must leave some steps"),
        ("--length_schedule 48:0.5", "at least 8 and below max_seq_length (48)"),
        ("--length_schedule 40:0.2 32:0.5", "rising"),
        ("--batch_size_schedule 4", "BATCH:SHARE"),
        ("--batch_size_schedule 0:0.1", "each at least 1 and below global_batch_size (8)"),
        ("--batch_size_schedule 8:0.1", "each at least 1 and below global_batch_size (8)"),
        ("--batch_size_schedule 4:0.1 2:0.1", "rising"),
        ("--batch_size_schedule 2:0.5 4:0.5", "must leave some steps for global_batch_size"),
        ("--optim=sgd", "invalid choice: 'sgd'"),
        ("--lr_scheduler_type=constant", "invalid choice: 'constant'"),
        ("--decay_ratio=0.1", "decay_ratio is for lr_scheduler_type warmup_stable_decay"),
        ("--lr_scheduler_type=warmup_stable_decay --decay_ratio=0.96", "(0.05) and decay_ratio (0.96) are more"),
        ("--lr_scheduler_type=warmup_stable_decay --warmup_ratio=0.9", "(0.9) and decay_ratio (0.2) are more"),
        ("--micro_batch_size=some", "micro_batch_size must be a whole number or auto, got 'some'"),
        ("--ema_decay=0", "ema_decay must be a number in (0, 1)"),
        ("--max_minutes=1 --max_steps=3", "exactly one of"),
        ("--extend_vocab=5", "give one, or raise vocab_size"),
        ("--strip_accents=maybe", "true or false, not 'maybe'"),
        ("--streaming", "streaming is for dataset"),
        ("--pairing=sentences --short_seq_prob=0.5", "short_seq_prob is for pairing segments"),
        ("--source_weights 1 two", "numbers such as 2 or 0.5, got 1 two"),
        ("--source_weights 0", "give one source at least some weight"),
        ("--source_weights 1 2", "2 weights for 1 source"),
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
def test_values_out_of_range_are_refused(fails, books, tmp_path, option, way_out):
    length = [] if "max_" in option else ["--max_steps=2"]
    line = fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *SMALL, *length, *option.split())
    assert way_out in line and not (tmp_path / "out" / "model.safetensors").exists()


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
def test_wrong_commands_options_and_choices_are_refused(fails, arguments, message):
    assert message in fails(*arguments)


@pytest.mark.parametrize("existing", ["tokenizer", "init_from"])
@pytest.mark.parametrize(
    "option", ["--vocab_size=100", "--lowercase", "--strip_accents", "--limit_alphabet=9", "--min_frequency=3"]
)
def test_options_for_training_a_tokenizer_are_refused_beside_an_existing_one(
    fails, books, trained, tmp_path, existing, option
):
    out = (f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", f"--{existing}={trained}", option)
    for command in ("pretrain", "prepare")[: 1 if existing == "init_from" else 2]:
        line = fails(command, *out)
        assert (
            f"{option.partition('=')[0][2:]} is for training a tokenizer" in line and f"{existing} gives one" in line
        )
    assert os.listdir(tmp_path) == []


@pytest.fixture
def fails_to_start_from(fails, books, tmp_path):
    """Start from a model that must be refused; no file may be left over."""

    def run(model, *options):
        short = ("--max_seq_length=48", "--max_steps=1", "--dataloader_num_workers=0")
        out = (f"--corpus={books}", f"--output_dir={tmp_path / 'out'}")
        line = fails("pretrain", f"--init_from={model}", *out, *short, *options)
        assert not (tmp_path / "out").exists()
        return line

    return run


def test_options_that_the_start_model_fixes_are_refused_by_name(fails_to_start_from, trained):
    for option in ("--hidden_size=64", "--num_hidden_layers=3", "--tie_word_embeddings", "--layer_norm_eps=1e-12"):
        assert f"{option.partition('=')[0][2:]} is fixed by the model" in fails_to_start_from(trained, option)
    assert "attention_init neighbours" in fails_to_start_from(trained, "--attention_init=neighbours")
    line = fails_to_start_from(trained, "--max_seq_length=65")
    assert "max_seq_length (65)" in line and "64" in line and "raise" not in line


def test_a_model_that_no_run_can_start_from_is_refused(fails_to_start_from, books, trained, tmp_path):
    from transformers import BertConfig

    assert "nowhere: cannot be loaded: no folder here" in fails_to_start_from(tmp_path / "nowhere")
    BertConfig().save_pretrained(tmp_path / "stock")
    assert "d2l-bert convert" in (line := fails_to_start_from(tmp_path / "stock")) and "--from bert" in line
    bare = shutil.copytree(
        trained / "checkpoint-20", tmp_path / "bare", ignore=shutil.ignore_patterns("*tok*", "vocab*")
    )
    assert "the model has no tokenizer; give --tokenizer" in fails_to_start_from(bare)
    shutil.copytree(trained, tmp_path / "wide", ignore=shutil.ignore_patterns("checkpoint-*"))
    config = json.loads((trained / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps({**config, "vocab_size": 9999}))
    assert "the model's vocabulary has 9999 entries" in fails_to_start_from(tmp_path / "wide")
    other = ["prepare", f"--corpus={books}", f"--output_dir={tmp_path / 'other'}", "--vocab_size=60"]
    assert main(other) == 0
    line = fails_to_start_from(trained, f"--tokenizer={tmp_path / 'other'}")
    assert "must begin with the model's vocabulary" in line and "use the model's tokenizer" in line
    line = fails_to_start_from(trained, f"--corpus={tmp_path / 'other'}")
    assert "must begin with the model's vocabulary" in line
    shutil.copytree(trained, tmp_path / "cut", ignore=shutil.ignore_patterns("checkpoint-*"))
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"")
    assert "cannot be loaded" in fails_to_start_from(tmp_path / "cut")


def test_the_folder_of_the_start_model_is_not_overwritten(fails, books, trained):
    before = (trained / "model.safetensors").read_bytes()
    for start in (trained, trained / "checkpoint-20"):
        options = (f"--init_from={start}", f"--tokenizer={trained}", "--overwrite_output_dir", "--max_seq_length=48")
        line = fails("pretrain", f"--corpus={books}", f"--output_dir={trained}", *options)
        assert "holds the model to start from" in line
    assert (trained / "model.safetensors").read_bytes() == before


def test_an_output_folder_with_other_files_is_left_alone(fails, books, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    line = fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path}", "--max_steps=2", *SMALL)
    assert "holds other files (thesis.txt)" in line
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert "holds other files" in fails(
        "pretrain", f"--corpus={books}", f"--output_dir={tmp_path}", "--overwrite_output_dir", *SMALL
    )


def test_an_output_folder_with_a_run_is_refused_with_both_mends(fails, books, trained):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    line = fails("pretrain", f"--corpus={books}", f"--output_dir={trained}", "--max_steps=2", *SMALL)
    assert "--resume_from_checkpoint latest" in line and "--overwrite_output_dir" in line
    # A run that is refused must not delete the old run, even with --overwrite_output_dir.
    fails("pretrain", "--corpus=nowhere", f"--output_dir={trained}", "--overwrite_output_dir", "--max_steps=2", *SMALL)
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_an_output_folder_that_cannot_be_written_is_refused(fails, books, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'file' / 'out'}")
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        assert "cannot be written" in fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'locked'}")


def test_an_output_folder_in_use_by_another_run_is_refused(fails, books, tmp_path):
    with output_folder(PretrainConfig(output_dir=str(tmp_path / "out"))):
        line = fails("pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", "--max_steps=2", *SMALL)
    assert "another run is writing there" in line and not (tmp_path / "out").exists()


def test_a_failed_resume_overwrites_nothing(fails, books, trained, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    options = (f"--corpus={books}", f"--output_dir={other}", "--max_steps=40", "--mixed_precision=no", *SMALL)
    line = fails("pretrain", *options, f"--resume_from_checkpoint={trained / 'checkpoint-20'}")
    assert "holds another run than that of" in line
    for checkpoint in other.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for option in ([], ["--resume_from_checkpoint=latest"]):
        line = fails("pretrain", *options, *option)
        assert "no checkpoint to go on from" in line and "go on with" not in line
    assert (other / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_a_damaged_model_folder_is_refused(fails, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be loaded" in fails("fill-mask", tmp_path / "cut", "a [MASK]")
    shutil.copytree(trained, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "vocab.txt"))
    assert "cannot be loaded" in fails("next-sentence", tmp_path / "bare", "a", "b")


def test_a_folder_that_is_no_checkpoint_is_refused(fails, books, tmp_path):
    options = (f"--output_dir={tmp_path / 'out'}", f"--resume_from_checkpoint={tmp_path}", "--max_steps=2", *SMALL)
    assert "not a checkpoint" in fails("pretrain", f"--corpus={books}", *options)


def test_models_that_cannot_be_loaded_and_texts_that_do_not_fit_are_refused(fails, trained, tmp_path):
    assert "cannot be loaded" in fails("fill-mask", tmp_path / "nowhere", "a [MASK]")
    assert "no [MASK] in" in fails("fill-mask", trained, "Nothing is masked here.")
    assert "64 positions" in fails("fill-mask", trained, "[MASK] " + "Anna walked to the garden. " * 20)
    assert "64 positions" in fails("next-sentence", trained, "Anna walked. " * 20, "The drum was red. " * 10)


def test_options_may_be_written_with_dashes_instead_of_underscores(books, tmp_path):
    options = ["--max-steps=1", f"--output-dir={tmp_path / 'out'}", *(option.replace("_", "-") for option in SMALL)]
    assert main(["pretrain", f"--corpus={books}", *options]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def help_of(capsys, *options):
    with pytest.raises(SystemExit) as stop:
        main(["pretrain", "--recipe=d2l", *options])
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("written", ["--help-all", "--help_all"])
def test_help_names_the_common_options_and_help_all_every_one(capsys, written):
    names = {*architecture_options(), *(field.name for field in dataclasses.fields(PretrainConfig))}
    everything, common = help_of(capsys, written), help_of(capsys, "--help")
    assert {name for name in names if f"--{name} " in everything} == names
    assert "--hidden_dropout_prob X" in everything and "(0.2)" in everything
    assert "(20256)" in everything and "(sentences)" in everything
    assert 10 <= sum(f"--{name} " in common for name in {*names, "recipe"}) <= 15


@pytest.mark.slow
def test_a_mistake_shows_no_traceback(tmp_path):
    command = [sys.executable, "-m", "d2l_bert", "pretrain", "--corpus", str(tmp_path / "nowhere")]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.startswith("d2l-bert pretrain: error: ") and process.stderr.count("\n") == 1


def test_a_name_that_the_hub_does_not_have_and_a_hub_that_cannot_be_reached_name_both_ways_out(here, fails):
    for _ in range(2):
        line = fails("fill-mask", "someone/nothing", "a [MASK]")
        assert "someone/nothing" in line and "network" in line and "hf auth login" in line
        here.stop()
