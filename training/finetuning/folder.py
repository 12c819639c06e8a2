"""The finished folder of a fine-tuning: the model, `metrics.json`, predictions, pictures and the card."""

import shutil
import statistics

from d2l_bert import folders
from d2l_bert.model_cards import card, figures, pictures
from d2l_bert.modeling import conversion
from d2l_bert.tokenization import account, wordpiece
from d2l_bert.training import run_folder
from d2l_bert.training.checkpoint import WEIGHTS_FILE
from d2l_bert.training.finetuning import metrics as measures
from d2l_bert.training.finetuning.rows import write_predictions


# In the folder of each rate and seed: the best one's model.
MODEL_FOLDER = "model"


def write_folder(run, model, outputs: dict, tried: list[dict], seeds: list[dict], kept: dict) -> str:
    """
    Write the finished folder; only the main process calls this.

    Args:
        run: the `Run`.
        model: the trained model to keep, as in training.
        outputs: its outputs for the test rows, and for the rows to report on, by split.
        tried, seeds, kept: what `Run.train` has returned.

    Returns:
        The report for the user: the table of figures, and what the folder holds.
    """
    task, splits, folder = run.task, run.splits, run.folder
    attempt = run.folder_of(kept["learning_rate"], kept["seed"])
    metrics = make_metrics(run, tried, seeds, kept)
    with folders.replacing_files(folder, last=WEIGHTS_FILE) as partial:
        task.finish(model)
        conversion.save_model(model, partial)
        wordpiece.save_tokenizer(run.tokenizer, partial)
        if "test" in splits:
            predicted = task.in_csv(task.predictions(splits["test"], outputs["test"]))
            write_predictions(partial / run_folder.PREDICTIONS_FILE, splits["test"], predicted)
        pictures.plot_finetuning(
            kept["log"],
            run.metric,
            f"{folder.resolve().name}: {run.config.task}, {attempt.name}",
            partial / card.CURVES_FILE,
        )
        metrics["pictures"] = {card.CURVES_FILE: "Loss and metric over the steps"}
        # Of the test rows, or of the validation rows if the test rows have no labels.
        for name in run.measured()[-1:]:
            if sides := task.sides(splits[name], outputs[name]):
                metrics["classification_report"] = {name: measures.report_by_class(*sides)}
                place = partial / pictures.CONFUSION_FILE
                if caption := pictures.plot_confusion(*sides, splits[name].name, place):
                    metrics["pictures"][place.name] = caption
        folders.write_json(partial / card.METRICS_FILE, metrics)
        folders.write_json(partial / card.RUN_FILE, run.record)
        text = card.render_card(partial, folder.resolve().name)
        if run.config.resume_from_checkpoint:
            text = card.updated_card(folder, text)
        (partial / card.CARD_FILE).write_text(text, encoding="utf-8")
    for other in {*attempt.parent.iterdir()} - {attempt}:
        shutil.rmtree(other / MODEL_FOLDER, ignore_errors=True)
    # Of 264 letters: after 36 steps a model tells three classes half of the time, after 180 four fifths.
    few = (
        f"; {kept['steps']} steps are few: try --num_train_epochs 20"
        if kept["steps"] < 200 and not (run.config.num_train_epochs or run.config.max_steps)
        else ""
    )
    lines = [
        figures.results_table(metrics, run.record["data"]["splits"]),
        f"trained in {metrics['train_seconds']:,.0f} s; the model of seed {metrics['kept_seed']} with rate "
        f"{metrics['learning_rate']:g} is in {folder}{few}",
    ]
    if "test" in splits:
        lines.append(f"predictions for the test rows: {folder / run_folder.PREDICTIONS_FILE}")
    return "\n".join(lines)


def make_metrics(run, tried: list[dict], seeds: list[dict], kept: dict) -> dict:
    """
    The content of metrics.json, without pictures and the report by class.

    Returns:
        `test_accuracy` and the like: the figures of the model in the folder. `mean` and `sd`: mean and standard
        deviation (with n - 1) over the seeds, by split and metric; `sd` is None for one seed. `know_nothing`: of a
        prediction that needs no model, by split, `prediction` in words, its `figures`, and `is_beaten`, whether the
        model in the folder is better. `f1_of`: the class that F1 is of, where there are two. `seeds`: each seed's
        figures. `rates`: the figures of the first seed with each rate.
    """
    task, splits, measured = run.task, run.splits, run.measured()
    names, shown = (*task.metrics_shown, "loss"), ("seed", "learning_rate", "steps", "best_step", "seconds", *measured)
    over = {split: {name: [result[split][name] for result in seeds] for name in names} for split in measured}
    trained = {(result["learning_rate"], result["seed"]): result["seconds"] for result in (*tried, *seeds)}
    return {
        **{f"{split}_{name}": kept[split][name] for split in measured for name in names},
        "know_nothing": {split: _know_nothing(run, split, kept[split]) for split in measured},
        "f1_of": task.classes[1] if "matthews_correlation" in names and len(task.classes) == 2 else None,
        "best_metric": run.metric,
        "kept_seed": kept["seed"],
        "learning_rate": kept["learning_rate"],
        "mean": {split: {name: statistics.fmean(of) for name, of in over[split].items()} for split in measured},
        "sd": {
            split: {name: statistics.stdev(of) if len(of) > 1 else None for name, of in over[split].items()}
            for split in measured
        },
        "seeds": [{name: result[name] for name in shown} for result in seeds],
        "rates": [{name: result[name] for name in shown} for result in tried],
        "metrics_shown": list(task.metrics_shown),
        "train_seconds": round(sum(trained.values()), 2),
        "unknown_share": {
            name: account.unknown_share(run.tokenizer, (text for row in split.rows for text in row.texts))
            for name, split in splits.items()
            if name != "train"
        },
        "lost_to_length": {name: split.note for name, split in splits.items()},
        "diverged_rates": sorted(set(run.rates) - {rate for rate, _ in trained}),
        "diverged_seeds": sorted(set(run.seeds) - {result["seed"] for result in seeds}),
    }


def _know_nothing(run, name, reached):
    """The entry `know_nothing` of a split in metrics.json; None for a task without such a prediction."""
    split = run.splits[name]
    if (known := run.task.know_nothing(run.splits["train"], split)) is None:
        return None
    prediction, found = known
    metric = run.metric if run.metric in found else run.task.main_metric
    sign = -1 if metric in measures.LOWER_IS_BETTER else 1
    return {
        "prediction": prediction,
        # Its correlations are 0.
        "figures": {name: value for name, value in found.items() if value or figures.METRICS[name][1] == "%"},
        "is_beaten": sign * reached[metric] > sign * found[metric],
    }
