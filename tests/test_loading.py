"""Loading the folder of a run: with the package, without the package, and with stock classes."""

import ast
import subprocess
import sys

import pytest
import torch
from transformers.dynamic_module_utils import get_relative_imports


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
