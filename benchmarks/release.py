"""Makes a released model from its recipe and compares it with its record (`make release MODEL=NAME`)."""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import pipeline

from d2l_bert.folders import content_hash, short_hash, write_json
from d2l_bert.messages import UserError
from d2l_bert.model_cards.card import CARD_FILE, CURVES_FILE, METRICS_FILE, RELEASE_FILE, RUN_FILE, render_card
from d2l_bert.model_cards.figures import FINETUNED_SD, FROM_SCRATCH, formatted, reported_figures
from d2l_bert.records import read_record
from d2l_bert.tokenization.python_docs import required_distributions
from d2l_bert.tokenization.sources import file_source
from d2l_bert.training.checkpoint import WEIGHTS_FILE


DESCRIPTION = """\
Make a released model again, and compare its bytes and its figures with the record in model_cards/NAME.

  make release MODEL=d2l-bert-tiny-python-docs
  make release MODEL=d2l-bert-tiny-books-10m BOOKS=DIR BLIMP=DIR
  make release MODEL=d2l-bert-tiny-books-10m FINETUNE=DIR TASK=sst2

The first two train and evaluate; the third fine-tunes the model that they have made, and the same architecture from
scratch, for one task of the recipe. A model that is made already is not trained again; one whose training was
interrupted goes on. The exit code is 0 if the bytes are the same or all figures lie within the deviations that the
record states, and 1 if a figure does not."""

# A folder for each release, with its recipe `release.toml`; and `texts.toml`.
RELEASES = Path(__file__).parent.parent / "model_cards"

CPUINFO = Path("/proc/cpuinfo")

# The record of a release in the repository; and what a release with `ships_weights` has there beside it.
RECORDED = ("config.json", RUN_FILE, METRICS_FILE, CURVES_FILE, CARD_FILE, RELEASE_FILE)
SHIPPED = (WEIGHTS_FILE, "tokenizer.json", "tokenizer_config.json")

# Two models' figures agree if they differ by at most this many standard deviations of one model. The difference of two
# models has sqrt(2) standard deviations, so this is four of the difference: chance alone exceeds that in 1.6 % of the
# cases if the deviation was measured on five models, and in 5.7 % if on three.
DEVIATIONS = 4 * math.sqrt(2)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.release",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the release, a folder of model_cards/")
    parser.add_argument("texts", nargs="*", metavar="TEXT=DIR", help="the folders of texts, such as BOOKS=DIR")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="folder for the model; default: build/NAME")
    parser.add_argument("--overwrite_output_dir", action="store_true", help="make a model anew that is there already")
    parser.add_argument("--task", metavar="TASK", help="a task of the recipe to fine-tune the finished model for")
    parser.add_argument("--record", action="store_true", help="write the record into model_cards/NAME")
    arguments = parser.parse_args(argv)
    given = {}
    for text in arguments.texts:
        name, _, place = text.partition("=")
        given[name] = Path(place).absolute()
    folder = arguments.output_dir or Path("build", arguments.name)
    try:
        return release(arguments.name, given, folder, arguments.overwrite_output_dir, arguments.record, arguments.task)
    except UserError as error:
        print(f"release: error: {error}", file=sys.stderr)
        return 2


def release(
    name: str,
    given: dict[str, Path],
    folder: Path,
    overwrite: bool = False,
    record: bool = False,
    task: str | None = None,
    root: Path = RELEASES,
) -> int:
    """
    Make a model and evaluate it, or fine-tune it for a task; then compare it with its record, or record it.

    Args:
        given: the folder of each text, by its name. Texts that only measurements need may be missing.
        folder: where the model is made.
        overwrite: make the model anew if it is there.
        record: write the record.
        task: fine-tune the model in `folder`, which is made already, for this task of the recipe.
        root: the folder of the releases.

    Returns:
        0 if the bytes are the same, all figures lie within their deviations, or there is no record; else 1.

    Raises:
        UserError: a text is missing or is not that of the release, or the folder holds another model.
        SystemExit: a command failed, or was interrupted; it has said why.
    """
    recipe = read_recipe(name, root)
    model = Model(recipe, Texts(tomllib.loads((root / "texts.toml").read_text()), given), folder)
    if task:
        finetune(model, task)
    else:
        make(model, overwrite)
    (folder / CARD_FILE).write_text(render_card(folder, name), encoding="utf-8")
    place = root / name
    if record:
        for file in RECORDED:
            shutil.copyfile(folder / file, place / file)
        if recipe["ships_weights"]:
            ship(folder, place)
    if not (place / RELEASE_FILE).exists():
        print(f"{name}: made in {folder}; there is no record to compare with")
        return 0
    return compare(folder, place)


