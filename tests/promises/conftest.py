"""A small corpus, a model trained on it, and the command: what the promises' tests share."""

import pytest
import torch

from .driving import SMALL, command, write_books


@pytest.fixture(autouse=True)
def _one_thread():
    """The models are too small to gain from more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of 24 text files in a small made-up English."""
    return write_books(tmp_path_factory.mktemp("promised") / "texts", 24, seed=0)


@pytest.fixture(scope="session")
def model(texts, tmp_path_factory):
    """The folder of a finished run of 60 steps, with checkpoints at steps 30 and 60."""
    folder = tmp_path_factory.mktemp("promised-model") / "model"
    options = ["--max_steps=60", "--save_steps=30", "--license=mit", *SMALL]
    assert command("pretrain", "--corpus", texts, "--output_dir", folder, *options) == 0
    return folder
