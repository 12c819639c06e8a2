"""What the command and `import d2l_bert` load: help waits for no library, a wrong option for no other command's."""

import json
import subprocess
import sys

import pytest


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
    assert "d2l-bert" in said and code == (0 if words and words[0].startswith("--") else 2)
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
    of_work = {"training.pretrain", "training.finetuning.run", "training.evaluation.evaluate", "tokenization.sources"}
    assert not {*of_work, "training.optimizer", "model_cards.card", "pair_tasks", "inference.demo"} & ours(modules)
    if not any(package.startswith("training.") for package in packages):
        assert not {"torch", "transformers"} & modules


PROGRAMS = {
    "ours first": "import d2l_bert, transformers",
    "ours last": "import transformers; from transformers import AutoModelForMaskedLM; import d2l_bert",
    "the command's module": "from d2l_bert.__main__ import main; import d2l_bert, transformers",
}


@pytest.mark.slow
@pytest.mark.parametrize("imports", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_that_imports_the_package_can_load_its_models_at_once(tmp_path, imports):
    program = tmp_path / "program.py"
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
        *("pair_tasks", *OF_OPTIONS),
    }
