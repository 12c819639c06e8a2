"""The command line: clear lines for mistakes, what the command loads, where its messages go."""

import dataclasses
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import SMALL

from d2l_bert.__main__ import main, make_parser
from d2l_bert.commands import COMMANDS
from d2l_bert.inference.config import EmbedConfig
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.evaluation.config import EvaluateConfig
from d2l_bert.training.finetuning.all_tasks import CLASSES
from d2l_bert.training.finetuning.config import FinetuneConfig, PredictConfig
from d2l_bert.training.recipes import architecture_options


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


@pytest.mark.slow
def test_options_may_be_written_with_dashes_instead_of_underscores(books, tmp_path):
    options = ["--max-steps=1", f"--output-dir={tmp_path / 'out'}", *(option.replace("_", "-") for option in SMALL)]
    assert main(["pretrain", f"--corpus={books}", *options]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("shows_all", ["--help-all", "--help_all", None])
def test_help_names_the_common_options_and_help_all_every_one(capsys, shows_all):
    names = {*architecture_options(), *(field.name for field in dataclasses.fields(PretrainConfig))}
    with pytest.raises(SystemExit) as stop:
        main(["pretrain", "--recipe=d2l", shows_all or "--help"])
    said = capsys.readouterr().out
    found = {name for name in names if f"--{name} " in said}
    assert stop.value.code == 0
    assert found == names if shows_all else 10 <= len(found) <= 15
    assert not shows_all or all(
        text in said for text in ("--hidden_dropout_prob X", "(0.2)", "(20256)", "(sentences)")
    )


def help_of(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_help_lists_every_command_once_in_a_group_and_has_an_example_of_it_that_parses(capsys):
    lines = help_of(capsys)
    groups = ("train:", "measure:", "use:", "share:")
    listed = []
    for group in groups:
        start = lines.index(group) + 1
        listed += [line.split()[0] for line in lines[start : lines.index("", start)]]
    assert sorted(listed) == sorted(COMMANDS)
    shown = set()
    for line in lines:
        if line.startswith("  d2l-bert "):
            command, _, _ = line.strip().partition("   ")  # what the example does stands behind
            words = shlex.split(command)[1:]
            assert make_parser(words).parse_args(words).name == words[0]
            shown.add(words[0])
    assert shown == set(COMMANDS)


def test_the_help_of_finetune_names_the_columns_that_each_task_reads(capsys):
    lines = help_of(capsys, "finetune")
    for task, its_class in CLASSES.items():
        (line,) = [line for line in lines if line.startswith(f"  {task} ")]
        usual = {columns[0] for columns in its_class.usual_columns.values()}
        assert usual <= set(re.findall(r"\w+", line.replace(task, ""))), line


@pytest.mark.parametrize("flag", ["-h", "--help", "--help_all", "--help-all"])
def test_help_measures_no_core(flag, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr("d2l_bert.__main__.spare_busy_cores", lambda: measured.append(True))
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, flag])
    assert not measured
    with pytest.raises(SystemExit):
        main(["demo"])  # without a model
    assert measured == [True]


@pytest.mark.parametrize(
    "words, expected",
    [
        ("publish --dry_run my-bert me/x", True),
        ("publish my-bert --dry_run me/x", True),
        ("publish my-bert me/x --dry_run", True),
        ("publish --dry_run -- my-bert me/x", True),
        ("publish --dry_run --public=false my-bert me/x", True),
        ("publish --dry_run true my-bert me/x", True),
        ("publish my-bert --dry_run TRUE me/x", True),
        ("publish my-bert me/x --dry_run false", False),
        ("publish --dry_run=false my-bert me/x", False),
        ("publish --dry_run=False -- my-bert me/x", False),
        ("predict --excel my-bert me/x --output new.csv", True),
        ("predict my-bert --excel me/x --output new.csv", True),
        ("predict my-bert --excel=false me/x --output new.csv", False),
    ],
)
def test_a_flag_of_true_or_false_takes_no_other_word(words, expected):
    argv = words.split()
    arguments = vars(make_parser(argv).parse_args(argv))
    names = ("folder", "repo_id", "dry_run") if argv[0] == "publish" else ("model", "file", "excel")
    assert [arguments[name] for name in names] == ["my-bert", "me/x", expected]


@pytest.mark.parametrize("word, expected", [("auto", "auto"), ("false", False), (None, True)])
def test_a_flag_of_true_false_or_auto_takes_these_words(word, expected):
    argv = ["prepare", "--output_dir=out", "--strip_accents", *([word] if word else []), "--corpus", "books"]
    assert make_parser(argv).parse_args(argv).strip_accents == expected


def test_words_behind_two_dashes_are_no_flags():
    argv = ["fill-mask", "my-bert", "--", "--dry_run", "a [MASK]"]
    assert make_parser(argv).parse_args(argv).text == ["--dry_run", "a [MASK]"]
    argv = ["publish", "--", "--dry_run", "me/x"]
    assert make_parser(argv).parse_args(argv).folder == "--dry_run"


def test_an_option_before_the_command_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--seed=1", "pretrain"])
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(said) == 1 and "--seed=1" in said[0]


@pytest.mark.parametrize(
    ("before", "option"),
    [
        ("pretrain", "corpus"),
        ("prepare --output_dir=o", "dataset"),
        ("prepare", "check"),
        ("evaluate m", "corpus"),
        ("finetune m", "label_column"),
    ],
)
def test_an_option_that_takes_a_list_may_be_given_several_times(before, option):
    argv = [*before.split(), f"--{option}", "a", "b", f"--{option}=c", f"--{option}", "d"]
    for _ in range(2):  # the values of one call do not stay for the next
        assert getattr(make_parser(argv).parse_args(argv), option) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("change", [lambda config, given: config, lambda config, given: replace(config, **given)])
@pytest.mark.parametrize(
    "config_class, paths",
    [
        (PretrainConfig, {"corpus": ["a.txt", "b/c"], "output_dir": "out"}),
        (FinetuneConfig, {"model": "m/n", "task": "regression", "train_file": "a.csv", "output_dir": "out"}),
        (PredictConfig, {"output": "a/b.csv"}),
        (EvaluateConfig, {"corpus": ["a.txt"], "output": "a/b.md", "line_scores": "a.txt"}),
        (EmbedConfig, {"output": "a/b.npy"}),
    ],
)
def test_a_path_in_an_option_is_its_string(config_class, paths, change):
    given = {name: as_paths(value) if name != "task" else value for name, value in paths.items()}
    config = change(config_class(**given), given)
    for name, value in given.items():
        setattr(config, name, value)
    assert dataclasses.asdict(config) == dataclasses.asdict(config_class(**paths))
    config.check_values()


def as_paths(value):
    return [Path(entry) for entry in value] if isinstance(value, list) else Path(value)


def test_a_text_whose_name_is_not_utf_8_is_prepared(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text(" ".join(f"A line of {n % 9} words." for n in range(300)))
    assert main(["prepare", f"--corpus={path}", f"--output_dir={tmp_path / 'out'}", "--vocab_size=60"]) == 0
    assert json.loads((tmp_path / "out" / "prepared.json").read_text())["counts"]["corpus_name"] == "caf\ufffd.txt"


# ---------------------------------------------------------------------------------------------------------------------
# What the command and `import d2l_bert` load: help waits for no library, a wrong option for no other command's


# The script that pip writes for the entry point, which tells what it has loaded at its end.
SCRIPT = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))
from d2l_bert.__main__ import main
sys.exit(main())
"""

# The libraries that only the work of a command needs.
OF_WORK = {"pyarrow", "datasets", "matplotlib", "sentencex", "gradio", "sklearn", "onnxruntime"}

# Modules that hold options, and what the options are declared with.
OF_OPTIONS = {"messages", "options", "folders", "commands", "__main__"}


def loaded(folder, *words):
    """The modules that the command loads, and what it prints."""
    script = folder / "d2l-bert"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=60)
    *said, modules = done.stderr.splitlines()
    return set(json.loads(modules)), done.stdout + "\n".join(said), done.returncode


def ours(modules):
    return {name.partition("d2l_bert.")[2] for name in modules if name.startswith("d2l_bert.")}


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["no-command"], []])
def test_help_loads_no_library_and_no_package_of_ours(tmp_path, words):
    modules, said, code = loaded(tmp_path, *words)
    assert "d2l-bert" in said
    assert code == (0 if words and words[0].startswith("--") else 2)
    assert not {"torch", "numpy", "transformers", "tokenizers", *OF_WORK} & modules
    assert ours(modules) <= OF_OPTIONS


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, packages",
    [
        (["publish", "run", "me/x", "--bogus"], {"model_cards.config"}),
        (["prepare", "--bogus"], {"tokenization.config", "tokenization.rules"}),
        (["attention", "run", "--help"], {"inference.config", "tokenization.config", "tokenization.rules"}),
        (["fill-mask", "run", "a", "--bogus"], set()),
        (["finetune", "run", "--bogus"], {"training.finetuning.config", "training.config"}),
        (["pretrain", "--help"], {"training.recipes", "training.config"}),
        (["evaluate", "run", "--bogus"], {"training.evaluation.config"}),
    ],
)
def test_help_and_errors_of_a_command_load_its_options_alone(tmp_path, words, packages):
    modules, said, code = loaded(tmp_path, *words)
    assert code == (0 if "--help" in words else 2) and said
    assert not OF_WORK & modules and packages <= ours(modules)
    of_work = {
        "training.pretrain",
        "training.finetuning.train",
        "training.evaluation.evaluate",
        "tokenization.sources",
    }
    assert not {*of_work, "training.optimizer", "model_cards.card", "pair_tasks", "inference.demo"} & ours(modules)
    if not any(package.startswith("training.") for package in packages):
        assert not {"torch", "transformers"} & modules


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_of_python_m_loads_no_library_either(word):
    command = [sys.executable, "-X", "importtime", "-m", "d2l_bert", word]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "d2l-bert" in done.stdout and "d2l_bert.commands" in modules
    assert not {"torch", "numpy", "transformers", "tokenizers", *OF_WORK} & modules
    assert ours(modules) <= OF_OPTIONS


PROGRAMS = {
    "ours first": "import d2l_bert, transformers",
    "ours last": "import transformers; from transformers import AutoModelForMaskedLM; import d2l_bert",
    "the command's module": "from d2l_bert.__main__ import main; import d2l_bert, transformers",
    "a module that imports Transformers": "from d2l_bert.modeling import conversion; import d2l_bert, transformers",
    "a module of the registration": "from d2l_bert import pair_tasks; import d2l_bert, transformers",
    "a public name": "from d2l_bert import D2lBertConfig; import d2l_bert, transformers",
}


@pytest.mark.slow
@pytest.mark.parametrize("imports", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("name", ["program.py", "d2l-bert"])
def test_a_program_that_imports_the_package_can_load_its_models_at_once(tmp_path, name, imports):
    program = tmp_path / name
    program.write_text(f"""
{imports}
import json, sys
loaded = list(sys.modules)
from transformers import AutoModelForMaskedLM
from transformers.pipelines import PIPELINE_REGISTRY
config = transformers.AutoConfig.for_model("d2l-bert", vocab_size=9, hidden_size=4)
assert type(AutoModelForMaskedLM.from_config(config)) is d2l_bert.D2lBertForMaskedLM
assert "next-sentence-prediction" in PIPELINE_REGISTRY.get_supported_tasks()
print(json.dumps(loaded))
""")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    modules = set(json.loads(done.stdout))
    assert not OF_WORK & modules
    assert ours(modules) <= {
        *("modeling", "modeling.configuration_d2l_bert", "modeling.modeling_d2l_bert", "modeling.conversion"),
        *(
            "pair_tasks",
            "records",
            "tokenization",
            "tokenization.model_files",
            "tokenization.weight_files",
            *OF_OPTIONS,
        ),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Messages are records of the standard library's logging; the command shows them on stderr


# Prints every record that reaches the root logger, and nothing else, as a line of JSON.
PROGRAM = """
import json, logging, sys

