"""Card metadata: what the Hub accepts passes; what it rejects or shows wrongly is refused in a line with the mend."""

import copy
import os

import pytest
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from d2l_bert.model_cards.metadata import LICENSES, TASKS, check_license, check_metadata, read_metadata


# From the Hub's documentation: the cards of google-bert/bert-base-uncased, answerdotai/ModernBERT-base, coqui/XTTS-v1
# and 01-ai/Yi-34B. Also: a card by Transformers' Trainer, widgets of several tasks, and keys unknown to the Hub.
REAL = {
    "bert": """
        language: en
        tags:
        - exbert
        license: apache-2.0
        datasets:
        - bookcorpus
        - wikipedia""",
    "modernbert": """
        library_name: transformers
        license: apache-2.0
        language:
        - en
        tags: [fill-mask, masked-lm, long-context, modernbert]
        pipeline_tag: fill-mask
        inference: false""",
    "other": """
        license: other
        license_name: coqui-public-model-license
        license_link: https://coqui.ai/cpml""",
    "licence beside the card": """
        license: [other, cc-by-nc-4.0]
        license_name: own-1.0
        license_link: LICENSE.md""",
    "yi": """
        license: mit
        model-index:
        - name: Yi-34B
          results:
          - task:
              type: text-generation
            dataset:
              name: ai2_arc
              type: ai2_arc
            metrics:
            - name: AI2 Reasoning Challenge (25-Shot)
              type: AI2 Reasoning Challenge (25-Shot)
              value: 64.59
            source:
              name: Open LLM Leaderboard
              url: https://huggingface.co/spaces/HuggingFaceH4/open_llm_leaderboard""",
    "trainer": """
        license: [mit, cc-by-4.0]
        base_model: distilbert-base-uncased
        base_model_relation: finetune
        tags: []
        metrics: [accuracy]
        datasets: emotion
        language: ['no', code, multilingual, haw]
        model-index:
        - name: finetuned
          results:
          - task: {name: Text Classification, type: text-classification}
            dataset: {name: emotion, type: dair-ai/emotion, config: split, split: validation, args: {a: 1}}
            metrics: [{name: Accuracy, type: accuracy, value: 20.0 ± 1.2}]
        - name: unmeasured
          results: []""",
    "widgets": """
        license: unknown
        inference: {parameters: {temperature: 0.7}}
        language_bcp47: [pt-BR]
        some_key: {of: [ours, 1, null]}
        thumbnail:
        widget:
        - text: Paris is [MASK].
          example_title: a city
          output: [{label: 'true', score: 0.5}, {label: nice, score: 1}]
        - src: https://example.org/a.flac
          output: {text: hello}""",
}


def metadata(yaml):
    return read_metadata(f"---\n{yaml}\n---\n\n# A card\n")


def refusal(check, *arguments):
    with pytest.raises(ValueError) as caught:
        check(*arguments)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.parametrize("name", REAL)
def test_cards_from_the_hub_pass_and_are_not_changed(name):
    given = metadata(REAL[name])
    before = copy.deepcopy(given)
    check_metadata(given)
    assert given == before


def test_the_card_of_a_run_passes(trained, tmp_path, monkeypatch):
    given = read_metadata((trained / "README.md").read_text())
    check_metadata(given, mask_token="[MASK]")
    assert given["license"] == "apache-2.0" and len(given["widget"]) == 5 and given["model-index"]
    monkeypatch.chdir(tmp_path)
    assert "license: the card lacks a licence; give --license" in refusal(check_metadata, given | {"license": None})
    assert "[BLANK]" in refusal(check_metadata, given, "[BLANK]")