def read_recipe(name: str, root: Path = RELEASES) -> dict:
    """
    The recipe of a release, with the entries of its `release.toml`:

    - `about`: a sentence or two for the top of the card; `prompts`, the texts of metrics.json that the card shows, the
      least surprising first; and `comparison`, a table of other models with `columns`, `figures` (the key and the unit
      of each column), `models` (rows) and a `note` on what differs, with the sources;
    - `device` (`cpu` or `cuda`), `threads` and `seed` of the run;
    - `ships_weights`: whether the repository has the weights, rounded to bf16, and the tokenizer;
    - `deviations`: standard deviations between models of other seeds, by the keys of metrics.json; and `source`, which
      says what they were measured on;
    - `pretrain`: options of `d2l-bert pretrain`;
    - `evaluate`, `finetune`: by a name, options of `d2l-bert evaluate` and of `d2l-bert finetune`.

    Raises:
        UserError: there is no such release.
    """
    known = sorted(path.parent.name for path in root.glob("*/release.toml"))
    if name not in known:
        raise UserError(f"{name}: no such release; give the name of one: {', '.join(known)}")
    defaults = {"name": name, "ships_weights": False, "evaluate": {}, "finetune": {}}
    return {**defaults, **tomllib.loads((root / name / "release.toml").read_text())}


def ship(folder: Path, place: Path) -> None:
    """Copy the weights and the tokenizer beside the record in `place`, where no code stands beside them."""
    for file in SHIPPED:
        shutil.copyfile(folder / file, place / file)
    config = read_record(place / "config.json")
    config.pop("auto_map", None)
    write_json(place / "config.json", config)


# ---------------------------------------------------------------------------------------------------------------------
# Options with texts: `$BOOKS/train` stands for the folder `train` of the text BOOKS


@dataclass(frozen=True)
class Texts:
    """
    The texts of a release.

    Args:
        entries: those of `texts.toml`, by the name of a text.
        given: the folders of those that are here, by the name.
    """

    entries: dict[str, dict]
    given: dict[str, Path]


@dataclass(frozen=True)
class Model:
    """A model to make: its recipe, the texts, and the folder in which it is made."""

    recipe: dict
    texts: Texts
    folder: Path


def texts_of(options: dict) -> list[tuple[str, str]]:
    """The texts that options name: pairs of a name and the first folder below, which may be empty."""
    return list(dict.fromkeys(re.findall(r'"\$([A-Z]+)(?:/([\w-]+))?', json.dumps(options))))


def flags(options: dict, given: dict[str, Path] | None = None) -> list[str]:
    """
    Options as words of a command line.

    Args:
        given: the folder of each text; without it, `$BOOKS/train` becomes `BOOKS/train`, as the card shows it.
    """
    folders = given or {}
    words = []
    for name, value in options.items():
        words.append(f"--{name}")
        for entry in value if isinstance(value, list) else [value]:
            words.append(re.sub(r"^\$([A-Z]+)", lambda text: str(folders.get(text[1], text[1])), str(entry)))
    return words


