"""Options of the runs that the tests interrupt, and readers of what these runs leave."""

import json

from conftest import SMALL


OPTIONS = ("--mixed_precision=no", "--hidden_dropout_prob=0.1", "--logging_steps=1", "--save_total_limit=9", *SMALL)
SHORT = (*OPTIONS, "--max_steps=6", "--save_steps=3", "--eval_steps=6")
LONG = (*OPTIONS, "--max_steps=40", "--save_steps=10", "--eval_steps=40")


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def rows(folder):
    """The rows of the log. Every line must be strict JSON, which has no NaN."""

    def refuse(constant):
        raise ValueError(constant)

    lines = (folder / "training_log.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]
