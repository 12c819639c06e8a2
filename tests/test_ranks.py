"""Several processes: one text, errors said once, ends within seconds, the group of the caller, FSDP2 as one."""

import contextlib
import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import SMALL
from promises.driving import end, error_lines, start, wait_for
from runs import log_rows
from safetensors.torch import load_file

from d2l_bert.__main__ import main


RANKS_APART = Path(__file__).with_name("ranks_apart.py")
RUN = [*SMALL, "--mixed_precision=no", "--max_steps=4", "--license=mit"]


@pytest.fixture
def apart(books, tmp_path):
    """A folder for two ranks without a common disk; both have the text `books`, also under the name `validation`."""
    for place in ("0/books", "1/books", "0/validation", "1/validation"):
        shutil.copytree(books, tmp_path / "apart" / place)
    return tmp_path / "apart"


def run_apart(folder, *words):
    """Train on two ranks; returns the `subprocess.Popen` objects, and a function that reads what each has said."""
    said = folder / "said.txt"
    words = ["pretrain", "--output_dir=out", *words]
    environment = {"APART": str(folder)}
    ranks = start(words, script=RANKS_APART, environment=environment, processes=2, said=said)
    return ranks, lambda: [said.read_text(), Path(f"{said}.1").read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("differs", ["books", "validation"])
def test_ranks_that_read_different_texts_are_refused_before_the_first_step(apart, differs):
    """Equal texts in two places train; with another word in rank 1's files, no rank takes a step."""
    words = ["--corpus=books", *RUN, "--vocab_size=100"]  # so small that both vocabularies have this size
    words += ["--validation_corpus=validation"] if differs == "validation" else []
    for file in (apart / "1" / differs).iterdir():  # of the same size
        file.write_text(file.read_text().replace("nobody", "no one"))
    ranks, said = run_apart(apart, *words)
    assert end(ranks, 90) == [2, 2], said()
    told = "\n".join(said())
    assert len(error_lines(told)) == 1 and "Traceback" not in told, told
    assert not (apart / "0" / "out").exists()
    shutil.copytree(apart / "0" / differs, apart / "1" / differs, dirs_exist_ok=True)
    ranks, said = run_apart(apart, *words)
    assert end(ranks, 90) == [0, 0], said()
    assert log_rows(apart / "0" / "out")[-1]["step"] == 4


@pytest.mark.slow
def test_an_error_of_rank_1_alone_is_said_once_and_names_the_rank(apart, trained):
    """Only rank 0 has the model to start from. A launcher would now end rank 0; here the test does."""
    shutil.copytree(trained, apart / "0" / "start")
    words = ["--corpus=books", "--init_from=start", "--max_steps=4", "--max_seq_length=48"]
    ranks, said = run_apart(apart, *words)
    code = ranks[1].wait(60)
    ranks[0].terminate()
    end(ranks, 30)
    (line,) = [line for line in error_lines("\n".join(said())) if "start" in line]
    assert code == 2 and re.search(r"\b(rank|process) 1\b", line) and "Traceback" not in said()[1], said()


@pytest.mark.slow
def test_a_dry_run_that_is_refused_says_so_once(apart):
    """Both ranks see the mistake: the output folder holds other files and no run."""
    for rank in "01":
        (apart / rank / "out").mkdir()
        (apart / rank / "out" / "letter.txt").write_text("Dear Emma,")
    ranks, said = run_apart(apart, "--corpus=books", *RUN, "--dry_run")
    assert end(ranks, 60) == [2, 2], said()
    (line,) = error_lines("\n".join(said()))
    assert "letter.txt" in line


# ---------------------------------------------------------------------------------------------------------------------
# `d2l_bert.pretrain` in a program of the user's own, which is launched as several ranks

PROGRAM = """
import sys
import torch
import d2l_bert

if __name__ == "__main__":
    folder, corpus, group = sys.argv[1:]
    if group == "own group":
        torch.distributed.init_process_group("gloo")
    for name in ("first", "second"):
        architecture = d2l_bert.D2lBertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=48,
        )
        run = d2l_bert.PretrainConfig(
            corpus=[corpus], output_dir=f"{folder}/{name}", vocab_size=300, max_seq_length=48, max_steps=3,
            global_batch_size=8, mixed_precision="no", dataloader_num_workers=0, license="mit",
        )
        d2l_bert.pretrain(architecture, run)
        print(f"the {name} run is done")
        if group == "own group":
            ranks = torch.tensor([1.0 + torch.distributed.get_rank()])
            torch.distributed.all_reduce(ranks)
            assert ranks.item() == 3.0
    if group == "own group":
        torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["no group", "own group"])
def test_a_launched_program_can_pretrain_twice_and_keeps_its_process_group(books, tmp_path, group):
    """Without a group of the program's own, and with one, which still adds over the ranks after each run."""
    program = tmp_path / "program.py"
    said = tmp_path / "said.txt"
    program.write_text(PROGRAM)
    ranks = start([tmp_path, books, group], script=program, processes=2, said=said)
    assert end(ranks, 120) == [0, 0], said.read_text()
    for name in ("first", "second"):
        assert (tmp_path / name / "model.safetensors").exists()
        assert log_rows(tmp_path / name)[-1]["step"] == 3
        assert all(f"the {name} run is done" in file.read_text() for file in (said, Path(f"{said}.1")))


# ---------------------------------------------------------------------------------------------------------------------
# DDP keeps each gradient once: in the bucket in which it sends it


def run_on_two_ranks(program, folder, seconds):
    """Run a program, which may import the modules of the tests, in two processes; both must end well."""
    script = folder / "program.py"
    script.write_text(program)
    said = folder / "said.txt"
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    ranks = start([], script=script, environment=environment, processes=2, said=said)
    assert end(ranks, seconds) == [0, 0], said.read_text()


GRADIENTS_IN_BUCKETS = """
import torch
from small_models import in_training, make_batch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from d2l_bert import PretrainConfig
from d2l_bert.training.data.batches import counts_of
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.learner import Learner

learner = Learner(make_accelerator("no"), in_training(), PretrainConfig())
parameters = list(learner.model.parameters())
batches = [make_batch(learner.model)] * 3
tensors = []  # how many share out the memory of the gradients: buckets, or each gradient for itself


def count(*_):
    addresses = {parameter.grad.untyped_storage().data_ptr() for parameter in parameters}
    tensors.append(len(addresses))


register_optimizer_step_pre_hook(count)
learner.update(batches, counts_of(batches), 1e-3)
learner.model.register_forward_pre_hook(count)  # before each micro-batch of the second step
learner.update(batches, counts_of(batches), 1e-3)
assert len(tensors) == 5 and len(parameters) > 20 and max(tensors) <= 2, tensors
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_gradients_of_ddp_lie_in_its_buckets_from_one_step_to_the_next(tmp_path):
    run_on_two_ranks(GRADIENTS_IN_BUCKETS, tmp_path, seconds=120)


# ---------------------------------------------------------------------------------------------------------------------
# FSDP2 trains the same weights as one process, and each resumes from the other's checkpoints


GRADIENTS = """
import copy
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from small_models import make_batch, make_config, make_model

from d2l_bert import D2lBertForPreTraining, PretrainConfig
from d2l_bert.training.data.batches import counts_of
from d2l_bert.training.devices import make_accelerator
from d2l_bert.training.learner import Learner
from d2l_bert.training.shards import full_tensor, shard

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
torch.distributed.init_process_group("gloo")
for setting in ("d2l", "bert"):  # untied and tied
    whole = make_model(D2lBertForPreTraining, make_config(setting)).train()
    batch = make_batch(whole)
    sharded = copy.deepcopy(whole)
    shard(sharded, plugin)
    parts = torch.distributed.get_world_size()
    assert sharded.mlm.decoder.weight.to_local().numel() < whole.mlm.decoder.weight.numel()
    calls = []
    for model, skip_logits in ((whole, False), (sharded, False), (sharded, True)):
        model.zero_grad()
        hook = model.bert.register_forward_hook(lambda *_: calls.append(skip_logits))
        model.mlm.forward = lambda states: calls.append("logits") or type(model.mlm).forward(model.mlm, states)
        model(**batch, skip_logits=skip_logits).loss.backward()
        hook.remove()
        gradients = [full_tensor(parameter.grad) for parameter in model.parameters()]
        if model is whole:
            expected = gradients
        for found, gradient in zip(gradients, expected, strict=True):
            torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)
    assert calls == [False, "logits", False, "logits", True], calls

