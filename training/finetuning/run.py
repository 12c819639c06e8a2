"""`finetune`: checks options and rows, trains one model for each rate and seed, leaves the best with its tables."""

import contextlib
import itertools
import logging
import math
import shutil
import statistics
from pathlib import Path

import torch
import transformers
from accelerate.state import AcceleratorState
from transformers.integrations import get_available_reporting_integrations

from d2l_bert import folders
from d2l_bert.messages import UserError, counted, report
from d2l_bert.model_cards.card import CARD_FILE, CURVES_FILE, METRICS_FILE, RUN_FILE, render_card
from d2l_bert.model_cards.config import PublishConfig
from d2l_bert.model_cards.figures import no_better, shown_metric
from d2l_bert.model_cards.publish import publish
from d2l_bert.model_cards.push import check_push
from d2l_bert.modeling import conversion
from d2l_bert.modeling.conversion import save_model, save_with_code
from d2l_bert.tokenization.account import unknown_share
from d2l_bert.tokenization.wordpiece import save_tokenizer
from d2l_bert.training.devices import is_set, on_main, restore_host_settings, start_processes, together
from d2l_bert.training.finetuning import folder as output
from d2l_bert.training.finetuning.answers_kind import Answers
from d2l_bert.training.finetuning.attempts import MODEL_FOLDER, Work, attempt_name, run_all, saved_outputs
from d2l_bert.training.finetuning.choice_kind import MultipleChoice
from d2l_bert.training.finetuning.config import FinetuneConfig
from d2l_bert.training.finetuning.data import Data, load_data
from d2l_bert.training.finetuning.kind import Kind
from d2l_bert.training.finetuning.metrics import check_extra
from d2l_bert.training.finetuning.pictures import draw_curves
from d2l_bert.training.finetuning.start import is_ours, make_model, read_start
from d2l_bert.training.finetuning.tags_kind import Tags
from d2l_bert.training.finetuning.text_kinds import Classification, Multilabel, Regression
from d2l_bert.training.finetuning.trainer import (
    default_rate,
)
from d2l_bert.training.log import check_trackers


logger = logging.getLogger(__name__)


def finetune(config: FinetuneConfig) -> Path:
    """
    Fine-tune a model on a table, by Transformers' `Trainer`, on all launched processes.

    Data and options are checked before anything is written. One model is trained for each rate, with the first seed;
    then one for each further seed, with the best rate. The folder holds the model of the best seed.

    Args:
        config: the options of the run.

    Returns:
        The output folder.

    Raises:
        UserError: an option, the data, the model or the output folder is wrong, or a file cannot be written.
    """
    state = start_processes()
    with together():
        config.check()
        check_extra()
        if is_set("ACCELERATE_USE_FSDP"):
            raise UserError("finetune trains with DDP, not FSDP; launch it without FSDP")
    with restore_host_settings(), conversion.without_log_messages():
        transformers.utils.logging.disable_progress_bar()
        AcceleratorState._reset_state()  # an earlier run in this process may have had another precision
        with together():
            if config.fp16 and not torch.cuda.is_available():
                raise UserError("fp16 needs an NVIDIA GPU, and this machine shows none; leave fp16 out, or give bf16")
            check_trackers(config.report_to, get_available_reporting_integrations())
            kind = CLASSES[config.kind](config)
            # What can be refused without the rows, which may be many, is refused before the rows are read.
            best_metric(config, kind)
            output.check_output_folder(config, output.folder_of(config), config.model, is_finetuning=True)
            start = read_start(config, kind)
            kind.check_tokenizer(start.tokenizer, start.max_seq_length)
            data = load_data(config, kind)
            metric = best_metric(config, kind)  # of `tags`, the rows decide
            make_model(start, kind, config.from_scratch)  # weights that cannot be loaded are refused here
            features = {
                split: kind.features(table, start.tokenizer, start.max_seq_length)
                for split, table in data.splits().items()
            }
            if config.push_to_hub:
                if not (is_ours(start.config) or start.config.model_type == "bert"):
                    raise UserError(
                        f"push_to_hub: d2l-bert publish takes d2l-bert models and stock BERT, and {config.model} is a "
                        f"{start.config.model_type} model; leave push_to_hub out"
                    )
                repository = config.hub_model_id or output.folder_of(config).resolve().name
                on_main(check_push, repository, config.license, config.hub_private_repo, False)
        return _run(config, kind, metric, data, start, features, state)