def test_a_card_made_by_huggingface_hub_passes():
    result = EvalResult("fill-mask", "some/set", "Some set", "accuracy", 0.5, dataset_config="1.0")
    data = ModelCardData(license="mit", language="no", model_name="1", eval_results=[result])
    check_metadata(read_metadata(str(ModelCard(f"---\n{data.to_yaml()}\n---\ntext"))))


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("# A card", "has no metadata; begin it"),
        ("", "has no metadata"),
        ("# A card\n---\nlicense: mit\n---\n", "has no metadata"),
        ("---\nlicense: mit\n", "has no metadata"),
        ("---\nlicense: mit\ntags: [a\n---\n", "line 3: not valid YAML"),
        (
            "\n\n---\nlicense: mit\nlanguage: en: fr\n---\n",
            "line 5: not valid YAML (mapping values are not allowed here)",
        ),
        ("\ufeff---\r\nlicense: mit\r\n\ttags: a\r\n---\r\n", "line 3: not valid YAML"),
        (
            "---\nlicense: mit\ntags: [a]\nlicense: gpl\n---\n",
            "line 4: not valid YAML (the key 'license' appears twice)",
        ),
        ("---\nwidget:\n- text: a\n  text: b\n---\n", "line 4: not valid YAML (the key 'text' appears twice)"),
        ("---\nlicense: !!python/object:a.b {}\n---\n", "line 2: not valid YAML"),
        ("---\n[a]: b\n---\n", "line 2: not valid YAML (found unhashable key)"),
        ("---\nwhen: 2024-13-45\n---\n", "not valid YAML (month must be in 1..12"),
        ("---\nlicense: \x07\n---\n", "not valid YAML"),
        ("---\nwhat: !!bool maybe\n---\n", "not valid YAML"),
        ("---\n- license\n---\n", "is ['license']; give it as lines of `key: value`"),
        ("---\njust text\n---\n", "is 'just text'; give it"),
        ("---\n\n---\n", "is None; give it"),
    ],
)
def test_a_card_without_readable_metadata_is_refused(card, said):
    assert said in refusal(read_metadata, card)


def test_metadata_is_read_by_the_rules_of_yaml():
    card = "\ufeff---\nlicense: mit\nbase: &b {x: 1}\nmore: {<<: *b, y: 2}\n---\n# A card\n---\nlicense: gpl\n---\n"
    assert read_metadata(card) == read_metadata(card.replace("\n", "\r\n"))
    assert read_metadata(card) == {"license": "mit", "base": {"x": 1}, "more": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Apache 2.0", "apache-2.0"),
        ("Apache License, Version 2.0", "apache-2.0"),
        ("apache-2", "apache-2.0"),
        ("APACHE_2.0", "apache-2.0"),
        ("MIT", "mit"),
        ("The MIT License", "mit"),
        ("CC BY-SA 4.0", "cc-by-sa-4.0"),
        ("GPL 3.0", "gpl-3.0"),
        ("BSD 3-Clause", "bsd-3-clause"),
    ],
)
def test_a_licence_in_another_spelling_is_refused_with_the_hubs_identifier(written, meant):
    said = f"license {written!r} is not one that the Hub knows; write {meant}"
    assert refusal(check_license, written) == said == refusal(check_metadata, {"license": written})


@pytest.mark.parametrize("unknown", ["proprietary", "", "\n", 2, None, True, ["mit"], "all rights\nreserved"])
def test_an_unknown_licence_is_refused(unknown):
    assert "license" in refusal(check_license, unknown)


