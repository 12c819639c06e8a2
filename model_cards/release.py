"""Makes a released model again and compares it with its record, or records it anew (`make release MODEL=NAME`)."""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch
from packaging.utils import canonicalize_name
from packaging.version import Version

from d2l_bert.errors import UserError, why_unwritable
from d2l_bert.folders import read_json, write_json
from d2l_bert.model_cards.card import CARD_FILE, CURVES_FILE, METRICS_FILE, RUN_FILE, render_card
from d2l_bert.model_cards.figures import finetuned_entries
from d2l_bert.model_cards.outgoing import without_paths
from d2l_bert.model_cards.release_recipe import (
    RELEASES,
    Recipe,
    Text,
    check_texts,
    flags,
    read_recipe,
    read_texts,
    texts_of,
)
from d2l_bert.model_cards.release_record import (
    RELEASE_FILE,
    compare_figures,
    differences,
    figures_table,
    installed_versions,
    make_record,
    verdict,
)
from d2l_bert.tokenization.cache import fingerprint


DESCRIPTION = """\
Make a released model again, and compare its bytes and its figures with the record in model_cards/NAME.

  make release MODEL=d2l-bert-tiny-python-docs
  make release MODEL=d2l-bert-tiny-books-10m BOOKS=DIR BLIMP=DIR
  make release MODEL=d2l-bert-tiny-books-10m FINETUNE=DIR TASK=sst2

The first two train and evaluate; the third fine-tunes the model that they have made, and the same architecture from
scratch, for one task of the recipe. A model that is made already is not trained again; one whose training was
interrupted goes on. The exit code is 0 if the bytes are the same or all figures lie within the deviations that the
record states, and 1 if a figure does not."""

# Variables of the environment that change the order of sums or the instructions, and with them the bytes.
UNSET = (
    *("OMP_DYNAMIC", "OMP_THREAD_LIMIT", "MKL_NUM_THREADS", "MKL_DYNAMIC", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
)


def main(argv: list[str] | None = None) -> int:
    """
    Run the command.

    Returns:
        0 if the bytes are the same, all figures lie within their deviations, or the model was recorded; 1 if a figure
        does not; 2 for an error that the user can mend.
    """
    parser = argparse.ArgumentParser(
        prog="python -m d2l_bert.model_cards.release",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="the release, a folder of model_cards/")
    parser.add_argument("texts", nargs="*", metavar="TEXT=DIR", help="the folders of texts, such as BOOKS=DIR")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="folder for the model; default: build/NAME")
    parser.add_argument("--overwrite_output_dir", action="store_true", help="make a model anew that is there already")
    parser.add_argument("--task", metavar="TASK", help="a task of the recipe to fine-tune the finished model for")
    parser.add_argument("--record", action="store_true", help="write the record into model_cards/NAME")
    arguments = parser.parse_args(argv)
    try:
        return release(
            arguments.name,
            folders_of_texts(arguments.texts, read_texts()),
            arguments.output_dir or Path("build", arguments.name),
            arguments.overwrite_output_dir,
            arguments.record,
            arguments.task,
        )
    except UserError as error:
        print(f"release: error: {error}", file=sys.stderr)
        return 2