def _run(config, kind, metric, data, start, features, state):
    """The run after all checks of options, data and model."""
    rates = config.learning_rates() or [default_rate(getattr(start.config, "hidden_size", 768))]
    with contextlib.ExitStack() as stack:
        folder = on_main(lambda: stack.enter_context(output.output_folder(config)))
        record = output.make_record(config, kind, data, start, rates, state.num_processes)
        on_main(output.start_folder, config, folder, record)
        _say_sizes(config, data, features, start, rates, state.num_processes)
        work = Work(config, kind, data, start, features, metric, folder / output.WORK_FOLDER, state)
        tried, seeds, kept = run_all(work, rates)
        message = on_main(_finish, work, folder, record, tried, seeds, kept)
        state.wait_for_everyone()
    if state.is_main_process:
        report.info(message)
        if config.push_to_hub:
            repository = config.hub_model_id or folder.resolve().name
            report.info(publish(folder, repository, PublishConfig(public=not config.hub_private_repo)))
    state.wait_for_everyone()
    return folder


def _say_sizes(config, data, features, start, rates, processes):
    """Log what is trained on, and how many texts are truncated."""
    for split, table in data.splits().items():
        labels = "" if split != "test" or data.test_is_labelled else ", without labels"
        lost = features[split].note or f"none is longer than {start.max_seq_length} tokens"
        logger.info(f"{split}: {counted(len(table), 'row')} of {table.name}{labels}; {lost}")
    given = "" if config.learning_rate else " (by the model's size; --learning_rate sets it)"
    logger.info(f"rate {', '.join(f'{rate:g}' for rate in rates)}{given}")
    if config.num_seeds > 1 and data.validation is None:
        logger.info(f"no validation rows choose among the seeds: the model of seed {config.seed} is kept")


# ---------------------------------------------------------------------------------------------------------------------
# The end of a run


def _finish(work: Work, folder: Path, record: dict, tried: list[dict], seeds: list[dict], kept: int) -> str:
    """
    Write the finished folder; only the main process calls this. Until then all models stand in `WORK_FOLDER`.

    Returns:
        The report for the user: the table of figures, and what the folder holds.
    """
    kind, data, best = work.kind, work.data, seeds[kept]
    name = attempt_name(best["learning_rate"], best["seed"])
    source = work.folder / name / MODEL_FOLDER
    model = getattr(transformers, kind.auto_class).from_pretrained(source, trust_remote_code=False)
    logs = {attempt_name(result["learning_rate"], result["seed"]): result["log"] for result in (*tried, *seeds)}
    title = f"{folder.resolve().name}: {work.config.task}, seed {best['seed']}, rate {best['learning_rate']:g}"
    with folders.replacing_files(folder, last=output.WEIGHTS_FILE) as partial:
        save_with_code(model, partial) if is_ours(model.config) else save_model(model, partial)
        save_tokenizer(work.start.tokenizer, partial)
        if data.test is not None:
            predicted = kind.predicted_columns(data.test, work.features["test"], saved_outputs(source, "test"))
            output.write_table(partial / output.PREDICTIONS_FILE, data.test.columns, predicted)
        draw_curves(logs, name, work.metric, title, partial / CURVES_FILE)
        pictures = {CURVES_FILE: "Loss and metric over the steps"}
        # Of the test rows, or of the validation rows if the test rows have no labels.
        for split in data.measured()[-1:]:
            outputs = saved_outputs(source, split)
            pictures |= kind.pictures(data.splits()[split], work.features[split], outputs, partial)
        metrics = make_metrics(kind, work.metric, data, tried, seeds, kept) | {
            "unknown_share": {
                split: unknown_share(work.start.tokenizer, itertools.chain.from_iterable(kind.texts(table)))
                for split, table in data.splits().items()
                if split != "train"
            },
            "lost_to_length": {split: made.note for split, made in work.features.items()},
            "shared_with_training": data.shared,
            "diverged_rates": sorted(set(record["learning_rates"]) - {result["learning_rate"] for result in tried}),
            "pictures": pictures,
        }
        folders.write_json(partial / METRICS_FILE, metrics)
        folders.write_json(partial / RUN_FILE, record)
        (partial / CARD_FILE).write_text(render_card(partial, folder.resolve().name), encoding="utf-8")
    shutil.rmtree(folder / output.WORK_FOLDER, ignore_errors=True)
    return results_text(folder, metrics, data)


