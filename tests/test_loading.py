"""Loading the folder of a run: with the package, without the package, and with stock classes."""

import ast
import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, BertTokenizer
from transformers.dynamic_module_utils import get_relative_imports

import d2l_bert.modeling.configuration_d2l_bert
import d2l_bert.modeling.modeling_d2l_bert
from d2l_bert import D2lBertForPreTraining
from d2l_bert.cli import main


LOAD = """
import sys
if {remote}:
    sys.modules["d2l_bert"] = None  # importing it now fails
import torch
from transformers import (AutoModel, AutoModelForMaskedLM, AutoModelForNextSentencePrediction, AutoModelForPreTraining,
                          AutoTokenizer, pipeline)
options = {{"trust_remote_code": True}} if {remote} else {{}}
if not {remote}:
    import d2l_bert
tokenizer = AutoTokenizer.from_pretrained({folder!r}, **options)
encoded = tokenizer("Anna walked to the [MASK].", "The drum was red.", return_tensors="pt")
tensors = {{}}
for auto in (AutoModel, AutoModelForMaskedLM, AutoModelForNextSentencePrediction, AutoModelForPreTraining):
    model, report = auto.from_pretrained({folder!r}, output_loading_info=True, **options)
    assert not any(report.values()), (auto, report)
    with torch.no_grad():
        outputs = model.eval()(**encoded)
    tensors |= {{f"{{auto.__name__}}.{{name}}": value for name, value in outputs.items()}}
fill = pipeline("fill-mask", model={folder!r}, **options)
tensors["fill"] = torch.tensor([row["score"] for row in fill("Anna walked to the [MASK].")])
torch.save(tensors, {result!r})
print(type(model).__module__)
"""


@pytest.fixture(scope="module")
def loaded(trained, tmp_path_factory):
    """Outputs of every head in two new processes: with `import d2l_bert`, and where that import is impossible."""
    tensors, modules = {}, {}
    for remote in (False, True):
        result = tmp_path_factory.mktemp("loaded") / "tensors.pt"
        code = LOAD.format(remote=remote, folder=str(trained), result=str(result))
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert "missing" not in process.stderr.lower() and "newly initialized" not in process.stderr
        tensors[remote], modules[remote] = torch.load(result, weights_only=True), process.stdout.strip()
    return tensors, modules


def test_the_package_and_the_copied_code_give_equal_outputs(loaded):
    tensors, modules = loaded
    assert modules[False].startswith("d2l_bert.") and modules[True].startswith("transformers_modules.")
    assert tensors[False].keys() == tensors[True].keys()
    for name, tensor in tensors[False].items():
        assert torch.equal(tensor, tensors[True][name]), name


def test_every_head_has_the_same_weights(loaded):
    (tensors, _), _ = loaded, None
    here = tensors[False]
    assert torch.equal(here["AutoModelForMaskedLM.logits"], here["AutoModelForPreTraining.prediction_logits"])
    nsp = here["AutoModelForNextSentencePrediction.logits"]
    assert torch.equal(nsp, here["AutoModelForPreTraining.seq_relationship_logits"])


def test_the_tokenizer_is_a_stock_bert_tokenizer(trained):
    written = json.loads((trained / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "BertTokenizer"
    text = ("Anna walked to the garden.", "The drum was red.")
    expected = AutoTokenizer.from_pretrained(trained)(*text)
    assert dict(BertTokenizer.from_pretrained(trained)(*text)) == dict(expected)
    from_vocabulary = BertTokenizer(vocab=str(trained / "vocab.txt"))
    assert from_vocabulary(*text)["input_ids"] == expected["input_ids"]


def test_the_code_in_the_folder_is_the_code_of_the_package(trained):
    for module in (d2l_bert.modeling.configuration_d2l_bert, d2l_bert.modeling.modeling_d2l_bert):
        with open(module.__file__) as file:
            assert (trained / file.name.rsplit("/", 1)[-1]).read_text() == file.read()


def test_the_copied_code_imports_only_what_every_reader_has(trained):
    files = {file.stem: file for file in trained.glob("*.py")}
    assert set(files) == {"configuration_d2l_bert", "modeling_d2l_bert"}
    for file in files.values():
        siblings = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and node.module in files, ast.unparse(node)  # `from .sibling import name`
                siblings.add(node.module)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                for top in {name.partition(".")[0] for name in names}:
                    # NumPy is a requirement of Transformers itself.
                    assert top in {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub", "numpy"}, top
        # For `trust_remote_code`, Transformers finds the files to copy by a pattern, which also matches docstrings.
        assert set(get_relative_imports(file)) == siblings


def test_stock_bert_fills_masks_and_predicts_next_sentences_as_our_model_of_the_same_weights(
    trained, tmp_path, capsys
):
    ours = shutil.copytree(trained, tmp_path / "ours")
    config = AutoConfig.from_pretrained(ours, embedding_layer_norm=True)
    D2lBertForPreTraining(config).eval().save_pretrained(ours)
    assert main(["convert", str(ours), str(tmp_path / "stock"), "--to", "bert"]) == 0
    assert json.loads((tmp_path / "stock" / "config.json").read_text())["model_type"] == "bert"
    shown = []
    for folder in (ours, tmp_path / "stock"):
        capsys.readouterr()
        assert main(["fill-mask", str(folder), "anna [MASK] to the garden"]) == 0
        assert main(["next-sentence", str(folder), "anna left .", "boris came ."]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "IsNext" in shown[0]
