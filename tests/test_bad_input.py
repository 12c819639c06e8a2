"""Wrong inputs, a row each: one line that says what, where and the mend, exit code 2, and nothing read or written."""

import json
import os
import shlex
import shutil
import subprocess

import pytest
import torch
from conftest import SMALL, write_books
from transformers import AutoTokenizer, BertConfig, BertForPreTraining, GPT2Config, GPT2Model

from d2l_bert import D2lBertConfig, D2lBertForMaskedLM, D2lBertForSequenceClassification
from d2l_bert.cli import main
from d2l_bert.errors import UserError
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.publish import publish
from d2l_bert.modeling.saving import save_with_code
from d2l_bert.options import cores
from d2l_bert.tokenization.config import TextConfig
from d2l_bert.tokenization.existing import load_tokenizer
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.config import PretrainConfig


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of texts, models and damaged copies of them, by the names that the rows use."""
    folder, here = tmp_path_factory.mktemp("world"), os.getcwd()
    os.chdir(folder)
    try:
        make_texts(folder)
        make_models(folder)
    finally:
        os.chdir(here)
    return folder


def make_texts(folder):
    write_books(folder / "books", count=12)
    for name in ("empty", "full", "shapes", "parts"):
        (folder / name).mkdir()
    (folder / "full" / "thesis.txt").write_text("precious")
    (folder / "shapes" / "train.jsonl").write_text('{"title": "no text"}\n')
    (folder / "parts" / "train.jsonl").write_text('{"text": "Some text."}\n')
    for name, content in {
        "file.txt": b"Some text.\n",
        "latin.txt": "Zürich".encode("latin-1"),
        "wide.md": "Some text.".encode("utf-16"),
        "nul.txt": b"Some\0text.",
        "words.json": b'{"a": 1}',
        "twice.json": b'["<pad>", "<pad>"]',
        "empty.vocab": b"",
        "list.jsonl": b'["a"]\n',
        "number.jsonl": b'{"text": 3}\n',
        "cut.jsonl": b'{"text": "a\n',
        "half.jsonl": b'{"text": "\\ud800"}\n',
        "title.csv": b"title\nx\n",
        "twice.csv": b"text,text\nx,y\n",
        "long.csv": b"text\nx,y\n",
        "cut.parquet": b"PAR1",
        "cut.txt.zst": b"abc",
        "cut.txt.gz": b"abc",
        "broken.params": b"PK nonsense",
    }.items():
        (folder / name).write_bytes(content)
    torch.save({"a": torch.zeros(2)}, folder / "other.params")
    torch.save([1, 2], folder / "list.params")


def make_models(folder):
    assert main(["prepare", "--corpus=books", "--output_dir=tokens", "--vocab_size=300"]) == 0
    assert main(["prepare", "--corpus=books", "--output_dir=unrecorded", "--vocab_size=300"]) == 0
    (folder / "unrecorded" / "prepared.json").unlink()
    run = ["--corpus=books", "--output_dir=run", "--max_steps=2", "--save_steps=1", "--license=mit"]
    assert main(["pretrain", *run, *SMALL]) == 0
    tokenizer, config = AutoTokenizer.from_pretrained("run"), D2lBertConfig.from_pretrained("run")
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
            save_with_code(model, folder / name)
            save_tokenizer(tokenizer, folder / name)
        else:
            model.save_pretrained(folder / name)
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
        ("endless", "run", "tokenizer_config.json", lambda content: changed(content, model_max_length="x")),
        ("uncarded", "run", "README.md", lambda content: b"no metadata"),
        ("uncoded", "run", "modeling_d2l_bert.py", None),
        ("recoded", "run", "modeling_d2l_bert.py", lambda content: content + b"\n"),
        ("unnamed", "run", "config.json", lambda content: changed(content, architectures=["D2lBertForX"])),
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


def snapshot(folder):
    """Every path below a folder, with the size and the time of its content."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (path.is_dir() or (entry.st_size, entry.st_mtime_ns)) for path, entry in found.items()}


def arguments_of(line):
    """The row's words, and what a run of its command needs beside them."""
    command, *options = shlex.split(line)
    given = {option.partition("=")[0] for option in options}
    beside = []
    if command in ("prepare", "pretrain"):
        beside += [] if given & {"--corpus", "--dataset"} else ["--corpus=books"]
        beside += [] if "--output_dir" in given else ["--output_dir=out"]
    if command == "pretrain":
        settled = ("--vocab_size", "--hidden", "--num", "--inter", "--max_pos") if "--init_from" in given else ()
        settled += ("--vocab_size",) if "--tokenizer" in given or "tokens" in options else ()
        beside += [] if given & {"--num_train_epochs", "--max_minutes"} else ["--max_steps=1"]
        beside += [option for option in SMALL if not option.startswith(settled)]
    return [command, *beside, *options]  # of an option that is given twice the last counts


