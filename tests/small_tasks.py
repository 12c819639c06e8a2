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
    rng, rows = random.Random(seed), []
    for _ in range(count):
        who, where, what = (rng.choice(words) for words in WORDS.values())
        place = ["old", where][rng.randrange(2) :]
        tokens, tags = (
            [who, "walked", "to", "the", *place],
            ["B-PER", "O", "O", "O", "B-LOC", "I-LOC"][: 4 + len(place)],
        )
        rows.append({"tokens": [*tokens, "with", "a", what], "ner_tags": [*tags, "O", "O", "B-OBJ"]})
    return rows


def answer_rows(count, seed, unanswerable=0.0):
    """Questions who, where and what about a sentence; some ask for what the sentence does not say."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        asked, is_said = rng.choice(list(WORDS)), rng.random() >= unanswerable
        said = {kind: rng.choice(WORDS[kind]) for kind in rng.sample(list(WORDS), 3) if is_said or kind != asked}
        context = f"then {', '.join(f'the {word}' for word in said.values())} and nobody"
        found = [said[asked]] if is_said else []
        answers = {"text": found, "answer_start": [context.index(word) for word in found]}
        rows.append({"id": str(number), "context": context, "question": f"{asked} was there?", "answers": answers})
    return rows


def choice_rows(count, seed):
    """A question who, where or what, with a person, a place and a thing to choose from."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        asked, kinds = rng.choice(list(WORDS)), rng.sample(list(WORDS), 3)
        choices = [f"the {rng.choice(WORDS[kind])}" for kind in kinds]
        rows.append({"context": f"{asked} was there?", "choices": choices, "label": kinds.index(asked)})
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
