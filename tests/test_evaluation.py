"""`d2l-bert evaluate`: one process or two, the held-out text of a run, scores of lines, the table of runs."""

import csv
import json
import math
import re
import shutil
import statistics
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, write_books
from judged_models import save_models, write_pairs
from promises.driving import end, start
from runs import run
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from d2l_bert.__main__ import main
from d2l_bert.commands import COMMANDS


@pytest.fixture(scope="module")
def models(trained, books, tmp_path_factory):
    return save_models(trained, books, tmp_path_factory.mktemp("judged"))


@pytest.fixture
def evaluate(tmp_path):
    """Run the command; returns the content of its JSON file."""

    def run_command(*arguments):
        output = tmp_path / f"figures-{len(list(tmp_path.glob('figures-*.json')))}.json"
        assert main(["evaluate", *map(str, arguments), f"--output={output}"]) == 0
        return json.loads(output.read_text())

    return run_command


@pytest.mark.slow
def test_two_processes_give_the_figures_of_one(models, evaluate, tmp_path):
    others = write_books(tmp_path / "others", count=3, seed=5)  # a text that no model was trained on
    pairs = write_pairs(tmp_path / "pairs")
    folders = [str(models[name]) for name in ("ours", "bert", "roberta")]
    options = [f"--corpus={others}", "--pppl_sentences=9", f"--blimp={pairs}", "--batch_tokens=300"]
    alone = evaluate(*folders, *options)
    output = tmp_path / "two.json"
    said = tmp_path / "said.txt"
    ranks = start(["evaluate", *folders, *options, f"--output={output}"], processes=2, said=said)
    assert end(ranks, 240) == [0, 0], said.read_text()
    assert said.read_text().count("MLM loss") == 1
    assert "MLM loss" not in (tmp_path / "said.txt.1").read_text()
    both = json.loads(output.read_text())
    for one, two in zip(alone["models"], both["models"], strict=True):
        assert two["blimp"] == one["blimp"]
        assert two["text"].keys() == one["text"].keys()
        for name, value in one["text"].items():
            of_one = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert two["text"][name] == of_one, name


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
    ["--objective=nsp", "--max_eval_pairs=30", "--ema_decay=0.5"],  # the average is evaluated and published
    ["--pairing=sentences", "--objective=sop", "--mlm_probability=0.30->0.25"],
    ["--objective=none", "--masking=whole_word", "--max_seq_length=24"],
]


@pytest.mark.slow
@pytest.mark.parametrize("options", ROW_OPTIONS, ids=lambda options: options[0].removeprefix("--"))
def test_the_held_out_figures_are_those_of_the_run_without_an_option(options, lines, evaluate, tmp_path):
    """An option that is given wins over that of the run, whose options are not the defaults."""
    folder = tmp_path / "model"
    run(lines, folder, *TEXT_OPTIONS, *options, "--max_steps=2", "--mixed_precision=no", "--license=mit")
    metrics = json.loads((folder / "metrics.json").read_text())
    found = evaluate(folder, f"--corpus={lines}", "--held_out", "--pppl_sentences=0")["models"][0]["text"]
    of_the_run_alone = ("eval_token_entropy", "eval_initial_mlm_loss")
    names = [name for name in metrics if name.startswith("eval_") and name not in of_the_run_alone]
    assert len(names) >= 5
    for name in names:
        assert found[name.removeprefix("eval_")] == pytest.approx(metrics[name], rel=1e-6), name
    other = evaluate(folder, f"--corpus={lines}", "--held_out", "--pppl_sentences=0", "--mlm_probability=0.5")
    assert other["models"][0]["text"]["masked_tokens"] > 1.4 * found["masked_tokens"]