@pytest.fixture
def refused(world, monkeypatch, capfd):
    """Run a command line in the world; returns the line that it is refused with, and what else was said before."""
    monkeypatch.chdir(world)
    shutil.rmtree("out", ignore_errors=True)  # left by a row that was not refused

    def run(line):
        arguments, before = arguments_of(line), snapshot(world)
        capfd.readouterr()
        try:
            code = main(arguments)
        except SystemExit as stop:  # argparse's way
            code = stop.code
        captured = capfd.readouterr()
        assert code == 2, captured.err
        assert "Traceback" not in captured.err and captured.out == ""
        *progress, last = captured.err.splitlines()
        assert last.startswith(f"d2l-bert {arguments[0]}: error: "), captured.err
        assert snapshot(world) == before
        return last, progress

    return run


LARGER = 10**23

AT_ONCE = [  # the command line, and what its one line says: the value, where it stands, the mend
    # Empty, as an unset shell variable leaves it.
    *[
        (f"{command} --{name} ''", f"{name} is empty (got ''); give a value, or leave it out")
        for command, names in {
            "prepare": "corpus dataset tokenizer dataset_config dataset_split text_column language",
            "pretrain": "corpus dataset tokenizer init_from output_dir resume_from_checkpoint license hub_model_id "
            "mlm_probability report_to source_weights length_schedule",
            "publish run me/x --dry_run": "revision collection commit_message license",
        }.items()
        for name in names.split()
    ],
    ("pretrain --corpus books ' '", "corpus is empty (got ' ')"),
    ("prepare --output_dir ''", "argument --output_dir: it is empty (got ''); give a value"),
    ("fill-mask '' 'a [MASK]'", "argument MODEL: it is empty (got ''); give a value"),
    ("fill-mask run ''", "argument TEXT: it is empty"),
    ("next-sentence '' a b", "argument MODEL: it is empty"),
    ("next-sentence run '' b", "argument A: it is empty"),
    ("next-sentence run a ' '", "argument B: it is empty"),
    ("convert '' out --from bert", "argument SRC: it is empty"),
    ("convert bert '' --from bert", "argument DST: it is empty"),
    ("convert other.params out --from d2l --num_attention_heads 2 --vocab ''", "argument --vocab: it is empty"),
    ("publish '' me/x", "argument DIR: it is empty"),
    ("publish run ''", "argument REPO_ID: it is empty"),
    # Characters that no name has.
    ("pretrain --output_dir 'o\0ut'", r"output_dir 'o\x00ut': holds a NUL character, which no name has; take it out"),
    ("pretrain --corpus 'b\0ooks'", r"corpus 'b\x00ooks': holds a NUL character"),
    ("prepare --output_dir 'o\0ut'", "argument --output_dir", "holds a NUL character"),
    ("convert bert 'o\0ut' --from bert", "argument DST", "holds a NUL character"),
    ("fill-mask 'r\0un' 'a [MASK]'", "argument MODEL", "holds a NUL character"),
    ("publish run 'me/x\n' --dry_run", r"'me/x\n' cannot be a repository"),
    ("publish run 'me/x y' --dry_run", "'me/x y' cannot be a repository"),
    ("publish run me/x/y --dry_run", "'me/x/y' cannot be a repository"),
    (
        "publish run me/x --dry_run --revision 'my branch'",
        "revision 'my branch': git allows no branch",
        "take letters",
    ),
    ("publish run me/x --dry_run --revision @", "revision '@': git allows no branch"),
    ("publish run me/x --dry_run --revision a..b", "revision 'a..b': git allows no branch"),
    ("pretrain --corpus 'no\nwhere'", "no where: no such file or folder; give a text file"),
    # Numbers beyond what they can mean.
    ("pretrain --validation_fraction 1", "validation_fraction must be above 0 and below 1, got 1.0"),
    ("pretrain --validation_fraction 0", "validation_fraction must be above 0 and below 1, got 0.0"),
    ("pretrain --validation_fraction 0.99999999", "got 0.99999999, which is 1 in float32"),
    ("prepare --limit_alphabet 1", "limit_alphabet must be at least 2, got 1"),
    ("prepare --vocab_size 5", "vocab_size must be at least 6, got 5"),
    ("pretrain --vocab_size 0", "vocab_size must be at least 6, got 0"),
    ("pretrain --adam_epsilon 1e-300", "adam_epsilon must be above 0, got 1e-300, which is 0 in float32"),
    ("pretrain --learning_rate 1e-300", "learning_rate must be above 0, got 1e-300, which is 0 in float32"),
    ("pretrain --learning_rate 1e39", "learning_rate must be finite in float32 (at most 3.4e38), got 1e+39"),
    ("pretrain --weight_decay 1e39", "weight_decay must be finite in float32"),
    ("pretrain --max_grad_norm 1e-300", "max_grad_norm must be above 0, got 1e-300, which is 0 in float32"),
    ("pretrain --max_grad_norm 1e39", "max_grad_norm must be finite in float32"),
    ("pretrain --ema_decay 0.99999999999", "ema_decay must be above 0 and below 1, got 0.99999999999, which is 1"),
    ("pretrain --adam_beta1 0.99999999999", "adam_beta1 must be at least 0 and below 1", "which is 1 in float32"),
    ("pretrain --adam_beta2 1", "adam_beta2 must be at least 0 and below 1, got 1.0"),
    ("pretrain --max_minutes 1e-300", "max_minutes must be above 0, got 1e-300, which is 0 in float32"),
    ("pretrain --max_minutes 1e30", "max_minutes must be at most 10000000, got 1e+30"),
    ("pretrain --num_train_epochs 1e30", "num_train_epochs must be at most 1000000, got 1e+30"),
    ("pretrain --num_train_epochs -1", "num_train_epochs must be above 0, got -1.0"),
    *[
        (f"pretrain --{name} {LARGER}", f"{name} must be at most {most}, got {LARGER}")
        for name, most in {
            "max_steps": 2**31 - 1,
            "global_batch_size": 2**24,
            "vocab_size": 2**24,
            "micro_batch_size": 2**63 - 1,
            "max_documents": 2**63 - 1,
            "min_frequency": 2**63 - 1,
            "max_eval_pairs": 2**63 - 1,
            "max_validation_characters": 2**63 - 1,
            "save_steps": 2**63 - 1,
        }.items()
    ],
    (f"prepare --tokenizer run --extend_vocab {LARGER}", "extend_vocab must be at most 16777216"),
    ("pretrain --learning_rate inf", "learning_rate must be a finite number, got inf"),
    ("pretrain --learning_rate 1e999", "learning_rate must be a finite number, got inf"),
    ("pretrain --weight_decay nan", "weight_decay must be a finite number, got nan"),
    ("pretrain --max_steps 1e3", "argument --max_steps", "'1e3'"),
    ("pretrain --max_steps 1.5", "argument --max_steps", "'1.5'"),
    ("pretrain --seed -1", "seed must be at least 0 and at most 9223372036854775807, got -1"),
    ("pretrain --warmup_ratio 2", "warmup_ratio must be at least 0 and at most 1, got 2.0"),
    ("pretrain --short_seq_prob -0.1", "short_seq_prob must be at least 0 and at most 1, got -0.1"),
    ("pretrain --max_grad_norm 0", "max_grad_norm must be above 0, got 0.0"),
    ("pretrain --save_total_limit 0", "save_total_limit must be at least 1, got 0"),
    ("pretrain --max_seq_length 7", "max_seq_length must be at least 8, got 7"),
    ("pretrain --micro_batch_size 1.5", "micro_batch_size must be a whole number or auto, got '1.5'"),
    (f"pretrain --source_weights {'9' * 400}", "source_weights: 99999", "is too large; give smaller numbers"),
    ("pretrain --source_weights 1 2", "source_weights: 2 of them for 1 source; give one for each"),
    ("pretrain --source_weights 1 2 --dry_run", "source_weights: 2 of them for 1 source; give one for each"),
    ("pretrain --length_schedule 32:nan", "length_schedule takes LENGTH:SHARE such as 16:0.4, got '32:nan'"),
    ("pretrain --hidden_dropout_prob 1", "hidden_dropout_prob must be", "below 1, got 1.0"),
    ("pretrain --num_attention_heads 3", "hidden_size (32) must be a multiple of num_attention_heads (3)"),
    ("pretrain --num_hidden_layers 99999999", "GB at least, and this machine has", "num_hidden_layers (99,999,999)"),
    ("pretrain --hidden_size 99999998", "GB at least, and this machine has", "hidden_size"),
    ("pretrain --type_vocab_size 99999999999999999", "GB at least, and this machine has", "type_vocab_size"),
    ("prepare --preprocessing_num_workers 3000", f"this machine has {cores()} cores, so give at most", "got 3,000"),
    ("pretrain --dataloader_num_workers 3000", "dataloader_num_workers: this machine has", "got 3,000"),
    ("fill-mask run 'a [MASK]' --top_k 0", "argument --top_k: a whole number of at least 1, not '0'"),
    # Options that contradict each other, or that the command does not have.
    ("pretrain --resume_from_checkpoint latest --dry_run", "leave resume_from_checkpoint out"),
    ("pretrain --output_dir run --resume_from_checkpoint latest --overwrite_output_dir", "give one"),
    ("pretrain --hub_model_id me/x", "hub_model_id is for push_to_hub; give that too, or leave it out"),
    ("pretrain --push_to_hub", "a model of this text needs a licence; give --license"),
    ("pretrain --push_to_hub --license mit --hub_model_id 'a b'", "'a b' cannot be a repository"),
    ("pretrain --license nolicence", "license 'nolicence' is not one that the Hub knows"),
    ("pretrain --report_to none wandb", "report_to: none stands alone; leave it out"),
    ("pretrain --report_to paper", "report_to takes", "got 'paper'"),
    ("pretrain --optim muon --mixed_precision fp16", "give bf16, or adamw"),
    ("pretrain --attn_implementation flex_attention", "give eager or sdpa"),
    ("prepare --max_steps 3", "unknown option --max_steps; did you mean"),
    ("fill-mask run 'a [MASK]' --topk 3", "unknown option --topk; did you mean --top_k?"),
    ("next-sentence run a", "the following arguments are required: B"),
    ("next-sentence run a b c", "unexpected argument 'c'"),
    ("publish run me/x --public=maybe", "true or false, not 'maybe'"),
    ("convert bert out", "one of the arguments --from --to is required"),
    ("convert bert out --from bert --to d2l", "not allowed with argument --from"),
    ("convert bert out --from bert --vocab words.json", "are for --from d2l; leave them out"),
    ("convert other.params out --from d2l", "give --num_attention_heads"),
    # Texts.
    ("pretrain --corpus Books", "Books: no such file or folder; give a text file, a folder, or python-docs"),
    ("prepare --corpus empty", "empty: no text file in this folder; what is read is .txt"),
    ("prepare --corpus latin.txt", "latin.txt: not UTF-8 text (byte 0xfc at offset 1); convert it"),
    ("prepare --corpus wide.md", "wide.md: UTF-16 text; convert it"),
    ("prepare --corpus nul.txt", "nul.txt: a binary file (NUL at byte 4), not text; leave it out"),
    ("prepare --corpus words.json", "words.json: a JSON file is no text; write its texts as lines of JSON"),
    ("prepare --corpus list.jsonl", "list.jsonl, line 1: column 'text' holds no text but list; name another"),
    ("prepare --corpus number.jsonl", "number.jsonl, line 1: column 'text' holds no text but int; name another"),
    ("prepare --corpus cut.jsonl", "cut.jsonl, line 1: no JSON; repair the line or take it out"),
    ("prepare --corpus half.jsonl", "half.jsonl, line 1: half a character", "repair the line"),
    ("prepare --corpus title.csv", "title.csv: no column 'text'; it has title: name one with --text_column"),
    ("prepare --corpus twice.csv", "twice.csv: two columns are called 'text'; give each a name of its own"),
    ("prepare --corpus long.csv", "long.csv, line 2: more fields than", "put texts with commas"),
    ("prepare --corpus cut.parquet", "cut.parquet: cannot be read", "repair it or leave it out"),
    ("prepare --corpus cut.txt.gz", "cut.txt.gz: cannot be read", "repair the file or leave it out"),
    ("prepare --corpus cut.txt.zst", "cut.txt.zst: cannot be read", "repair the file or leave it out"),
    ("prepare --corpus bert/model.safetensors", "model.safetensors: a binary file", "leave it out"),
    ("prepare --corpus tokens", "corpus tokens: is prepared already; give its text"),
    ("pretrain --corpus tokens books", "corpus tokens: a prepared folder is a whole corpus; give it alone"),
    ("pretrain --corpus tokens --dataset books", "corpus tokens: a prepared folder is a whole corpus"),
    (
        "pretrain --corpus unrecorded",
        "unrecorded: a prepared folder without its prepared.json; prepare the text again",
    ),
    ("pretrain --dataset nowhere", "dataset nowhere: cannot be loaded", "no folder here has this name", "HF_TOKEN"),
    ("pretrain --dataset some/data:en", "dataset some/data: cannot be loaded", "no folder here has this name"),
    ("pretrain --dataset empty", "dataset empty: cannot be loaded", "give a folder of save_to_disk or of data files"),
    ("pretrain --dataset file.txt", "dataset file.txt: a file; give it with --corpus"),
    ("pretrain --dataset tokens", "dataset tokens: cannot be loaded", "or its texts with --corpus"),
    ("pretrain --dataset shapes --streaming", "dataset shapes: no column 'text'", "name one with --text_column"),
    ("pretrain --dataset parts --streaming --dataset_split dev", "dataset parts", "with --dataset_split"),
    (
        "pretrain --dataset parts:en",
        "dataset parts: cannot be loaded",
        "name a configuration that it has: parts:CONFIG",
    ),
    # Tokenizers.
    ("prepare --tokenizer nowhere", "tokenizer nowhere: cannot be loaded: no folder here", "or set HF_TOKEN"),
    ("prepare --tokenizer empty", "tokenizer empty: cannot be loaded: it has no tokenizer", "give a folder with one"),
    ("prepare --tokenizer books", "tokenizer books: cannot be loaded: it has no tokenizer", "give a folder with one"),
    ("prepare --tokenizer file.txt", "tokenizer file.txt: cannot be loaded: it is a file; give the folder"),
    ("prepare --tokenizer mute", "tokenizer mute: cannot be loaded: its tokenizer is damaged", "save it there again"),
    ("prepare --tokenizer endless", "model_max_length in its tokenizer_config.json is 'x', not a number; put back"),
    ("fill-mask endless [MASK]", "model_max_length in its tokenizer_config.json is 'x', not a number; put back"),
    ("prepare --tokenizer odd", "tokenizer odd: cannot be loaded: its tokenizer is damaged", "save it there again"),
    ("prepare --tokenizer gpt2", "tokenizer gpt2", "it must be a BertTokenizer"),
    # Models to start from.
    ("pretrain --init_from nowhere", "init_from nowhere: cannot be loaded: no folder here", "HF_TOKEN"),
    ("pretrain --init_from tokens", "it is a prepared text, not a model; d2l-bert pretrain --corpus tokens trains"),
    ("pretrain --init_from bert", "first d2l-bert convert bert DST --from bert"),
    ("pretrain --init_from gpt2", "it is a gpt2 model, not a d2l-bert one; give one of d2l-bert pretrain"),
    ("pretrain --init_from negative", "its config.json: hidden_size must be", "got -1; put back the one"),
    ("pretrain --init_from torn", "init_from torn: cannot be loaded: its config.json is no JSON; save it there again"),
    ("pretrain --init_from cut", "init_from cut: cannot be loaded: model.safetensors is damaged", "copy the file"),
    ("pretrain --init_from cut --dry_run", "init_from cut: cannot be loaded: model.safetensors is damaged"),
    ("pretrain --init_from weightless", "init_from weightless: cannot be loaded: it has no model.safetensors"),
    ("pretrain --init_from wider", "another shape than its config.json says; put back the config.json"),
    ("pretrain --init_from mute", "tokenizer mute: cannot be loaded: its tokenizer is damaged"),
    # Checkpoints and output folders.
    ("pretrain --resume_from_checkpoint run", "run: not a checkpoint (no manifest.json); give a checkpoint-<step>"),
    ("pretrain --resume_from_checkpoint file.txt", "file.txt: not a checkpoint", "give a checkpoint-<step> folder"),
    ("pretrain --resume_from_checkpoint checkpoint-torn", "optimizer.safetensors is not as it was saved", "another"),
    ("pretrain --output_dir file.txt", "output_dir file.txt: cannot be written", "name another folder"),
    ("pretrain --output_dir file.txt --dry_run", "file.txt: a file; name a folder"),
    ("pretrain --output_dir full --dry_run", "full: holds other things (thesis.txt)", "name a new or empty folder"),
    ("prepare --output_dir full", "full: there is something already; name a new or empty folder"),
    ("prepare --output_dir file.txt/x", "file.txt/x: cannot be written (Not a directory); name another folder"),
    ("convert bert full --from bert", "full: there is something already; name a new or empty folder"),
    # Models to ask.
    ("fill-mask nowhere 'a [MASK]'", "nowhere: cannot be loaded: no folder here has this name", "HF_TOKEN"),
    ("fill-mask bert 'a [MASK]'", "it is a bert model", "first d2l-bert convert bert DST --from bert"),
    ("fill-mask gpt2 'a [MASK]'", "it is a gpt2 model", "give one of d2l-bert pretrain or convert"),
    ("fill-mask tokens 'a [MASK]'", "tokens: cannot be loaded: it is a prepared text, not a model"),
    ("fill-mask empty 'a [MASK]'", "it has no config.json with a model_type; give a folder of pretrain"),
    ("fill-mask nameless 'a [MASK]'", "it has no config.json with a model_type"),
    ("fill-mask listed 'a [MASK]'", "it has no config.json with a model_type"),
    ("fill-mask torn 'a [MASK]'", "torn: cannot be loaded: its config.json is no JSON; save it there again"),
    ("fill-mask negative 'a [MASK]'", "its config.json: hidden_size must be", "put back the one that was saved"),
    ("fill-mask wider 'a [MASK]'", "a weight has another shape than its config.json says; put back the config.json"),
    ("fill-mask overcounted 'a [MASK]'", "another shape than its config.json says; put back the config.json"),
    ("fill-mask cut 'a [MASK]'", "cut: cannot be loaded: model.safetensors is damaged or cut short", "copy the file"),
    ("fill-mask hollow 'a [MASK]'", "model.safetensors is damaged or cut short", "save it there again"),
    ("fill-mask weightless 'a [MASK]'", "it has no model.safetensors; save the model there"),
    ("fill-mask mute 'a [MASK]'", "mute: cannot be loaded: its tokenizer is damaged", "save it there again"),
    (
        "fill-mask file.txt 'a [MASK]'",
        "file.txt: cannot be loaded: it is a file; give the folder that holds the model",
    ),
    ("fill-mask run/model.safetensors 'a [MASK]'", "it is a file; give the folder"),
    ("fill-mask classifier 'a [MASK]'", "saved as D2lBertForSequenceClassification, without an MLM head; give what"),
    ("fill-mask run 'Nothing is masked.'", "no [MASK] in 'Nothing is masked.': put it where"),
    ("next-sentence classifier a b", "saved as D2lBertForSequenceClassification, without an NSP head; give what"),
    ("next-sentence mlm a b", "without an NSP head (--objective none) and does fill-mask alone", "--init_from mlm"),
    ("next-sentence bert a b", "first d2l-bert convert bert DST --from bert"),
    # Models to convert.
    ("convert run out --from bert", "it is a d2l-bert model, not a bert one; it is ours already, so take it as it is"),
    ("convert bert out --to bert", "it is stock BERT already, and --from bert makes it ours"),
    ("convert gpt2 out --from bert", "gpt2: cannot be loaded: it is a gpt2 model, not a bert one; give a stock BERT"),
    ("convert decoder out --from bert", "this BERT is a decoder", "encoders only; give another BERT, or use this"),
    ("convert loud out --from bert", "this BERT has hidden_act silu, and d2l-bert has relu, gelu only; give another"),
    (
        "convert unnamed out --to bert",
        "config.json names a class that d2l-bert has not, D2lBertForX; put back the one",
    ),
    ("convert mute out --to bert", "its tokenizer cannot be read", "; put back the model's own, or take it out"),
    ("convert file.txt out --from bert", "it is a file; give the folder that holds it"),
    ("convert bert-cut out --from bert", "model.safetensors is damaged or cut short", "copy the file anew"),
    ("convert bert-nameless out --from bert", "it has no config.json with a model_type; give a folder"),
    ("convert bert-pickled out --from bert", "pytorch_model.bin is damaged, or holds more than tensors"),
    ("convert nowhere out --to d2l", "nowhere: cannot be loaded: no folder here has this name"),
    ("convert run out --to d2l", "cannot express this model: it normalises its embeddings"),
    ("convert cut out --to bert", "cut: cannot be loaded: model.safetensors is damaged", "copy the file anew"),
    ("convert other.params out --from d2l --num_attention_heads 2", "not in the state dict", "give that of its BERT"),
    ("convert list.params out --from d2l --num_attention_heads 2", "holds no state dict; save one with torch.save"),
    ("convert broken.params out --from d2l --num_attention_heads 2", "no PyTorch state dict; save one with"),
    ("convert empty out --from d2l --num_attention_heads 2", "no file empty/pretrained.params; give the file"),
    *[
        (f"convert other.params out --from d2l --num_attention_heads 2 --vocab {vocabulary}", vocabulary, mend)
        for vocabulary, mend in {
            "nowhere.json": "(No such file or directory); give a file of tokens",
            "empty": "(Is a directory); give a file of tokens",
            "latin.txt": "neither JSON nor UTF-8 text; save its idx_to_token with json.dump",
            "words.json": "of their ids, none of them empty; save its idx_to_token with json.dump",
            "empty.vocab": "of their ids, none of them empty; save its idx_to_token with json.dump",
            "twice.json": "'<pad>' stands in the vocabulary twice; save the idx_to_token of the model's own Vocab",
        }.items()
    ],
    # Models to publish.
    ("publish nowhere me/x --dry_run", "nowhere: no such folder; give one that d2l-bert pretrain has left"),
    ("publish tokens me/x --dry_run", "tokens: config.json is missing, so it is no model; give a folder"),
    ("publish bert me/x --dry_run", "bert/config.json: a bert model", "hf upload publishes any model"),
    ("publish cut me/x --dry_run", "cut/model.safetensors: damaged or cut short", "copy the file anew"),
    ("publish weightless me/x --dry_run", "model.safetensors is missing", "save the model there again"),
    ("publish torn me/x --dry_run", "torn/config.json: cannot be read", "put the right one back"),
    ("publish listed me/x --dry_run", "listed/config.json: holds no JSON object", "put the right one back"),
    ("publish wider me/x --dry_run", "says hidden_size 64, and run_config.json 32; put back what was trained"),
    ("publish odd me/x --dry_run", "its tokenizer cannot be loaded; save the tokenizer"),
    ("publish uncoded me/x --dry_run", "modeling_d2l_bert.py is missing", "copy it from"),
    ("publish recoded me/x --dry_run", "differs from that of the installed d2l-bert", "--changed_code"),
    ("publish uncarded me/x --dry_run", "the card has no metadata; begin it with a block of YAML"),
    ("publish run me/x", "no token for the Hub here; log in with `hf auth login`"),
    # Names and texts that the system or a tokenizer cannot take.
    *[
        (line.format("n" * 300), "File name too long; give a shorter name")
        for line in (
            "prepare --corpus latin.txt --output_dir {}",
            "pretrain --corpus {} --max_steps 1",
            "pretrain --dataset {} --max_steps 1",
            "pretrain --init_from {}",
            "publish {} me/x",
            "fill-mask {} [MASK]",
        )
    ],
    ("fill-mask run '\udcff [MASK]'", "argument TEXT: '\\udcff [MASK]' is not UTF-8; write it in that"),
    ("next-sentence run a '\udcff'", "argument B: '\\udcff' is not UTF-8; write it in that"),
]


