"""`d2l-bert evaluate`: two processes give the figures of one, and a run's held-out text its own figures."""

import json
import re
import shutil

import pytest
from conftest import write_books
from judged_models import save_models, write_pairs
from promises.driving import end, start
from runs import run
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from d2l_bert.__main__ import main
from d2l_bert.commands import COMMANDS


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(trained, books, tmp_path_factory):
    return save_models(trained, books, tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def other_books(tmp_path_factory):
    """A text that no model was trained on."""
    return write_books(tmp_path_factory.mktemp("other") / "others", count=3, seed=5)


@pytest.fixture
def evaluate(tmp_path):
    """Run the command; returns the content of its JSON file."""

    def run_command(*arguments):
        output = tmp_path / f"figures-{len(list(tmp_path.glob('figures-*.json')))}.json"
        assert main(["evaluate", *map(str, arguments), f"--output={output}"]) == 0
        return json.loads(output.read_text())

    return run_command


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one(models, other_books, evaluate, tmp_path):
    pairs = write_pairs(tmp_path / "pairs")
    folders = [str(models[name]) for name in ("ours", "bert", "roberta")]
    options = [f"--corpus={other_books}", "--pppl_sentences=9", f"--blimp={pairs}", "--batch_tokens=300"]
    alone = evaluate(*folders, *options)
    output, said = tmp_path / "two.json", tmp_path / "said.txt"
    ranks = start(["evaluate", *folders, *options, f"--output={output}"], processes=2, said=said)
    assert end(ranks, 240) == [0, 0], said.read_text()
    assert said.read_text().count("MLM loss") == 1 and "MLM loss" not in (tmp_path / "said.txt.1").read_text()
    both = json.loads(output.read_text())
    for one, two in zip(alone["models"], both["models"], strict=True):
        assert two["blimp"] == one["blimp"]
        assert two["text"].keys() == one["text"].keys()
        for name, value in one["text"].items():
            assert two["text"][name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name


# ---------------------------------------------------------------------------------------------------------------------
# A run's own figures


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """A file in which each line is a document of one or two sentences; some lines are too short for the runs below."""
    things = ("apple", "book", "cup", "door", "egg", "fork", "gate")
    texts = [
        f"The {things[number % 7]} has {number} parts. It is on the {things[number % 5]}."
        if number % 4
        else "Too short."
        for number in range(400)
    ]
    path = tmp_path_factory.mktemp("lines") / "lines.txt"
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


TEXT_OPTIONS = ["--documents=line", "--language=de", "--validation_fraction=0.2"]
TEXT_OPTIONS += ["--max_validation_characters=1000"]  # a fifth of the lines has more
ROW_OPTIONS = [
    ["--objective=nsp", "--max_eval_pairs=30"],
    ["--pairing=sentences", "--objective=sop", "--mlm_probability=0.30->0.25"],
    ["--objective=none", "--masking=whole_word", "--max_seq_length=24"],
]


@pytest.mark.parametrize("options", ROW_OPTIONS, ids=lambda options: options[0].removeprefix("--"))
def test_the_held_out_figures_are_those_of_the_run_without_an_option(options, lines, evaluate, tmp_path):
    """An option that is given wins over that of the run, whose options are not the defaults."""
    folder = tmp_path / "model"
    run(lines, folder, *TEXT_OPTIONS, *options, "--max_steps=2", "--mixed_precision=no", "--license=mit")
    metrics = json.loads((folder / "metrics.json").read_text())
    found = evaluate(folder, f"--corpus={lines}", "--held_out", "--pppl_sentences=0")["models"][0]["text"]
    names = [name for name in metrics if name.startswith("eval_") and name != "eval_token_entropy"]
    assert len(names) >= 5
    for name in names:
        assert found[name.removeprefix("eval_")] == pytest.approx(metrics[name], rel=1e-6), name
    other = evaluate(folder, f"--corpus={lines}", "--held_out", "--pppl_sentences=0", "--mlm_probability=0.5")
    assert other["models"][0]["text"]["masked_tokens"] > 1.4 * found["masked_tokens"]


def test_held_out_documents_are_refused_where_they_are_not_those_of_the_run(trained, books, lines, tmp_path, capsys):
    (tmp_path / "other.txt").write_text(lines.read_text() + "One more line is another text.\n")
    shutil.copytree(trained, tmp_path / "bare")
    (tmp_path / "bare" / "run_config.json").unlink()
    changed = tmp_path / "changed"
    shutil.copytree(trained, changed)
    record = json.loads((changed / "run_config.json").read_text())
    for model, corpus, data, words in [
        (changed, tmp_path / "other.txt", {}, "another text"),
        (tmp_path / "bare", books, {}, "no run_config.json"),
        (changed, books, {"validation": {"corpus_name": "x"}}, "validation text"),
        (changed, books, {"held_out_fingerprint": "0"}, "other documents"),
    ]:
        (changed / "run_config.json").write_text(json.dumps({**record, "data": {**record["data"], **data}}))
        assert main(["evaluate", str(model), f"--corpus={corpus}", "--held_out"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"error: {model}: " in said and words in said


def test_a_text_without_a_token_is_named(trained, tmp_path, capsys):
    (tmp_path / "private.txt").write_text("\ue000\ue001 \ue000\n")
    assert main(["evaluate", str(trained), f"--corpus={tmp_path / 'private.txt'}", "--pppl_sentences=0"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "private.txt" in said and "cache" not in said


@pytest.mark.parametrize(
    ("auto_class", "command", "others"),
    [
        (AutoModelForSequenceClassification, "evaluate", {"embed", "attention", "finetune"}),
        (AutoModel, "evaluate", {"embed", "attention", "finetune"}),
        (AutoModelForMaskedLM, "next-sentence", {"embed", "attention", "finetune", "evaluate", "fill-mask"}),
    ],
)
def test_a_model_without_the_head_is_told_apart_from_a_damaged_one_with_the_commands_that_take_it(
    auto_class, command, others, trained, tmp_path, fails
):
    folder, pairs = tmp_path / "other", write_pairs(tmp_path / "pairs")
    words = [command, folder, *(["A b.", "C d."] if command == "next-sentence" else [f"--blimp={pairs}"])]
    model = auto_class.from_pretrained(trained)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained).save_pretrained(folder)
    (tmp_path / "lines.txt").write_text("Anna walked.\n")
    said = fails(*words)
    assert type(model).__name__ in said and "cannot be loaded" not in said
    assert set(re.findall(r"[a-z-]+", said.partition("; ")[2])) & set(COMMANDS) == others
    assert main(["embed", str(folder), str(tmp_path / "lines.txt"), "--nearest=Anna"]) == 0
    if "evaluate" in others:
        assert main(["evaluate", str(folder), f"--blimp={pairs}"]) == 0
    state = {name: tensor for name, tensor in model.state_dict().items() if "layer.0.ffn" not in name}
    model.save_pretrained(folder, state_dict=state)
    assert "cannot be loaded" in fails(*words)


def test_a_sentence_that_a_model_cannot_read_or_has_no_known_word_is_not_in_the_sample(trained, evaluate, tmp_path):
    (tmp_path / "text").mkdir()
    known = ["Anna walked to the garden.", "The drum was old.", "Then Hugo left."]
    for number, sentence in enumerate([*known, "κηπος πυργος.", f"Anna {'and Hugo ' * 20}left."]):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{sentence}\n")
    options = [f"--corpus={tmp_path / 'text'}", "--objective=none", "--max_seq_length=24"]
    figures = evaluate(trained, *options, "--pppl_sentences=9")["models"][0]["text"]
    assert (figures["pppl_sentences"], figures["pppl_words"]) == (3, len(" ".join(known).split()))
    assert evaluate(trained, *options, "--pppl_sentences=2")["models"][0]["text"]["pppl_sentences"] == 2