@pytest.mark.slow
def test_held_out_documents_are_refused_where_they_are_not_those_of_the_run(trained, books, lines, tmp_path, capsys):
    (tmp_path / "other.txt").write_text(lines.read_text() + "One more line is another text.\n")
    shutil.copytree(trained, tmp_path / "bare")
    (tmp_path / "bare" / "run_config.json").unlink()
    changed = tmp_path / "changed"
    shutil.copytree(trained, changed)
    record = json.loads((changed / "run_config.json").read_text())
    cases = [
        (changed, tmp_path / "other.txt", {}, "another text"),
        (tmp_path / "bare", books, {}, "no run_config.json"),
        (changed, books, {"validation": {"corpus_name": "x"}}, "validation text"),
        (changed, books, {"held_out_fingerprint": "0"}, "other documents"),
    ]
    for model, corpus, changes, words in cases:
        data = {**record["data"], **changes}
        (changed / "run_config.json").write_text(json.dumps({**record, "data": data}))
        assert main(["evaluate", str(model), f"--corpus={corpus}", "--held_out"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"error: {model}: " in said and words in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("auto_class", "command", "others"),
    [
        (AutoModelForSequenceClassification, "evaluate", {"embed", "attention", "finetune", "predict"}),
        (AutoModel, "evaluate", {"embed", "attention", "finetune"}),
        (AutoModelForMaskedLM, "next-sentence", {"embed", "attention", "finetune", "evaluate", "fill-mask"}),
    ],
)
def test_a_model_without_the_head_is_told_apart_from_a_damaged_one_with_the_commands_that_take_it(
    auto_class, command, others, trained, tmp_path, fails
):
    folder = tmp_path / "other"
    pairs = write_pairs(tmp_path / "pairs")
    asked = ["A b.", "C d."] if command == "next-sentence" else [f"--blimp={pairs}"]
    words = [command, folder, *asked]
    model = auto_class.from_pretrained(trained)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained).save_pretrained(folder)
    (tmp_path / "lines.txt").write_text("Anna walked.\n")
    said = fails(*words)
    assert type(model).__name__ in said and "cannot be loaded" not in said
    advice = said.partition("; ")[2].replace("evaluate --test_file", "")  # that is for labelled rows
    assert set(re.findall(r"[a-z-]+", advice)) & set(COMMANDS) == others
    assert main(["embed", str(folder), str(tmp_path / "lines.txt"), "--nearest=Anna"]) == 0
    if "evaluate" in others:
        assert main(["evaluate", str(folder), f"--blimp={pairs}"]) == 0
    state = {name: tensor for name, tensor in model.state_dict().items() if "layer.0.ffn" not in name}
    model.save_pretrained(folder, state_dict=state)
    assert "cannot be loaded" in fails(*words)


def test_fill_mask_says_where_a_text_has_words_that_the_tokenizer_does_not_know(trained, capsys):
    for text, has_unknown in (("Anna [MASK].", False), ("κηπος [MASK].", True)):
        assert main(["fill-mask", str(trained), text]) == 0
        assert ("[UNK]" in capsys.readouterr().out) == has_unknown


def test_a_sentence_that_a_model_cannot_read_or_has_no_known_word_is_not_in_the_sample(trained, evaluate, tmp_path):
    (tmp_path / "text").mkdir()
    known = ["Anna walked to the garden.", "The drum was old.", "Then Hugo left."]
    for number, sentence in enumerate([*known, "κηπος πυργος.", f"Anna {'and Hugo ' * 20}left."]):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{sentence}\n")
    options = [f"--corpus={tmp_path / 'text'}", "--objective=none", "--max_seq_length=24"]
    figures = evaluate(trained, *options, "--pppl_sentences=9")["models"][0]["text"]
    assert (figures["pppl_sentences"], figures["pppl_words"]) == (3, len(" ".join(known).split()))
    assert evaluate(trained, *options, "--pppl_sentences=2")["models"][0]["text"]["pppl_sentences"] == 2


# ---------------------------------------------------------------------------------------------------------------------
# `--line_scores`: each line's pseudo-log-likelihood, as Transformers' models give it, line by line


LINES = [
    "Then Anna sold the apple in the garden, and nobody knew.",
    "apple apple garden Boris",
    "",
    "The valley was old.",
    "☃ ☃",
    "Boris found ☃ in the library of the old harbour, and Clara walked to the market with a drum.",
]


