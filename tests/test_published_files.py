"""The files that publishing sends: no path of this machine, and a card whose examples run."""

import json
import re

import pytest
from local_hub import TOKEN
from publishing import TEXT, published, run

from d2l_bert.__main__ import main


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
    assert card.count(f'from_pretrained("someone/bert", revision="{tag}", trust_remote_code=True') == 1
    filling, tuning = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    code = f"""
import sys
sys.modules["d2l_bert"] = None  # importing it now fails
{filling}
assert len(fill({TEXT!r})) == 5
{tuning}
assert type(model).__name__ == "D2lBertForSequenceClassification"
"""
    process = run(code, here, tmp_path / "home", TOKEN)
    assert process.returncode == 0, process.stderr
    code = "import d2l_bert\n" + filling.replace(f', revision="{tag}", trust_remote_code=True', "")
    process = run(code, here, tmp_path / "home", TOKEN)
    assert process.returncode == 0, process.stderr
    assert '"model"' not in card  # the name of the folder
