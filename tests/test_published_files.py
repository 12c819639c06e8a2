"""The files that publishing sends: no others, no path of this machine, no token, and a card of known facts."""

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_hub import TOKEN, environment
from publishing import TEXT, published, run

from d2l_bert.__main__ import main


# ---------------------------------------------------------------------------------------------------------------------
# The files sent


def test_paths_of_the_start_model_and_the_tokenizer_are_sent_as_names(here, trained, books, tmp_path, monkeypatch):
    out = tmp_path / "further"
    monkeypatch.chdir(trained.parent.parent)
    start = f"{trained.parent.name}/model"
    options = ["--max_steps=2", "--mixed_precision=no", "--max_seq_length=48", "--global_batch_size=8"]
    options += ["--license=mit", "--dataloader_num_workers=0", f"--tokenizer={trained}", f"--init_from={start}"]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={out}", *options]) == 0
    assert main(["publish", str(out), "someone/bert"]) == 0
    record = json.loads(published(here)["run_config.json"])
    assert record["run"]["init_from"] == record["run"]["tokenizer"] == "model"
    assert [read["name"] for read in record["fingerprints"]] == ["books", "model", "model"]
    assert all(re.fullmatch("[0-9a-f]{16}", read["fingerprint"]) for read in record["fingerprints"])
    card = published(here)["README.md"].decode()
    assert "pretrained further on books" in card and "base_model" not in card and str(tmp_path) not in card


@pytest.mark.slow
def test_the_cards_examples_run_as_written_and_pin_the_revision_of_code(here, trained, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    card, (tag,) = published(here)["README.md"].decode(), here.tags("someone/bert")
    assert card.count(f'from_pretrained("someone/bert", revision="{tag}", trust_remote_code=True)') == 2
    with_package, without, from_stock = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    (convert,) = re.findall(r"^d2l-bert (convert .*)$", card, re.MULTILINE)
    both = f"""
import os, shlex, sys
os.chdir({str(tmp_path)!r})
{with_package}
assert len(fill({TEXT!r})) == 5
from d2l_bert.__main__ import main
assert main(shlex.split({convert!r})) == 0
{from_stock}
assert type(model).__name__ == "BertForMaskedLM"
"""
    others = f"import sys\nsys.modules['d2l_bert'] = None\n{without}\nassert len(tokenizer) == model.config.vocab_size"
    for code in (both, others):
        process = run(code, here, tmp_path / "home", TOKEN)
        assert process.returncode == 0, process.stderr
    assert '"model"' not in card  # the name of the folder


# ---------------------------------------------------------------------------------------------------------------------
# The token


@pytest.mark.slow
def test_the_token_is_in_no_output_log_file_or_process_list(hub, folder, tmp_path):
    token = "hf_" + hashlib.sha256(b"nobody's").hexdigest()[:34]
    hub.users[token] = "someone"
    variables = {**environment(hub, tmp_path / "home", token), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "d2l_bert", "publish", str(folder), "someone/bert"]
    seen, said = set(), tmp_path / "said.txt"
    hub.fail = lambda method, path: time.sleep(0.05)  # slow enough for the test to look at the process
    with said.open("wb") as file:
        process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, cwd=tmp_path)
        while process.poll() is None:
            for listed in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(listed.read_bytes())
                except OSError:  # the process has ended
                    continue
            time.sleep(0.01)
    assert process.returncode == 0, said.read_text()
    # The test did look at the process.
    assert any(b"publish" in command and str(folder).encode() in command for command in seen)
    assert token in {request.token for request in hub.requests}  # and the process used the token
    assert not any(token.encode() in command for command in seen)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert said in files and folder / "README.md" in files
    for path in files:
        assert token.encode() not in path.read_bytes(), path
    for revision in hub.commits("someone/bert"):
        for name, content in hub.files("someone/bert", revision).items():
            assert token.encode() not in content, name
