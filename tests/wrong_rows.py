"""Wrong rows of tagged words, answers and choices, with words of the one line that `d2l-bert finetune` says."""

import json


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

# The task, the files by option, words of the error line.
WRONG = {
    "words and tags of different counts": (
        "token-classification",
        {"train.jsonl": TAGS, "validation.jsonl": lines(tagged(["a", "b", "c"], ["O", "O"]))},
        ["validation_file validation.jsonl, line 1: 3 words in column 'tokens' and 2 tags in column 'ner_tags'"],
    ),
    "words and tags of different counts in CSV": (
        "token-classification",
        {"train.csv": "words,tags\nAda left,B-PER O\nIt left now,O O\n"},
        ["train.csv, line 3: 3 words in column 'words' and 2 tags in column 'tags'; give each word one tag"],
    ),
    "a tag that training lacks": (
        "token-classification",
        {"train.jsonl": TAGS, "validation.jsonl": lines(tagged(["Rome", "left"], ["B-LOC", "O"]))},
        ["validation.jsonl, line 1: label 'B-LOC'"],
    ),
    "a tag of the test rows that training lacks": (
        "token-classification",
        {"train.jsonl": TAGS, "test.jsonl": lines(tagged(["a", "b"], ["O", "I-PER"]))},
        ["test_file test.jsonl, line 1: label 'I-PER'"],
    ),
    "one tag only": ("token-classification", {"train.jsonl": lines(tagged(["a"], ["O"]))}, ["'O'"]),
    "no tags": ("token-classification", {"train.jsonl": lines(tagged(["a"], []))}, ["column 'ner_tags' is empty"]),
    "a row without tags": (
        "token-classification",
        {"train.jsonl": TAGS + lines(tagged(["a"], []))},
        ["line 3: column 'ner_tags' is empty"],
    ),
    "validation rows without tags": (
        "token-classification",
        {"train.jsonl": TAGS, "validation.jsonl": lines({"tokens": ["a"]})},
        ["validation_file validation.jsonl: no column 'ner_tags'"],
    ),
    "no words": (
        "token-classification",
        {"train.jsonl": TAGS + lines(tagged([], []))},
        ["line 3: column 'ner_tags' is empty"],
    ),
    "an empty word": (
        "token-classification",
        {"train.jsonl": TAGS + lines(tagged(["a", " "], ["O", "O"]))},
        ["line 3: word 2 of column 'tokens'"],
    ),
    "a number as a word": (
        "token-classification",
        {"train.jsonl": TAGS + lines(tagged(["a", 5], ["O", "O"]))},
        ["train_file train.jsonl"],
    ),
    "a number for a list of words": (
        "token-classification",
        {"train.jsonl": lines({"tokens": 1, "ner_tags": ["O"]}, {"tokens": 2, "ner_tags": ["B"]})},
        ["line 1: column 'tokens' holds int"],
    ),
    "a number for a list of tags": (
        "token-classification",
        {"train.jsonl": lines({"tokens": ["a"], "ner_tags": ["O"]}, {"tokens": ["a"], "ner_tags": 1.5})},
        ["train_file train.jsonl"],
    ),
    "floats as tags": (
        "token-classification",
        {"train.jsonl": lines(tagged(["a"], [0.5]))},
        ["column 'ner_tags' holds 0.5"],
    ),
    "no column of words": (
        "token-classification",
        {"train.jsonl": lines({"text": "a", "tags": ["O"]})},
        ["no column 'tokens'"],
    ),
    "a line of CoNLL with fewer fields": (
        "token-classification",
        {"train.conll": "Ada NNP B-PER\nleft O\n"},
        ["train_file train.conll"],
    ),
    "an empty word of CoNLL-U": (
        "token-classification",
        {"train.conllu": "1\tAda\t_\tPROPN" + "\t_" * 6 + "\n2\t\t_\tVERB" + "\t_" * 6 + "\n"},
        ["error: train_file train.conllu: cannot be read (line 2: its word is empty; repair the line)"],
    ),
    "a word a row": (
        "token-classification",
        {"train.csv": "Sentence #,tokens,tags\nSentence: 1,Ada,B-PER\n,left,O\nSentence: 2,Bo,B-PER\n,left,O\n"},
        ["train.csv: each row has one word", "does column 'Sentence #' say which?", ".conll"],
    ),
    "an empty CoNLL file": ("token-classification", {"train.conll": "\n\n"}, ["train_file train.conll: has no rows"]),
    "CoNLL in another encoding": (
        "token-classification",
        {"train.conll": "Ada O\nZürich B-LOC\n".encode("latin-1")},
        ["train_file train.conll"],
    ),
    "CoNLL without tags": ("token-classification", {"train.conll": "Ada\nleft\n"}, ["no column", "--label_column"]),
    "an answer at another place": (
        "question-answering",
        {"train.jsonl": ANSWERS + lines(asked(start=[1]))},
        ["train.jsonl, line 3: the answer 'Ada' is not at character 1 of its context (it begins at 0); correct"],
    ),
    "an answer at no whole place": (
        "question-answering",
        {"train.jsonl": ANSWERS + lines(asked(start=[0.9]))},
        ["train.jsonl, line 3: column 'answers' has no answers in SQuAD's form (answer_start is 0.9"],
    ),
    "yes as the place of an answer": (
        "question-answering",
        {"train.jsonl": ANSWERS + lines(asked(context="sAda", start=[True]))},
        ["line 3: column 'answers' has no answers in SQuAD's form (answer_start is True"],
    ),
    "digits as the places of letters": (
        "question-answering",
        {"train.jsonl": ANSWERS + lines({**asked(), "answers": {"text": "Ada", "answer_start": "012"}})},
        ["line 3: column 'answers' has no answers in SQuAD's form (text and answer_start are no lists"],
    ),
    "an answer that is nowhere": (
        "question-answering",
        {"train.jsonl": ANSWERS, "validation.jsonl": lines(asked(text=["Bo"]))},
        ["validation.jsonl, line 1: the answer 'Bo' is not at character 0", "it is nowhere in the context"],
    ),
    "an answer before the context": (
        "question-answering",
        {"train.jsonl": lines(asked(start=[-12]))},
        ["at character -12"],
    ),
    "a second answer that is nowhere": (
        "question-answering",
        {"train.jsonl": ANSWERS, "test.jsonl": lines(asked(text=["Ada", "Bo"], start=[0, 0]))},
        ["test_file test.jsonl, line 1: the answer 'Bo' is not at character 0"],
    ),
    "an answer in SQuAD's file that is nowhere": (
        "question-answering",
        {"train.json": squad(QUESTION, {**QUESTION, "id": "q2", "answers": [{"text": "Bo", "answer_start": 3}]})},
        ["train_file train.json"],
    ),
    "an empty context": (
        "question-answering",
        {"train.jsonl": lines(asked(" "))},
        ["line 1: column 'context' is empty"],
    ),
    "an empty question": (
        "question-answering",
        {"train.jsonl": ANSWERS, "test.jsonl": lines({"context": "a", "question": ""})},
        ["test_file test.jsonl, line 1: column 'question' is empty"],
    ),
    "an empty answer": ("question-answering", {"train.jsonl": lines(asked(text=[""]))}, ["line 1: the answer ''"]),
    "no answer at all": ("question-answering", {"train.jsonl": lines(asked(text=[], start=[]))}, ["column 'answers'"]),
    "a question without an answer that training lacks": (
        "question-answering",
        {"train.jsonl": ANSWERS, "validation.jsonl": ANSWERS + lines(asked(text=[], start=[]))},
        ["validation.jsonl, line 3: column 'answers' has no answer"],
    ),
    "answers without places": (
        "question-answering",
        {"train.jsonl": lines({"context": "a b", "question": "c", "answers": {"text": ["a"]}})},
        ["line 1: column 'answers'"],
    ),
    "answers and places of different counts": (
        "question-answering",
        {"train.jsonl": lines(asked(start=[0, 1]))},
        ["line 1: column 'answers'"],
    ),
    "answers as plain text": (
        "question-answering",
        {"train.csv": "context,question,answers\nAda sold it.,Who?,Ada\n"},
        ["train.csv, line 2: column 'answers'"],
    ),
    "a number as a context": (
        "question-answering",
        {"train.jsonl": lines({**asked(), "context": 5})},
        ["line 1: column 'context' holds int, not text"],
    ),
    "no answers column": (
        "question-answering",
        {"train.jsonl": lines({"context": "a", "question": "b"})},
        ["no column 'answers'"],
    ),
    "JSON of another form": ("question-answering", {"train.json": '{"rows": []}'}, ["train_file train.json"]),
    "no JSON in SQuAD's file": ("question-answering", {"train.json": '{"data": ['}, ["train_file train.json"]),
    "JSON in another encoding": (
        "question-answering",
        {"train.json": squad(QUESTION, context="Zürich").replace("\\u00fc", "ü").encode("latin-1")},
        ["train_file train.json"],
    ),
    "an article without questions": (
        "question-answering",
        {"train.json": json.dumps({"data": [{"paragraphs": [{"context": "a"}]}]})},
        ["train_file train.json"],
    ),
    "an empty SQuAD file": (
        "question-answering",
        {"train.json": '{"data": []}'},
        ["train_file train.json: has no rows"],
    ),
    "a question without its text": (
        "question-answering",
        {"train.json": squad({"id": "q7"})},
        ["train_file train.json"],
    ),
    "answers for some questions only": (
        "question-answering",
        {"train.json": squad(QUESTION, {"id": "q2", "question": "Who?"})},
        ["train_file train.json"],
    ),
    "rows with different numbers of choices": (
        "multiple-choice",
        {"train.jsonl": CHOICES + lines(chosen(choices=("a", "b", "c")))},
        ["train.jsonl, line 3: 3 choices, and most training rows have 2; give every row equally many"],
    ),
    "test rows with another number of choices": (
        "multiple-choice",
        {"train.jsonl": CHOICES, "test.jsonl": lines(chosen(choices=("a", "b", "c")))},
        ["test_file test.jsonl, line 1: 3 choices, and most training rows have 2"],
    ),
    "a label that is no choice": (
        "multiple-choice",
        {"train.jsonl": CHOICES, "validation.jsonl": lines(chosen(label=2))},
        ["validation.jsonl, line 1: label '2'"],
    ),
    "a label below zero": (
        "multiple-choice",
        {"train.jsonl": CHOICES + lines(chosen(label=-1))},
        ["line 3: label '-1'"],
    ),
    "a text as a label": ("multiple-choice", {"train.jsonl": lines(chosen(label="no"))}, ["label 'no'"]),
    "a float as a label": ("multiple-choice", {"train.jsonl": lines(chosen(label=1.5))}, ["label '1.5'"]),
    "tags as a list of pandas": (
        "token-classification",
        {"train.csv": "words,tags\nAda left,\"['B-PER', 'O']\"\n"},
        ["line 2: column 'tags' holds ['B-PER', 'O']"],
    ),
    "words as a list of pandas": (
        "token-classification",
        {"train.csv": "words,tags\nAda left,B-PER O\n\"['It', 'left']\",O O\n"},
        ["line 3: column 'words' holds ['It', 'left']"],
    ),
    "labels as a list of pandas": (
        "multi_label_classification",
        {"train.csv": "text,label\na,\"['x', 'y']\"\nb,x\n"},
        ["line 2: column 'label' holds ['x', 'y']"],
    ),
    "a list of choices that pandas has written": (
        "multiple-choice",
        {"train.csv": "context,choices,label\na,\"['b', 'c']\",0\n"},
        ["line 2: column 'choices' holds ['b', 'c']", "json.dumps"],
    ),
    "an empty label of choices": (
        "multiple-choice",
        {"train.jsonl": CHOICES + lines(chosen(label=None))},
        ["line 3: column 'label' is empty"],
    ),
    "two choices of one label": (
        "multiple-choice",
        {"train.jsonl": CHOICES + lines(chosen() | {"choices": {"text": ["a", "b"], "label": ["A", "A"]}})},
        ["line 3: column 'choices' has the same label for two choices"],
    ),
    "more choices than a batch can have": (
        "multiple-choice",
        {"train.jsonl": lines(chosen(choices=["a"] * 101))},
        ["line 1: 101 choices in column 'choices', and 100 at most are read"],
    ),
    "more columns of choices than a batch can have": (
        "multiple-choice",
        {"train.jsonl": lines({"context": "a", "label": 0} | {f"ending{number}": "b" for number in range(101)})},
        ["line 1: 101 choices in column 'ending0' and others, and 100 at most are read"],
    ),
    "an empty choice": (
        "multiple-choice",
        {"train.csv": "sent1,ending0,ending1,label\na,b,c,0\na,,c,1\n"},
        ["train.csv, line 3: column 'ending0' is empty; write a text there"],
    ),
    "an empty choice in a list": (
        "multiple-choice",
        {"train.jsonl": lines(chosen(choices=("a", " ")))},
        ["line 1: choice 1 (from 0) of column 'choices' is empty"],
    ),
    "an empty context of choices": (
        "multiple-choice",
        {"train.jsonl": CHOICES, "test.jsonl": lines(chosen(context=""))},
        ["test_file test.jsonl, line 1: column 'context' is empty"],
    ),
    "a number as a choice": (
        "multiple-choice",
        {"train.jsonl": lines(chosen(choices=("a", 7)))},
        ["train_file train.jsonl"],
    ),
    "one choice": ("multiple-choice", {"train.jsonl": lines(chosen(choices=("a",)))}, ["line 1: 1 choice in column"]),
    "choices as text": (
        "multiple-choice",
        {"train.csv": "context,choices,label\na,b or c,0\n"},
        ["line 2: column 'choices' holds str, not a list of choices; give JSONL"],
    ),
    "no choices": (
        "multiple-choice",
        {"train.csv": "context,label\na,0\n"},
        ["no column 'choices'", "--choices_column"],
    ),
    "no context": ("multiple-choice", {"train.csv": "ending0,ending1,label\na,b,0\n"}, ["no column 'context'"]),
    "no label in any row": (
        "multiple-choice",
        {"train.csv": "sent1,ending0,ending1,label\na,b,c,\n"},
        ["train_file train.csv: column 'label' is empty"],
    ),
    "no labels": ("multiple-choice", {"train.csv": "sent1,ending0,ending1\na,b,c\n"}, ["no column 'label'"]),
    "validation rows without labels": (
        "multiple-choice",
        {"train.jsonl": CHOICES, "validation.jsonl": lines({"context": "a", "choices": ["b", "c"]})},
        ["validation_file validation.jsonl: no column 'label'"],
    ),
}
