"""Rows, options and folders of `d2l-bert finetune`: what is wrong gets one line, what is right is read as meant."""

import json

import pytest
from finetuning import load, rows_of, write_csv, write_jsonl
from small_tasks import tag_rows, write_rows

from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import load_data
from d2l_bert.training.finetuning.folder import write_table
from d2l_bert.training.finetuning.run import CLASSES


TWO = "text,label\na text,yes\nanother,no\nthird,yes\nfourth,no\n"

# The kind, the files by option (bytes or text; .csv, unless the name says otherwise), words of the error line.
WRONG = {
    "no label column": ("classification", {"train": "text\na\n"}, ["no column 'label'; it has 'text'", "--label_col"]),
    "no text column": ("classification", {"train": "label\n1\n0\n"}, ["no column 'text'; it has 'label'"]),
    "validation without text": (
        "classification",
        {"train": TWO, "validation": "txt,label\na,yes\n"},
        ["validation_file validation.csv: no column 'text'"],
    ),
    "test without text": ("classification", {"train": TWO, "test": "txt\na\n"}, ["test_file test.csv: no column"]),
    "validation without labels": (
        "classification",
        {"train": TWO, "validation": "text\na\n"},
        ["validation_file validation.csv: no column 'label'"],
    ),
    "validation with empty labels": (
        "classification",
        {"train": TWO, "validation": "text,label\na,\n"},
        ["validation_file validation.csv: column 'label' is empty"],
    ),
    "an empty text": (
        "classification",
        {"train": "text,label\na,yes\n  ,no\nb,no\n"},
        ["train_file train.csv, line 3: column 'text' is empty; write a text there, or take the row out"],
    ),
    "an empty text in the test rows": (
        "classification",
        {"train": TWO, "test": "text,label\n,yes\n"},
        ["test_file test.csv, line 2: column 'text' is empty"],
    ),
    "an empty second text": (
        "classification",
        {"train": 'text,text_pair,label\na,b,yes\na,"",no\n'},
        ["line 3: column 'text_pair' is empty"],
    ),
    "an empty label": ("classification", {"train": "text,label\na,yes\nb,\n"}, ["line 3: column 'label' is empty"]),
    "labels for some test rows only": (
        "classification",
        {"train": TWO, "test": "text,label\na,yes\nb,\n"},
        ["test_file test.csv, line 3: column 'label' is empty"],
    ),
    "a label that training lacks": (
        "classification",
        {"train": TWO, "validation": "text,label\na,yes\nb,maybe\n"},
        ["validation_file validation.csv, line 3: label 'maybe' does not stand in the training rows", "'no', 'yes'"],
    ),
    "a label of the test rows that training lacks": (
        "classification",
        {"train": TWO, "test": "text,label\na,maybe\n"},
        ["test_file test.csv, line 2: label 'maybe' does not stand in the training rows"],
    ),
    "an empty file": ("classification", {"train": ""}, ["train_file train.csv"]),
    "no rows": ("classification", {"train": "text,label\n"}, ["train_file train.csv"]),
    "no validation rows": (
        "classification",
        {"train": TWO, "validation": "text,label\n"},
        ["validation_file validation.csv"],
    ),
    "no test rows": ("classification", {"train": TWO, "test": b""}, ["test_file test.csv"]),
    "floats for classes": (
        "classification",
        {"train": "text,label\na,0.5\nb,1.25\n"},
        ["line 2: column 'label' holds numbers such as 0.5, not classes; give --task regression"],
    ),
    "floats for classes in JSON": (
        "classification",
        {"train.jsonl": '{"text": "a", "label": 1.0}\n{"text": "b", "label": 0.0}\n'},
        ["holds numbers such as 1.0, not classes"],
    ),
    "lists for classes": (
        "classification",
        {"train.jsonl": '{"text": "a", "label": ["x"]}\n{"text": "b", "label": ["y"]}\n'},
        ["holds list, not classes", "--task multilabel"],
    ),
    "one class": (
        "classification",
        {"train": "text,label\na,1\nb,1\n"},
        ["every row has the label '1'", "two classes at least"],
    ),
    "a class for each row": ("classification", {"train": "text,label\na,1\nb,2\nc,3\n"}, ["a label of its own"]),
    "another encoding": ("classification", {"train": "text,label\nü,1\n".encode("latin-1")}, ["train_file train.csv"]),
    "UTF-16 without a byte order mark": (
        "classification",
        {"train": TWO.encode("utf-16-le")},
        ["train_file train.csv"],
    ),
    "a label of pandas for none": (
        "classification",
        {"train": "text,label\na,yes\nb,nan\nc,no\n"},
        ["line 3: column 'label' holds"],
    ),
    "one text in all rows": (
        "classification",
        {"train": "text,label\na,yes\na,no\na,no\n"},
        ["has too few different texts to hold out some for validation"],
    ),
    "another encoding in JSON": (
        "classification",
        {"train.jsonl": '{"text": "Zürich", "label": 1}\n'.encode("latin-1")},
        ["train_file train.jsonl"],
    ),
    "more fields": (
        "classification",
        {"train": "text,label\na,b,yes\n"},
        ["train_file train.csv", "train_file train.csv"],
    ),
    "fewer fields": (
        "classification",
        {"train": "text,label\na,yes\nb\n"},
        ["train_file train.csv", "train_file train.csv"],
    ),
    "an open quote": ("classification", {"train": 'text,label\n"a,yes\nb,no\n'}, ["train_file train.csv"]),
    "two columns of a name": (
        "classification",
        {"train": "text,text,label\na,b,1\n"},
        ["train_file train.csv"],
    ),
    "no JSON": ("classification", {"train.jsonl": '{"text": "a"\n'}, ["train_file train.jsonl"]),
    "a line without a value": (
        "classification",
        {"train.jsonl": '{"text": "a", "label": 1}\n{"text": "b"}\n'},
        ["train_file train.jsonl"],
    ),
    "numbers as texts": (
        "classification",
        {"train.jsonl": '{"text": 1, "label": 1}\n{"text": 2, "label": 0}\n'},
        ["line 1: column 'text' holds int, not text"],
    ),
    "texts and numbers in a column": (
        "classification",
        {"train.jsonl": '{"text": "a", "label": 1}\n\n{"text": "b", "label": "1"}\n'},
        ["train_file train.jsonl, line 3: column 'label' holds str, unlike line 1"],
    ),
    "another suffix": ("classification", {"train.txt": "a\n"}, ["_file "]),
    "damaged Parquet": ("classification", {"train.parquet": b"PAR1"}, ["train.parquet: cannot be read"]),
    "NaN for a number": (
        "regression",
        {"train": "text,label\na,1\nb,nan\n"},
        ["line 3", "'nan', not a finite number"],
    ),
    "infinity for a number": ("regression", {"train": "text,label\na,1\nb,inf\n"}, ["line 3", "not a finite number"]),
    "a number beyond float32": (
        "regression",
        {"train": "text,label\na,1\nb,1e39\n"},
        ["line 3: column 'label' holds '1e39'"],
    ),
    "a number of 400 digits": (
        "regression",
        {"train.jsonl": '{"text": "a", "label": 1}\n{"text": "b", "label": 1' + "0" * 400 + "}\n"},
        ["train_file train.jsonl", "train_file train.jsonl"],
    ),
    "a word for a number": ("regression", {"train": "text,label\na,1\nb,yes\n"}, ["line 3", "'yes', not a finite"]),
    "no number": ("regression", {"train": "text,label\na,1\nb,\n"}, ["line 3: column 'label' is empty"]),
    "a number that is always the same": ("regression", {"train": "text,label\na,1\nb,1\n"}, ["every row has the num"]),
    "NaN in the test rows": (
        "regression",
        {"train": "text,label\na,1\nb,2\n", "test": "text,label\na,NaN\n"},
        ["test_file test.csv, line 2", "not a finite number"],
    ),
    "no labels at all": ("multilabel", {"train": "text,label\na,\nb,\n"}, ["every row has the labels"]),
    "all labels in every row": ("multilabel", {"train": 'text,label\na,"x,y"\nb,"x,y"\n'}, ["'x', 'y'"]),
    "an unknown label of several": (
        "multilabel",
        {"train": 'text,label\na,"x,y"\nb,x\n', "validation": "text,label\na,z\n"},
        ["validation.csv, line 2: label 'z' does not stand in the training rows"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.filterwarnings("error")
def test_wrong_rows_get_one_line_and_nothing_is_written(case, trained, tmp_path, fails):
    kind, contents, words = WRONG[case]
    options = []
    for name, content in contents.items():
        file = tmp_path / (name if "." in name else f"{name}.csv")
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        options.append(f"--{name.partition('.')[0]}_file={file}")
    before = sorted(tmp_path.iterdir())
    line = fails("finetune", trained, f"--task={kind}", f"--output_dir={tmp_path / 'out'}", *options)
    for word in words:
        assert word in line
    assert sorted(tmp_path.iterdir()) == before


OPTIONS = [  # options, words of the error line
    ("", ["task None: give one of text-classification"]),
    ("--task clasification --train_file x", ["task 'clasification': give one of"]),
    ("--task classification", ["train_file is missing; give --train_file FILE, or --dataset ID"]),
    ("--task classification --train_file nowhere.csv", ["train_file nowhere.csv"]),
    ("--task classification --train_file .", ["train_file ."]),
    ("--task classification --train_file a --dataset b", ["both give the training rows; give one"]),
    ("--task classification --train_file a --test_split b", ["test_split is for dataset"]),
    ("--task classification --train_file a --label_column x y", ["several columns are for --task multilabel"]),
    ("--task sst2 --validation_share 1", ["validation_share", "got 1.0"]),
    ("--task sst2 --validation_share 0.1 --validation_file v", ["validation_share holds out training rows"]),
    ("--task sst2 --learning_rate fast", ["learning_rate takes numbers above 0", "got fast"]),
    ("--task sst2 --learning_rate 1e-4 0.0001", ["each once"]),
    ("--task sst2 --learning_rate 1e-4 1e-3 --validation_share 0", ["need validation rows to choose"]),
    ("--task sst2 --early_stopping_patience 1 --validation_share 0", ["early_stopping_patience needs validation"]),
    ("--task sst2 --num_train_epochs 2 --max_steps 3", ["num_train_epochs and max_steps contradict each other"]),
    ("--task sst2 --warmup_steps 2 --warmup_ratio 0.1", ["warmup_ratio and warmup_steps contradict"]),
    ("--task sst2 --eval_strategy steps", ["give --eval_steps N"]),
    ("--task sst2 --eval_steps 5", ["eval_steps is for eval_strategy steps"]),
    ("--task sst2 --num_seeds 0", ["num_seeds", "got 0"]),
    ("--task sst2 --layerwise_decay 1.5", ["layerwise_decay", "got 1.5"]),
    ("--task sst2 --hidden_dropout_prob 1", ["hidden_dropout_prob"]),
    ("--task sst2 --metric_for_best_model bleu", ["metric_for_best_model 'bleu'", "accuracy, f1"]),
    ("--task sst2 --hub_model_id me/x", ["hub_model_id is for push_to_hub"]),
    ("--task sst2 --report_to none wandb", ["report_to takes none"]),
    ("--task sst2 --train_fil x", ["unknown option --train_fil; did you mean --train_file?"]),
    (
        "--task sst2",
        ["_file ", "_file "],
    ),
    ("--task classification --dataset no/where", ["_file "]),
]


@pytest.mark.parametrize("options, words", OPTIONS, ids=[options[:60] for options, _ in OPTIONS])
def test_wrong_options_get_one_line(options, words, trained, fails):
    line = fails("finetune", trained, *options.split())
    for word in words:
        assert word in line


@pytest.fixture
def rows_file(tmp_path):
    return f"--train_file={write_csv(tmp_path / 'train.csv', rows_of(20, 0))}"


def test_an_output_folder_with_other_things_is_kept(trained, rows_file, tmp_path, fails, folder):
    command = ["finetune", trained, "--task=classification", rows_file, "--max_steps=1"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    assert "holds other files (thesis.txt) and no run" in fails(*command, f"--output_dir={other}")
    assert "holds the model to start from" in fails("finetune", folder, *command[2:], f"--output_dir={folder}")
    assert "holds a run of another command" in fails(*command, f"--output_dir={folder}", "--overwrite_output_dir")
    assert (folder / "model.safetensors").exists()
    run = tmp_path / "run"
    run.mkdir()
    (run / "run_config.json").write_text(json.dumps({"finetune": {}}))
    assert "go on with --resume_from_checkpoint latest" in fails(*command, f"--output_dir={run}")
    both = ["--resume_from_checkpoint=latest", "--overwrite_output_dir"]
    assert "give one" in fails(*command, f"--output_dir={run}", *both)


# ---------------------------------------------------------------------------------------------------------------------
# Rows that are right


def loaded(tmp_path, rows, **options):
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    config = FinetuneConfig(**{"model": "m", "task": "classification", "train_file": str(path), **options})
    config.check()
    kind = CLASSES[config.kind](config)
    return load_data(config, kind), kind


def test_held_out_rows_are_drawn_by_the_seed_and_share_no_text_with_training(tmp_path):
    rows = [{"text": f"text {n % 50}", "label": n % 2} for n in range(100)]
    data, kind = loaded(tmp_path, rows, validation_share=0.2)
    assert len(data.validation) == 20 and len(data.train) == 80
    assert not set(kind.texts(data.train)) & set(kind.texts(data.validation))
    again, _ = loaded(tmp_path, rows, validation_share=0.2)
    other, _ = loaded(tmp_path, rows, validation_share=0.2, seed=7)
    assert again.validation.columns == data.validation.columns != other.validation.columns
    default, _ = loaded(tmp_path, rows)
    assert len(default.validation) == 10
    none, _ = loaded(tmp_path, rows, validation_share=0)
    assert none.validation is None and len(none.train) == 100


def test_classes_are_in_the_order_of_their_numbers_or_names(tmp_path):
    def classes(labels, **options):
        _, kind = loaded(
            tmp_path, [{"text": f"t{n}", "label": label} for n, label in enumerate(labels * 2)], **options
        )
        return kind.classes

    assert classes([10, 2, 1]) == ["1", "2", "10"]
    assert classes(["no", "yes", "maybe"]) == ["maybe", "no", "yes"]
    assert classes([True, False]) == ["False", "True"]
    assert classes([["b", "a"], [], ["a"]], task="multilabel") == ["a", "b"]


# ---------------------------------------------------------------------------------------------------------------------
# Cells and labels


def test_lists_as_json_in_cells_of_csv_are_those_of_json_lines(tmp_path):
    rows = tag_rows(6, 0)
    _, data = load(write_rows(tmp_path / "rows.jsonl", rows), "tags")
    write_table(tmp_path / "rows.csv", data.train.columns, {})
    kind, again = load(tmp_path / "rows.csv", "tags")
    assert [row.label for row in again.train.rows] == [row["ner_tags"] for row in rows]
    assert kind.texts(again.train) == [tuple(row["tokens"]) for row in rows]
    write_table(tmp_path / "labels.csv", {"text": ["one", "two"], "label": [["a", "b"], ["b"]]}, {})
    kind, data = load(tmp_path / "labels.csv", "multilabel")
    assert kind.classes == ["a", "b"] and kind.targets(data.train).tolist() == [[1, 1], [0, 1]]


def test_labels_of_choices_are_numbers_or_letters(tmp_path):
    def targets(*rows):
        path = write_rows(
            tmp_path / "rows.jsonl", [{"context": "a", "choices": each, "label": label} for each, label in rows]
        )
        kind, data = load(path, "multiple_choice")
        return kind.targets(data.train).tolist()

    assert targets((["2", "3", "1"], "2"), (["7", "8", "9"], "0")) == [2, 0]
    assert targets((["b", "A", "c"], "A"), (["b", "c", "d"], "C")) == [0, 2]
    assert targets((["a", "b"], "1.0"), (["c", "d"], "0.0")) == [1, 0]
    assert targets((["2", "0", "1"], 2), (["2", "0", "1"], 0)) == [2, 0]
