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
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import pipeline

from d2l_bert.folders import content_hash, short_hash, write_json
from d2l_bert.messages import UserError
from d2l_bert.model_cards.card import CARD_FILE, CURVES_FILE, METRICS_FILE, RELEASE_FILE, RUN_FILE, render_card
from d2l_bert.model_cards.figures import FINETUNED_SD, FROM_SCRATCH, formatted, reported_metrics
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

RELEASES = (
    Path(__file__).parent.parent / "model_cards"
)  # a folder for each release, with its recipe `release.toml`; and `texts.toml`

CPUINFO = Path("/proc/cpuinfo")

# What a release with `ships_weights` has in the repository beside its record.
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
    given = {name: Path(folder).absolute() for name, _, folder in (text.partition("=") for text in arguments.texts)}
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
    recipe, texts = read_recipe(name, root), tomllib.loads((root / "texts.toml").read_text())
    if task:
        finetune(recipe, task, texts, given, folder)
    else:
        make(recipe, texts, given, folder, overwrite)
    (folder / CARD_FILE).write_text(render_card(folder, name), encoding="utf-8")
    place = root / name
    if record:
        shipped = SHIPPED if recipe["ships_weights"] else ()
        for file in ("config.json", RUN_FILE, METRICS_FILE, CURVES_FILE, CARD_FILE, RELEASE_FILE, *shipped):
            shutil.copyfile(folder / file, place / file)
        if shipped:  # no code stands beside these weights
            config = read_record(place / "config.json")
            write_json(place / "config.json", {name: value for name, value in config.items() if name != "auto_map"})
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


# ---------------------------------------------------------------------------------------------------------------------
# Options with texts: `$BOOKS/train` stands for the folder `train` of the text BOOKS


def texts_of(options: dict) -> list[tuple[str, str]]:
    """The texts that options name: pairs of a name and the first folder below, which may be empty."""
    return list(dict.fromkeys(re.findall(r'"\$([A-Z]+)(?:/([\w-]+))?', json.dumps(options))))


def flags(options: dict, given: dict[str, Path] | None = None) -> list[str]:
    """
    Options as words of a command line.

    Args:
        given: the folder of each text; without it, `$BOOKS/train` becomes `BOOKS/train`, as the card shows it.
    """
    words = []
    for name, value in options.items():
        values = [str(entry) for entry in (value if isinstance(value, list) else [value])]
        words += [
            f"--{name}",
            *(re.sub(r"^\$([A-Z]+)", lambda text: str((given or {}).get(text[1], text[1])), each) for each in values),
        ]
    return words


def check_texts(options: dict, texts: dict[str, dict], given: dict[str, Path]) -> None:
    """Raise `UserError` if a text that the options name is not given, or has other files than that of the release."""
    for name, below in texts_of(options):
        text = texts[name]
        way_out = f"give {name}=DIR with {text['what']} (from {text['source']})"
        if name not in given:
            raise UserError(f"{name} is missing: {way_out}")
        below = below if below in text["fingerprints"] else "."
        folder, expected = given[name] / below, text["fingerprints"][below]
        found = short_hash(file_source(folder).identity[0]) if folder.is_dir() else "none"
        if found != expected:
            raise UserError(f"{folder}: its files have the fingerprint {found}, not {expected}; {way_out}")


# ---------------------------------------------------------------------------------------------------------------------
# Making a model


