"""The main job: text in, a model folder out."""

import contextlib
import copy
import dataclasses
import json
import re
import tempfile
from pathlib import Path

from transformers.utils import logging

from d2l_bert.errors import GO_ON, UserError
from d2l_bert.model_cards.metadata import check_license
from d2l_bert.model_cards.push import check_push
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.progress import report
from d2l_bert.tokenization.prepare import is_prepared, prepare
from d2l_bert.training import distributed, interruption
from d2l_bert.training.batching import check_source_weights, make_passes, pairs_of
from d2l_bert.training.checkpoint import find_checkpoint
from d2l_bert.training.config import HUB_OPTIONS, LENGTH_OPTIONS, PretrainConfig, check_architecture
from d2l_bert.training.device import check_device, faster_attention, processes_that_load
from d2l_bert.training.distributed import on_main
from d2l_bert.training.host_settings import host_settings_kept
from d2l_bert.training.initialize import check_start, check_weights, model_class_of
from d2l_bert.training.loop import train
from d2l_bert.training.run_folder import RUN_FILE, default_output_dir, output_folder, refuse_what_is_there, repository
from d2l_bert.training.tracking import check_trackers


@host_settings_kept()
def pretrain(architecture: D2lBertConfig, run: PretrainConfig) -> Path | None:
    """
    Pretrain a BERT from text.

    Args:
        architecture: the model's numbers; its vocabulary follows the tokenizer. With `init_from` they are that
            model's, `D2lBertConfig.from_pretrained(run.init_from)`, dropout apart.
        run: everything else.

    Returns:
        The output folder: a model that `from_pretrained` loads, its tokenizer, its code, its card, `run_config.json`,
        `metrics.json`, the log, the curves, and checkpoints. None after a dry run.

    Raises:
        UserError: for whatever the user can mend, in one line.
    """
    with distributed.said_once():
        run.check()
        if run.license is not None:
            check_license(run.license)
    if run.dry_run:
        return rehearse(architecture, run)
    logging.disable_progress_bar()  # Transformers would draw one for every file it saves
    architecture = copy.deepcopy(architecture)
    with distributed.said_once():
        check_architecture(architecture, run)
        if not is_prepared(run):  # what a prepared folder holds shows when it is read
            check_source_weights(run, len(run.text_paths()) + len(run.named_datasets()))
        trackers, folder = check_trackers(run.report_to), run.output_dir or default_output_dir(run)
        accelerator = distributed.make_accelerator(run.mixed_precision, log_with=trackers, project_dir=folder)
        device = accelerator.device.type
        run = dataclasses.replace(
            run,
            mixed_precision=accelerator.mixed_precision,
            attn_implementation=run.attn_implementation or faster_attention(architecture, run, device),
            dataloader_num_workers=processes_that_load(run, device),
        )
        check_device(architecture, run, accelerator)
    with interruption.failures_explained(run), contextlib.ExitStack() as held:
        if run.init_from is not None:
            on_main(accelerator, check_start, run.init_from, architecture, run.tokenizer)
        folder = on_main(accelerator, held.enter_context, output_folder(run))
        resumed = on_main(accelerator, find_checkpoint, run.resume_from_checkpoint, folder)
        if run.init_from is not None and not resumed:
            on_main(accelerator, check_weights, model_class_of(run), run.init_from, architecture)
        if run.push_to_hub:
            hub = (repository(run, folder), run.known_license(), run.hub_private_repo)
            on_main(accelerator, check_push, *hub, False)
        # The first process reads and tokenizes, the others find what it left; on another machine, perhaps, which may
        # not see what the first one sees.
        text = on_main(accelerator, prepare, run, shared=False) or prepare(run)
        run = dataclasses.replace(run, **text.settled)
        with distributed.said_once():
            make_passes(run, text)  # refuses weights that do not fit the text, before anything is written
        architecture.vocab_size, architecture.pad_token_id = len(text.tokenizer), text.tokenizer.pad_token_id
        text.tokenizer.model_max_length = architecture.max_position_embeddings
        train(architecture, run, text, accelerator, folder, resumed)
    return folder


def rehearse(architecture: D2lBertConfig, run: PretrainConfig) -> None:
    """A dry run: all that `pretrain` does, with a pair or two of each length, in a folder that goes again."""
    wanted = Path(run.output_dir or default_output_dir(run)).absolute()
    if wanted.exists():
        refuse_what_is_there(run, wanted)
    if run.push_to_hub and not distributed.launched_rank():
        check_push(repository(run, wanted), run.known_license(), run.hub_private_repo, dry_run=True)
    lengths = list(dict.fromkeys(length for _, length, _ in run.stages(1_000_000)))
    beside = next(parent for parent in wanted.parents if parent.exists())
    try:
        folder = tempfile.TemporaryDirectory(prefix=".d2l-bert-dry-run-", dir=beside)
    except OSError as error:
        raise UserError(f"output_dir {wanted}: cannot be written ({error.strerror}); name another folder") from None
    with folder as folder:
        short = dataclasses.replace(
            run,
            dry_run=False,
            **{name: getattr(PretrainConfig, name) for name in HUB_OPTIONS},
            output_dir=f"{folder}/{wanted.name}",
            overwrite_output_dir=False,
            report_to=[],
            length_schedule=[f"{length}:{0.99 / len(lengths):.3f}" for length in lengths[:-1]],
            batch_size_schedule=[],
            global_batch_size=2,
            micro_batch_size=None,
            max_eval_pairs=2,
            **{**dict.fromkeys(LENGTH_OPTIONS), "max_steps": max(2, len(lengths))},
            **dict.fromkeys(("save_steps", "eval_steps"), max(2, len(lengths))),
        )
        report.disabled = True  # what it has learnt is nothing
        try:
            made = pretrain(architecture, short)
        except UserError as error:  # there is nothing to go on with
            raise UserError(re.sub(f"(;|, and) {GO_ON}", "", str(error))) from None
        finally:
            report.disabled = False
        if distributed.launched_rank():
            return
        record = json.loads((made / RUN_FILE).read_text())
        size = sum(path.stat().st_size for path in made.glob("checkpoint-*/*"))
    report.info(f"dry run: {expectation(run, record['data']['train_tokens'])}")
    report.info(f"dry run: a checkpoint takes {size / 1e6:,.0f} MB, and {run.save_total_limit} are kept")
    report.info("dry run: text, steps, evaluation, checkpoint and model folder went well; nothing is kept")


def expectation(run: PretrainConfig, train_tokens: int) -> str:
    """How long a run is, in words."""
    if run.max_minutes is not None:
        return f"steps are timed and counted when the run begins, for {run.max_minutes:g} minutes"
    if run.num_train_epochs is not None:
        return f"{run.num_train_epochs:g} passes over {train_tokens:,} tokens"
    tokens = pairs_of(run, run.max_steps) * run.max_seq_length
    return f"{run.max_steps:,} steps of {tokens:,} tokens at most, {tokens / train_tokens:.1f} passes over the text"