@pytest.mark.parametrize("row", AT_ONCE, ids=[line[:70] for line, *_ in AT_ONCE])
def test_a_wrong_input_is_one_line_and_nothing_is_written(refused, row):
    line, *words = row
    said, progress = refused(line)
    assert progress == []
    for word in words:
        assert word in said


@pytest.mark.parametrize("option", ["corpus", "output_dir", "max_steps", "learning-rate", "packing", "optim"])
def test_two_dashes_as_the_value_of_an_option_are_refused(world, monkeypatch, capfd, option):
    """argparse would take them for the end of the options, and the option for one without a value."""
    monkeypatch.chdir(world)
    before = snapshot(world)
    assert main(["pretrain", "--corpus=books", "--output_dir=out", f"--{option}=--", "--max_steps=1", *SMALL]) == 2
    captured, written = capfd.readouterr(), option.replace("-", "_")
    assert captured.err == f"d2l-bert: error: --{written}=-- gives no value; write one behind the =\n"
    assert captured.out == "" and snapshot(world) == before


AFTER_READING = [  # what shows when the text is read, so that what was read is said before
    ("pretrain --corpus file.txt", "file.txt: too little text", "add text"),
    ("pretrain --min_paragraph_characters 9999", "books: too little text: 0 documents with sentences", "add text"),
    ("pretrain --dataset parts --dataset_split dev", "dataset parts: cannot be loaded", "with --dataset_split"),
    ("pretrain --corpus tokens --source_weights 1 2", "source_weights: 2 of them for 1 source; give one for each"),
    ("pretrain --dataset run", "dataset run: cannot be loaded", "give a folder of save_to_disk or of data files"),
    ("pretrain --vocab_size 20", "vocab_size 20 is below the alphabet", "raise vocab_size"),
    ("pretrain --hidden_size 31 --num_attention_heads 1", "got 31; give an even one, or attention_init normal"),
    ("pretrain --resume_from_checkpoint run/checkpoint-1", "max_steps was 2, and is 1 now; go on with what it was"),
]