@pytest.fixture(scope="module")
def reader(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    model = AutoModelForMaskedLM.from_pretrained(trained)
    return SimpleNamespace(tokenizer=tokenizer, model=model.eval(), folder=trained)


@torch.no_grad()
def expected(reader, line, apart):
    """Score, tokens scored and `[UNK]`, in a loop over groups of tokens; `apart` 0 is each token alone."""
    limit = reader.model.config.max_position_embeddings
    ids = reader.tokenizer(line, truncation=True, max_length=limit, return_tensors="pt")["input_ids"][0]
    special = {reader.tokenizer.cls_token_id, reader.tokenizer.sep_token_id, reader.tokenizer.unk_token_id}
    places = [place for place, number in enumerate(ids.tolist()) if number not in special]
    total = 0.0
    for first in range(min(apart or len(places), len(places))):
        group = places[first :: apart or len(places)]
        masked = ids.clone()
        masked[group] = reader.tokenizer.mask_token_id
        chances = reader.model(masked[None]).logits[0].log_softmax(-1)
        total += sum(float(chances[place, ids[place]]) for place in group)
    return total, len(places), int((ids == reader.tokenizer.unk_token_id).sum())


@pytest.mark.parametrize("apart", [7, 3, 0])
def test_scores_are_those_of_a_loop_over_each_line(reader, tmp_path, capsys, apart):
    lines = [*LINES, " ".join([LINES[0]] * 9)]  # the last has more tokens than the model has positions
    (tmp_path / "lines.log").write_text("\n".join(lines) + "\n")
    options = [f"--line_scores={tmp_path / 'lines.log'}", f"--line_masks={apart}"]
    assert main(["evaluate", str(reader.folder), *options]) == 0
    shown = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(int(row[4]), row[5]) for row in shown] == list(enumerate(lines, 1))
    for row, line in zip(shown, lines, strict=True):
        of_token, total, of_word, unknown = map(float, row[:4])
        score, tokens, of_unknown = expected(reader, line, apart)
        if tokens:
            assert total == pytest.approx(score, abs=2e-3)
            assert of_token == pytest.approx(score / tokens, abs=2e-3)
            limit = reader.model.config.max_position_embeddings
            read = reader.tokenizer(line, truncation=True, max_length=limit, return_offsets_mapping=True)
            words = line[: max(end for _, end in read["offset_mapping"])].split()
            assert of_word == pytest.approx(score / len(words), abs=2e-3)
        else:
            assert {of_token, total, of_word} == {-math.inf}
        assert unknown == pytest.approx(of_unknown / max(1, tokens + of_unknown), abs=1e-4)


@pytest.mark.slow
def test_rows_of_a_table_are_scored_and_nothing_else_stands_beside_them(reader, tmp_path, capsys, fails):
    (tmp_path / "rows.csv").write_text('message\n"The valley\nwas old."\n""\n')  # an empty cell keeps its row
    options = [f"--line_scores={tmp_path / 'rows.csv'}", "--text_column=message"]
    assert main(["evaluate", str(reader.folder), *options]) == 0
    shown = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[5] for row in shown] == ["The valley was old.", ""]
    assert "one model" in fails("evaluate", reader.folder, reader.folder, *options)
    for more in (f"--output={tmp_path / 'figures.json'}", "--score=within_word_l2r"):
        assert "alone" in fails("evaluate", reader.folder, *options, more)


# ---------------------------------------------------------------------------------------------------------------------
# The table of runs: those that differ in their seed alone are one row