def check_texts(options: dict, texts: Texts) -> None:
    """Raise `UserError` if a text that the options name is not given, or has other files than that of the release."""
    for name, below in texts_of(options):
        text = texts.entries[name]
        way_out = f"give {name}=DIR with {text['what']} (from {text['source']})"
        if name not in texts.given:
            raise UserError(f"{name} is missing: {way_out}")
        if below not in text["fingerprints"]:
            below = "."
        folder = texts.given[name] / below
        expected = text["fingerprints"][below]
        found = short_hash(file_source(folder).identity[0]) if folder.is_dir() else "none"
        if found != expected:
            raise UserError(f"{folder}: its files have the fingerprint {found}, not {expected}; {way_out}")


# ---------------------------------------------------------------------------------------------------------------------
# Making a model


def make(model: Model, overwrite: bool) -> None:
    """
    Train a model and evaluate it. What an earlier call has done with the same options is not done again.

    An evaluation whose texts are not given is left out, which is said.
    """
    recipe = model.recipe
    folder = model.folder
    check_texts(recipe["pretrain"], model.texts)
    before = {} if overwrite else read_record(folder / RELEASE_FILE)
    if not before:
        pretrain(model, overwrite)
    of_float32 = before.get("float32_sha256") or content_hash(folder / WEIGHTS_FILE)
    if recipe["ships_weights"] and not before:
        round_weights(model)
    made = record_of(model)
    made["float32_sha256"] = of_float32
    made["measured"] = before.get("measured", {})
    check_made(before, made, folder)
    write_json(folder / RELEASE_FILE, made)
    for name, options in recipe["evaluate"].items():
        if made["measured"].get(f"evaluate {name}") == options:
            continue
        missing = [text for text, _ in texts_of(options) if text not in model.texts.given]
        if missing:
            print(f"evaluate {name}: not measured; give {missing[0]}=DIR to measure it", file=sys.stderr)
            continue
        check_texts(options, model.texts)
        run(recipe, "evaluate", folder, *flags(options, model.texts.given), "--update_card", "true")
        made["measured"][f"evaluate {name}"] = options
        write_json(folder / RELEASE_FILE, made)


def pretrain(model: Model, overwrite: bool) -> None:
    """Train the model; training that was interrupted goes on."""
    recipe = model.recipe
    (model.folder / RELEASE_FILE).unlink(missing_ok=True)
    how = ["--overwrite_output_dir"] if overwrite else ["--resume_from_checkpoint", "latest"]
    options = flags(recipe["pretrain"], model.texts.given)
    run(recipe, "pretrain", *options, "--seed", recipe["seed"], "--output_dir", model.folder, *how)


def round_weights(model: Model) -> None:
    """
    Round a model's weights to bf16, and measure its held-out figures and its answers to masks again.

    Its config.json says float32: so Transformers loads the weights as float32, and trains them as float32.
    """
    path = model.folder / WEIGHTS_FILE
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(rounded, path, {"format": "pt"})
    metrics = read_record(model.folder / METRICS_FILE)
    for name, value in held_out_figures(model).items():
        if f"eval_{name}" in metrics:
            metrics[f"eval_{name}"] = value
    fill = pipeline("fill-mask", model=str(model.folder))
    for prediction in metrics["predictions"]:
        answers = fill(prediction["text"], top_k=len(prediction["output"]))
        prediction["output"] = [{"label": each["token_str"], "score": round(each["score"], 4)} for each in answers]
    write_json(model.folder / METRICS_FILE, metrics)


def held_out_figures(model: Model) -> dict:
    """What `d2l-bert evaluate` measures on the text that the run has held out."""
    options = model.recipe["pretrain"]
    text = {"corpus": options.get("validation_corpus") or options.get("corpus", ["python-docs"])}
    text["held_out"] = "false" if "validation_corpus" in options else "true"
    words = flags(text, model.texts.given)
    figures = model.folder / "figures.json"
    run(model.recipe, "evaluate", model.folder, *words, "--pppl_sentences", 0, "--output", figures)
    (measured,) = read_record(figures)["models"]
    figures.unlink()
    return measured["text"]


