"""Writes and reads the model card. All numbers in a new card come from the files in the model's folder."""

import difflib
import logging
import math
import re
import shlex
import shutil
from pathlib import Path
from urllib.parse import quote

import jinja2
import yaml
from huggingface_hub import ModelCard
from safetensors import SafetensorError

from d2l_bert.folders import base_name, write_json
from d2l_bert.hub_metadata import check_card
from d2l_bert.messages import UserError, counted, explained
from d2l_bert.model_cards import facts, figures
from d2l_bert.model_cards.facts import HUB_ID
from d2l_bert.model_cards.markdown import authored, cell, code, fenced, quoted, shell_words, shown
from d2l_bert.model_cards.metadata import PIPELINE_TAGS, card_data
from d2l_bert.modeling.records import Metrics, Release, RunRecord
from d2l_bert.options import flag
from d2l_bert.records import inside, read_record
from d2l_bert.tokenization.config import dataset_and_config
from d2l_bert.tokenization.model_files import ConfigFile, check_within, find_file
from d2l_bert.tokenization.weight_files import stored_weights


logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
RUN_FILE = "run_config.json"
METRICS_FILE = "metrics.json"
CURVES_FILE = "training_curves.png"
WEIGHTS_FILE = "model.safetensors"
RELEASE_FILE = "release.json"

# The name of a picture in a model's folder, such as `few labels.png`: no path, and not hidden.
PICTURE_FILE = r"\w[\w .-]*\.(png|jpg|svg)"

# What a card with strange metadata, and a record with entries of strange types, raise where they are read.
CARD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    yaml.YAMLError,
    jinja2.TemplateError,
    SafetensorError,
)

# The options of `prepare` that a prepared folder was made with, for the command on a card.
PREPARE_OPTIONS = (
    "documents",
    "language",
    "vocab_size",
    "lowercase",
    "strip_accents",
    "pre_tokenizer",
    "unicode_normalization",
    "individual_digits",
)

# Options that name files and folders, and those that name models and data sets: on the Hub, or on this machine.
PATH_OPTIONS = (
    "corpus",
    "validation_corpus",
    "train_file",
    "validation_file",
    "test_file",
    "output_dir",
    "resume_from_checkpoint",
)
NAME_OPTIONS = ("model", "init_from", "tokenizer", "dataset", "validation_dataset")

# Options by which a command writes or sends something elsewhere: no command on a card has one of them.
WRITING_OPTIONS = {
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "report_to",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
}

# Cards of this package have some 20,000 bytes. Those of others are searched by patterns whose time grows faster.
LARGEST_CARD = 100_000


# The templates of cards lie beside this file. A line with nothing but a tag {% ... %} or a comment {# ... #} leaves no
# line in the card. A line of text that ends in a tag loses its end, by `trim_blocks`: there an empty line follows.
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
# What templates may call: the modules `facts` and `figures`, and what shows words of others.
TEMPLATES.globals |= {
    "facts": facts,
    "figures": figures,
    "authored": authored,
    "cell": cell,
    "code": code,
    "fenced": fenced,
    "quoted": quoted,
    "counted": counted,
}


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def render_card(folder: Path, name: str | None = None, parameters: int | None = None) -> str:
    """
    The card of a model folder: metadata for the Hub, and a text for people.

    Args:
        folder: has `config.json` and `model.safetensors`. The card also shows the contents of `run_config.json`,
            `metrics.json`, pictures and `release.json`, if the folder has these files.
        name: the name of the model, by default the name of the folder.
        parameters: the number of weights, for a folder without `model.safetensors`.

    Raises:
        UserError: an entry of a file is of another kind than those that this package writes.
    """
    way_out = f"put back the {RUN_FILE}, {METRICS_FILE} and {RELEASE_FILE} that were written there, or take them out"
    with explained(f"{folder}: its files cannot be shown on a card", way_out, *CARD_ERRORS):
        return _render(folder, shown(name or folder.resolve().name), parameters or count_parameters(folder))


