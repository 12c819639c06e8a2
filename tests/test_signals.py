"""Signals to a run: it ends after its step with a checkpoint, or at once at a second Ctrl-C."""

import itertools
import signal
import time

import pytest
from promises.driving import end, start, wait_for
from runs import OPTIONS, log_rows

from d2l_bert.__main__ import main
from d2l_bert.training.pretrain import StopSignals


pytestmark = pytest.mark.usefixtures("one_thread")

LONG = (*OPTIONS, "--max_steps=40", "--save_steps=10", "--eval_steps=40")


@pytest.mark.parametrize("question", (3, 4, 7, 11))
def test_whenever_a_signal_comes_the_last_step_taken_is_saved(command, monkeypatch, tmp_path, question):
    """The signal comes right before the loop asks for the n-th time whether a signal has come."""
    asked = itertools.count(1)

    def wanted(stop):
        if next(asked) >= question:
            stop.agreed_signal = signal.SIGTERM
        return bool(stop.agreed_signal)

    monkeypatch.setattr(StopSignals, "should_stop", wanted)
    with pytest.raises(SystemExit, match="143"):
        main(command(tmp_path, *LONG))
    (saved,) = tmp_path.glob("checkpoint-*")
    assert saved.name == f"checkpoint-{log_rows(tmp_path)[-1]['step']}"


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_the_step(command, tmp_path):
    """Each step takes ten seconds more; a Ctrl-C between two of them would end the run at once."""
    said, slow = tmp_path / "said.txt", {"PROMISES_STEP_SECONDS": "10"}
    (run,) = start(command(tmp_path / "model", *LONG), script="faulty.py", environment=slow, said=said)
    for words in ("step  1/40", "a second Ctrl-C"):
        wait_for(lambda words=words: words in said.read_text(), [run])
        time.sleep(1)  # until the run is within its second step
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
    # By `sys.exit`, or by the signal, which a shell also shows as 130.
    assert end([run], 4)[0] in (130, -signal.SIGINT)
    assert not list((tmp_path / "model").glob("*checkpoint*"))
