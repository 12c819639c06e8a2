"""Runs of a few steps with the same options, and their logs."""

import json

from conftest import SMALL

from d2l_bert.__main__ import main


def run(books, folder, *options):
    """Train through the command line; returns the weights file's bytes."""
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={folder}", *SMALL, *options]) == 0
    return (folder / "model.safetensors").read_bytes()


def log_rows(folder):
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