def make(recipe: dict, texts: dict[str, dict], given: dict[str, Path], folder: Path, overwrite: bool) -> None:
    """
    Train a model and evaluate it. What an earlier call has done with the same options is not done again.

    An evaluation whose texts are not given is left out, which is said.
    """
    check_texts(recipe["pretrain"], texts, given)
    before = {} if overwrite else read_record(folder / RELEASE_FILE)
    if not before:
        (folder / RELEASE_FILE).unlink(missing_ok=True)
        how = ["--overwrite_output_dir"] if overwrite else ["--resume_from_checkpoint", "latest"]
        words = [*flags(recipe["pretrain"], given), "--seed", recipe["seed"], "--output_dir", folder, *how]
        run(recipe, "pretrain", *words)
    of_float32 = before.get("float32_sha256") or content_hash(folder / WEIGHTS_FILE)
    if recipe["ships_weights"] and not before:
        round_weights(recipe, given, folder)
    made = {**record_of(recipe, texts, folder), "float32_sha256": of_float32, "measured": before.get("measured", {})}
    check_made(before, made, folder)
    write_json(folder / RELEASE_FILE, made)
    for name, options in recipe["evaluate"].items():
        if made["measured"].get(f"evaluate {name}") == options:
            continue
        if missing := [text for text, _ in texts_of(options) if text not in given]:
            print(f"evaluate {name}: not measured; give {missing[0]}=DIR to measure it", file=sys.stderr)
            continue
        check_texts(options, texts, given)
        run(recipe, "evaluate", folder, *flags(options, given), "--update_card", "true")
        made["measured"][f"evaluate {name}"] = options
        write_json(folder / RELEASE_FILE, made)


def round_weights(recipe: dict, given: dict[str, Path], folder: Path) -> None:
    """
    Round a model's weights to bf16, and measure its held-out figures and its answers to masks again.

    Its config.json says float32: so Transformers loads the weights as float32, and trains them as float32.
    """
    path, figures = folder / WEIGHTS_FILE, folder / "figures.json"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(rounded, path, {"format": "pt"})
    options = recipe["pretrain"]
    text = {"corpus": options.get("validation_corpus") or options.get("corpus", ["python-docs"])}
    text["held_out"] = "false" if "validation_corpus" in options else "true"
    run(recipe, "evaluate", folder, *flags(text, given), "--pppl_sentences", 0, "--output", figures)
    metrics, found = read_record(folder / METRICS_FILE), read_record(figures)["models"][0]["text"]
    figures.unlink()
    metrics |= {f"eval_{name}": value for name, value in found.items() if f"eval_{name}" in metrics}
    fill = pipeline("fill-mask", model=str(folder))
    for prediction in metrics["predictions"]:
        answers = fill(prediction["text"], top_k=len(prediction["output"]))
        prediction["output"] = [{"label": each["token_str"], "score": round(each["score"], 4)} for each in answers]
    write_json(folder / METRICS_FILE, metrics)


def finetune(recipe: dict, task: str, texts: dict[str, dict], given: dict[str, Path], folder: Path) -> None:
    """
    Fine-tune a model for a task, and the same architecture from scratch, in folders beside it; add the figures of both
    to the model's metrics.json. Training that was interrupted goes on; what is finished is not done again. Other
    weights, options or rows have folders of other names.

    Raises:
        UserError: the recipe has no such task, or the folder holds no model of this release.
    """
    if task not in recipe["finetune"]:
        raise UserError(f"{task}: no task of {recipe['name']}; give one of {', '.join(recipe['finetune']) or 'none'}")
    options, before = recipe["finetune"][task], read_record(folder / RELEASE_FILE)
    check_texts(options, texts, given)
    if not before:
        raise UserError(f"output_dir {folder}: there is no model of {recipe['name']}; make it first, without TASK")
    made = {**record_of(recipe, texts, folder), "float32_sha256": before["float32_sha256"]}
    check_made(before, made, folder)
    rows = [texts[name]["fingerprints"] for name, _ in texts_of(options)]
    found = []
    for from_scratch in ("false", "true"):
        inputs = short_hash([made["weights_sha256"], options, rows, from_scratch])
        tuned = folder.with_name(f"{folder.name}-{task}-{inputs[:8]}")
        if not (tuned / METRICS_FILE).exists():
            words = [*flags(options, given), "--from_scratch", from_scratch, "--output_dir", tuned]
            run(recipe, "finetune", folder, *words, "--resume_from_checkpoint", "latest")
        found.append(read_record(tuned / METRICS_FILE))
    write_json(folder / METRICS_FILE, {**read_record(folder / METRICS_FILE), **finetuned_entries(task, *found)})
    write_json(folder / RELEASE_FILE, {**made, "measured": {**before["measured"], f"finetune {task}": options}})


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