class Lines(logging.Handler):
    def emit(self, record):
        sys.stdout.write(json.dumps([record.name, record.levelname, record.getMessage()]) + "\\n")

logging.basicConfig(level=logging.INFO, handlers=[Lines()])
from d2l_bert import D2lBertConfig, PretrainConfig, pretrain
architecture = D2lBertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
options = dict(vocab_size=400, max_seq_length=32, max_steps=4, global_batch_size=8, dataloader_num_workers=1)
if __name__ == "__main__":
    run = PretrainConfig(corpus=[sys.argv[1]], output_dir=sys.argv[2], mixed_precision="no", **options)
    pretrain(architecture, run)
    logging.getLogger("d2l_bert").setLevel(logging.WARNING)
    pretrain(architecture, PretrainConfig(**{**vars(run), "overwrite_output_dir": True}))
"""


@pytest.mark.slow
def test_a_program_gets_the_packages_messages_as_log_records_and_no_other_output(books, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", books, tmp_path / "out"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    records = [json.loads(line) for line in done.stdout.splitlines()]  # fails if anything but JSON was printed
    ours = [record for record in records if record[0].startswith("d2l_bert.")]
    assert ours == records
    messages = {name: message for name, _, message in ours}
    assert {"d2l_bert.tokenization.account", "d2l_bert.training.log", "d2l_bert.report"} <= messages.keys()
    assert "What it learnt" in messages["d2l_bert.report"]
    assert sum(name == "d2l_bert.report" for name, *_ in ours) == 1, "the second run was told to be quiet"


@pytest.mark.slow
def test_the_command_shows_messages_on_stderr_and_the_report_on_stdout(books, tmp_path, capsys):
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", "--max_steps=4", *SMALL]
    root = logging.getLogger()
    heard = logging.Handler()
    heard.emit = lambda record: pytest.fail(f"{record.name} reached the root logger")
    root.addHandler(heard)
    try:
        assert main(command) == 0
    finally:
        root.removeHandler(heard)
    out, err = capsys.readouterr()
    assert "What it learnt" in out and "What it learnt" not in err
    assert [line for line in err.splitlines() if line.startswith("held out: MLM loss")]
    assert logging.getLogger("d2l_bert").propagate and not logging.getLogger("d2l_bert").handlers