def make_metrics(kind: Kind, metric: str, data: Data, tried: list[dict], seeds: list[dict], kept: int) -> dict:
    """
    The content of metrics.json.

    Returns:
        `test_accuracy` and the like: the figures of the model in the folder. `mean` and `sd`: mean and standard
        deviation (with n - 1) over the seeds, by split and metric; `sd` is None for one seed. `most_frequent_class`:
        for classes, the share of the most frequent one, by split. `seeds`: each seed's figures. `rates`: the figures
        of the first seed with each rate.
    """
    names = (*kind.metrics_shown, "loss")
    measured = data.measured()

    def figures(result):
        return {
            "seed": result["seed"],
            "learning_rate": result["learning_rate"],
            "steps": result["steps"],
            "best_step": result["best_step"],
            "seconds": round(result["seconds"], 2),
            **{split: {name: result[split][name] for name in names} for split in measured},
        }

    over = {split: {name: [result[split][name] for result in seeds] for name in names} for split in measured}
    return {
        **{f"{split}_{name}": seeds[kept][split][name] for split in measured for name in names},
        "most_frequent_class": {
            split: share for split in measured if (share := kind.most_frequent_share(data.splits()[split])) is not None
        },
        "best_metric": metric,
        "kept_seed": seeds[kept]["seed"],
        "learning_rate": seeds[kept]["learning_rate"],
        "mean": {
            split: {name: statistics.fmean(values) for name, values in over[split].items()} for split in measured
        },
        "sd": {
            split: {name: statistics.stdev(values) if len(seeds) > 1 else None for name, values in over[split].items()}
            for split in measured
        },
        "seeds": [figures(result) for result in seeds],
        "rates": [figures(result) for result in tried],
        "metrics_shown": list(kind.metrics_shown),
        "train_seconds": round(math.fsum(result["seconds"] for result in (*tried, *seeds[1:])), 2),
    }


def results_text(folder: Path, metrics: dict, data: Data) -> str:
    """The table at the end of a run: a line for each seed, mean and standard deviation, and what the folder holds."""
    names, lines = metrics["metrics_shown"], []
    for split in data.measured():
        table = data.splits()[split]
        rows = {f"seed {result['seed']}": result[split] for result in metrics["seeds"]}
        if len(rows) > 1:
            rows |= {"mean": metrics["mean"][split], "sd": metrics["sd"][split]}
        unknown = f"{metrics['unknown_share'][split]:.1%} of the characters in [UNK]"
        lines.append(f"{split}: {counted(len(table), 'row')} of {table.name}; {unknown}")
        lines.append("".join([f"  {'':>8}", *(f"{name:>{max(9, len(name)) + 2}}" for name in names)]))
        for label, row in rows.items():
            cells = (f"{shown_metric(name, row[name]):>{max(9, len(name)) + 2}}" for name in names)
            kept = " (kept)" if len(rows) > 1 and label == f"seed {metrics['kept_seed']}" else ""
            lines.append("".join([f"  {label:>8}", *cells]) + kept)
        if comparison := no_better(metrics, split):
            lines.append(f"  {comparison}")
    lines.append(
        f"trained in {metrics['train_seconds']:,.0f} s; the model of seed {metrics['kept_seed']} with rate "
        f"{metrics['learning_rate']:g} is in {folder}"
    )
    if (folder / output.PREDICTIONS_FILE).exists():
        lines.append(f"predictions for the test rows: {folder / output.PREDICTIONS_FILE}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------

# A line for each name in `config.KINDS`.
CLASSES = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "tags": Tags,
    "answers": Answers,
    "multiple_choice": MultipleChoice,
}


def best_metric(config: FinetuneConfig, kind: Kind) -> str:
    """
    The name of the metric that chooses checkpoint, rate and seed.

    Raises:
        UserError: `metric_for_best_model` is not a metric of the task.
    """
    known = (*kind.metrics_shown, "loss")
    if config.metric_for_best_model is None:
        return config.named_task().metric if config.named_task() else kind.main_metric
    chosen = config.metric_for_best_model.removeprefix("eval_")
    if chosen not in known:
        raise UserError(f"metric_for_best_model {chosen!r}: --task {config.task} has {', '.join(known)}; give one")
    return chosen