accelerator = make_accelerator("no")
accelerator.state.fsdp_plugin = plugin  # as Accelerate sets it on GPUs
for state in (accelerator.state, PartialState()):
    state.distributed_type = DistributedType.FSDP
learner = Learner(accelerator, make_model(D2lBertForPreTraining, make_config()).train(), PretrainConfig())
learner.model.mlm.forward = None  # not called in a step
learner.update([batch], counts_of([batch]), 1e-3)
assert accelerator.is_fsdp2 and accelerator.num_processes == parts
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_shards_give_the_gradient_of_the_whole_model_without_logits_and_a_step_computes_none(tmp_path):
    run_on_two_ranks(GRADIENTS, tmp_path, seconds=300)


OPTIONS = ["--max_steps=4", "--save_steps=2", "--micro_batch_size=3", "--mixed_precision=no"]
FILES = ("model.safetensors", "checkpoint-4/model.safetensors", "checkpoint-4/optimizer.safetensors")


def assert_the_same(one, two, *files):
    for name in (*FILES, *files):
        tensors = load_file(two / name)
        expected = load_file(one / name)
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(tensors[key], tensor, atol=1e-4, rtol=0)


def without_the_end(folder, copy):
    """A copy of the folder without the files that a run writes after its second step."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoint-4")
    for name in ("model.safetensors", "metrics.json"):
        (copy / name).unlink()
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--tie_word_embeddings=true"], ["--ema_decay=0.9"], ["--optim=muon"]],
    ids=["tied", "averaged", "muon"],
)
def test_fsdp2_and_one_process_train_the_same_weights_and_resume_each_others_checkpoints(books, tmp_path, options):
    """
    Each evaluation comes right before a checkpoint, when FSDP2 holds some parameters unsharded, as other objects.
    """

    def train(folder, *more, with_fsdp):
        words = ["pretrain", f"--corpus={books}", "--tie_word_embeddings=false", *options, *OPTIONS, *SMALL, *more]
        if with_fsdp:
            said = tmp_path / "said.txt"
            ranks = start([*words, f"--output_dir={folder}"], script="on_fsdp.py", processes=2, said=said)
            assert end(ranks, 300) == [0, 0], said.read_text()
        else:
            assert main([*words, f"--output_dir={folder}"]) == 0

    averages = ["checkpoint-4/average.safetensors"] if "--ema_decay=0.9" in options else []
    one = tmp_path / "one"
    two = tmp_path / "two"
    train(one, with_fsdp=False)
    train(two, with_fsdp=True)
    assert_the_same(one, two, *averages)
    for source, with_fsdp in ((two, False), (one, True)):
        resumed = without_the_end(source, tmp_path / f"from-{source.name}")
        train(resumed, "--resume_from_checkpoint=latest", with_fsdp=with_fsdp)
        assert_the_same(one, resumed, *averages)


# ---------------------------------------------------------------------------------------------------------------------
# Errors in one process of a run: all processes end within seconds, with the right message and exit code


FAULTS = Path(__file__).with_name("faults.py")
LONG = ["--max_steps=40", "--mixed_precision=no", "--logging_steps=1", "--eval_steps=40", "--save_steps=10", *SMALL]
SOON = 10.0  # seconds from an error to the end of every process


@pytest.fixture
def hang(books, tmp_path):
    """Start a run with a fault; returns its ranks, and the files of what they say. All are killed after the test."""
    started = []

    def run(fault, *options, processes=1, **environment):
        words = ["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'model'}", *LONG, *options]
        how = {"environment": {"FAULT": fault, **environment}, "processes": processes, "said": tmp_path / "said.txt"}
        started.extend(start(words, script=FAULTS, **how))
        return started, [tmp_path / "said.txt", tmp_path / "said.txt.1"]

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def workers_of(hang, *options, **environment):
    """A run that waits for a batch that takes ten minutes: its process, what it says, and its loader's processes."""
    (run,), (said, _) = hang("endless step", *options, **environment)
    wait_for(lambda: "step 15/40" in said.read_text(), [run])
    return run, said, psutil.Process(run.pid).children(recursive=True)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_in_one_line(hang):
    run, said, (worker,) = workers_of(hang, "--dataloader_num_workers=1")
    worker.kill()
    assert run.wait(SOON) == 2
    (line,) = error_lines(said.read_text())
    assert "a process that makes batches has ended" in line


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.slow
def test_the_workers_of_a_killed_run_end_too(hang, method):
    run, _, workers = workers_of(hang, "--dataloader_num_workers=3", START_METHOD=method)
    assert len(workers) >= 3
    run.kill()
    limit = time.monotonic() + SOON
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            while worker.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < limit, worker
                time.sleep(0.05)