def record_of(recipe: dict, texts: dict[str, dict], folder: Path) -> dict:
    """The content of `release.json` for the model in a folder, without `float32_sha256` and `measured`."""
    options = [recipe["pretrain"], *recipe["evaluate"].values(), *recipe["finetune"].values()]
    needed = dict.fromkeys(name for name, _ in texts_of(recipe["pretrain"]))
    cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""  # a CPU's name may be that of many models
    processor = re.findall(r"^(cpu family|model|stepping)\s*: (\d+)$", cpuinfo, re.MULTILINE)[:3]
    git = ["git", "-C", str(Path(find_spec("d2l_bert.training").origin).parent), "rev-parse", "HEAD"]
    return {
        "release": recipe["name"],
        "command": " ".join(["make", "release", f"MODEL={recipe['name']}", *(f"{name}=DIR" for name in needed)]),
        "recipe": recipe,
        "weights_sha256": content_hash(folder / WEIGHTS_FILE),
        "processor_details": ", ".join(f"{name.removeprefix('cpu ')} {number}" for name, number in processor) or None,
        "versions": {each.metadata["Name"]: each.version for each in required_distributions("d2l-bert")},
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or None,
        "texts": {name: texts[name] for name, _ in texts_of(options)},
    }


def check_made(before: dict, now: dict, folder: Path) -> None:
    """Raise `UserError` if the model in a folder was made by another recipe or of other texts than it would be now."""
    if before and (_inputs(before), before["weights_sha256"]) != (_inputs(now), now["weights_sha256"]):
        raise UserError(
            f"output_dir {folder}: holds a model that was made in another way, or changed since; make it anew with "
            f"--overwrite_output_dir, or name another folder"
        )


def _inputs(release):
    """What a release's model is made from."""
    recipe = release["recipe"]
    texts = [release["texts"][name]["fingerprints"] for name, _ in texts_of(recipe["pretrain"])]
    return [*(recipe[name] for name in ("pretrain", "device", "threads", "seed")), texts]


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
    known = {metric.key: metrics.get(f"{metric.key}{FINETUNED_SD}") for metric in reported_metrics(metrics)}
    known = {key: release["recipe"]["deviations"].get(key, sd) for key, sd in known.items()}
    return {key: sd for key, sd in known.items() if sd is not None}


def compare(folder: Path, place: Path) -> int:
    """Print how the model in a folder compares with its record in `place`; returns the exit code."""
    (recorded, made), (figures, ours) = (
        [read_record(where / file) for where in (place, folder)] for file in (RELEASE_FILE, METRICS_FILE)
    )
    are_same = recorded["weights_sha256"] == made["weights_sha256"]
    found = "the same bytes as recorded" if are_same else "other bytes than recorded (another CPU, or other versions)"
    print(f"{place.name}: {found}")
    known, are_close = deviations(recorded, figures), True
    for metric in reported_metrics(figures):
        if metric.key in ours:
            values = [formatted(each[metric.key], metric.unit) for each in (figures, ours)]
            line = f"  {metric.name}: recorded {values[0]}, here {values[1]}"
            if metric.key in known:
                most = DEVIATIONS * known[metric.key]
                is_within = abs(ours[metric.key] - figures[metric.key]) <= most
                are_close &= is_within
                line += f", {'within' if is_within else 'NOT WITHIN'} {formatted(most, metric.unit)}"
            print(line)
    return 0 if are_same or are_close else 1


if __name__ == "__main__":
    sys.exit(main())
