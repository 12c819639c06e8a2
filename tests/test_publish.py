"""Publishing a model folder on a Hub, loading it from there, who sees it, and uploads that fail."""

import pytest
import torch
from local_hub import TOKEN
from publishing import SENT, TEXT, published, run
from transformers import AutoTokenizer, BertConfig, BertModel

from d2l_bert import D2lBertForMaskedLM, D2lBertForPreTraining
from d2l_bert.__main__ import main
from d2l_bert.model_cards.publish import hub_errors
from d2l_bert.tokenization.wordpiece import save_tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Publish and load

LOAD = """
import sys
if {remote}:
    sys.modules["d2l_bert"] = None  # importing it now fails
else:
    import d2l_bert
import torch
from transformers import AutoModelForMaskedLM, AutoModelForNextSentencePrediction, AutoTokenizer, pipeline
tensors = {{}}
for revision in {revisions!r}:
    options = dict(trust_remote_code={remote}, revision=revision)
    tokenizer = AutoTokenizer.from_pretrained("someone/bert", **options)
    encoded = tokenizer({text!r}, return_tensors="pt")
    for auto in (AutoModelForMaskedLM, AutoModelForNextSentencePrediction):
        model = auto.from_pretrained("someone/bert", **options).eval()
        assert type(model).__module__.startswith("transformers_modules" if {remote} else "d2l_bert.")
        with torch.no_grad():
            tensors[f"{{revision}} {{auto.__name__}}"] = model(**encoded).logits
    fill = pipeline("fill-mask", model="someone/bert", **options)
    tensors[f"{{revision}} fill"] = torch.tensor([row["score"] for row in fill({text!r})])
torch.save(tensors, {result!r})
"""


