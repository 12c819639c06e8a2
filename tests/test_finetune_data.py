"""`d2l-bert finetune`: wrong rows, options and folders get one line; the model to start from; what a run deletes."""

import contextlib
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import wrong_rows
from finetuning import file_options, finetune, load, read_csv, rows_of, saved
from text_sources import write_table
from transformers import AutoTokenizer

from d2l_bert import D2lBertForSequenceClassification
from d2l_bert.messages import UserError
from d2l_bert.records import read_record
from d2l_bert.tokenization import tables
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.models import make_model, read_start
from d2l_bert.training.run_folder import enter_finetuning


TWO = "text,label\na text,yes\nanother,no\nthird,yes\nfourth,no\n"

# The task, the files by option (bytes or text; .csv, unless the name says otherwise), words of the error line.
WRONG = {
    "no label column": (
        "text-classification",
        {"train": "text\na\n"},
        ["no column 'label'; it has 'text'", "--label_col"],
    ),
    "no text column": ("text-classification", {"train": "label\n1\n0\n"}, ["no column 'text'; it has 'label'"]),
    "validation without text": (
        "text-classification",
        {"train": TWO, "validation": "txt,label\na,yes\n"},
        ["validation_file validation.csv: no column 'text'"],
    ),
    "test without text": (
        "text-classification",
        {"train": TWO, "test": "txt\na\n"},
        ["test_file test.csv: no column"],
    ),
    "validation without labels": (
        "text-classification",
        {"train": TWO, "validation": "text\na\n"},
        ["validation_file validation.csv: no column 'label'"],
    ),
    "validation with empty labels": (
        "text-classification",
        {"train": TWO, "validation": "text,label\na,\n"},
        ["validation_file validation.csv: column 'label' is empty"],
    ),
    "an empty text": (
        "text-classification",
        {"train": "text,label\na,yes\n  ,no\nb,no\n"},
        ["train_file train.csv, line 3: column 'text' is empty; write a text there, or take the row out"],
    ),
    "an empty text in the test rows": (
        "text-classification",
        {"train": TWO, "test": "text,label\n,yes\n"},
        ["test_file test.csv, line 2: column 'text' is empty"],
    ),
    "an empty second text": (
        "text-classification",
        {"train": 'text,text_pair,label\na,b,yes\na,"",no\n'},
        ["line 3: column 'text_pair' is empty"],
    ),
    "an empty label": (
        "text-classification",
        {"train": "text,label\na,yes\nb,\nc,no\n"},
        ["line 3: column 'label' is empty"],
    ),
    "labels for some test rows only": (
        "text-classification",
        {"train": TWO, "test": "text,label\na,yes\nb,\n"},
        ["test_file test.csv, line 3: column 'label' is empty"],
    ),
    "a label that training lacks": (
        "text-classification",
        {"train": TWO, "validation": "text,label\na,yes\nb,maybe\n"},
        ["validation_file validation.csv, line 3: label 'maybe' in column 'label' is none of 'no', 'yes'"],
    ),
    "a label of the test rows that training lacks": (
        "text-classification",
        {"train": TWO, "test": "text,label\na,maybe\n"},
        ["test_file test.csv, line 2: label 'maybe' in column 'label' is none of 'no', 'yes'"],
    ),
    "an empty file": ("text-classification", {"train": ""}, ["train_file train.csv"]),
    "no rows": ("text-classification", {"train": "text,label\n"}, ["train_file train.csv"]),
    "no validation rows": (
        "text-classification",
        {"train": TWO, "validation": "text,label\n"},
        ["validation_file validation.csv"],
    ),
    "no test rows": ("text-classification", {"train": TWO, "test": b""}, ["test_file test.csv"]),
    "floats for classes": (
        "text-classification",
        {"train": "text,label\na,0.5\nb,1.25\n"},
        ["line 2: column 'label' holds '0.5'", "--task regression"],
    ),
    "floats for classes in JSON": (
        "text-classification",
        {"train.jsonl": '{"text": "a", "label": 1.0}\n{"text": "b", "label": 0.5}\n'},
        ["line 2: column 'label' holds 0.5"],
    ),
    "lists for classes": (
        "text-classification",
        {"train.jsonl": '{"text": "a", "label": ["x"]}\n{"text": "b", "label": ["y"]}\n'},
        ["line 1: column 'label' holds ['x']", "--task multi_label_classification"],
    ),
    "one class": (
        "text-classification",
        {"train": "text,label\na,1\nb,1\n"},
        ["every row has the label '1'", "two classes at least"],
    ),
    "a class for each row": ("text-classification", {"train": "text,label\na,1\nb,2\nc,3\n"}, ["a label of its own"]),
    "another encoding": (
        "text-classification",
        {"train": "text,label\nü,1\n".encode("latin-1")},
        ["train_file train.csv"],
    ),
    "UTF-16 without a byte order mark": (
        "text-classification",
        {"train": TWO.encode("utf-16-le")},
        ["train_file train.csv"],
    ),
    "a label of pandas for none": (
        "text-classification",
        {"train": "text,label\na,yes\nb,nan\nc,no\n"},
        ["line 3: column 'label' holds 'nan', which pandas writes for an empty cell"],
    ),
    "one text in all rows": (
        "text-classification",
        {"train": "text,label\na,yes\na,no\na,no\n"},
        ["has too few different texts to hold out some for validation"],
    ),
    "another encoding in JSON": (
        "text-classification",
        {"train.jsonl": '{"text": "Zürich", "label": 1}\n'.encode("latin-1")},
        ["train_file train.jsonl"],
    ),
    "more fields": (
        "text-classification",
        {"train": "text,label\na,b,yes\n"},
        ["train_file train.csv", "train_file train.csv"],
    ),
    "fewer fields": (
        "text-classification",
        {"train": "text,label\na,yes\nb\n"},
        ["train_file train.csv", "train_file train.csv"],
    ),
    "an open quote": ("text-classification", {"train": 'text,label\n"a,yes\nb,no\n'}, ["train_file train.csv"]),
    "two columns of a name": (
        "text-classification",
        {"train": "text,text,label\na,b,1\n"},
        ["train_file train.csv"],
    ),
    "no JSON": ("text-classification", {"train.jsonl": '{"text": "a"\n'}, ["train_file train.jsonl"]),
    "a line without a value": (
        "text-classification",
        {"train.jsonl": '{"text": "a", "label": 1}\n{"text": "b"}\n'},
        ["train_file train.jsonl"],
    ),
    "numbers as texts": (
        "text-classification",
        {"train.jsonl": '{"text": 1, "label": 1}\n{"text": 2, "label": 0}\n'},
        ["line 1: column 'text' holds int, not text"],
    ),
    "a column without a name": (
        "text-classification",
        {"train": ",sentence,label\n0,a text,yes\n1,another,no\n"},
        ["train_file train.csv: no column 'text'; it has '', 'sentence', 'label': name one with --text_column"],
    ),
    "a list of strings": (
        "text-classification",
        {"train.json": '["a", "b"]'},
        ["train.json: cannot be read", "a list of objects"],
    ),
    "another suffix": ("text-classification", {"train.txt": "a\n"}, ["_file "]),
    "damaged Parquet": ("text-classification", {"train.parquet": b"PAR1"}, ["train.parquet: cannot be read"]),
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
    "a number as Python writes it": (
        "regression",
        {"train": "text,label\na,1\nb,1_05\n"},
        ["line 3", "'1_05', not a finite number"],
    ),
    "no number": ("regression", {"train": "text,label\na,1\nb,\n"}, ["line 3: column 'label' is empty"]),
    "a number that is always the same": ("regression", {"train": "text,label\na,1\nb,1\n"}, ["differ by 0 around 1"]),
    "NaN in the test rows": (
        "regression",
        {"train": "text,label\na,1\nb,2\n", "test": "text,label\na,NaN\n"},
        ["test_file test.csv, line 2", "not a finite number"],
    ),
    "numbers that float32 cannot tell apart": (
        "regression",
        {"train": "text,label\na,1000000001\nb,1000000009\n"},
        ["differ by 4 around 1e+09", "subtract a constant"],
    ),
    "no labels at all": ("multi_label_classification", {"train": "text,label\na,\nb,\n"}, ["column 'label' is empty"]),
    "all labels in every row": (
        "multi_label_classification",
        {"train": 'text,label\na,"x,y"\nb,"x,y"\n'},
        ["'x', 'y'"],
    ),
    "a yes or no for each label in a list": (
        "multi_label_classification",
        {"train": 'text,label\na,"[0, 1]"\nb,"[0, 0]"\nc,"[1, 0]"\n'},
        ["line 3: column 'label' holds ['0', '0'], as a yes or no for each label", "the names of the labels"],
    ),
    "the columns of pandas in JSON": (
        "text-classification",
        {"train.json": '{"text": {"0": "a", "1": "b"}, "label": {"0": "x", "1": "y"}}'},
        ["train.json: cannot be read", "orient='records'"],
    ),
    "no header": (
        "text-classification",
        {"train": '"0","0","a"\n"4","1","b"\n'},
        ["where the first line is no header"],
    ),
    "numbers from 1 for the labels of a named task": (
        "sst2",
        {"train": "sentence,label\na,1\nb,2\nc,1\n"},
        ["column 'label' has '2' beside labels of --task sst2, 'negative', 'positive'"],
    ),
    "an unknown label of several": (
        "multi_label_classification",
        {"train": 'text,label\na,"x,y"\nb,x\n', "validation": "text,label\na,z\n"},
        ["validation.csv, line 2: label 'z' in column 'label' is none of 'x', 'y'"],
    ),
}


