"""Standard streams that are closed, full or left by their reader, and a working folder that is gone: no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


COMMAND = [sys.executable, "-m", "d2l_bert"]


def run(shell, *words, **how):
    """Run a line of the shell in which "$@" is the command with these words; returns stderr and the exit code."""
    done = subprocess.run(
        ["bash", "-c", shell, "-", *COMMAND, *map(str, words)], capture_output=True, text=True, **how
    )
    return done.stderr, done.returncode


OF_COMMAND = "; exit ${PIPESTATUS[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_a_command_quietly(trained, tmp_path, unbuffered):
    many = tmp_path / "many.txt"
    many.write_text("".join(f"anna walked to the garden {number}\n" for number in range(3000)))
    how = {"env": {**os.environ, "PYTHONUNBUFFERED": unbuffered}}
    said, code = run(f'"$@" | true{OF_COMMAND}', "fill-mask", trained, "a [MASK]", **how)
    assert (said, code) == ("", 141)
    said, code = run(f'"$@" | head -1{OF_COMMAND}', "evaluate", trained, "--line_scores", many, **how)
    assert code == 141 and "error" not in said and "Traceback" not in said
    output = tmp_path / "figures.json"
    words = ("evaluate", trained, "--corpus", many, "--pppl_sentences=0", f"--output={output}")
    said, code = run(f'"$@" | true{OF_COMMAND}', *words, **how)
    assert code == 141 and "rror" not in said and output.exists()  # what is left to do is done
    said, code = run(f'"$@" | true{OF_COMMAND}', "--help", **how)
    assert said == "" and code in (0, 141)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_below_stdout_is_one_line(trained, unbuffered):
    how = {"env": {**os.environ, "PYTHONUNBUFFERED": unbuffered}}
    said, code = run('"$@" > /dev/full', "fill-mask", trained, "a [MASK]", **how)
    assert code == 2 and said.count("error") == 1 and "No space left" in said


@pytest.mark.slow
def test_closed_streams_are_no_bug(trained, tmp_path):
    said, code = run('"$@" <&-', "embed", trained, "-", f"--output={tmp_path / 'v.npy'}")
    assert code == 2 and "standard input: is closed" in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())
    assert run('"$@" <&- >&- 2>&-', "fill-mask", trained, "a [MASK]") == ("", 0)
    assert run('"$@" <&- >&- 2>&-', "fill-mask", tmp_path / "none", "a [MASK]") == ("", 2)


@pytest.mark.parametrize("words", ["fill-mask model 'a [MASK]'", "pretrain", "pretrain --help"])
@pytest.mark.parametrize("program", [Path(sys.executable).with_name("d2l-bert"), f"{sys.executable} -m d2l_bert"])
def test_a_working_folder_that_is_gone_is_one_line(program, words, tmp_path):
    (tmp_path / "gone").mkdir()
    said, code = run(f"rmdir {tmp_path / 'gone'}; {program} {words}", cwd=tmp_path / "gone")
    assert code == 2 and "working folder" in said and len(said.splitlines()) == 1