@pytest.mark.parametrize("row", AFTER_READING, ids=[line[:70] for line, *_ in AFTER_READING])
def test_what_shows_when_the_text_is_read_is_one_line_too(refused, row):
    line, *words = row
    said, progress = refused(line)
    assert not any("error" in earlier for earlier in progress)
    for word in words:
        assert word in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("line", ["prepare --output_dir locked/out", "pretrain --output_dir locked/out"])
def test_a_folder_that_may_not_be_written(refused, world, line):
    (world / "locked").mkdir(mode=0o500, exist_ok=True)
    assert "locked/out: cannot be written (Permission denied); name another folder" in refused(line)[0]


def length(**options):
    return PretrainConfig(**{"max_steps": 1, **options})


FROM_PYTHON = [  # a call, and what it is refused with
    (lambda: TextConfig(corpus=[""]).check(), "corpus is empty (got '')"),
    (lambda: TextConfig(corpus="books").check(), "corpus must be a list of texts, got 'books'"),
    (lambda: TextConfig(vocab_size=True).check(), "vocab_size must be a whole number, got True"),
    (lambda: TextConfig(vocab_size=300.0).check(), "vocab_size must be a whole number, got 300.0"),
    (lambda: TextConfig(preprocessing_num_workers=10**6).check(), "got 1,000,000"),
    (lambda: length(tokenizer="a\0b").check(), "tokenizer 'a\\x00b': holds a NUL character"),
    (lambda: length(output_dir=" ").check(), "output_dir is empty (got ' ')"),
    (lambda: length(torch_compile="maybe").check(), "torch_compile must be auto or true or false, got 'maybe'"),
    (lambda: length(torch_compile=1).check(), "torch_compile must be auto or true or false, got 1"),
    (lambda: length(mlm_probability="1.5").check(), "mlm_probability must be above 0 and at most 1, got 1.5"),
    (lambda: length(mlm_probability="nan").check(), "mlm_probability must be a finite number or text, got nan"),
    (lambda: length(mlm_probability="a lot").check(), "mlm_probability takes 0.15, or 0.30->0.15, got 'a lot'"),
    (lambda: PublishConfig(revision="a b").check(), "revision 'a b': git allows no branch of this name"),
    (lambda: publish("run", "me/x", PublishConfig(license="")), "license is empty (got '')"),
    (lambda: load_tokenizer("no such name"), "tokenizer no such name: cannot be loaded: no folder here has this name"),
]