@pytest.mark.slow
def test_runs_of_several_seeds_are_one_row_with_mean_and_deviation(books, tmp_path, capsys):
    folders = [tmp_path / name for name in ("nsp-1", "nsp-2", "nsp-3", "mlm")]
    for folder in folders:
        kind, _, seed = folder.name.partition("-")
        options = [f"--output_dir={folder}", f"--seed={seed or 1}", "--max_steps=4", "--license=mit"]
        options += ["--objective=none"] if kind == "mlm" else []
        assert main(["pretrain", f"--corpus={books}", *SMALL, *options]) == 0
    words = ["evaluate", *map(str, folders), f"--corpus={books}", "--held_out", "--pppl_sentences=0"]
    capsys.readouterr()
    for name in ("all.json", "runs.csv", "runs.md"):
        assert main([*words, f"--output={tmp_path / name}"]) == 0
    table = (tmp_path / "runs.md").read_text()
    assert table in capsys.readouterr().out
    first, second = csv.DictReader((tmp_path / "runs.csv").open(newline=""))
    assert first["runs"] == "nsp" and first["seeds"] == "3"
    assert second["runs"] == "mlm" and second["seeds"] == "1"
    models = json.loads((tmp_path / "all.json").read_text())["models"]
    assert models[3]["parameters"] == AutoModelForMaskedLM.from_pretrained(folders[3]).num_parameters()
    for column, name in {"MLM loss": "mlm_loss", "NSP accuracy": "nsp_accuracy"}.items():
        values = [model["text"][name] for model in models[:3]]
        assert float(first[column]) == pytest.approx(statistics.fmean(values))
        assert float(first[f"{column}, standard deviation"]) == pytest.approx(statistics.stdev(values))
    assert second["NSP accuracy"] == second["MLM loss, standard deviation"] == ""
    seconds = [json.loads((folder / "metrics.json").read_text())["train_seconds"] for folder in folders[:3]]
    assert float(first["minutes"]) == pytest.approx(statistics.fmean(seconds) / 60)
    header, _, *rows = table.splitlines()
    assert header.count("|") == rows[0].count("|") == rows[1].count("|")
    assert "(" in rows[0]
    assert "(" not in rows[1]


def record_of(folder, **changes):
    """Change entries of a copied run's record: those of `run` and `data` are merged, others are replaced."""
    record = json.loads((folder / "run_config.json").read_text())
    for name, value in changes.items():
        record[name] = {**record[name], **value} if isinstance(value, dict) else value
    (folder / "run_config.json").write_text(json.dumps(record))


def with_swapped_words(folder):
    """Give two words of a model's tokenizer each other's number: a tokenizer of as many tokens, and another one."""
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    anna = vocab["anna"]
    vocab["anna"] = vocab["boris"]
    vocab["boris"] = anna
    (folder / "tokenizer.json").write_text(json.dumps(state))


@pytest.mark.slow
def test_only_runs_that_differ_in_nothing_but_their_seed_are_seeds_of_one(trained, tmp_path, capsys):
    """Copies of one run, whose records say that they had other seeds, texts, start models or options."""
    changes = {
        "run-1": {"run": {"seed": 1}},
        "run-2": {"run": {"seed": 2}},
        "again": {"run": {"seed": 2}},
        "text": {"run": {"seed": 3}, "data": {"corpus_fingerprint": "another"}},
        "start": {"run": {"seed": 3}, "fingerprints": [{"name": "start", "fingerprint": "another"}]},
        "option": {"run": {"seed": 3, "weight_decay": 0.3}},
        "words": {"run": {"seed": 3}},
        "unfinished": {"run": {"seed": 3}},
        "bare": {},
    }
    for number, (name, change) in enumerate(changes.items()):
        shutil.copytree(trained, tmp_path / name)
        record_of(tmp_path / name, **change)
        metrics = json.loads((trained / "metrics.json").read_text())
        (tmp_path / name / "metrics.json").write_text(json.dumps({**metrics, "train_words_seen": 1e6 * number}))
    with_swapped_words(tmp_path / "words")
    (tmp_path / "unfinished" / "metrics.json").unlink()
    (tmp_path / "bare" / "run_config.json").unlink()
    pairs = write_pairs(tmp_path / "pairs", paradigms=1, pairs=2)
    words = ["evaluate", *(str(tmp_path / name) for name in changes), f"--blimp={pairs}"]
    assert main([*words, f"--output={tmp_path / 'runs.csv'}"]) == 0
    assert "(0.7)" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "runs.csv").open(newline="")))
    assert [(row["runs"], row["seeds"]) for row in rows] == [("run", "2"), *((name, "1") for name in [*changes][2:])]
    seen = rows[0]["words seen, millions"]
    deviation = rows[0]["words seen, millions, standard deviation"]
    assert (float(seen), float(deviation)) == pytest.approx((0.5, math.sqrt(0.5)))


