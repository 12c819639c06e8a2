"""The files that publishing sends: no others, no path of this machine, no token, and a card of known facts."""

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants
from local_hub import TOKEN, environment
from publishing import SENT, TEXT, change_json, published, run
from transformers import AutoTokenizer

from d2l_bert import D2lBertForSequenceClassification
from d2l_bert.cli import main
from d2l_bert.model_cards.outgoing import without_paths
from d2l_bert.modeling.conversion import AUTO_MAP


# ---------------------------------------------------------------------------------------------------------------------
# The files sent


def test_only_listed_files_are_sent_and_a_dry_run_lists_them(here, folder, capsys):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (folder / "notes.txt").write_text("mine")
    (folder / "secret.png").symlink_to("/etc/hostname")
    (folder / "1_Pooling").mkdir()
    also = {"LICENSE", "1_Pooling/config.json", "plot.svg"}
    for name in also:
        (folder / name).write_text("{}")
    assert main(["publish", str(folder), "someone/bert", "--dry_run"]) == 0
    assert not here.requests
    *lines, total, stays = capsys.readouterr().out.splitlines()
    listed = {line.split()[2]: int(line.split()[0].replace(",", "")) for line in lines}
    assert main(["publish", str(folder), "someone/bert"]) == 0
    assert {name: len(content) for name, content in published(here).items()} == listed
    assert listed.keys() == SENT | also
    assert total.split()[0] == f"{sum(listed.values()):,}"
    kept = {"checkpoint-20", "checkpoint-40", "notes.txt", "pytorch_model.bin", "secret.png", "training_log.jsonl"}
    assert set(stays.removeprefix("stays here: ").split(", ")) == kept