def finetune(model: Model, task: str) -> None:
    """
    Fine-tune a model for a task, and the same architecture from scratch, in folders beside it; add the figures of both
    to the model's metrics.json. Training that was interrupted goes on; what is finished is not done again.

    Raises:
        UserError: the recipe has no such task, or the folder holds no model of this release.
    """
    recipe = model.recipe
    folder = model.folder
    if task not in recipe["finetune"]:
        raise UserError(f"{task}: no task of {recipe['name']}; give one of {', '.join(recipe['finetune']) or 'none'}")
    options = recipe["finetune"][task]
    before = read_record(folder / RELEASE_FILE)
    check_texts(options, model.texts)
    if not before:
        raise UserError(f"output_dir {folder}: there is no model of {recipe['name']}; make it first, without TASK")
    made = record_of(model)
    made["float32_sha256"] = before["float32_sha256"]
    check_made(before, made, folder)
    tuned = finetuned(model, task, made["weights_sha256"], "false")
    from_scratch = finetuned(model, task, made["weights_sha256"], "true")
    metrics = read_record(folder / METRICS_FILE)
    write_json(folder / METRICS_FILE, {**metrics, **finetuned_entries(task, tuned, from_scratch)})
    made["measured"] = {**before["measured"], f"finetune {task}": options}
    write_json(folder / RELEASE_FILE, made)


def finetuned(model: Model, task: str, weights: str, from_scratch: str) -> dict:
    """
    The content of metrics.json of a fine-tuning. Other weights, options or rows have a folder of another name.

    Args:
        weights: the hash of the model's weights.
        from_scratch: "true" for fresh weights, or "false".
    """
    options = model.recipe["finetune"][task]
    rows = [model.texts.entries[name]["fingerprints"] for name, _ in texts_of(options)]
    inputs = short_hash([weights, options, rows, from_scratch])
    folder = model.folder.with_name(f"{model.folder.name}-{task}-{inputs[:8]}")
    if not (folder / METRICS_FILE).exists():
        words = [*flags(options, model.texts.given), "--from_scratch", from_scratch, "--output_dir", folder]
        run(model.recipe, "finetune", model.folder, *words, "--resume_from_checkpoint", "latest")
    return read_record(folder / METRICS_FILE)


def run(recipe: dict, *words: str | int | Path) -> None:
    """
    Run a command of `d2l-bert` in a process with the threads and the device of the recipe, and wait for it.

    Raises:
        SystemExit: with the exit code of the command, if that is not 0.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(recipe["threads"])}
    if recipe["device"] == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    command = [str(word) for word in words]
    print(f"$ d2l-bert {shlex.join(command)}", file=sys.stderr, flush=True)
    process = subprocess.Popen([sys.executable, "-m", "d2l_bert", *command], env=environment)
    # After either signal the command ends in order; Ctrl-C reaches it from the terminal.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    if code := process.wait():
        sys.exit(code if code > 0 else 128 - code)


# ---------------------------------------------------------------------------------------------------------------------
# The record


def record_of(model: Model) -> dict:
    """The content of `release.json` for a model, without `float32_sha256` and `measured`."""
    recipe = model.recipe
    command = ["make", "release", f"MODEL={recipe['name']}"]
    for name in dict.fromkeys(name for name, _ in texts_of(recipe["pretrain"])):
        command.append(f"{name}=DIR")
    options = [recipe["pretrain"], *recipe["evaluate"].values(), *recipe["finetune"].values()]
    return {
        "release": recipe["name"],
        "command": " ".join(command),
        "recipe": recipe,
        "weights_sha256": content_hash(model.folder / WEIGHTS_FILE),
        "processor_details": processor_details(),
        "versions": {each.metadata["Name"]: each.version for each in required_distributions("d2l-bert")},
        "commit": commit_here(),
        "texts": {name: model.texts.entries[name] for name, _ in texts_of(options)},
    }


def processor_details() -> str | None:
    """The family, model and stepping of the CPU, whose name may be that of many models; None if Linux does not say."""
    cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""
    found = re.findall(r"^(cpu family|model|stepping)\s*: (\d+)$", cpuinfo, re.MULTILINE)[:3]  # of the first core
    return ", ".join(f"{name.removeprefix('cpu ')} {number}" for name, number in found) or None


def commit_here() -> str | None:
    """The commit of the checkout that the package is from; None outside of one."""
    package = Path(find_spec("d2l_bert.training").origin).parent
    git = subprocess.run(["git", "-C", str(package), "rev-parse", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or None


def check_made(before: dict, now: dict, folder: Path) -> None:
    """Raise `UserError` if the model in a folder was made by another recipe or of other texts than it would be now."""
    if not before:
        return
    if before["weights_sha256"] != now["weights_sha256"] or _inputs(before) != _inputs(now):
        raise UserError(
            f"output_dir {folder}: holds a model that was made in another way, or changed since; make it anew with "
            f"--overwrite_output_dir, or name another folder"
        )


def _inputs(release):
    """What a release's model is made from."""
    recipe = release["recipe"]
    texts = [release["texts"][name]["fingerprints"] for name, _ in texts_of(recipe["pretrain"])]
    return [recipe["pretrain"], recipe["device"], recipe["threads"], recipe["seed"], texts]


