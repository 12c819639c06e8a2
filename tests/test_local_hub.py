"""The real clients (huggingface_hub, its command, Transformers) work with the small Hub of the tests."""

import subprocess
import sys
from textwrap import dedent

import pytest
from local_hub import environment


SOMEONE, ANOTHER = "hf_made_up_for_someone", "hf_made_up_for_another"

# Every script begins with this: a folder with a small and a large file, and `told`, which prints how a call failed.
HEAD = """
from pathlib import Path
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
api, name = HfApi(), "someone/bert"

def told(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except Exception as error:
        answer = getattr(error, "response", None)
        print(type(error).__name__, "no answer" if answer is None else answer.status_code)
    else:
        print("done")
"""


@pytest.fixture
def say(hub, tmp_path):
    """Runs a script in a process of its own; returns the lines that the script prints."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\npipeline_tag: fill-mask\n---\n# A model\n")
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "sub" / "a name.txt").write_text("grün\n")

    def run(script, token=SOMEONE, home="home"):
        variables = {**environment(hub, tmp_path / home, token), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", HEAD + dedent(script)]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.slow
def test_transformers_publishes_and_loads(hub, say):
    """Loads with another home folder, so without the cache of the first process."""
    sums = """
    import torch
    from transformers import BertConfig, BertModel
    def total(model):
        return sum(weight.double().sum() for weight in model.parameters()).item()
    """
    sizes = "vocab_size=40, hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=20"
    pushed = say(
        dedent(sums)
        + f"model = BertModel(BertConfig({sizes})); print(total(model)); model.push_to_hub(name, private=True)"
    )
    assert {"config.json", "model.safetensors"} < set(hub.files("someone/bert"))
    assert say(dedent(sums) + "print(total(BertModel.from_pretrained(name)))", home="other") == pushed
    assert {request.status for request in hub.requests} <= {200, 302, 404}
