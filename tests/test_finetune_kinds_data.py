"""Wrong rows for tags, answers and multiple choice: one line each, before anything is trained or written."""

import json

import pytest


def lines(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def tagged(words, tags):
    return {"tokens": words, "ner_tags": tags}


def asked(context="Ada sold it.", question="Who?", text=("Ada",), start=(0,)):
    return {"context": context, "question": question, "answers": {"text": list(text), "answer_start": list(start)}}


def chosen(context="She opens the door.", choices=("She walks in.", "It is red."), label=0):
    return {"context": context, "choices": list(choices), "label": label}


def squad(*questions, context="Ada sold it."):
    return json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}]})


TAGS = lines(tagged(["Ada", "left"], ["B-PER", "O"]), tagged(["It", "left"], ["O", "O"]))
ANSWERS = lines(asked(), asked("It was Bo.", text=["Bo"], start=[7]))
CHOICES = lines(chosen(), chosen(label=1))
QUESTION = {"id": "q1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}

# The kind, the files by option, words of the error line.
WRONG = {
    "words and tags of different counts": (
        "tags",
        {"train.jsonl": TAGS, "validation.jsonl": lines(tagged(["a", "b", "c"], ["O", "O"]))},
        ["validation_file validation.jsonl, line 1: 3 words in column 'tokens' and 2 tags in column 'ner_tags'"],
    ),
    "words and tags of different counts in CSV": (
        "tags",
        {"train.csv": "words,tags\nAda left,B-PER O\nIt left now,O O\n"},
        ["train.csv, line 3: 3 words in column 'words' and 2 tags in column 'tags'; give each word one tag"],
    ),
    "a tag that training lacks": (
        "tags",
        {"train.jsonl": TAGS, "validation.jsonl": lines(tagged(["Rome", "left"], ["B-LOC", "O"]))},
        ["validation.jsonl, line 1: label 'B-LOC'"],
    ),
    "a tag of the test rows that training lacks": (
        "tags",
        {"train.jsonl": TAGS, "test.jsonl": lines(tagged(["a", "b"], ["O", "I-PER"]))},
        ["test_file test.jsonl, line 1: label 'I-PER'"],
    ),
    "one tag only": ("tags", {"train.jsonl": lines(tagged(["a"], ["O"]))}, ["'O'"]),
    "no tags": ("tags", {"train.jsonl": lines(tagged(["a"], []))}, ["column 'ner_tags' is empty"]),
    "a row without tags": (
        "tags",
        {"train.jsonl": TAGS + lines(tagged(["a"], []))},
        ["line 3: column 'ner_tags' is empty"],
    ),
    "validation rows without tags": (
        "tags",
        {"train.jsonl": TAGS, "validation.jsonl": lines({"tokens": ["a"]})},
        ["validation_file validation.jsonl: no column 'ner_tags'"],
    ),
    "no words": ("tags", {"train.jsonl": TAGS + lines(tagged([], []))}, ["line 3: column 'tokens' has no words"]),
    "an empty word": (
        "tags",
        {"train.jsonl": TAGS + lines(tagged(["a", " "], ["O", "O"]))},
        ["line 3: word 2 of column 'tokens'"],
    ),
    "a number as a word": (
        "tags",
        {"train.jsonl": TAGS + lines(tagged(["a", 5], ["O", "O"]))},
        ["train_file train.jsonl"],
    ),
    "a number for a list of words": (
        "tags",
        {"train.jsonl": lines({"tokens": 1, "ner_tags": ["O"]}, {"tokens": 2, "ner_tags": ["B"]})},
        ["line 1: column 'tokens' holds int"],
    ),
    "a number for a list of tags": (
        "tags",
        {"train.jsonl": lines({"tokens": ["a"], "ner_tags": ["O"]}, {"tokens": ["a"], "ner_tags": 1.5})},
        ["train_file train.jsonl"],
    ),
    "floats as tags": ("tags", {"train.jsonl": lines(tagged(["a"], [0.5]))}, ["column 'ner_tags' holds 0.5"]),
    "no column of words": ("tags", {"train.jsonl": lines({"text": "a", "tags": ["O"]})}, ["no column 'tokens'"]),
    "a line of CoNLL with fewer fields": (
        "tags",
        {"train.conll": "Ada NNP B-PER\nleft O\n"},
        ["train_file train.conll"],
    ),
    "an empty CoNLL file": ("tags", {"train.conll": "\n\n"}, ["train_file train.conll: has no rows"]),
    "CoNLL in another encoding": (
        "tags",
        {"train.conll": "Ada O\nZürich B-LOC\n".encode("latin-1")},
        ["train_file train.conll"],
    ),
    "CoNLL without tags": ("tags", {"train.conll": "Ada\nleft\n"}, ["no column", "--label_column"]),
    "an answer at another place": (
        "answers",
        {"train.jsonl": ANSWERS + lines(asked(start=[1]))},
        ["train.jsonl, line 3: the answer 'Ada' is not at character 1 of its context (it begins at 0); correct"],
    ),
    "an answer that is nowhere": (
        "answers",
        {"train.jsonl": ANSWERS, "validation.jsonl": lines(asked(text=["Bo"]))},
        ["validation.jsonl, line 1: the answer 'Bo' is not at character 0", "it is nowhere in the context"],
    ),
    "an answer before the context": ("answers", {"train.jsonl": lines(asked(start=[-12]))}, ["at character -12"]),
    "a second answer that is nowhere": (
        "answers",
        {"train.jsonl": ANSWERS, "test.jsonl": lines(asked(text=["Ada", "Bo"], start=[0, 0]))},
        ["test_file test.jsonl, line 1: the answer 'Bo' is not at character 0"],
    ),
    "an answer in SQuAD's file that is nowhere": (
        "answers",
        {"train.json": squad(QUESTION, {**QUESTION, "id": "q2", "answers": [{"text": "Bo", "answer_start": 3}]})},
        ["train_file train.json"],
    ),
    "an empty context": ("answers", {"train.jsonl": lines(asked(" "))}, ["line 1: column 'context' is empty"]),
    "an empty question": (
        "answers",
        {"train.jsonl": ANSWERS, "test.jsonl": lines({"context": "a", "question": ""})},
        ["test_file test.jsonl, line 1: column 'question' is empty"],
    ),
    "an empty answer": ("answers", {"train.jsonl": lines(asked(text=[""]))}, ["line 1: the answer ''"]),
    "no answer at all": ("answers", {"train.jsonl": lines(asked(text=[], start=[]))}, ["column 'answers'"]),
    "a question without an answer that training lacks": (
        "answers",
        {"train.jsonl": ANSWERS, "validation.jsonl": ANSWERS + lines(asked(text=[], start=[]))},
        ["validation.jsonl, line 3: a question without an answer, and every training row has an answer"],
    ),
    "answers without places": (
        "answers",
        {"train.jsonl": lines({"context": "a b", "question": "c", "answers": {"text": ["a"]}})},
        ["line 1: column 'answers'"],
    ),
    "answers and places of different counts": (
        "answers",
        {"train.jsonl": lines(asked(start=[0, 1]))},
        ["line 1: column 'answers'"],
    ),
    "answers as plain text": (
        "answers",
        {"train.csv": "context,question,answers\nAda sold it.,Who?,Ada\n"},
        ["train.csv, line 2: column 'answers'"],
    ),
    "a number as a context": (
        "answers",
        {"train.jsonl": lines({**asked(), "context": 5})},
        ["line 1: column 'context' holds int, not text"],
    ),
    "no answers column": (
        "answers",
        {"train.jsonl": lines({"context": "a", "question": "b"})},
        ["no column 'answers'"],
    ),
    "JSON of another form": ("answers", {"train.json": '{"rows": []}'}, ["train_file train.json"]),
    "no JSON": ("answers", {"train.json": '{"data": ['}, ["train_file train.json"]),
    "JSON in another encoding": (
        "answers",
        {"train.json": squad(QUESTION, context="Zürich").replace("\\u00fc", "ü").encode("latin-1")},
        ["train_file train.json"],
    ),
    "an article without questions": (
        "answers",
        {"train.json": json.dumps({"data": [{"paragraphs": [{"context": "a"}]}]})},
        ["train_file train.json"],
    ),
    "an empty SQuAD file": ("answers", {"train.json": '{"data": []}'}, ["train_file train.json: has no rows"]),
    "a question without its text": (
        "answers",
        {"train.json": squad({"id": "q7"})},
        ["train_file train.json"],
    ),
    "answers for some questions only": (
        "answers",
        {"train.json": squad(QUESTION, {"id": "q2", "question": "Who?"})},
        ["train_file train.json"],
    ),
    "rows with different numbers of choices": (
        "multiple_choice",
        {"train.jsonl": CHOICES + lines(chosen(choices=("a", "b", "c")))},
        ["train.jsonl, line 3: 3 choices, and most training rows have 2; give every row equally many"],
    ),
    "test rows with another number of choices": (
        "multiple_choice",
        {"train.jsonl": CHOICES, "test.jsonl": lines(chosen(choices=("a", "b", "c")))},
        ["test_file test.jsonl, line 1: 3 choices, and most training rows have 2"],
    ),
    "a label that is no choice": (
        "multiple_choice",
        {"train.jsonl": CHOICES, "validation.jsonl": lines(chosen(label=2))},
        ["validation.jsonl, line 1: label '2'"],
    ),
    "a label below zero": (
        "multiple_choice",
        {"train.jsonl": CHOICES + lines(chosen(label=-1))},
        ["line 3: label '-1'"],
    ),
    "a text as a label": ("multiple_choice", {"train.jsonl": lines(chosen(label="no"))}, ["label 'no'"]),
    "a float as a label": ("multiple_choice", {"train.jsonl": lines(chosen(label=1.5))}, ["label '1.5'"]),
    "tags as a list of pandas": (
        "tags",
        {"train.csv": "words,tags\nAda left,\"['B-PER', 'O']\"\n"},
        ["line 2: column 'tags' holds ['B-PER', 'O']"],
    ),
    "words as a list of pandas": (
        "tags",
        {"train.csv": "words,tags\nAda left,B-PER O\n\"['It', 'left']\",O O\n"},
        ["line 3: column 'words' holds ['It', 'left']"],
    ),
    "labels as a list of pandas": (
        "multilabel",
        {"train.csv": "text,label\na,\"['x', 'y']\"\nb,x\n"},
        ["line 2: column 'label' holds ['x', 'y']"],
    ),
    "a list of choices that pandas has written": (
        "multiple_choice",
        {"train.csv": "context,choices,label\na,\"['b', 'c']\",0\n"},
        ["line 2: column 'choices' holds ['b', 'c']", "json.dumps"],
    ),
    "an empty label": (
        "multiple_choice",
        {"train.jsonl": CHOICES + lines(chosen(label=None))},
        ["line 3: column 'label' is empty"],
    ),
    "an empty choice": (
        "multiple_choice",
        {"train.csv": "sent1,ending0,ending1,label\na,b,c,0\na,,c,1\n"},
        ["train.csv, line 3: column 'ending0' is empty; write a text there"],
    ),
    "an empty choice in a list": (
        "multiple_choice",
        {"train.jsonl": lines(chosen(choices=("a", " ")))},
        ["line 1: choice 1 (from 0) of column 'choices' is empty"],
    ),
    "an empty context of choices": (
        "multiple_choice",
        {"train.jsonl": CHOICES, "test.jsonl": lines(chosen(context=""))},
        ["test_file test.jsonl, line 1: column 'context' is empty"],
    ),
    "a number as a choice": (
        "multiple_choice",
        {"train.jsonl": lines(chosen(choices=("a", 7)))},
        ["train_file train.jsonl"],
    ),
    "one choice": ("multiple_choice", {"train.jsonl": lines(chosen(choices=("a",)))}, ["line 1: 1 choice in column"]),
    "choices as text": (
        "multiple_choice",
        {"train.csv": "context,choices,label\na,b or c,0\n"},
        ["line 2: column 'choices' holds str, not a list of choices; give JSONL"],
    ),
    "no choices": (
        "multiple_choice",
        {"train.csv": "context,label\na,0\n"},
        ["no column 'choices'", "--choices_column"],
    ),
    "no context": ("multiple_choice", {"train.csv": "ending0,ending1,label\na,b,0\n"}, ["no column 'context'"]),
    "no label in any row": (
        "multiple_choice",
        {"train.csv": "sent1,ending0,ending1,label\na,b,c,\n"},
        ["train_file train.csv: column 'label' is empty"],
    ),
    "no labels": ("multiple_choice", {"train.csv": "sent1,ending0,ending1\na,b,c\n"}, ["no column 'label'"]),
    "validation rows without labels": (
        "multiple_choice",
        {"train.jsonl": CHOICES, "validation.jsonl": lines({"context": "a", "choices": ["b", "c"]})},
        ["validation_file validation.jsonl: no column 'label'"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rows_get_one_line_and_nothing_is_written(case, trained, tmp_path, fails):
    kind, contents, words = WRONG[case]
    options = []
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        options.append(f"--{name.partition('.')[0]}_file={tmp_path / name}")
    before = sorted(tmp_path.iterdir())
    line = fails("finetune", trained, f"--task={kind}", f"--output_dir={tmp_path / 'out'}", *options)
    for word in words:
        assert word in line
    assert sorted(tmp_path.iterdir()) == before


OPTIONS = [  # options, words of the error line
    ("--task classification --doc_stride 8", ["doc_stride is for kind answers"]),
    ("--task tags --context_column a", ["context_column is for kind answers or multiple_choice"]),
    ("--task answers --text_column a", ["text_column is for kind classification"]),
    ("--task answers --choices_column a b", ["choices_column is for kind multiple_choice"]),
    ("--task tags --label_separator ;", ["label_separator is for kind multilabel"]),
    (
        "--task multilabel --label_separator ; --label_column a b",
        ["label_separator is for one column of labels, and label_column names several"],
    ),
    ("--task answers --license foo", ["license 'foo'", "https://huggingface.co/docs/hub/repositories-licenses"]),
    ("--task tags --n_best_size 3", ["n_best_size is for kind answers"]),
    ("--task squad --max_answer_length 0", ["max_answer_length", "got 0"]),
    ("--task squad --doc_stride -1", ["doc_stride", "got -1"]),
    ("--task squad --null_score_diff_threshold nan", ["null_score_diff_threshold", "must be a finite number"]),
    ("--task answers --label_column a b", ["several columns are for --task multilabel"]),
    (
        "--task tags --metric_for_best_model exact_match",
        ["--task tags has f1, precision, recall, strict_f1, accuracy"],
    ),
    ("--task squad", ["dataset rajpurkar/squad: cannot be read"]),
    ("--task squad_v2", ["dataset rajpurkar/squad_v2: cannot be read"]),
    ("--task swag", ["dataset allenai/swag: cannot be read"]),
    ("--task conll2003", ["dataset lhoestq/conll2003: cannot be read"]),
]


@pytest.mark.parametrize("options, words", OPTIONS, ids=[options for options, _ in OPTIONS])
def test_wrong_options_get_one_line(options, words, trained, tmp_path, fails):
    (tmp_path / "train.jsonl").write_text("{}\n")
    given = options.split()
    if len(given) > 2 and given[1] not in ("squad",):
        given.append(f"--train_file={tmp_path / 'train.jsonl'}")
    line = fails("finetune", trained, *given)
    for word in words:
        assert word in line