def finetuned_entries(task: str, tuned: dict, from_scratch: dict) -> dict:
    """
    The entries of a model's metrics.json for the models that were fine-tuned from it for a task.

    The figure is the task's metric on the test rows, or on the validation rows if there are no labelled test rows.

    Args:
        tuned, from_scratch: the contents of metrics.json of `d2l-bert finetune`, from the model's weights and from
            fresh ones.
    """
    split = "test" if "test" in tuned["mean"] else "validation"
    name = tuned["best_metric"]
    key = f"finetune/{task}/{split}_{name}"
    entries = {f"finetune/{task}/seeds": len(tuned["seeds"])}
    for ending, metrics in (("", tuned), (FROM_SCRATCH, from_scratch)):
        entries[f"{key}{ending}"] = metrics["mean"][split][name]
        entries[f"{key}{ending}{FINETUNED_SD}"] = metrics["sd"][split][name]
    return entries


def deviations(release: dict, metrics: dict) -> dict[str, float]:
    """
    The standard deviations of a model's figures between models of other seeds, by their keys in metrics.json.

    Args:
        release: the content of release.json; its recipe has them for what was pretrained.
        metrics: the content of metrics.json; it has them for what was fine-tuned, over the seeds of the fine-tuning.
    """
    found = {}
    for figure in reported_figures(metrics):
        over_seeds = metrics.get(f"{figure.key}{FINETUNED_SD}")
        deviation = release["recipe"]["deviations"].get(figure.key, over_seeds)
        if deviation is not None:
            found[figure.key] = deviation
    return found


def compare(folder: Path, place: Path) -> int:
    """Print how the model in a folder compares with its record in `place`; returns the exit code."""
    recorded = read_record(place / RELEASE_FILE)
    recorded_metrics = read_record(place / METRICS_FILE)
    metrics = read_record(folder / METRICS_FILE)
    are_same = recorded["weights_sha256"] == read_record(folder / RELEASE_FILE)["weights_sha256"]
    found = "the same bytes as recorded" if are_same else "other bytes than recorded (another CPU, or other versions)"
    print(f"{place.name}: {found}")
    deviation_of = deviations(recorded, recorded_metrics)
    are_close = True
    for figure in reported_figures(recorded_metrics):
        if figure.key not in metrics:
            continue
        expected = recorded_metrics[figure.key]
        here = metrics[figure.key]
        line = f"  {figure.name}: recorded {formatted(expected, figure.unit)}, here {formatted(here, figure.unit)}"
        if figure.key in deviation_of:
            most = DEVIATIONS * deviation_of[figure.key]
            is_within = abs(here - expected) <= most
            are_close = are_close and is_within
            line += f", {'within' if is_within else 'NOT WITHIN'} {formatted(most, figure.unit)}"
        print(line)
    return 0 if are_same or are_close else 1


if __name__ == "__main__":
    sys.exit(main())