def test_every_licence_and_task_passes_and_none_is_listed_twice():
    assert len(LICENSES) == len(set(LICENSES)) == 83 and len(TASKS) == len(set(TASKS))
    for identifier in LICENSES:
        check_license(identifier)
    for task in TASKS:
        check_metadata({"license": "mit", "pipeline_tag": task})


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("tags: [a]", "the card lacks a licence; give --license apache-2.0, or write `license: "),
        ("license:", "the card lacks a licence"),
        ("license: []", "the card lacks a licence"),
        ("license: [mit, Apache]", "license 'Apache' is not one that the Hub knows; write apache-2.0"),
        ("license: {name: mit}", "license is {'name': 'mit'}"),
        ("license: 2.0", "license is 2.0; YAML does not read it as text; put it in quotes"),
        ("license: other", "license other needs a license_name beside it"),
        ("license: [other]\nlicense_name: my-own", "license other needs a license_link beside it"),
        (
            "license: other\nlicense_name: My own\nlicense_link: LICENSE",
            "license_name 'My own' is not one that the Hub",
        ),
        (
            "license: other\nlicense_name: my-own\nlicense_link: ask me",
            "license_link 'ask me' is not one that the Hub",
        ),
        ("license: other\nlicense_name: 2.0\nlicense_link: LICENSE", "license_name is 2.0; YAML"),
    ],
)
def test_a_card_with_an_unclear_licence_is_refused(yaml, said):
    assert said in refusal(check_metadata, metadata(yaml))


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("language: no", 'language is False; YAML reads no, off, yes and on as that; put it in quotes, as "no"'),
        ("language: [en, no]", "language is False"),
        ("language: English", "language 'English' is not one that the Hub takes; write an ISO 639 code"),
        ("language: EN", "language 'EN' is not one"),
        ("language: python", "language 'python' is not one"),
        (
            "language: pt-br",
            "language 'pt-br' is not one that the Hub takes; write pt, and pt-br under language_bcp47",
        ),
        ("language: [en, zh_CN]", "write zh, and zh-CN under language_bcp47"),
        ("language: {en: 1}", "language is {'en': 1}; write text"),
        ("language: [null]", "language is None; write text"),
        ("library_name: [transformers]", "library_name is ['transformers']; write text"),
        ("pipeline_tag: fill_mask", "pipeline_tag 'fill_mask' is not one that the Hub knows; write fill-mask"),
        ("pipeline_tag: guessing", "write one of https://huggingface.co/tasks"),
        ("pipeline_tag: [fill-mask]", "pipeline_tag is ['fill-mask']; write text"),
        ("tags: bert", "tags is 'bert', not a list; write each on a line of its own that begins with -"),
        ("tags: [bert, 1.0]", "tags is 1.0; YAML does not read it as text; put it in quotes"),
        ("tags: [2024-01-01]", "YAML does not read it as text"),
        ("tags: ['']", "tags is ''; write text, or take it out"),
        ("metrics: 1", "metrics is 1; YAML"),
        ("model_name: 7", "model_name is 7; YAML"),
        ("inference: 'no'", "inference is 'no'; write false, or `parameters:`"),
        ("1: a", "a key is 1; YAML"),
        (
            "base_model_relation: fine-tuned",
            "base_model_relation 'fine-tuned' is not one that the Hub knows; write finetune",
        ),
        ("base_model_relation: child", "write adapter or merge or quantized or finetune"),
        ("eval_results: [1]\nmodel_name: a", "huggingface_hub refuses the card's metadata: "),
        ("self: 1", "huggingface_hub refuses the card's metadata: "),
    ],
)
def test_a_key_with_a_value_that_the_hub_rejects_is_refused(yaml, said):
    assert said in refusal(check_metadata, metadata(f"license: mit\n{yaml}"))


