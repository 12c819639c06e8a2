"""Publishing a model folder on a Hub: what is sent, where to, and what stands there afterwards."""

import json
import re

import pytest
from local_hub import TOKEN
from publishing import SENT, TEXT, published, run
from transformers import AutoTokenizer, BertConfig, BertModel

from d2l_bert import D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.model_cards.publish import hub_errors
from d2l_bert.tokenization.wordpiece import save_tokenizer


def test_no_weights_or_metrics_of_an_earlier_commit_remain_beside_the_new_ones(here, trained, folder):
    for _ in range(2):  # a name without an owner is under the token's account; the same files make no second commit
        assert main(["publish", str(trained), "bert"]) == 0
    assert len(here.commits("someone/bert")) == 2 and len(here.tags("someone/bert")) == 1
    (folder / "model.safetensors").unlink()
    D2lBertForPreTraining.from_pretrained(trained).save_pretrained(folder, max_shard_size="50KB")
    for name in ("metrics.json", "README.md"):
        (folder / name).unlink()
    (folder / "plot.png").write_bytes(b"one that the card may show")
    assert main(["publish", str(folder), "someone/bert"]) == 0
    (folder / "plot.png").unlink()
    assert main(["publish", str(folder), "someone/bert"]) == 0
    files = published(here)
    assert "model-00001-of-00002.safetensors" in files and "plot.png" in files
    assert "model.safetensors" not in files and "metrics.json" not in files


def test_branch_message_and_pull_request_are_used(here, trained, capsys):
    publish = ["publish", str(trained), "someone/bert"]
    assert main([*publish, "--revision=trial", "--commit_message=Try it"]) == 0
    assert published(here, revision="trial").keys() == SENT and not published(here)
    assert here.repositories["someone/bert"].at("trial").title == "Try it"
    assert list(here.tags("someone/bert").values()) == [here.branches("someone/bert")["trial"]]
    capsys.readouterr()
    assert main([*publish, "--create_pr", "--license=mit"]) == 0
    assert f"{here.endpoint}/someone/bert/discussions/1" in capsys.readouterr().out
    assert published(here, revision="refs/pr/1").keys() == SENT and not published(here)
    assert len(here.tags("someone/bert")) == 1 and here.is_private("someone/bert")
    assert main([*publish, "--create_pr", "--revision=none"]) == 2
    said = capsys.readouterr().err
    assert (
        "404 Invalid rev id" in said
        and said.count("\n") == 1
        and here.branches("someone/bert").keys()
        == {
            "main",
            "trial",
        }
    )


def test_a_stock_bert_with_a_padded_vocabulary_and_its_pooling_is_published(here, trained, tmp_path, capsys):
    """Many BERTs have more entries than their tokenizer, and a sentence-transformers model has modules beside it."""
    tokenizer, folder = AutoTokenizer.from_pretrained(trained), tmp_path / "stock"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(tokenizer) + 7, **sizes)).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    modules = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"}
    for name in modules:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"{}")
    assert main(["publish", str(folder), "someone/stock", "--license=mit"]) == 0
    assert published(here, "someone/stock").keys() - SENT == modules
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    assert main(["publish", str(folder), "someone/stock", "--license=mit"]) == 2
    assert "2_Dense/pytorch_model.bin" in capsys.readouterr().err


def test_a_model_that_was_downloaded_is_published_under_its_new_name(here, trained, tmp_path, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    for name, content in published(here).items():
        (tmp_path / name).write_bytes(content)
    card = tmp_path / "README.md"
    card.write_text(card.read_text() + '\nBeside `from_pretrained("another/bert")`, "someone/bert" is small.\n')
    assert main(["publish", str(tmp_path), "someone/other"]) == 0
    (tag,) = here.tags("someone/other")
    text = published(here, "someone/other")["README.md"].decode()
    assert text.count(f'from_pretrained("someone/other", revision="{tag}", trust_remote_code=True') == 1
    assert text.endswith('\nBeside `from_pretrained("another/bert")`, "someone/bert" is small.\n')
    assert 'from_pretrained("someone/bert"' not in text and 'model="someone/bert"' not in text


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
    assert "pretrained further from model on books" in card and "base_model" not in card and str(tmp_path) not in card


@pytest.mark.slow
def test_the_cards_examples_run_as_written_and_pin_the_revision_of_code(here, trained, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    card, (tag,) = published(here)["README.md"].decode(), here.tags("someone/bert")
    filling, tuning = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert tuning.count(f'from_pretrained("someone/bert", revision="{tag}", trust_remote_code=True') == 1
    code = f"""
import sys
sys.modules["d2l_bert"] = None  # importing it now fails
{filling}
assert len(fill({TEXT!r})) == 5
{tuning}
assert type(model).__name__ == "D2lBertForSequenceClassification"
"""
    with_package = "import d2l_bert\n" + filling.replace(f', revision="{tag}", trust_remote_code=True', "")
    for program in (code, with_package):
        process = run(program, here, tmp_path / "home", TOKEN)
        assert process.returncode == 0, process.stderr
    assert '"model"' not in card  # the name of the folder


def test_errors_of_our_own_are_not_reported_as_the_hubs():
    with pytest.raises(RuntimeError, match="ours"), hub_errors("someone/bert"):
        raise RuntimeError("a mistake of ours")
    with pytest.raises(ValueError, match="client has been closed.*the same command completes the upload"):
        with hub_errors("someone/bert"):  # when one thread of the client fails, the others find it closed
            raise RuntimeError("Error while uploading 'x' to the Hub.") from RuntimeError("client has been closed")