def folders_of_texts(words: list[str], known: dict[str, Text]) -> dict[str, Path]:
    """The folder of each text, from words such as `BOOKS=DIR`."""
    given = {}
    for word in words:
        name, _, folder = word.partition("=")
        if name not in known or not folder:
            raise UserError(f"{word}: give TEXT=DIR, with one of the texts {', '.join(known)}")
        given[name] = Path(folder).absolute()
    return given


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
        root: holds a folder for each release, with its recipe and its record.

    Returns:
        The exit code, as `main`.

    Raises:
        UserError: a text is missing or is not that of the release, or the folder holds another model.
        SystemExit: a command failed, or was interrupted; it has said why.
    """
    texts = read_texts(root)
    recipe, recorded = read_recipe(name, texts, root), read_json(root / name / RELEASE_FILE)
    if task and task not in recipe.finetune:
        raise UserError(f"{task}: no task of {name}; give one of {', '.join(recipe.finetune) or 'another release'}")
    needed = recipe.finetune[task] if task else recipe.pretrain
    for options in (needed, *(() if task else recipe.evaluate.values())):
        if options is needed or all(text in given for text, _ in texts_of(options)):
            check_texts(options, texts, given)
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{name} is made on a GPU, and PyTorch sees none here; make it on a machine with one")
    if record:
        check_pins(RELEASES.parent / "constraints.txt", installed_versions())
    if task:
        finetune(recipe, task, texts, given, folder)
    else:
        make(recipe, texts, given, folder, overwrite)
    (folder / CARD_FILE).write_text(render_card(folder, name), encoding="utf-8")
    finished = read_json(folder / RELEASE_FILE)
    if record:
        write_record(folder, root / name)
        print(f"{name}: recorded in {root / name}, SHA-256 {finished['weights_sha256']}")
        return 0
    if not recorded:
        print(f"{name}: made in {folder}, SHA-256 {finished['weights_sha256']}; there is no record to compare with")
        return 0
    return compare(name, folder, root / name)


# ---------------------------------------------------------------------------------------------------------------------
# Making a model


def make(recipe: Recipe, texts: dict[str, Text], given: dict[str, Path], folder: Path, overwrite: bool) -> None:
    """
    Train a model and evaluate it. What an earlier call has done is not done again.

    Raises:
        UserError: the folder holds a model that was made in another way, and `overwrite` is not given.
    """
    environment, before = environment_of(recipe), read_json(folder / RELEASE_FILE)
    if before and not overwrite:
        check_made(before, make_record(recipe, texts, folder), folder)
        print(f"{folder}: made before; --overwrite_output_dir makes it anew", file=sys.stderr)
    else:
        (folder / RELEASE_FILE).unlink(missing_ok=True)
        is_replaced = overwrite and (folder / RUN_FILE).exists()
        how = ["--overwrite_output_dir"] if is_replaced else ["--resume_from_checkpoint", "latest"]
        options = [*flags(recipe.pretrain, given), "--seed", str(recipe.seed), "--output_dir", str(folder), *how]
        run(["pretrain", *options], environment)
    measured = {} if overwrite else before.get("measured", {})
    write_json(folder / RELEASE_FILE, {**make_record(recipe, texts, folder), "measured": measured})
    evaluate(recipe, given, folder, environment)


def check_made(done: dict, now: dict, folder: Path) -> None:
    """
    Refuse a model that was made in another way than it would be made now.

    Args:
        done: the content of release.json in the folder.
        now: the same for a model that is made now with the folder's weights.
    """

    if done["weights_sha256"] != now["weights_sha256"]:
        raise UserError(
            f"output_dir {folder}: its weights have changed since they were made; make them anew with "
            f"--overwrite_output_dir, or name another folder"
        )

    def how(release):
        recipe = release["recipe"]
        return {
            "options of [pretrain]": recipe["pretrain"],
            "device, threads or seed": [recipe["device"], recipe["threads"], recipe["seed"]],
            "processors": release["processor_details"],
            "packages": release["versions"],
            "code of d2l-bert": release["code"],
            "texts": [release["texts"][name]["fingerprints"] for name, _ in texts_of(recipe["pretrain"])],
        }

    before = how(done)
    for name, value in how(now).items():
        if before[name] != value:
            raise UserError(
                f"output_dir {folder}: holds a model that was made with other {name}; make it anew with "
                f"--overwrite_output_dir, or name another folder"
            )


def evaluate(recipe: Recipe, given: dict[str, Path], folder: Path, environment: dict[str, str]) -> None:
    """
    Evaluate a model as its recipe says, and add the figures to its metrics.json.

    What was measured before with the same options is not measured again. A measurement whose texts are not given is
    left out, which is said.
    """
    for name, options in recipe.evaluate.items():
        release, label = read_json(folder / RELEASE_FILE), f"evaluate {name}"
        if release["measured"].get(label) == options:
            continue
        if missing := [text for text, _ in texts_of(options) if text not in given]:
            print(f"{label}: not measured; give {missing[0]}=DIR to measure it", file=sys.stderr)
            continue
        run(["evaluate", str(folder), *flags(options, given), "--update_card", "true"], environment)
        write_json(folder / RELEASE_FILE, {**release, "measured": {**release["measured"], label: options}})


def finetune(recipe: Recipe, task: str, texts: dict[str, Text], given: dict[str, Path], folder: Path) -> None:
    """
    Fine-tune a model for a task, and the same architecture from scratch, in folders beside it; add the figures of both
    to the model's metrics.json. Training that was interrupted goes on; what is finished is not done again. Other
    weights, options or rows have folders of other names.

    Raises:
        UserError: the folder holds no model of this release.
    """
    before, options = read_json(folder / RELEASE_FILE), recipe.finetune[task]
    if not before:
        raise UserError(f"output_dir {folder}: there is no model of {recipe.name}; make it first, without TASK")
    release = make_record(recipe, texts, folder)
    check_made(before, release, folder)
    found = []
    for from_scratch in ("false", "true"):
        rows = [texts[name].fingerprints for name, _ in texts_of(options)]
        inputs = fingerprint([release["weights_sha256"], options, rows, from_scratch])
        tuned = folder.with_name(f"{folder.name}-{task}-{inputs[:8]}")
        how = ["--resume_from_checkpoint", "latest"] if (tuned / RUN_FILE).exists() else []
        words = [*flags(options, given), "--from_scratch", from_scratch, "--output_dir", str(tuned), *how]
        if not (tuned / METRICS_FILE).exists():
            run(["finetune", str(folder), *words], environment_of(recipe))
        found.append(read_json(tuned / METRICS_FILE))
    write_json(folder / METRICS_FILE, {**read_json(folder / METRICS_FILE), **finetuned_entries(task, *found)})
    write_json(folder / RELEASE_FILE, {**release, "measured": {**before["measured"], f"finetune {task}": options}})


def environment_of(recipe: Recipe) -> dict[str, str]:
    """The environment of the commands: the number of threads and the device are those of the recipe."""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment["OMP_NUM_THREADS"] = str(recipe.threads)
    if recipe.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    return environment


def run(words: list[str], environment: dict[str, str]) -> None:
    """
    Run a command of `d2l-bert` in a process of its own, and wait for it. SIGTERM is passed on to it; Ctrl-C reaches it
    from the terminal.

    Raises:
        SystemExit: with the exit code of the command, if that is not 0.
    """
    print(f"$ d2l-bert {shlex.join(words)}", file=sys.stderr, flush=True)
    process = subprocess.Popen([sys.executable, "-m", "d2l_bert", *words], env=environment)
    # Functions and not SIG_IGN, which the command would inherit.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        sys.exit(code if code > 0 else 128 - code)


# ---------------------------------------------------------------------------------------------------------------------
# The record


def compare(name: str, folder: Path, place: Path) -> int:
    """Print how the model in a folder compares with the record of its release in `place`; returns the exit code."""
    recorded, made = (read_json(where / RELEASE_FILE) for where in (place, folder))
    runs = [without_paths(read_json(where / RUN_FILE)) for where in (place, folder)]
    compared = compare_figures(recorded, *(read_json(where / METRICS_FILE) for where in (place, folder)))
    are_same = recorded["weights_sha256"] == made["weights_sha256"]
    print(verdict(name, are_same, differences((recorded, runs[0]), (made, runs[1])), compared))
    print("\n".join(figures_table(recorded, read_json(place / METRICS_FILE), compared)))
    return 0 if are_same or all(each.within is not False for each in compared) else 1


def write_record(folder: Path, place: Path) -> None:
    """Write the record of a release: all files of the model's folder that the card is made of, and the card."""
    try:
        write_json(place / RUN_FILE, without_paths(read_json(folder / RUN_FILE)))
        for name in ("config.json", METRICS_FILE, CURVES_FILE, CARD_FILE, RELEASE_FILE):
            shutil.copyfile(folder / name, place / name)
    except OSError as error:
        raise UserError(f"{error.filename}: {why_unwritable(error, '')}") from None


def check_pins(constraints: Path, installed: dict[str, str]) -> None:
    """
    Refuse to record a model with other versions than those that `constraints.txt` pins.

    Args:
        installed: the versions of the packages, by their names.
    """
    if not constraints.is_file():
        raise UserError(f"{constraints}: no such file; record a release in a checkout of the repository")
    pins = re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(), re.MULTILINE)
    pinned = {canonicalize_name(name): version for name, version in pins}
    for name, version in installed.items():
        pin = pinned.get(canonicalize_name(name))
        if pin is None or Version(version).public != Version(pin).public:
            raise UserError(
                f"{name} {version} is installed, and {constraints.name} pins {pin or 'no version'}; install with "
                f"--constraint {constraints.name}, or pin it there"
            )


if __name__ == "__main__":
    sys.exit(main())
