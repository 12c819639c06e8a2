"""Small tasks that a test makes itself: tags, answers and multiple choice about people, places and things."""

import json
import random


WORDS = {
    "who": ["anna", "boris", "clara", "daniel", "emma", "felix", "greta", "hugo"],
    "where": ["garden", "kitchen", "harbour", "library", "market", "station", "tower", "valley"],
    "what": ["apple", "basket", "candle", "drum", "engine", "feather", "glove", "hammer"],
}


def write_rows(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def tag_rows(count, seed):
    """Sentences with BIO tags: a person, a place of one or two words, and a thing."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        who, where, what = (rng.choice(words) for words in WORDS.values())
        old = rng.random() < 0.5
        place, tags = (["old", where], ["B-LOC", "I-LOC"]) if old else ([where], ["B-LOC"])
        parts = [
            ([who], ["B-PER"]),
            (["walked", "to", "the"], ["O"] * 3),
            (place, tags),
            (["with", "a"], ["O"] * 2),
            ([what], ["B-OBJ"]),
        ]
        if rng.random() < 0.3:
            parts = parts[2:] + parts[:2]
        rows.append({"tokens": sum((p[0] for p in parts), []), "ner_tags": sum((p[1] for p in parts), [])})
    return rows


def answer_rows(count, seed, unanswerable=0.0):
    """Questions who, where and what about a sentence; some ask for what the sentence does not say."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        asked = rng.choice(list(WORDS))
        kinds = rng.sample(list(WORDS), 3)
        says_nothing = rng.random() < unanswerable
        if says_nothing:
            kinds.remove(asked)
        said = {kind: rng.choice(WORDS[kind]) for kind in kinds}
        context = f"then {', '.join(f'the {said[kind]}' for kind in kinds)} and nobody"
        answers = {"text": [], "answer_start": []}
        if not says_nothing:
            answers = {"text": [said[asked]], "answer_start": [context.index(said[asked])]}
        rows.append({"id": str(number), "context": context, "question": f"{asked} was there?", "answers": answers})
    return rows


def choice_rows(count, seed):
    """A question who, where or what, with a person, a place and a thing to choose from."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        asked, kinds = rng.choice(list(WORDS)), rng.sample(list(WORDS), 3)
        choices = [f"the {rng.choice(WORDS[kind])}" for kind in kinds]
        context = f"{asked} was there?"
        rows.append({"context": context, "choices": choices, "label": kinds.index(asked)})
    return rows


def swag_rows(rows):
    """The rows of `choice_rows` with SWAG's columns."""
    return [
        {
            "sent1": row["context"],
            "sent2": "then",
            **{f"ending{number}": choice for number, choice in enumerate(row["choices"])},
            "label": row["label"],
        }
        for row in rows
    ]


def squad_json(rows):
    """The rows of `answer_rows` in SQuAD's nested form."""
    paragraphs = [
        {
            "context": row["context"],
            "qas": [
                {
                    "id": row["id"],
                    "question": row["question"],
                    "answers": [
                        {"text": text, "answer_start": start}
                        for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                    ],
                    "is_impossible": not row["answers"]["text"],
                }
            ],
        }
        for row in rows
    ]
    return {"version": "v2.0", "data": [{"title": "books", "paragraphs": paragraphs}]}