def test_nothing_sent_is_a_pickle_or_names_a_folder_of_this_machine(here, trained, books):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    files = published(here)
    for name, content in files.items():
        assert not content.startswith((b"\x80", b"PK")) and not name.endswith((".bin", ".pt", ".pkl")), name
        for path in (trained.parent, books.parent, Path.home(), Path(__file__).parent, Path(constants.HF_HOME)):
            assert not re.search(re.escape(str(path)).encode() + rb"(?![\w-])", content), (name, path)
    here_record, there = json.loads((trained / "run_config.json").read_text()), json.loads(files["run_config.json"])
    assert here_record["run"]["corpus"] == [str(books)] and there["run"]["corpus"] == ["books"]
    assert there["run"]["output_dir"] == "model" and "local_paths" not in there
    assert there["fingerprints"] == [here_record["local_paths"][str(books)]]
    left = {name: part for name, part in there.items() if name not in ("run", "fingerprints")}
    assert left == {name: here_record[name] for name in left}
    changed = {name for name, value in there["run"].items() if value != here_record["run"][name]}
    assert changed == {"corpus", "output_dir"}


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
from d2l_bert.cli import main
assert main(shlex.split({convert!r})) == 0
{from_stock}
assert type(model).__name__ == "BertForMaskedLM"
"""
    others = f"import sys\nsys.modules['d2l_bert'] = None\n{without}\nassert len(tokenizer) == model.config.vocab_size"
    for code in (both, others):
        process = run(code, here, tmp_path / "home", TOKEN)
        assert process.returncode == 0, process.stderr
    assert '"model"' not in card  # the name of the folder


def test_a_published_model_can_be_published_again_under_another_name(here, folder, tmp_path):
    others = 'AutoModel.from_pretrained("google-bert/model")\n'
    (folder / "README.md").open("a").write(others)
    assert main(["publish", str(folder), "someone/bert"]) == 0
    again = tmp_path / "again"
    again.mkdir()
    for name, content in published(here).items():
        (again / name).write_bytes(content)
    assert main(["publish", str(again), "someone/else"]) == 0
    card, (tag,) = published(here, "someone/else")["README.md"].decode(), here.tags("someone/else")
    assert card.count('"someone/else"') == 3 and card.count(tag) == 2 and "someone/bert" not in card and others in card
    assert json.loads(published(here, "someone/else")["run_config.json"])["fingerprints"][0]["name"] == "books"


def test_a_card_with_a_byte_order_mark_or_without_text_gets_the_licence_of_the_option(here, folder):
    card = folder / "README.md"
    metadata = re.match(r"---\n.*?\n---", card.read_text(), re.DOTALL)[0]
    for text in ("\ufeff" + card.read_text(), metadata):
        card.write_text(text)
        assert main(["publish", str(folder), "someone/bert", "--license=mit"]) == 0
        assert ModelCard(published(here)["README.md"].decode()).data.license == "mit"


def test_two_texts_of_one_name_each_have_a_fingerprint():
    paths = {path: {"name": "books", "fingerprint": path} for path in ("/a/books", "/b/books")}
    record = without_paths(
        {"run": {"corpus": list(paths), "seed": 1}, "local_paths": paths, "x": ["/c/d", "~/e", "/"]}
    )
    assert record["run"] == {"corpus": ["books", "books"], "seed": 1} and record["x"] == ["d", "e", "/"]
    assert record["fingerprints"] == list(paths.values()) and "local_paths" not in record


def test_an_edited_card_is_sent_as_edited(here, folder):
    card = folder / "README.md"
    card.write_text(card.read_text().replace("## Uses", "## Made with love\n\nBy us.\n\n## Uses"))
    before = card.read_text()
    assert main(["publish", str(folder), "someone/bert", "--license=mit"]) == 0
    sent = published(here)["README.md"].decode()
    assert "## Made with love\n\nBy us.\n" in sent and card.read_text() == before
    metadata, meant = ModelCard(sent).data.to_dict(), ModelCard(before).data.to_dict()
    assert metadata == {**meant, "license": "mit"}


def test_a_fine_tuned_model_can_be_published_and_its_card_states_only_known_facts(here, trained, tmp_path):
    tuned = tmp_path / "tuned"
    D2lBertForSequenceClassification.from_pretrained(trained, num_labels=3).save_pretrained(tuned)
    AutoTokenizer.from_pretrained(trained).save_pretrained(tuned)
    own = "AutoModelForSequenceClassification"  # the auto_map names this class only
    change_json(tuned / "config.json", auto_map={name: AUTO_MAP[name] for name in ("AutoConfig", own)})
    assert not (tuned / "vocab.txt").exists() and not (tuned / "README.md").exists()
    assert main(["publish", str(tuned), "someone/tuned", "--license=mit"]) == 0
    files = published(here, "someone/tuned")
    assert json.loads(files["config.json"])["auto_map"] == AUTO_MAP
    assert files["vocab.txt"] == (trained / "vocab.txt").read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert card.data.pipeline_tag == "text-classification" and card.data.license == "mit"
    assert card.data.eval_results is None and "Evaluation" not in card.text and "MLM loss" not in card.text
    assert 'AutoModelForSequenceClassification.from_pretrained("someone/tuned", revision="model-' in card.text


def test_a_start_model_from_the_hub_is_the_base_model_on_the_card(here, trained, books, tmp_path, monkeypatch):
    assert main(["publish", str(trained), "someone/bert", "--public"]) == 0
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "further"
    options = ["--max_steps=2", "--mixed_precision=no", "--max_seq_length=48", "--global_batch_size=8"]
    options += ["--license=mit", "--dataloader_num_workers=0", "--init_from=someone/bert"]
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={out}", *options]) == 0
    assert main(["publish", str(out), "someone/further"]) == 0
    card = ModelCard(published(here, "someone/further")["README.md"].decode())
    assert card.data.base_model == "someone/bert"
    assert json.loads(published(here, "someone/further")["run_config.json"])["run"]["init_from"] == "someone/bert"


# ---------------------------------------------------------------------------------------------------------------------
# The token


def test_the_token_is_used_but_is_in_no_output_and_no_file_sent(here, folder, capfd):
    assert main(["publish", str(folder), "someone/bert"]) == 0
    said = capfd.readouterr()
    assert TOKEN in {request.token for request in here.requests} and "someone/bert" in said.out
    assert TOKEN not in said.out + said.err
    for name, content in here.files("someone/bert").items():
        assert TOKEN.encode() not in content, name


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