@pytest.mark.parametrize(("call", "words"), FROM_PYTHON, ids=[words[:60] for _, words in FROM_PYTHON])
def test_from_python_it_is_a_user_error(call, words):
    with pytest.raises(UserError) as refusal:
        call()
    assert words in str(refusal.value)


def test_python_says_true_and_a_number_as_text_is_a_number():
    assert [length(torch_compile=said).torch_compile for said in (True, False, "auto")] == ["true", "false", "auto"]
    run = length(torch_compile=True, mlm_probability="0.15")
    run.check()
    assert run == length(torch_compile="true", mlm_probability=0.15) and run.mlm_probabilities() == (0.15, 0.15)


def test_the_most_processes_are_four_a_core_and_at_least_16(monkeypatch):
    for here, most in ((1, 16), (2, 16), (4, 16), (5, 20), (64, 256)):
        monkeypatch.setattr("d2l_bert.options.cores", lambda here=here: here)
        length(dataloader_num_workers=most, preprocessing_num_workers=most).check()
        for name in ("dataloader_num_workers", "preprocessing_num_workers"):
            with pytest.raises(UserError, match=f"{name}: this machine has {here} cores, so give at most {most} "):
                length(**{name: most + 1}).check()


@pytest.mark.skipif(shutil.which("git") is None, reason="git says which names a branch may have")
def test_a_revision_is_refused_where_git_refuses_the_branch():
    names = "main v1.0 refs/pr/1 a/b.c ü a@b -a a- a b a..b a~1 a^ a:b a? a* [a a\\b /a a/ a//b .a a/.b a. a./b"
    names = [*names.split(" "), *"a.lock a.lock/b a@{1} HEAD last-checkpoint a.b.c".split(), "a b", "a\tb", "a\x7f"]
    for name in names:
        git = subprocess.run(["git", "check-ref-format", "--branch", name], capture_output=True, check=False)
        try:
            PublishConfig(revision=name).check()
            allowed = True
        except UserError:
            allowed = False
        assert allowed == (git.returncode == 0), name
