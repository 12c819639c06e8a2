"""`pretrain`: checks the options, prepares the text, trains, and leaves a model folder; and the dry run."""

import contextlib
import copy
import dataclasses
import json
import re
import tempfile
from pathlib import Path

from transformers.utils import logging

from d2l_bert.errors import GO_ON, UserError
from d2l_bert.model_cards.card import count_parameters
from d2l_bert.model_cards.config import check_license
from d2l_bert.model_cards.push import check_push
from d2l_bert.modeling.configuration_d2l_bert import D2lBertConfig
from d2l_bert.progress import report
from d2l_bert.tokenization.prepare import prepare
from d2l_bert.tokenization.prepared_folder import corpus_is_prepared
from d2l_bert.training import distributed, interruption
from d2l_bert.training.batching import check_architecture, check_source_weights, full_length_pairs, make_passes
from d2l_bert.training.checkpoint import find_checkpoint
from d2l_bert.training.config import HUB_OPTIONS, LENGTH_OPTIONS, PretrainConfig
from d2l_bert.training.distributed import on_main, restore_host_settings
from d2l_bert.training.initialize import check_start, check_weights, model_class_of
from d2l_bert.training.loop import train
from d2l_bert.training.machine import check_device, with_defaults
from d2l_bert.training.openmp import short_waits
from d2l_bert.training.run_folder import (
    LOG_FILE,
    RUN_FILE,
    check_output_folder,
    default_output_dir,
    output_folder,
    repository,
)
from d2l_bert.training.tracking import check_trackers


@restore_host_settings()
def pretrain(architecture: D2lBertConfig, run: PretrainConfig) -> Path | None:
    """
    Pretrain a BERT from text.

    The settings of the allocator, which the command makes for its whole process (`commands.keep_freed_memory`), are
    left to the calling program.

    Args:
        architecture: the model's configuration; `vocab_size` is replaced by the size of the tokenizer. With
            `init_from` it must be `D2lBertConfig.from_pretrained(run.init_from)`, with any dropout.
        run: all other options.

    Returns:
        The output folder, with the model, its tokenizer, code and card, `run_config.json`, `metrics.json`, the log,
        the curves and the checkpoints. `from_pretrained` loads the folder. None after a dry run.

    Raises:
        UserError: something that the user can mend, in one line.
        SystemExit: a signal stopped the run; a checkpoint is saved if the run had done a step. Or, in a run of several
            processes, the main process has raised an error, and shows it.
    """
    with distributed.report_errors_once():
        run.check()
        if run.license is not None:
            check_license(run.license)
    if run.dry_run:
        return dry_run(architecture, run)
    logging.disable_progress_bar()  # Transformers shows a bar for each file that it saves
    architecture = copy.deepcopy(architecture)
    with distributed.report_errors_once():
        check_architecture(architecture, run)
        if not corpus_is_prepared(run):  # the number of sources in a prepared folder is known after reading
            check_source_weights(run, len(run.text_paths()) + len(run.named_datasets()))
        trackers, folder = check_trackers(run.report_to), run.output_dir or default_output_dir(run)
        accelerator = distributed.make_accelerator(run.mixed_precision, log_with=trackers, project_dir=folder)
        run = with_defaults(run, architecture, accelerator)
        check_device(architecture, run, accelerator)
    with interruption.explain_failures(run), contextlib.ExitStack() as stack:
        if run.init_from is not None:
            on_main(accelerator, check_start, run.init_from, architecture, run.tokenizer)
        folder = on_main(accelerator, stack.enter_context, output_folder(run))
        resumed = on_main(accelerator, find_checkpoint, run.resume_from_checkpoint, folder)
        if run.init_from is not None and not resumed:
            on_main(accelerator, check_weights, model_class_of(run), run.init_from, architecture)
        if run.push_to_hub:
            hub = (repository(run, folder), run.known_license(), run.hub_private_repo)
            on_main(accelerator, check_push, *hub, False)
        # The main process prepares the text first. The other processes then find the prepared text in the cache; on
        # another machine, which may have another cache, they prepare the text again.
        text = on_main(accelerator, prepare, run, share_result=False)
        if text is None:
            text = prepare(run)
        run = dataclasses.replace(run, **text.token_options)
        with distributed.report_errors_once():
            make_passes(run, text)  # checks source_weights against the text, before anything is written
        architecture.vocab_size, architecture.pad_token_id = len(text.tokenizer), text.tokenizer.pad_token_id
        text.tokenizer.model_max_length = architecture.max_position_embeddings
        with short_waits():
            train(architecture, run, text, accelerator, folder, resumed)
    return folder