def logits(name, **options):
    model = D2lBertForMaskedLM.from_pretrained(name, **options).eval()
    with torch.no_grad():
        return model(**AutoTokenizer.from_pretrained(name, **options)(TEXT, return_tensors="pt")).logits


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True], ids=["with the package", "with its published code alone"])
def test_readers_load_the_same_logits_by_name_by_revision_and_offline(here, trained, tmp_path, remote, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    ((tag, commit),) = here.tags("someone/bert").items()
    assert commit == here.commits("someone/bert")[0]
    revisions, result = [None, tag, commit], tmp_path / "tensors.pt"
    code = LOAD.format(remote=remote, revisions=revisions, text=TEXT, result=str(result))
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        process = run(code, here, tmp_path / "home", TOKEN, **variables)
        assert process.returncode == 0, process.stderr
        tensors = torch.load(result, weights_only=True)
        assert len(tensors) == 9
        for revision in revisions:
            assert torch.equal(tensors[f"{revision} AutoModelForMaskedLM"], logits(trained)), revision
        result.unlink()
        here.stop()


def test_no_weights_or_metrics_of_an_earlier_commit_remain_beside_the_new_ones(here, trained, folder, tmp_path):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    model = D2lBertForPreTraining.from_pretrained(trained)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight *= 2
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    for name in ("metrics.json", "README.md"):
        (folder / name).unlink()
    (folder / "plot.png").write_bytes(b"one that the card may show")
    assert main(["publish", str(folder), "someone/bert"]) == 0
    (folder / "plot.png").unlink()
    assert main(["publish", str(folder), "someone/bert"]) == 0
    files = published(here)
    assert "model-00001-of-00002.safetensors" in files and "plot.png" in files
    assert "model.safetensors" not in files and "metrics.json" not in files
    assert torch.equal(logits("someone/bert", cache_dir=tmp_path / "cache"), logits(folder))
    assert not torch.equal(logits(folder), logits(trained))


def test_publishing_the_same_folder_again_makes_no_commit(here, trained):
    for _ in range(2):
        assert main(["publish", str(trained), "bert"]) == 0  # a name without an owner is under the token's account
    assert len(here.commits("someone/bert")) == 2 and len(here.tags("someone/bert")) == 1


def test_branch_message_and_pull_request_are_used(here, trained, capsys):
    publish = ["publish", str(trained), "someone/bert"]
    assert main([*publish, "--revision=trial", "--commit_message=Try it"]) == 0
    assert published(here, revision="trial").keys() == SENT and not published(here)
    assert here.repositories["someone/bert"].at("trial").title == "Try it"
    (tag,) = here.tags("someone/bert")
    assert here.tags("someone/bert")[tag] == here.branches("someone/bert")["trial"]
    capsys.readouterr()
    assert main([*publish, "--create_pr", "--license=mit"]) == 0
    assert f"{here.endpoint}/someone/bert/discussions/1" in capsys.readouterr().out
    assert published(here, revision="refs/pr/1").keys() == SENT and not published(here)
    assert list(here.tags("someone/bert")) == [tag]
    assert main([*publish, "--create_pr", "--license=isc", "--revision=trial"]) == 0
    assert here.branches("someone/bert").keys() == {"main", "trial"}
    assert published(here, revision="refs/pr/2").keys() == SENT


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
    assert "2_Dense/pytorch_model.bin: is a pickle" in capsys.readouterr().err


def test_a_model_that_was_downloaded_is_published_under_its_new_name(here, trained, tmp_path, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, content in published(here).items():
        (folder / name).write_bytes(content)
    card = folder / "README.md"
    card.write_text(card.read_text() + '\nBeside `from_pretrained("another/bert")`, "someone/bert" is small.\n')
    assert main(["publish", str(folder), "someone/other"]) == 0
    (tag,) = here.tags("someone/other")
    text = published(here, "someone/other")["README.md"].decode()
    assert text.count(f'from_pretrained("someone/other", revision="{tag}", trust_remote_code=True') == 1
    assert text.endswith('\nBeside `from_pretrained("another/bert")`, "someone/bert" is small.\n')
    assert 'from_pretrained("someone/bert"' not in text and 'model="someone/bert"' not in text


# ---------------------------------------------------------------------------------------------------------------------
# Private and public


@pytest.mark.slow
def test_a_private_model_is_visible_to_its_owner_only(here, trained, tmp_path, monkeypatch, capsys):
    assert main(["publish", str(trained), "someone/bert"]) == 0
    assert here.is_private("someone/bert")
    code = """
from d2l_bert.__main__ import main
code = main(["fill-mask", "someone/bert", "A [MASK]."])
from transformers import AutoModel
try:
    AutoModel.from_pretrained("someone/bert", trust_remote_code=True)
except OSError as error:
    print(code, error)
"""
    for token in (None, "hf_made_up_for_another"):
        process = run(code, here, tmp_path / "home", token)
        assert process.stdout.startswith("2 ") and "private repository" in process.stdout, process.stderr
        assert len(process.stderr.splitlines()) == 1 and "log in with `hf auth login`" in process.stderr


def test_a_pull_request_makes_nothing_public(here, trained, capsys):
    for dry_run in ([], ["--dry_run"]):
        assert main(["publish", str(trained), "someone/bert", "--create_pr", "--public", *dry_run]) == 2
        said = capsys.readouterr().err
        assert "makes no repository public; leave public out" in said and said.count("\n") == 1
    assert not here.requests
    assert main(["publish", str(trained), "someone/bert", "--create_pr"]) == 0
    assert here.is_private("someone/bert")


# ---------------------------------------------------------------------------------------------------------------------
# Failures on the way


def test_a_missing_revision_is_refused_before_the_commit(here, trained, capsys):
    assert main(["publish", str(trained), "someone/bert", "--create_pr", "--revision=none"]) == 2
    said = capsys.readouterr().err
    assert "refuses" in said and said.count("\n") == 1 and not published(here)


def test_errors_of_our_own_are_not_reported_as_the_hubs():
    with pytest.raises(RuntimeError, match="ours"), hub_errors("someone/bert"):
        raise RuntimeError("a mistake of ours")
    with pytest.raises(ValueError, match="client has been closed.; .* complete the upload"):
        with hub_errors("someone/bert"):  # when one thread of the client fails, the others find it closed
            raise RuntimeError("Error while uploading 'x' to the Hub.") from RuntimeError("client has been closed")
