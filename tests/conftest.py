"""Fixtures for all tests: a corpus in a small made-up language, one model trained on it, a local Hub. No downloads."""

import functools
import gc
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace


# Set before the imports: the libraries read these variables once, when they are imported.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="d2l-bert-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small to gain from more, and processes share cores

# Folders of tests are in memory where there is enough of it: a run syncs each checkpoint to the disk, and tests write
# hundreds.
MEMORY_DISK = Path("/dev/shm")
if MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP, and the programs that tests start inherit it.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

import pytest  # noqa: E402
from accelerate.utils import memory  # noqa: E402
from huggingface_hub import constants  # noqa: E402
from hypothesis import settings  # noqa: E402
from local_hub import TOKEN, LocalHub  # noqa: E402
from promises.driving import PEOPLE, PLACES, THINGS  # noqa: E402

from d2l_bert.__main__ import main  # noqa: E402
from d2l_bert.model_cards import pictures  # noqa: E402
from d2l_bert.training import log  # noqa: E402


# Each run measures the CPU's peak for some tenths of a second; for tests a hundredth does.
log.matmul_peak = functools.partial(log.matmul_peak, seconds=0.01)


# Trainer collects garbage before each run, through Accelerate, which takes a fifth of the time of a small fine-tuning.
memory.gc = SimpleNamespace(collect=lambda: 0)


def drawn_once(draw):
    """Draws the picture of this process's first run, for all runs: drawing takes as long as training some of them."""
    drawn = []

    def draw_once(*arguments):
        path = arguments[-1]
        if drawn:
            path.write_bytes(drawn[0])
        else:
            draw(*arguments)
            drawn.append(path.read_bytes())

    return draw_once


pictures.plot_curves = drawn_once(pictures.plot_curves)
pictures.plot_finetuning = drawn_once(pictures.plot_finetuning)

# A failed assert in these modules shows its values, as one in a test does.
pytest.register_assert_rewrite("publishing", "runs", "small_models")

# The property tests try the same examples on every machine; `make fuzz` draws new ones.
settings.register_profile("same", derandomize=True, database=None, deadline=None, max_examples=50)
settings.register_profile("fuzz", deadline=None, max_examples=2000)
settings.load_profile("same")


def pytest_unconfigure():
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)

# A model without dropout. All its sizes differ, so that a test notices if two are swapped.
SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

# The files of a finished model. The run's folder also holds the log and the checkpoints.
MODEL_FILES = {
    "README.md",
    "config.json",
    "configuration_d2l_bert.py",
    "metrics.json",
    "model.safetensors",
    "modeling_d2l_bert.py",
    "run_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_curves.png",
    "vocab.txt",
}

# A model small enough to train in a second or two, by AdamW: it learns more in so few steps than by Muon.
SMALL = (
    "--num_hidden_layers=1 --hidden_size=32 --num_attention_heads=2 --intermediate_size=64 "
    "--max_position_embeddings=64 --vocab_size=400 --max_seq_length=48 "
    "--global_batch_size=8 --dataloader_num_workers=0 --optim=adamw --learning_rate=3e-3"
).split()


def pytest_collection_finish():
    """What exists by now stays until the end: each run's `gc.collect` need not look at it."""
    gc.freeze()


def write_books(folder, count=24, seed=0):
    """Write text that a model can learn: each book repeats its own hero, place and thing in many sentences."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name = rng.choice(PEOPLE)
        place = rng.choice(PLACES)
        thing = rng.choice(THINGS)
        paragraphs = []
        for _ in range(10):
            sentences = [
                f"{name.title()} walked to the {place} with a {thing}.",
                f"The {thing} was {rng.choice(['red', 'old', 'heavy', 'small'])} and {name} liked it.",
                f"In the {place} there was nobody but {name}.",
                f"Then {name} {rng.choice(['sold', 'lost', 'found', 'painted'])} the {thing} and left the {place}.",
            ]
            paragraphs.append(" ".join(rng.sample(sentences, 3)))
        (folder / f"book-{number:02d}.txt").write_text("\n\n".join(paragraphs) + "\n")
    return folder


@pytest.fixture(scope="session")
def books(tmp_path_factory):
    """A folder of 24 text files, `book-00.txt` and so on."""
    return write_books(tmp_path_factory.mktemp("corpus") / "books")


@pytest.fixture(scope="session")
def trained(books, tmp_path_factory):
    """The folder of a finished run: 40 steps in float32, with checkpoints at steps 20 and 40."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    arguments = [f"--corpus={books}", f"--output_dir={folder}", "--max_steps=40", "--save_steps=20"]
    assert main(["pretrain", *arguments, "--mixed_precision=no", "--license=apache-2.0", *SMALL]) == 0
    return folder


@pytest.fixture
def shown():
    """Send the package's messages to stderr, as the command does, for tests that call its functions directly."""
    logger = logging.getLogger("d2l_bert")
    handler = logging.Handler()
    handler.emit = lambda record: print(record.getMessage(), file=sys.stderr)  # pytest replaces stderr later
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def here(monkeypatch):
    """
    A local Hub for this test alone, set as the Hub of this very process, which has the token of the user `someone`.

    Another process reaches it with the environment of `local_hub.environment`.
    """
    with LocalHub({TOKEN: "someone"}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        address = "{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.endpoint}/{address}")
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # keeps the address of an earlier test's Hub
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        no_waiting = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})  # no wait before a retry
        monkeypatch.setattr("huggingface_hub.utils._http.time", no_waiting)
        yield hub


@pytest.fixture
def fails(capsys):
    """Run a command that must fail; returns its one line on stderr."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse exits by itself
            code = stop.code
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if "error:" in line]
        assert code == 2 and len(lines) == 1, captured.err
        assert "Traceback" not in captured.err
        return lines[0]

    return run


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of a finished run's folder, for a test to damage."""
    return Path(shutil.copytree(trained, tmp_path / "model"))