def dry_run(architecture: D2lBertConfig, run: PretrainConfig) -> None:
    """
    Try a run out with a step of each sequence length, and say how long it takes, and how much memory.

    The steps, a checkpoint and the model folder are written to a temporary folder, which is deleted.

    Raises:
        UserError: what `pretrain` would raise.
    """
    output_dir = Path(run.output_dir or default_output_dir(run)).absolute()
    if output_dir.exists():
        check_output_folder(run, output_dir)
    if run.push_to_hub and not distributed.launched_rank():
        check_push(repository(run, output_dir), run.known_license(), run.hub_private_repo, dry_run=True)
    lengths = list(dict.fromkeys(length for _, length, _ in run.stages(1_000_000)))
    # The temporary folder goes into the nearest existing parent of the output folder, so that both are on one disk.
    parent = next(parent for parent in output_dir.parents if parent.exists())
    try:
        temporary = tempfile.TemporaryDirectory(prefix=".d2l-bert-dry-run-", dir=parent)
    except OSError as error:
        raise UserError(
            f"output_dir {output_dir}: cannot be written ({error.strerror}); name another folder"
        ) from None
    # At least two steps of full length: the second has the first one's optimizer state, and its memory. The time of
    # the last but one is what its log row says is left.
    steps = max(3, len(lengths) + 1)
    with temporary as folder:
        short_run = dataclasses.replace(
            run,
            dry_run=False,
            **{name: getattr(PretrainConfig, name) for name in HUB_OPTIONS},
            output_dir=f"{folder}/{output_dir.name}",
            overwrite_output_dir=False,
            save_words=[],
            report_to=[],
            length_schedule=[f"{length}:{1 / steps:.3f}" for length in lengths[:-1]],  # one step each
            batch_size_schedule=[],
            micro_batch_size=None if run.micro_batch_size == "auto" else run.micro_batch_size,
            max_eval_pairs=2,
            logging_steps=1,
            **{**dict.fromkeys(LENGTH_OPTIONS), "max_steps": steps, "save_steps": steps, "eval_steps": steps},
        )
        report.disabled = True  # the report of so short a run means nothing, and is not printed
        try:
            model_folder = pretrain(architecture, short_run)
        except UserError as error:  # without the hint to resume: the temporary folder is deleted
            raise UserError(re.sub(f"(;|, and) {GO_ON}", "", str(error))) from None
        finally:
            report.disabled = False
        if distributed.launched_rank():
            return
        record = json.loads((model_folder / RUN_FILE).read_text())
        rows = [json.loads(line) for line in (model_folder / LOG_FILE).read_text().splitlines()]
        rows = [row for row in rows if "seconds_left" in row]  # the others are evaluations and events
        size = sum(path.stat().st_size for path in model_folder.glob("checkpoint-*/*"))
        parameters = count_parameters(model_folder)
    seconds, memory = rows[-2]["seconds_left"], max(row["memory_mb"] for row in rows)
    report.info(f"dry run: {describe_length(run, record['data']['train_tokens'], seconds)}")
    report.info(
        f"dry run: a model of {parameters:,} parameters; a step takes {seconds:.3g} s, and a process {memory:,.0f} MB"
    )
    report.info(f"dry run: a checkpoint takes {size / 1e6:,.0f} MB, and {run.save_total_limit} are kept")
    report.info("dry run: text, steps, evaluation, checkpoint and model folder went well; nothing is kept")


def describe_length(run: PretrainConfig, train_tokens: int, seconds: float) -> str:
    """
    The length of a run in words, for a message.

    Args:
        seconds: the time of a step of full length.
    """
    if run.max_minutes is not None:
        steps = int(60 * run.max_minutes / seconds)
        return f"{run.max_minutes:g} minutes, about {steps:,} steps; they are timed and counted when the run begins"
    full = run.global_batch_size * run.max_seq_length
    if run.num_train_epochs is not None:
        minutes = run.num_train_epochs * train_tokens / full * seconds / 60
        return f"{run.num_train_epochs:g} passes over {train_tokens:,} tokens, about {minutes:,.3g} minutes"
    tokens = full_length_pairs(run, run.max_steps) * run.max_seq_length
    return (
        f"{run.max_steps:,} steps of {tokens:,} tokens at most, {tokens / train_tokens:.1f} passes over the text, "
        f"about {tokens / full * seconds / 60:,.3g} minutes without evaluations"
    )