@pytest.mark.parametrize("told", [[0, 1], [0], [1]], ids=["both are told", "rank 0 is told", "rank 1 is told"])
@pytest.mark.slow
def test_sigterm_ends_ranks_that_wait_for_each_other_within_seconds(hang, told):
    """Rank 1 waits for a message that is never sent, rank 0 waits for rank 1. Python handles no signal meanwhile."""
    ranks, said = hang("stuck before the first step", processes=2)
    wait_for(lambda: "never sent" in said[1].read_text(), ranks)
    time.sleep(1)  # until both ranks wait
    for rank in told:
        ranks[rank].send_signal(signal.SIGTERM)
    assert end(ranks, 8) == [-signal.SIGTERM if rank in told else 2 for rank in (0, 1)]
    assert not any("Traceback" in file.read_text() for file in said)


@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
@pytest.mark.slow
def test_a_lost_rank_ends_the_others_within_the_time_of_a_step_and_saving_may_take_longer(hang, tmp_path, lost_by):
    """A rank is silent where its machine has lost its power or its network: its connections stay open."""
    ranks, said = hang("lost in a step", processes=2, LOST_BY=str(int(lost_by)))
    wait_for(lambda: "step 14/40" in said[0].read_text(), [ranks[0]])
    assert (tmp_path / "model" / "checkpoint-10").is_dir(), "rank 1 has waited 9 seconds for it"
    assert ranks[0].wait(6 + SOON) == 2
    (line,) = error_lines(said[0].read_text())
    assert "another process of this run is gone, or cannot be reached" in line


