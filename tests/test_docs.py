"""The code and commands in the documentation run, the names in it exist, and it builds as a site."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from finetuning import answer_rows, choice_rows, squad_json
from text_sources import write_table
from torch.distributed.run import get_args_parser as torchrun_parser
from transformers import AutoTokenizer, BertConfig, BertForPreTraining

import d2l_bert
from d2l_bert.__main__ import main, make_parser


ROOT = Path(__file__).parent.parent
LAUNCHING = ROOT / "docs" / "accelerate"

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
PAGES = [page for page in PAGES if "notebooks" not in page]

# Commands that the test of all commands does not run, by their first words, and why.
NOT_RUN = {
    "make install": "installs from the network; tests/test_packaging.py installs the package",
    ". .venv/bin/activate": "the test runs in an environment of its own",
    "pip install": "the same",
    ".venv/bin/python -m pip install": "the same",
    "accelerate launch": "the launchers' own parsers read these below, and tests/test_ranks.py launches",
    "torchrun": "the same",
    "sbatch": "needs SLURM; tried below with stand-ins",
    "d2l-bert prepare --check parts/*": "wants the parts that sbatch makes; docs/data.md makes some",
    "d2l-bert pretrain --corpus parts/*": "the same",
    "git clone": "downloads",
    "zcat": "a pipe; tests/promises reads the standard input",
    "cat": "the same",
    "cut": "the same",
    "grep": "the same",
    "d2l-bert evaluate my-bert --line_scores": "a pipe; tests/test_evaluation.py reads lines",
    "d2l-bert evaluate log-bert --line_scores": "the same",
    "python -m benchmarks": "trains for minutes",
    "python -m http.server": "serves until it is stopped",
    "d2l-bert demo": "the same; tests/test_pages.py starts it",
    "npm install": "downloads; tests/test_pages.py writes a page with what `make browsers` has installed",
    "d2l-bert export my-bert with-page": "needs the former",
    "d2l-bert finetune my-bert --task sst2": "a data set of the Hub; tests/test_finetune_data.py has stand-ins",
    "d2l-bert finetune my-bert --task swag": "the same",
    "d2l-bert finetune my-bert --task text-classification --dataset": "the same",
    "d2l-bert finetune my-bert --task multiple-choice --dataset": "the same",
    "d2l-bert convert net.params": "wants weights of d2l's model; tests/test_conversion.py converts such",
    "d2l-bert convert my-bert for-d2l": "the same",
}

# What makes a command short: options behind those of the page, the last of which count.
SHORT = {
    "pretrain": ["--max_steps=2", "--max_eval_pairs=8", "--global_batch_size=8", "--batch_size_schedule=none"],
    "finetune": ["--max_steps=2", "--per_device_train_batch_size=4", "--overwrite_output_dir"],
    "evaluate": ["--max_eval_pairs=8", "--pppl_sentences=2"],
}
SIZES = ["--num_hidden_layers=2", "--hidden_size=32", "--num_attention_heads=2", "--intermediate_size=64"]

LAUNCHERS = {"accelerate": launch_command_parser, "torchrun": torchrun_parser}


@pytest.fixture(scope="module")
def my_bert(books, tmp_path_factory):
    """A model of two layers, as the pages have."""
    folder = tmp_path_factory.mktemp("docs") / "my-bert"
    options = ["--vocab_size=400", "--license=apache-2.0", *SIZES, *SHORT["pretrain"]]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={folder}", *options]) == 0
    return folder


@pytest.fixture
def workspace(my_bert, books, here, tmp_path, monkeypatch):
    """A working directory with everything that the pages speak of, and a local Hub with two models."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(my_bert, "my-bert", ignore=shutil.ignore_patterns("checkpoint-*"))
    for folder in (
        "books",
        "BOOKS/train",
        "BOOKS/valid",
        "check",
        "shards/0",
        "shards/1",
        "domain",
        "domains/text/icelandic",
        "domains/text/molecules",
    ):
        shutil.copytree(books, folder)
    Path("model_cards").symlink_to(ROOT / "model_cards")
    Path("shards/1/book-00.txt").unlink()
    texts = [f"in the {place} number {number}" for number in range(8) for place in ("garden", "tower")]
    rows = [(text, text.split()[2]) for text in texts]
    pairs = [("text,text_pair,label", *(f"{text},{text},{number % 2}" for number, text in enumerate(texts)))]
    tables = {f"{name}.csv": ["text,label", *map(",".join, rows)] for name in ("train", "val", "test")}
    tables |= dict.fromkeys(("mrpc.csv", "mrpc-test.csv"), *pairs)
    tables |= dict.fromkeys(("questions.csv", "check.csv"), ["question;kind", *map(";".join, rows)])
    tables |= {
        "prices.csv": ["text,price", *(f"{text},{len(text)}" for text in texts)],
        "toxic.csv": [
            "text,toxic,insult,threat",
            *(f"{text},{n % 2},{n // 2 % 2},{n // 4 % 2}" for n, text in enumerate(texts)),
        ],
        "texts.txt": ["Anna found a hammer.", "The valley was old."],
        "tomorrow.csv": ["text,question", *(f"{text},{text}" for text in texts)],
        "letters.csv": ["no;letter", "1;The valley was old."],
        "ner.csv": ["Sentence #,Word,Tag", "Sentence: 1,Ada,B-PER", ",left,O"],
    }
    for name in ("train", "dev", "test"):
        tables[f"{name}.conll"] = ["Ada B-PER\nmoved O\nto O\nYork B-LOC\n"] * 8
        tables[f"{name}-v2.0.json"] = [json.dumps(squad_json(answer_rows(8, seed=1)))]
    for name, lines in tables.items():
        Path(name).write_text("\n".join(lines) + "\n")
    write_table(Path("more.jsonl"), [{"text": (books / "book-00.txt").read_text()}] * 3)
    write_table(Path("train.jsonl"), [{"text": text, "label": [label]} for text, label in rows])
    for name in ("lines.log", "hour.log", "new.log"):
        count = 300 if name == "new.log" else 400
        lines = (f"INFO worker order {7919 * n % 10_000} packed by station {n % 8}\n" for n in range(count))
        Path(name).write_text("".join(lines))
    for name in ("vi.txt", "uk.txt"):
        shutil.copy(books / "book-00.txt", name)
    for name in ("choices", "choices-val"):
        write_table(Path(f"{name}.jsonl"), choice_rows(8, seed=1))
    pyarrow.parquet.write_table(pyarrow.table({"abstract": ["Anna found a hammer."]}), "texts.parquet")
    tokenizer = AutoTokenizer.from_pretrained("my-bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForPreTraining(BertConfig(vocab_size=len(tokenizer), **sizes))
    for part in (model, tokenizer):
        part.push_to_hub("someone/bert")
    return tmp_path


def commands_of(block):
    """The commands of a block: without variables of the environment; of a loop on one line, those of all its turns."""
    for line in block.replace("\\\n", " ").splitlines():
        if loop := re.fullmatch(r"for (\w+) in (.*); do (.*); done", line):
            yield from (loop[3].replace(f"${loop[1]}", word) for word in loop[2].split())
        else:
            yield re.sub(r"^(\w+=\S+ )+", "", line)


def short(command):
    """The arguments of a command of a page, with names that the local Hub has, and short enough for a test."""
    name, *words = shlex.split(command)[1:]
    words = [
        word.replace("google-bert/bert-base-uncased", "someone/bert").replace("me/", "someone/") for word in words
    ]
    words = [found for word in words for found in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    if name == "pretrain":
        for option in ("--max_steps", "--max_minutes", "--num_train_epochs"):
            if option in words:
                del words[words.index(option) : words.index(option) + 2]
        words += [] if "--init_from" in words else SIZES
    if "--blimp" in words:
        del words[words.index("--blimp") : words.index("--blimp") + 2]
    is_of_labelled_rows = name == "evaluate" and "--test_file" in words
    return [name, *words, *([] if is_of_labelled_rows else SHORT.get(name, []))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_every_block_of_python_of_a_page_runs(page, workspace, capsys):
    text = (ROOT / page).read_text()
    names = {"__name__": "__main__"}
    for kind, block in re.findall(r"^```(bash|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if kind == "python":
            exec(compile(block.replace("max_steps=1000", "max_steps=2"), page, "exec"), names)
            continue
        for command in commands_of(block):
            if any(command.startswith(beginning) for beginning in NOT_RUN):
                continue
            arguments = short(command)
            for option in ("--output_dir", "--output"):  # an earlier command of the page may have written it
                if option in arguments and (old := Path(arguments[arguments.index(option) + 1])).exists():
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            assert main(arguments) == 0, (command, capsys.readouterr().err[-2000:])


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_options_files_and_classes_that_exist(page):
    text = (ROOT / page).read_text()
    for command, options in re.findall(r"^(?:for .*; do )?d2l-bert (\S+)(.*)$", text, re.MULTILINE):
        assert set(re.findall(r"--\w+", options)) <= options_of(command), (command, options)
    for name in re.findall(r"\b(D2lBert\w+)\b", text):
        assert hasattr(d2l_bert, name), name
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def options_of(command):
    """The flags of one command."""
    return set(make_parser([command])._subparsers._group_actions[0].choices[command]._option_string_actions)


def test_every_launcher_takes_the_options_on_the_page():
    text = (ROOT / "docs" / "distributed.md").read_text().replace("\\\n    ", "")
    commands = [re.sub(r"^(\w+=\S+ )+", "", line) for line in text.splitlines()]
    tried = set()
    for launch, ours in (line.split(" -m d2l_bert pretrain ") for line in commands if " -m d2l_bert " in line):
        launcher, *arguments = shlex.split(launch.replace("accelerate launch", "accelerate"))
        parsed = LAUNCHERS[launcher]().parse_args([*arguments, "script"])
        if launcher == "accelerate":
            _validate_launch_command(parsed)
            assert parsed.multi_gpu or parsed.use_fsdp, "without a GPU, Accelerate else starts one process"
        assert set(re.findall(r"--\w+", ours)) <= options_of("pretrain"), ours
        tried.add(launcher)
    assert tried == set(LAUNCHERS)
    scripts = {"slurm.sh": options_of("pretrain"), "slurm_prepare.sh": {*options_of("prepare"), "--array"}}
    for batch in (line for line in commands if line.startswith("sbatch")):
        assert set(re.findall(r"--\w+", batch)) <= scripts.pop(re.findall(r"docs/accelerate/(\S+)", batch)[0])
    assert not scripts
    known = {*options_of("pretrain"), *launch_command_parser()._option_string_actions, "--signal"}
    assert set(re.findall(r"`(--[\w-]+)", text)) <= known | set(torchrun_parser()._option_string_actions)


@pytest.mark.parametrize("name", sorted(path.name for path in LAUNCHING.glob("*.yaml")))
def test_accelerate_knows_every_key_of_our_configuration_files(name):
    config = load_config_from_file(str(LAUNCHING / name))  # refuses unknown keys, except below fsdp_config
    assert set(config.fsdp_config) <= {action.dest for action in launch_command_parser()._actions}
    options = ["--config_file", str(LAUNCHING / name), "--num_processes=2", "script"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(options))
    wants_fsdp = prepare_multi_gpu_env(arguments).get("ACCELERATE_USE_FSDP") == "true"
    assert wants_fsdp == (name == "fsdp2.yaml") == bool(config.fsdp_config)


STAND_INS = {
    "scontrol": """echo "scontrol $*" >> calls; [ "$1" = show ] && printf 'node7\nnode8\n' """,
    "srun": """
echo "$1" >> calls; shift 2  # --kill-on-bad-exit and --cpus-per-task
export SLURM_NTASKS=2
for SLURM_PROCID in 0 1; do export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID; "$@" || code=$?; done; exit ${code:-0}""",
    "d2l-bert": """IFS="|"; echo "$RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT $HF_HOME $*" >> calls
exit $LEAVES""",
}


@pytest.mark.parametrize("code", [0, 2, 143])
def test_the_slurm_script_starts_every_task_and_queues_the_job_again_when_its_time_is_up(tmp_path, code):
    for name, lines in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": "/shared",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_CPUS_PER_TASK": "8",
        "LEAVES": str(code),
    }
    command = ["bash", LAUNCHING / "slurm.sh", "--corpus", "my books", "--max_steps=3"]
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == code
    show, ends_all, *tasks = (tmp_path / "calls").read_text().splitlines()
    assert show == "scontrol show hostnames node[7-8]"
    assert ends_all == "--kill-on-bad-exit=1"
    end = "node7:24567 /shared/hf pretrain|--resume_from_checkpoint|latest|--corpus|my books|--max_steps=3"
    assert tasks == [f"0/2 0 {end}", f"1/2 1 {end}", *(["scontrol requeue 1234567"] if code == 143 else [])]


# ---------------------------------------------------------------------------------------------------------------------
# The documentation as a site: it builds without a warning, so no link between its pages leads to nothing


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Sphinx warns of a link to a page, a file or a heading that is not there."""
    pytest.importorskip("sphinx", reason="sphinx is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", tmp_path / "site"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = {page.name for page in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "search.html", "api.html", "3-pretraining.html"} <= pages
