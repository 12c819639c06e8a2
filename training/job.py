"""`Job`: what a pretraining run has decided, built once; the loop, its log and its files read it."""

from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator

from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.tokenization.prepared_folder import PreparedText
from d2l_bert.training.checkpoint import Checkpoint
from d2l_bert.training.config import PretrainConfig
from d2l_bert.training.packing import Sharding


@dataclass
class Job:
    """
    What a run has decided. `pretrain` makes it; its `plan` fills in what is found by trying, before the first step.

    Args:
        run: the options, with the defaults of this machine and, after `plan`, the size of micro-batches.
        architecture: the model's configuration, with the vocabulary of `text`.
        text: the tokenized text.
        folder: the output folder.
        resumed: the checkpoint to resume from; None for a new run.
        sharding: this process's share of each step.
        max_steps: the steps of the run; known after `plan`.
        identity: what a checkpoint and the run that resumes from it must share; known after `plan`.
        record: the content of run_config.json; known after `plan`.
    """

    run: PretrainConfig
    architecture: D2lBertConfig
    text: PreparedText
    accelerator: Accelerator
    folder: Path
    resumed: Checkpoint | None
    sharding: Sharding
    max_steps: int = 0
    identity: dict = field(default_factory=dict)
    record: dict = field(default_factory=dict)