@pytest.mark.parametrize("case", [*WRONG, *wrong_rows.WRONG])
@pytest.mark.filterwarnings("error")
def test_wrong_rows_get_one_line_and_nothing_is_written(case, trained, tmp_path, fails):
    task, contents, words = (WRONG | wrong_rows.WRONG)[case]
    options = []
    for name, content in contents.items():
        file = tmp_path / (name if "." in name else f"{name}.csv")
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        options.append(f"--{name.partition('.')[0]}_file={file}")
    before = sorted(tmp_path.iterdir())
    line = fails("finetune", trained, f"--task={task}", f"--output_dir={tmp_path / 'out'}", *options)
    for word in words:
        assert word in line
    assert sorted(tmp_path.iterdir()) == before


OPTIONS = [  # options, words of the error line
    ("", ["--task is missing: give one of text-classification"]),
    ("--task clasification --train_file x", ["task 'clasification': give one of"]),
    ("--task classification", ["train_file is missing; give --train_file FILE, or --dataset ID"]),
    ("--task classification --train_file nowhere.csv", ["train_file nowhere.csv"]),
    ("--task classification --train_file .", ["train_file ."]),
    (f"--task classification --train_file a --output_dir {__file__}", ["is a file; name a folder"]),
    ("--task classification --train_file a --dataset b", ["both give the training rows; give one"]),
    ("--task classification --train_file a --test_split b", ["test_split is for dataset"]),
    ("--task classification --train_file a --label_column x y", ["several columns are for --task multi_label"]),
    ("--task sst2 --validation_share 1", ["validation_share", "got 1.0"]),
    ("--task sst2 --validation_share 0.1 --validation_file v", ["validation_share holds out training rows"]),
    ("--task sst2 --learning_rate fast", ["learning_rate fast", "give numbers"]),
    ("--task sst2 --learning_rate 1e-4 0.0001", ["each once"]),
    ("--task sst2 --learning_rate 1e-4 1e-3 --validation_share 0", ["need validation rows to choose"]),
    ("--task sst2 --early_stopping_patience 1 --validation_share 0", ["early_stopping_patience needs validation"]),
    ("--task sst2 --num_train_epochs 2 --max_steps 3", ["num_train_epochs and max_steps contradict each other"]),
    ("--task sst2 --eval_steps 4 --max_steps 3", ["eval_steps 4 is beyond max_steps 3"]),
    ("--task sst2 --warmup_steps 2 --warmup_ratio 0.1", ["warmup_ratio and warmup_steps contradict"]),
    ("--task sst2 --num_seeds 0", ["num_seeds", "got 0"]),
    ("--task sst2 --hidden_dropout_prob 1", ["hidden_dropout_prob"]),
    ("--task sst2 --metric_for_best_model bleu", ["metric_for_best_model 'bleu'", "accuracy, f1"]),
    ("--task sst2 --hub_model_id me/x", ["hub_model_id is for push_to_hub"]),
    ("--task sst2 --report_to none wandb", ["report_to takes none"]),
    ("--task sst2 --train_fil x", ["'--train_fil'; did you mean --train_file?"]),
    ("--task sst2", ["_file "]),
    ("--task classification --dataset d --validation_split test --test_split test", ["name a split twice"]),
    ("--task classification --dataset d --validation_split train", ["name a split twice"]),
    ("--task classification --dataset no/where", ["_file "]),
    ("--task sst2 --doc_stride 8", ["doc_stride is for --task question-answering; leave it out"]),
    ("--task conll2003 --context_column a", ["context_column is for --task question-answering or multiple-choice"]),
    ("--task squad --text_column a", ["text_column is for --task text-classification"]),
    ("--task squad --choices_column a b", ["choices_column is for --task multiple-choice"]),
    ("--task conll2003 --label_separator ;", ["label_separator is for --task multi_label_classification"]),
    (
        "--task multilabel --train_file a --label_separator ; --label_column a b",
        ["label_separator is for one column of labels, and label_column names several"],
    ),
    ("--task answers --license foo", ["license 'foo'", "https://huggingface.co/docs/hub/repositories-licenses"]),
    ("--task sst2 --train_file a --separator ;", ["train_file a"]),
    ("--task sst2 --validation_file a --validation_split b", ["validation_file and validation_split both give"]),
    ("--task sst2 --dataset d --test_file a --test_split b", ["test_file and test_split both give"]),
    ("--task sst2 --per_device_eval_batch_size 1000000000000000000000000000000", ["per_device_eval_batch_size"]),
    ("--task sst2 --gradient_accumulation_steps 1000000000000000000000000000000", ["gradient_accumulation_steps"]),
    ("--task sst2 --weight_decay 1e400", ["weight_decay"]),
    ("--task squad --max_answer_length 0", ["max_answer_length", "got 0"]),
    ("--task squad --doc_stride -1", ["doc_stride", "got -1"]),
    ("--task squad --null_score_diff_threshold nan", ["null_score_diff_threshold", "must be a finite number"]),
    (
        "--task conll2003 --metric_for_best_model exact_match",
        ["--task conll2003 has f1, precision, recall, strict_f1, accuracy"],
    ),
    ("--task squad", ["dataset rajpurkar/squad: cannot be read"]),
    ("--task squad_v2", ["dataset rajpurkar/squad_v2: cannot be read"]),
    ("--task swag", ["dataset allenai/swag: cannot be read"]),
    ("--task conll2003", ["dataset lhoestq/conll2003: cannot be read"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, rows, option, word",
    [
        ("classification", list(rows_of(6, 0)), "--separator=;", "separator"),
        (
            "answers",
            [wrong_rows.asked(), wrong_rows.asked()],
            "--null_score_diff_threshold=1",
            "null_score_diff_threshold",
        ),
    ],
)
def test_an_option_that_the_rows_give_no_effect_is_refused(task, rows, option, word, trained, tmp_path, fails):
    file = write_table(tmp_path / "rows.jsonl", rows)
    words = [f"--task={task}", f"--train_file={file}", "--validation_share=0", f"--output_dir={tmp_path / 'out'}"]
    line = fails("finetune", trained, *words, option)
    assert word in line and "leave it out" in line and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("label", ["7" * 5000, "y" * 5000], ids=["digits", "letters"])
def test_a_label_of_thousands_of_characters_is_shortened_in_a_message(label, trained, tmp_path, fails):
    rows = [{"text": f"a {number}", "label": label} for number in range(4)]
    words = ["finetune", trained, f"--output_dir={tmp_path / 'out'}"]
    options = file_options(tmp_path, train=rows)
    assert len(fails(*words, *options, "--task=text-classification")) < 400
    assert len(fails(*words, *options, "--task=text-classification", f"--label_column={label}")) < 600
    assert len(fails(*words, *options, "--task=regression")) < 900
    options = file_options(tmp_path, train=rows_of(12, 0), validation=rows)
    assert len(fails(*words, *options, "--task=text-classification")) < 600


@pytest.mark.slow
def test_the_predictions_of_a_run_hold_cells_as_they_were_read(trained, tmp_path):
    rows = [{"id": "=1+1", **row} for row in rows_of(6, 0)]
    options = file_options(tmp_path, train=rows, test=rows)
    finetune(trained, tmp_path / "out", "--task=classification", *options, "--validation_share=0", "--max_steps=1")
    assert {row["id"] for row in read_csv(tmp_path / "out" / "predictions.csv")} == {"=1+1"}


@pytest.mark.slow
@pytest.mark.parametrize("content", ["[]", "{}", '{"seed": "a"}', '{"validation": 5', None], ids=repr)
def test_a_damaged_result_of_a_seed_is_one_line(content, trained, tmp_path, fails):
    options = [*file_options(tmp_path, train=rows_of(12, 0), validation=rows_of(6, 1)), "--max_steps=1"]
    finetune(trained, tmp_path / "out", "--task=classification", *options)
    (result,) = (tmp_path / "out").glob("attempts/*/result.json")
    if content is None:
        content = json.dumps({name: value for name, value in read_record(result).items() if name != "validation"})
    result.write_text(content)
    words = ["finetune", trained, f"--output_dir={tmp_path / 'out'}", "--task=classification", *options]
    assert "result.json" in fails(*words, "--resume_from_checkpoint=latest")


@pytest.mark.slow
def test_rows_with_the_texts_of_training_rows_are_counted(trained, tmp_path, capsys):
    table = write_table(tmp_path / "train.csv", rows_of(20, 0))
    options = [f"--train_file={table}", f"--test_file={table}", "--validation_share=0", "--max_steps=1"]
    finetune(trained, tmp_path / "out", "--task=classification", *options)
    assert "test: 20 rows of train.csv, 20 of them with the texts of a training row; " in capsys.readouterr().err


def test_a_column_has_one_use(trained, fails, tmp_path):
    table = write_table(tmp_path / "train.csv", rows_of(20, 0))
    line = fails("finetune", trained, "--task=classification", f"--train_file={table}", "--text_column=label")
    assert "column 'label' cannot have two uses" in line


@pytest.mark.parametrize("options, words", OPTIONS, ids=[options[:60] for options, _ in OPTIONS])
def test_wrong_options_get_one_line(options, words, trained, fails):
    line = fails("finetune", trained, *options.split())
    for word in words:
        assert word in line


def test_an_output_folder_with_other_things_is_kept(trained, tmp_path, fails, folder):
    rows = write_table(tmp_path / "train.csv", rows_of(20, 0))
    command = ["finetune", trained, "--task=classification", f"--train_file={rows}", "--max_steps=1"]
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
    assert "go on with resume_from_checkpoint latest" in fails(*command, f"--output_dir={run}")
    both = ["--resume_from_checkpoint=latest", "--overwrite_output_dir"]
    assert "give one" in fails(*command, f"--output_dir={run}", *both)


# ---------------------------------------------------------------------------------------------------------------------
# The model that a fine-tuning starts from, and what a new run deletes


@pytest.mark.parametrize("labels", [2, 5])
def test_the_head_of_another_task_is_drawn_anew(labels, trained, tmp_path):
    saved = D2lBertForSequenceClassification.from_pretrained(trained, num_labels=labels)
    with torch.no_grad():
        saved.classifier.weight.fill_(7.0)
    saved.save_pretrained(tmp_path / "base")
    save_tokenizer(AutoTokenizer.from_pretrained(trained), tmp_path / "base")
    path = write_table(tmp_path / "train.csv", rows_of(20, 0))
    task, _ = load(path, "classification", model=str(tmp_path / "base"))
    torch.manual_seed(0)
    start = read_start(task.config, task)
    model = make_model(start.config, start.revision, task)
    assert model.classifier.weight.shape[0] == 2
    assert 0 < model.classifier.weight.std() < 1
    assert (model.classifier.bias == 0).all()
    assert torch.equal(model.bert.pooler.dense.weight, saved.bert.pooler.dense.weight)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The options of a short run with a constant rate, on files."""
    folder = tmp_path_factory.mktemp("rows")
    options = file_options(folder, train=rows_of(20, 0), validation=rows_of(20, 1), test=rows_of(8, 2))
    return ["--task=classification", *options, "--max_steps=1", "--lr_scheduler_type=constant"]


@pytest.fixture(scope="module")
def finished(trained, command, tmp_path_factory):
    """A folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "out"
    finetune(trained, folder, *command)
    return folder


def test_a_new_run_deletes_only_what_a_run_writes(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "out")
    pictures = read_record(folder / "metrics.json")["pictures"]
    notes = [folder / "notes.txt", folder / "plots" / "mine.png", folder / "runs" / "mine" / "log"]
    for note in notes:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text("precious")
    (folder / "attempts" / "rate-1-seed-1").mkdir()
    config = FinetuneConfig(model="m", overwrite_output_dir=True)
    with contextlib.ExitStack() as stack:
        enter_finetuning(config, folder, {"finetune": {}}, stack)
    assert all(note.read_text() == "precious" for note in notes) and "confusion_matrix.png" in pictures
    kept = {path.name for path in folder.iterdir()}
    assert {"notes.txt", "plots", "runs", "run_config.json"} <= kept
    assert not kept & {"model.safetensors", "metrics.json", "predictions.csv", "attempts", *pictures}


@pytest.mark.slow
def test_a_finished_run_is_replaced_or_gets_further_seeds(finished, command, trained, fails, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "out")
    go_on = "--resume_from_checkpoint=latest"
    line = fails("finetune", trained, *command, f"--output_dir={folder}")
    assert "resume_from_checkpoint latest" in line and "replace it with overwrite_output_dir" in line
    before = read_record(folder / "metrics.json")
    weights = (folder / "model.safetensors").read_bytes()
    metrics = finetune(trained, folder, *command, "--num_seeds=3", go_on)
    assert metrics["seeds"][0] == before["seeds"][0]
    assert len(metrics["seeds"]) == 3
    best = max(metrics["seeds"], key=lambda seed: (seed["validation"]["accuracy"], -seed["validation"]["loss"]))
    assert metrics["kept_seed"] == best["seed"]
    assert (weights == (folder / "model.safetensors").read_bytes()) == (best["seed"] == 42)
    whole = finetune(trained, tmp_path / "whole", *command, "--num_seeds=3")
    assert whole["mean"] == metrics["mean"] and whole["kept_seed"] == metrics["kept_seed"]
    other = f"--validation_file={write_table(tmp_path / 'other.csv', rows_of(20, 7))}"
    for words, said in (
        (command, "num_seeds was 3"),
        ([*command, other, "--num_seeds=4"], "the fingerprint of the validation rows was"),
        (
            [*(word for word in command if "test_file" not in word), "--num_seeds=3"],
            "the fingerprint of the test rows was",
        ),
    ):
        assert said in fails("finetune", trained, *words, f"--output_dir={folder}", go_on)


# ---------------------------------------------------------------------------------------------------------------------
# Rows are held in memory


ROWS = {"text": [f"A text of some words, {number}." for number in range(40)], "label": ["yes", "no"] * 20}


def test_of_parquet_the_columns_that_a_run_needs_are_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LONGEST_CELL", 1000)
    files = {split: tmp_path / f"{split}.parquet" for split in ("train", "validation", "test")}
    for file in files.values():
        pq.write_table(pa.table({**ROWS, "picture": [b"x" * 5000] * 40}), file)
    _, splits = load(
        files["train"], "text-classification", validation_file=str(files["validation"]), validation_share=None
    )
    assert [(len(split.rows), split.columns) for split in splits.values()] == [(40, ["text", "label"])] * 2
    with pytest.raises(UserError, match="test.parquet: row 1: column 'picture'"):  # it stands beside the predictions
        load(files["train"], "text-classification", test_file=str(files["test"]))


def test_columns_of_parquet_are_looked_at_before_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_MEMORY", 100)  # no row is read, or this would be said
    pq.write_table(pa.table({"body": ROWS["text"], "label": ROWS["label"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="train_file a.parquet: no column 'text'; it has 'body', 'label'"):
        load(tmp_path / "a.parquet", "text-classification")


def test_the_rows_of_all_splits_are_bounded_together(tmp_path, monkeypatch):
    pq.write_table(pa.table(ROWS), tmp_path / "a.parquet")
    write_table(tmp_path / "b.csv", [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)])
    monkeypatch.setattr(tables, "MOST_MEMORY", 30_000)
    load(tmp_path / "a.parquet", "text-classification")
    load(tmp_path / "b.csv", "text-classification")
    with pytest.raises(UserError, match="validation_file b.csv: .*in memory"):
        load(
            tmp_path / "a.parquet",
            "text-classification",
            validation_file=str(tmp_path / "b.csv"),
            validation_share=None,
        )


def test_the_rows_of_a_dataset_are_bounded(tmp_path, monkeypatch):
    rows = [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)]
    folder = saved(tmp_path / "set", train=rows)
    assert len(load(None, "text-classification", dataset=folder)[1]["train"].rows) == 40
    monkeypatch.setattr(tables, "MOST_MEMORY", 10_000)
    with pytest.raises(UserError, match="dataset .*set, split train: row .*in memory"):
        load(None, "text-classification", dataset=folder)