def _render(folder, name, parameters):
    config = read_record(folder / "config.json", ConfigFile)
    records = facts.Records(
        name=name,
        parameters=parameters,
        config=config,
        run_record=read_record(folder / RUN_FILE, RunRecord),
        metrics=read_record(folder / METRICS_FILE, Metrics, allow_nan=True),
        release=read_record(folder / RELEASE_FILE, Release),
        head=facts.head_of(config),
    )
    examples = chosen_examples(records.metrics, records.recipe)
    command = command_again(records.run_record, "finetune" if records.is_tuned else "pretrain", records.run)
    template = TEMPLATES.get_template("FINETUNED.md" if records.is_tuned else "TEMPLATE.md")
    return template.render(
        card_data=card_data(records, examples),
        records=records,
        pictures=shown_pictures(folder, records.metrics),
        examples=examples,
        prompt=shortest_prompt(folder, examples),
        pipeline_tag=PIPELINE_TAGS.get(records.head),
        command=command,
        in_memory=IN_MEMORY.findall(command or ""),
        release_command=release_command(records.release),
        prepare_command=prepare_command(records.run),
    )


def updated_card(folder: Path, new: str) -> str:
    """
    The card for a folder whose run goes on: the new one, or one that was edited, with the new figures in it.

    Lines that stand in the edited card as the run had written them become the new ones; all others stay.

    Args:
        folder: the files of the earlier run, as they are before they are replaced.
        new: the card of the new files.
    """
    # Without weights the folder is one in which a run was killed while it replaced the files: its card may belong to
    # the files before or after, and what was edited cannot be told.
    if not (folder / CARD_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        return new
    new_card = ModelCard(new)
    edited = read_card(folder)
    written = ModelCard(render_card(folder)) if (folder / "config.json").is_file() else new_card
    if edited.content == written.content:
        return new
    edited.text, left_out = _merged(
        edited.text.splitlines(keepends=True),
        written.text.splitlines(keepends=True),
        new_card.text.splitlines(keepends=True),
    )
    # In the metadata, figures that someone has added stay; those of the run are replaced.
    names_of_run = {result.metric_name for result in written.data.eval_results or []}
    added = [result for result in edited.data.eval_results or [] if result.metric_name not in names_of_run]
    edited.data.eval_results = [*added, *(new_card.data.eval_results or [])] or None
    edited.data.model_name = edited.data.model_name or new_card.data.model_name
    edited.data.license = edited.data.license or new_card.data.license
    lost = ""
    if left_out:
        lost = f"; {counted(left_out, 'change')} would be in edited lines: delete the card to have it new"
    logger.warning(f"{folder / CARD_FILE}: was edited; its words stay, with the new figures{lost}")
    return edited.content


def _merged(edited, written, new):
    """
    An edited text with the changes from `written` to `new`, where it still has the lines that change.

    For example, two figures have changed, and the line of the second was edited:

        written     edited          new         result
        # Model     # Model         # Model     # Model
                    My words.                   My words.
        loss 3.0    loss 3.0        loss 2.0    loss 2.0
        ---         ---             ---         ---
        steps 40    only 40 steps   steps 80    only 40 steps

    The loss becomes the new one. `edited` has no line "steps 40" any more: this change is left out.

    Args:
        edited, written, new: lists of lines.

    Returns:
        The text, and the number of changes that were left out, as the lines to replace are gone.
    """
    place_of = _places(written, edited)
    lines = list(edited)
    left_out = 0
    changes = difflib.SequenceMatcher(None, written, new, autojunk=False).get_opcodes()
    for kind, start, end, new_start, new_end in reversed(changes):  # from the end: earlier places stay as they are
        if kind == "equal":
            continue
        first = _place_to_change(start, end, place_of)
        if first is None:
            left_out += 1
        else:
            lines[first : first + end - start] = new[new_start:new_end]
    return "".join(lines), left_out


def _place_to_change(start, end, place_of):
    """
    Where lines `start` to `end` of `written` begin in `edited`; None if it has not all of them, one behind the other.

    Args:
        start, end: equal where lines come in and none goes: behind the line before `start`, if `edited` has it.
        place_of: from `_places`.
    """
    if start == end:
        before = place_of.get(start - 1)
        return None if before is None else before + 1
    places = [place_of.get(number) for number in range(start, end)]
    if None in places:
        return None
    are_together = places[-1] - places[0] == end - start - 1
    return places[0] if are_together else None


def _places(written, edited):
    """By the number of a line of `written`, its number in `edited` if it is there; the beginning and the end, too."""
    places = {-1: -1}
    for start, other, size in difflib.SequenceMatcher(None, written, edited, autojunk=False).get_matching_blocks():
        for number in range(size):
            places[start + number] = other + number
    places[len(written)] = len(edited)
    return places


def chosen_examples(metrics: dict, recipe: dict) -> list[dict]:
    """The predictions to show: those of the recipe's prompts; else those of whose first guess the model is surest."""
    known = metrics.get("predictions", [])
    of_prompts = []
    for prompt in recipe.get("prompts", []):
        of_prompts += [example for example in known if example["text"] == prompt]
    if of_prompts:
        return of_prompts
    return sorted(known, key=lambda example: -example["output"][0]["score"])[:3]


def shortest_prompt(folder: Path, examples: list[dict]) -> str:
    """The shortest text of the predictions on the card; without one a sentence with the tokenizer's mask."""
    if examples:
        return min((example["text"] for example in examples), key=len)
    mask = read_record(folder / "tokenizer_config.json").get("mask_token", "[MASK]")
    return f"Paris is the {mask} of France."


def shown_pictures(folder: Path, metrics: dict) -> dict[str, str]:
    """
    The pictures to show: their addresses in Markdown, and what they show.

    Raises:
        UserError: metrics.json names a picture that does not stay in the folder.
    """
    captions = {CURVES_FILE: "Training curves", **metrics.get("pictures", {})}
    return {quote(file): caption for file, caption in captions.items() if inside(folder, file).is_file()}


# The names that stand for data and a tokenizer that a program had in memory (`hub_datasets`, `existing_tokenizers`).
IN_MEMORY = re.compile(r"(?<=[ '])(?:dataset|tokenizer-in-memory)-[0-9a-f]{16}\b")


def command_again(record: dict, command: str, run: dict) -> str | None:
    """
    The command that makes a run again, as `run_config.json` has it, each word quoted anew.

    Args:
        command: the command of d2l-bert that makes such runs.
        run: the options of the run.

    Returns:
        None if there is none, or one that may be a stranger's: of another program, or with other options than the
        run's, or with one that writes or sends something.
    """
    try:
        words = shlex.split(record.get("command") or "")
    except ValueError:
        return None
    given = {word.removeprefix("--") for word in words if word.startswith("--")}
    of_run = {"recipe", *run, *record.get("architecture", {})}
    if words[:2] != ["d2l-bert", command] or not given <= of_run - WRITING_OPTIONS:
        return None
    return shell_words(words)


def prepare_command(run: dict) -> str:
    """The command that made the prepared folder which a run has read, without its folders."""
    words = ["d2l-bert", "prepare"]
    for option in PREPARE_OPTIONS:
        words += flag(option, run.get(option))
    return shell_words(words)


def release_command(release: dict) -> str | None:
    """The command that makes a release again, from release.json; None if it may be a stranger's."""
    command = release.get("command") or ""
    return command if re.fullmatch(r"make release MODEL=[\w.-]+( [A-Z]+=DIR)*", command, re.ASCII) else None


def portable(record: dict) -> dict:
    """
    The content of run_config.json without the paths of this machine, so that a run's folder can be published as it is.

    For example, a run has read a corpus, and writes into the folder `out`:

        record                                                          the returned content
        run: {corpus: [/home/me/books], output_dir: /home/me/out}       run: {corpus: [books], output_dir: out}
        local_paths: {/home/me/books: {name: books, fingerprint: 3c},   fingerprints: [{name: books, fingerprint: 3c}]
                      /home/me/out: {name: out, fingerprint: None}}

    Args:
        record: the content with options as they were given, and with `local_paths`: by each path a dict with `name`,
            its `local_name`, and `fingerprint`, a hash of what the run read there, or None.

    Returns:
        The content with names in place of paths; and in place of `local_paths`, `fingerprints`: the dicts of what the
        run has read.
    """
    made = {name: entry for name, entry in record.items() if name != "local_paths"}
    for part in ("run", "finetune", "identity"):
        if part in record:
            made[part] = {option: _portable_option(option, value) for option, value in record[part].items()}
    made["fingerprints"] = [entry for entry in record["local_paths"].values() if entry["fingerprint"]]
    return made


def _portable_option(option, value):
    """The value of an option, or its values, without the folders in which things lie."""
    if option not in (*PATH_OPTIONS, *NAME_OPTIONS) or value is None:
        return value
    if isinstance(value, list):
        return [_portable_option(option, one) for one in value]
    return base_name(value) if option in PATH_OPTIONS else local_name(value)


def local_name(name: str) -> str:
    """
    The name to show of a model, a tokenizer or a data set: an id on the Hub as it is; of what lies on this machine the
    last part of its path. A configuration of a data set, behind a colon, stays.
    """
    place, config = dataset_and_config(name)
    if config is not None and re.search(r"[/\\]", config):  # the colon of file:///folder
        place = name
        config = None
    if not Path(place).exists() and HUB_ID.fullmatch(place):
        return name
    return base_name(place) if config is None else f"{base_name(place)}:{config}"


# ---------------------------------------------------------------------------------------------------------------------
# Reading, and carrying over to a converted model


def read_card(folder: Path, license: str | None = None) -> ModelCard:
    """
    A folder's card. If the folder has none, one is written from the other files.

    Args:
        license: replaces the licence in the card.

    Raises:
        UserError: the card cannot be read, or its metadata is not valid.
    """
    path = folder / CARD_FILE
    check_within(path, folder)
    if not path.is_file():
        card = card_of_records(folder)
    else:
        with explained(f"{path}: cannot be read", "fix it, or delete it, and it is written again", *CARD_ERRORS):
            if path.stat().st_size > LARGEST_CARD:
                raise ValueError(f"it has more than {LARGEST_CARD:,} bytes")
            text = path.read_text(encoding="utf-8-sig")
            check_card(text)
            card = ModelCard(text)
            card.data.to_yaml()  # metadata that cannot be written again
    card.data.license = license or card.data.license
    return card


def card_of_records(folder: Path, name: str | None = None) -> ModelCard:
    """The card that follows from a folder's records, read back from what `render_card` writes; raises `UserError`."""
    return ModelCard(render_card(folder, name))


def carry_card(source: str, folder: Path, name: str, has_figures: bool = True, export: dict | None = None) -> None:
    """
    Give a converted model what its source has: the record of the run, figures, pictures and a card with its metadata.

    The card is rendered anew, as a stock BERT is loaded in another way. A release's record stays behind: it tells how
    to make other bytes.

    Args:
        source: the model that was converted, a folder or an id on the Hub.
        folder: the converted model.
        name: its name in the card.
        has_figures: whether the figures are those of the converted model, too, which may have lost a head.
        export: what `d2l-bert export` has measured.

    Raises:
        UserError: the source has a record that cannot be read, or one that names a picture outside of its folder.
    """
    for file in (CARD_FILE, RUN_FILE, CURVES_FILE):
        _copy_file(source, folder, file)
    if has_figures:
        _copy_file(source, folder, METRICS_FILE)
    try:
        _write_carried_card(source, folder, name, export)
    except UserError as error:  # of a file that was copied: it is the source's
        raise UserError(error.message.replace(str(folder), source)) from None


def _copy_file(source, folder, file):
    """Copy a file of the model `source` into a folder, if the model has it."""
    if found := find_file(source, file):
        shutil.copyfile(found, folder / file)


def _write_carried_card(source, folder, name, export):
    """Write the card of a converted model, whose records are copied already, and copy the pictures that it shows."""
    metrics = read_record(folder / METRICS_FILE, Metrics, allow_nan=True)
    for picture in metrics.get("pictures", {}):
        if not re.fullmatch(PICTURE_FILE, picture):
            raise UserError(
                f"{source}: its {METRICS_FILE} names the picture {picture!r:.200}, and a picture is a .png, .jpg or "
                f".svg in the folder itself; take the name out"
            )
        _copy_file(source, folder, picture)
    if export:
        write_json(folder / METRICS_FILE, {**metrics, "export": export})
    before = read_card(folder).data
    card = card_of_records(folder, name)
    for field in ("license", "language", "datasets", "base_model"):  # what the card lacks follows from the run
        setattr(card.data, field, getattr(before, field, None) or getattr(card.data, field, None))
    (folder / CARD_FILE).write_text(card.content, encoding="utf-8")


def count_parameters(folder: Path) -> int:
    """The number of weights in the safetensors files; a tied matrix counts once."""
    return sum(math.prod(weight.shape) for weight in stored_weights(folder, pickles=False).values())