@pytest.mark.parametrize("key", ["datasets", "base_model"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/data/books", "is a path on this machine"),
        ("~/books", "is a path on this machine"),
        ("./books", "is a path on this machine"),
        ("../books", "is a path on this machine"),
        ("..", "is a path on this machine"),
        ("data\\books", "is a path on this machine"),
        ("C:/books", "is a path on this machine"),
        ("file:///books", "is a path on this machine"),
        ("here", "is a path on this machine"),
        ("some/here", "is a path on this machine"),
        ("books.txt", "is the name of a file"),
        ("corpus/books.JSONL", "is the name of a file"),
        ("books.txt.zst", "is the name of a file"),
        ("MS Marco", "cannot be an id on the Hub"),
        ("some/set:config", "cannot be an id on the Hub"),
        ("https://huggingface.co/datasets/some/set", "cannot be an id on the Hub"),
        ("a/b/c", "cannot be an id on the Hub"),
        ("bücher", "cannot be an id on the Hub"),
        ("a--b", "cannot be an id on the Hub"),
    ],
)
def test_a_name_that_is_no_hub_id_is_refused(key, name, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("some/here")
    (tmp_path / "here").write_text("")
    for value in (name, ["owner/name", name]):
        said = refusal(check_metadata, {"license": "mit", key: value})
        assert said.startswith(f"{key}: {name!r} {why}") and "remove the entry, or write the " in said


@pytest.mark.parametrize("name", ["imdb", "Salesforce/wikitext", "owner/a.b_c-d", "mc4", "c4.en"])
def test_a_hub_id_passes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_metadata({"license": "mit", "datasets": name, "base_model": [name]})


INDEX = metadata(REAL["yi"])["model-index"]
RESULT = "model-index[0].results[0]"


def changed(path, value):
    """A copy of `INDEX` with another value at a path; without the entry if the value is `...`."""
    index = copy.deepcopy(INDEX)
    *parents, last = path
    place = index
    for step in parents:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return {"license": "mit", "model-index": index}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ([0, "name"], ..., "model-index[0] has no name; add a line `name: ...`"),
        ([0, "name"], 7, "model-index[0].name is 7; YAML"),
        ([0, "results"], ..., "model-index[0] has no results"),
        ([0, "results"], {}, "model-index[0].results is {}, not a list"),
        ([0], "Yi", "model-index[0] is 'Yi'; give it as lines of"),
        ([0, "results", 0, "task"], ..., f"{RESULT} has no task"),
        ([0, "results", 0, "task", "type"], ..., f"{RESULT}.task has no type"),
        ([0, "results", 0, "task", "name"], None, f"{RESULT}.task.name is None; write text, or take it out"),
        ([0, "results", 0, "dataset"], ..., f"{RESULT} has no dataset"),
        ([0, "results", 0, "dataset"], "ai2_arc", f"{RESULT}.dataset is 'ai2_arc'; give it as lines"),
        ([0, "results", 0, "dataset", "name"], ..., f"{RESULT}.dataset has no name"),
        ([0, "results", 0, "dataset", "type"], ..., f"{RESULT}.dataset has no type"),
        ([0, "results", 0, "dataset", "type"], "house price prediction", f"{RESULT}.dataset.type 'house price"),
        ([0, "results", 0, "dataset", "type"], "some/set:config", f"{RESULT}.dataset.type 'some/set:config'"),
        ([0, "results", 0, "dataset", "type"], "books, python-docs", "and the full name as dataset.name"),
        ([0, "results", 0, "dataset", "type"], "a/b/c", f"{RESULT}.dataset.type 'a/b/c'"),
        ([0, "results", 0, "dataset", "config"], None, f"{RESULT}.dataset.config is None"),
        ([0, "results", 0, "dataset", "config"], 2020, f"{RESULT}.dataset.config is 2020; YAML"),
        ([0, "results", 0, "dataset", "split"], ["test"], f"{RESULT}.dataset.split is ['test']"),
        ([0, "results", 0, "metrics"], ..., f"{RESULT} has no metrics"),
        ([0, "results", 0, "metrics", 0, "type"], ..., f"{RESULT}.metrics[0] has no type"),
        ([0, "results", 0, "metrics", 0, "value"], ..., f"{RESULT}.metrics[0] has no value"),
        ([0, "results", 0, "metrics", 0, "value"], float("nan"), f"{RESULT}.metrics[0].value is nan; write a finite"),
        ([0, "results", 0, "metrics", 0, "value"], float("inf"), f"{RESULT}.metrics[0].value is inf"),
        ([0, "results", 0, "metrics", 0, "value"], None, f"{RESULT}.metrics[0].value is None"),
        ([0, "results", 0, "metrics", 0, "value"], True, f"{RESULT}.metrics[0].value is True"),
        ([0, "results", 0, "source", "url"], ..., "huggingface_hub refuses the card's metadata: "),
    ],
)
def test_an_evaluation_result_that_lacks_an_entry_is_refused(path, value, said):
    assert said in refusal(check_metadata, changed(path, value))


@pytest.mark.parametrize("corpus", ["python-docs", "books", "ai2_arc", "Salesforce/wikitext", "v1.0"])
def test_a_result_on_a_corpus_with_a_plain_name_passes(corpus):
    check_metadata(changed([0, "results", 0, "dataset", "type"], corpus))


@pytest.mark.parametrize(
    ("widget", "said"),
    [
        ("{text: a}", "widget is {'text': 'a'}, not a list"),
        ("[a]", "widget[0] is 'a'; give it as lines"),
        ("[{text: 1}]", "widget[0].text is 1; YAML"),
        ("[{src: a}]", "widget[0] has no text"),
        ("[{text: 'a [MASK]'}, {text: b}]", "widget[1].text 'b' has no [MASK]; put one into it"),
        ("[{text: '[MASK]', output: good}]", "widget[0].output is 'good', not a list"),
        ("[{text: '[MASK]', output: [good]}]", "widget[0].output[0] is 'good'; give it as lines"),
        ("[{text: '[MASK]', output: [{score: 1}]}]", "widget[0].output[0] has no label"),
        ("[{text: '[MASK]', output: [{label: true, score: 1}]}]", "widget[0].output[0].label is True; YAML"),
        ("[{text: '[MASK]', output: [{label: a}]}]", "widget[0].output[0] has no score"),
        ("[{text: '[MASK]', output: [{label: a, score: '1'}]}]", "widget[0].output[0].score is '1'; write a finite"),
        ("[{text: '[MASK]', output: [{label: a, score: .nan}]}]", "widget[0].output[0].score is nan"),
    ],
)
def test_a_widget_that_the_hub_cannot_show_is_refused(widget, said):
    assert said in refusal(check_metadata, metadata(f"license: mit\nwidget: {widget}"), "[MASK]")


def test_the_error_line_cuts_a_long_value_short():
    assert "…" in refusal(check_metadata, {"license": "mit", "tags": "a\n" * 1000})