def test_a_model_without_figures_of_a_run_has_a_row(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "a|b")
    (tmp_path / "a|b" / "metrics.json").unlink()
    pairs = write_pairs(tmp_path / "pairs", paradigms=1, pairs=2)
    for name in ("runs.md", "runs.csv"):
        assert main(["evaluate", str(tmp_path / "a|b"), f"--blimp={pairs}", f"--output={tmp_path / name}"]) == 0
    assert "| a\\|b | 1 |" in (tmp_path / "runs.md").read_text()
    (row,) = csv.DictReader((tmp_path / "runs.csv").open(newline=""))
    assert row["runs"] == "a|b" and 0 <= float(row["minimal pairs of pairs"]) <= 1


OTHER_MASKS = [
    {"mlm_probability": "0.5->0.4"},
    {"masking": "whole_word", "mask_replace_prob": 0.5},
    {"pairing": "sentences", "short_seq_prob": 0.0},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHER_MASKS, ids=lambda options: [*options][0])
def test_models_side_by_side_are_measured_with_the_same_masks(options, trained, books, evaluate, tmp_path, capsys):
    """Two copies of one model, whose runs had other masks, have the same figures: those of the default masks."""
    other = shutil.copytree(trained, tmp_path / "other")
    record_of(other, run=options)
    text = [f"--corpus={books}", "--pppl_sentences=0", "--max_eval_pairs=40"]
    ours, theirs = (model["text"] for model in evaluate(trained, other, *text)["models"])
    assert ours == theirs
    assert f"{[*options][0]} differs" in capsys.readouterr().err
    assert ours == evaluate(trained, *text)["models"][0]["text"]  # its run had the defaults
    alone = evaluate(other, *text)
    assert alone["models"][0]["text"] != ours  # alone, a model has the masks of its run
    if "mlm_probability" in options:
        assert alone["options"]["mlm_probability"] == 0.4
    given = evaluate(trained, other, *text, "--mlm_probability=0.3", "--masking=token")
    assert given["options"]["mlm_probability"] == 0.3
    assert given["models"][0]["text"]["masked_tokens"] > 1.7 * ours["masked_tokens"]


@pytest.mark.slow
def test_the_file_says_where_the_figures_of_models_are_of_different_things(models, books, tmp_path):
    words = ["evaluate", str(models["ours"]), str(models["roberta"]), f"--corpus={books}", "--max_eval_pairs=20"]
    for name in ("runs.md", "runs.csv", "all.json"):
        assert main([*words, "--pppl_sentences=2", f"--output={tmp_path / name}"]) == 0
        said = (tmp_path / name).read_text()
        assert "tokenizers differ" in said and "single segments" in said


@pytest.mark.parametrize(
    "record",
    [
        {"run": []},
        {"run": {"objective": ["nsp"]}},
        {"run": {"seed": {}}},
        {"run": {"mlm_probability": "all"}},
        {"run": {"mlm_probability": 7}},
        {"data": 5},
        {"data": {"tokenizer": "a"}},
        {"fingerprints": [5]},
        {"fingerprints": [{"name": "a"}]},
    ],
    ids=json.dumps,
)
def test_a_record_of_other_types_is_refused_in_one_line(record, folder, books, fails):
    (folder / "run_config.json").write_text(json.dumps(record))
    assert "run_config.json" in fails("evaluate", folder, folder, f"--corpus={books}", "--pppl_sentences=0")
