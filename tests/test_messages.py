"""The package's messages are records of the standard library's logging; the command shows them on stderr."""

import json
import logging
import subprocess
import sys

import pytest
from conftest import SMALL

from d2l_bert.__main__ import main


# Prints every record that reaches the root logger, and nothing else, as a line of JSON.
PROGRAM = """
import json, logging, sys

class Lines(logging.Handler):
    def emit(self, record):
        sys.stdout.write(json.dumps([record.name, record.levelname, record.getMessage()]) + "\\n")

logging.basicConfig(level=logging.INFO, handlers=[Lines()])
from d2l_bert import D2lBertConfig, PretrainConfig, pretrain
architecture = D2lBertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
options = dict(vocab_size=400, max_seq_length=32, max_steps=4, global_batch_size=8, dataloader_num_workers=1)
if __name__ == "__main__":
    run = PretrainConfig(corpus=[sys.argv[1]], output_dir=sys.argv[2], mixed_precision="no", **options)
    pretrain(architecture, run)
    logging.getLogger("d2l_bert").setLevel(logging.WARNING)
    pretrain(architecture, PretrainConfig(**{**vars(run), "overwrite_output_dir": True}))
"""


@pytest.mark.slow
def test_a_program_gets_the_packages_messages_as_log_records_and_no_other_output(books, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", books, tmp_path / "out"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    records = [json.loads(line) for line in done.stdout.splitlines()]  # fails if anything but JSON was printed
    ours = [record for record in records if record[0].startswith("d2l_bert.")]
    assert ours == records
    messages = {name: message for name, _, message in ours}
    assert {"d2l_bert.tokenization.prepare", "d2l_bert.training.log", "d2l_bert.report"} <= messages.keys()
    assert "What it learnt" in messages["d2l_bert.report"]
    assert sum(name == "d2l_bert.report" for name, *_ in ours) == 1, "the second run was told to be quiet"


def test_the_command_shows_messages_on_stderr_and_the_report_on_stdout(books, tmp_path, capsys):
    command = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", "--max_steps=4", *SMALL]
    root = logging.getLogger()
    heard = logging.Handler()
    heard.emit = lambda record: pytest.fail(f"{record.name} reached the root logger")
    root.addHandler(heard)
    try:
        assert main(command) == 0
    finally:
        root.removeHandler(heard)
    out, err = capsys.readouterr()
    assert "What it learnt" in out and "What it learnt" not in err
    assert [line for line in err.splitlines() if line.startswith("held out: MLM loss")]
    assert logging.getLogger("d2l_bert").propagate and not logging.getLogger("d2l_bert").handlers
