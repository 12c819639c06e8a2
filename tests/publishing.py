"""What a Hub received, Python code in a process that uses it, and changes to a model folder."""

import json
import subprocess
import sys

from local_hub import environment


SENT = {
    *("README.md", "config.json", "configuration_d2l_bert.py", "metrics.json", "model.safetensors"),
    *("modeling_d2l_bert.py", "run_config.json", "tokenizer.json", "tokenizer_config.json", "training_curves.png"),
    "vocab.txt",
}
TEXT = "Anna walked to the [MASK]."


def published(hub, repo_id="someone/bert", revision="main"):
    """The files of a repository, without those that the Hub adds to every repository."""
    files = hub.files(repo_id, revision)
    return {name: content for name, content in files.items() if name != ".gitattributes"}


def run(code, hub, home, token=None, **variables):
    """Run Python code in a process of its own, whose only cache is in `home`."""
    variables = {**environment(hub, home, token), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def change_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_card(folder, old, new):
    card = folder / "README.md"
    assert old in card.read_text()
    card.write_text(card.read_text().replace(old, new, 1))