@pytest.mark.slow
def test_a_rank_without_a_batch_ends_the_others_within_the_time_of_a_step(hang):
    ranks, said = hang("stuck text of rank 1", processes=2)
    wait_for(lambda: "step 15/40" in said[0].read_text(), [ranks[0]])
    assert ranks[0].wait(6 + SOON) == 2
    (line,) = error_lines(said[0].read_text())
    assert "another process of this run is gone, or cannot be reached" in line


# ---------------------------------------------------------------------------------------------------------------------
# Bugs and memory


def break_at(place, error, monkeypatch):
    """Raise an error in a function, instead of what it does."""

    def stumble(*arguments, **named):
        raise error

    monkeypatch.setattr(f"d2l_bert.{place}", stumble)


def test_a_bug_is_shown_with_its_traceback_and_where_to_report_it(books, tmp_path, monkeypatch, capsys):
    break_at("training.learner.Learner.update", ValueError("operands could not be broadcast"), monkeypatch)
    assert main(["pretrain", f"--corpus={books}", f"--output_dir={tmp_path / 'out'}", *LONG]) == 1
    said = capsys.readouterr().err
    assert "in stumble" in said
    assert "this is a bug" in said
    assert "CONTRIBUTING.md" in said.splitlines()[-1]


@pytest.mark.parametrize("reader", ["read_sources", "count_words", "prepare_tokens", ""])
def test_out_of_memory_is_one_line_and_in_a_step_advises_smaller_ones(books, tmp_path, fails, monkeypatch, reader):
    """Not while the text is read."""
    text = tmp_path / "text.txt"  # not in the cache yet
    text.write_text("\n\n".join(file.read_text().replace("nobody", reader) for file in sorted(books.iterdir())))
    if reader:
        error = MemoryError("Unable to allocate 8.00 TiB for an array")
        break_at(f"tokenization.prepare.{reader}", error, monkeypatch)
    else:
        error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 B.")
        break_at("training.learner.Learner.update", error, monkeypatch)
    line = fails("pretrain", "--corpus", text, "--documents=blank_line", "--output_dir", tmp_path / "out", *LONG)
    assert "out of memory" in line
    assert ("--micro_batch_size" in line and "--gradient_checkpointing" in line) == (not reader)
