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
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import SafetensorError, safe_open

from d2l_bert.folders import base_name, write_json
from d2l_bert.hub_metadata import check_card
from d2l_bert.messages import UserError, counted, explained
from d2l_bert.model_cards import figures
from d2l_bert.model_cards.markdown import HIDDEN, authored, cell, code, fenced, quoted, shell_words, shown
from d2l_bert.modeling.records import Metrics, Release, RunRecord
from d2l_bert.options import flag
from d2l_bert.pair_tasks import PAIR_TASKS, unit
from d2l_bert.records import inside, read_record
from d2l_bert.tokenization.config import dataset_and_config
from d2l_bert.tokenization.model_files import ConfigFile, check_within, find_file


logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
RUN_FILE = "run_config.json"
METRICS_FILE = "metrics.json"
CURVES_FILE = "training_curves.png"
WEIGHTS_FILE = "model.safetensors"
RELEASE_FILE = "release.json"

# The name of a picture in a model's folder.
PICTURE = r"\w[\w .-]*\.(png|jpg|svg)"

# What a card with strange metadata, and a record with entries of strange types, raise where they are read.
OF_CARDS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(yaml.YAMLError, jinja2.TemplateError, SafetensorError),
)

# An id on the Hub: an owner's name, if it has one, and the repository's.
HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)

# The options of `prepare` that a prepared folder was made with, for the command on a card.
PREPARED_WITH = (
    *("documents", "language", "vocab_size", "lowercase", "strip_accents", "pre_tokenizer", "unicode_normalization"),
    "individual_digits",
)

# Options that name files and folders, and those that name models and data sets: on the Hub, or on this machine.
PATHS = (
    *("corpus", "validation_corpus", "train_file", "validation_file", "test_file", "output_dir"),
    "resume_from_checkpoint",
)
NAMES = ("model", "init_from", "tokenizer", "dataset", "validation_dataset")

# Options by which a command writes or sends something elsewhere: no command on a card has one of them.
WRITING = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "report_to"),
    *("push_to_hub", "hub_model_id", "hub_private_repo"),
}

# Cards of this package have some 20,000 bytes. Those of others are searched by patterns whose time grows faster.
LARGEST_CARD = 100_000

# The Hub's task (`pipeline_tag`) of each head; it has none for others.
PIPELINE_TAGS = {
    "ForPreTraining": "fill-mask",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "Model": "feature-extraction",
}


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.globals |= {
    **{of.__name__: of for of in (authored, cell, code, fenced, quoted)},
    "counted": counted,
    "figures": figures,
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
    with explained(f"{folder}: its files cannot be shown on a card", way_out, *OF_CARDS):
        return _rendered(folder, shown(name or folder.resolve().name), parameters or count_parameters(folder))


def _rendered(folder, name, parameters):
    config, record = read_record(folder / "config.json", ConfigFile), read_record(folder / RUN_FILE, RunRecord)
    metrics = read_record(folder / METRICS_FILE, Metrics, allow_nan=True)
    release = read_record(folder / RELEASE_FILE, Release)
    # A model that was exported without the head that it was fine-tuned with has the card of an encoder.
    head = re.sub("^.*?(?=For|Model$)", "", config["architectures"][0])  # `ForMaskedLM` of `BertForMaskedLM`
    if not re.fullmatch(r"\w+", head):
        raise ValueError(f"config.json: {head!r:.100} is no class")
    is_tuned = "finetune" in record and head == record["auto_class"].removeprefix("AutoModel")
    run = record.get("finetune" if is_tuned else "run", {})
    data, recipe = (record.get("data", {}) if run else {}), release.get("recipe", {})
    start = record["base_model"]["name"] if is_tuned else run.get("init_from")
    is_local = start in (read["name"] for read in record.get("fingerprints", []))
    is_on_hub = bool(start) and not is_local and HUB_ID.fullmatch(start) is not None
    base_model = start if is_on_hub and not run.get("from_scratch") else None
    # Parts may have been prepared with a language each.
    languages = shown((record["base_model"] if is_tuned else run).get("language") or "").split(", ")
    task, pipeline_tag = PAIR_TASKS.get(run.get("objective")), PIPELINE_TAGS.get(head)
    examples = chosen_examples(metrics, recipe)
    is_ours, kind = config["model_type"] == "d2l-bert", config["model_type"].removeprefix("d2l-")
    tags = ["d2l-bert", kind, pipeline_tag, "fine-tuned" if is_tuned else None, task and task.name.replace(" ", "-")]
    card_data = ModelCardData(
        language=[each.partition("-")[0] for each in languages]
        if languages[1:]
        else languages[0].partition("-")[0] or None,
        language_bcp47=[each for each in languages if "-" in each] or None,
        license=run.get("license") and shown(run["license"]),
        library_name="transformers",
        pipeline_tag=pipeline_tag,
        tags=[shown(tag) for tag in tags if tag],
        datasets=[each for each in data.get("hub_datasets", []) if HUB_ID.fullmatch(each)] or None,
        model_name=name,
        base_model=base_model,
        base_model_relation="finetune" if is_tuned and base_model else None,
        eval_results=eval_results(metrics, record, pipeline_tag) or None,
        # Texts stand in the metadata unescaped: those with invisible characters are left out.
        widget=[{"text": each["text"]} for each in examples if not HIDDEN.search(each["text"])] or None,
    )
    return TEMPLATES.get_template("FINETUNED.md" if is_tuned else "TEMPLATE.md").render(
        card_data=card_data,
        name=name,
        config=config,
        is_ours=is_ours,
        parameters=parameters,
        record=record,
        run=run,
        data=data,
        start=start and (f"[{cell(start)}](https://huggingface.co/{start})" if is_on_hub else cell(start)),
        metrics=metrics,
        pictures=shown_pictures(folder, metrics),
        release=release,
        recipe=recipe,
        task=task,
        unit=unit(task),
        examples=examples,
        prompt=min(
            (example["text"] for example in examples),
            key=len,
            default="Paris is the {} of France.".format(
                read_record(folder / "tokenizer_config.json").get("mask_token", "[MASK]")
            ),
        ),
        pipeline_tag=pipeline_tag,
        auto_class="AutoModelForMaskedLM" if head == "ForPreTraining" else f"Auto{head.replace('For', 'ModelFor')}",
        command=command_again(record, "finetune" if is_tuned else "pretrain", run),
        release_command=release_command(release),
        prepare=shell_words(["d2l-bert", "prepare", *(w for o in PREPARED_WITH for w in flag(o, run.get(o)))]),
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
    new_card, edited = ModelCard(new), read_card(folder)
    written = ModelCard(render_card(folder)) if (folder / "config.json").is_file() else new_card
    if edited.content == written.content:
        return new
    lines = (each.text.splitlines(keepends=True) for each in (edited, written, new_card))
    edited.text, left = _merged(*lines)
    of_run = {result.metric_name for result in written.data.eval_results or []}
    of_others = [result for result in edited.data.eval_results or [] if result.metric_name not in of_run]
    edited.data.eval_results = [*of_others, *(new_card.data.eval_results or [])] or None
    for field in ("model_name", "license"):
        setattr(edited.data, field, getattr(edited.data, field) or getattr(new_card.data, field))
    missing = f"; {counted(left, 'change')} would be in edited lines: delete the card to have it new" if left else ""
    logger.warning(f"{folder / CARD_FILE}: was edited; its words stay, with the new figures{missing}")
    return edited.content


def _merged(edited, written, new):
    """
    An edited text with the changes from `written` to `new`, where it still has the lines that change.

    Args:
        edited, written, new: lists of lines.

    Returns:
        The text, and the number of changes that were left out, as the lines to replace are gone.
    """
    kept = {}  # by the number of a line as it was written its number in the edited text
    for start, other, size in difflib.SequenceMatcher(None, written, edited, autojunk=False).get_matching_blocks():
        kept |= {start + number: other + number for number in range(size)}
    kept |= {-1: -1, len(written): len(edited)}  # the beginning and the end of both
    lines, left = list(edited), 0
    changes = difflib.SequenceMatcher(None, written, new, autojunk=False).get_opcodes()
    for kind, start, end, new_start, new_end in reversed(changes):
        if kind == "equal":
            continue
        places = [kept.get(number) for number in range(start, end)]
        before = kept.get(start - 1)
        if places and None not in places and places[-1] - places[0] == end - start - 1:
            lines[places[0] : places[-1] + 1] = new[new_start:new_end]
        elif not places and before is not None:
            lines[before + 1 : before + 1] = new[new_start:new_end]
        else:
            left += 1
    return "".join(lines), left


def chosen_examples(metrics: dict, recipe: dict) -> list[dict]:
    """The predictions to show: those of the recipe's prompts; else those of whose first guess the model is surest."""
    known = metrics.get("predictions", [])
    of_prompts = [example for prompt in recipe.get("prompts", []) for example in known if example["text"] == prompt]
    return of_prompts or sorted(known, key=lambda example: -example["output"][0]["score"])[:3]


def shown_pictures(folder: Path, metrics: dict) -> dict[str, str]:
    """
    The pictures to show: their addresses in Markdown, and what they show.

    Raises:
        UserError: metrics.json names a picture that does not stay in the folder.
    """
    captions = {CURVES_FILE: "Training curves", **metrics.get("pictures", {})}
    return {quote(file): caption for file, caption in captions.items() if inside(folder, file).is_file()}


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
    options = {word.removeprefix("--") for word in words if word.startswith("--")}
    known = {"recipe", *run, *record.get("architecture", {})} - WRITING
    if words[:2] != ["d2l-bert", command] or not options <= known:
        return None
    return shell_words(words)


def release_command(release: dict) -> str | None:
    """The command that makes a release again, from release.json; None if it may be a stranger's."""
    command = release.get("command") or ""
    return command if re.fullmatch(r"make release MODEL=[\w.-]+( [A-Z]+=DIR)*", command, re.ASCII) else None


def eval_results(metrics: dict, record: dict, pipeline_tag: str | None) -> list[EvalResult]:
    """
    The figures of a model for the card's metadata.

    Args:
        metrics: the content of metrics.json.
        record: the content of run_config.json; without it, a run's own figures are left out.
        pipeline_tag: the Hub's task of the model.
    """
    data, results = record.get("data", {}), []
    hub_datasets, validation = data.get("hub_datasets", []), data.get("validation")
    corpus, part = (validation or data).get("corpus_name"), "validation text" if validation else "held-out documents"
    measured_on = {"eval": f"{corpus}, {part}" if corpus else None} | {  # by the first word of a figure's key
        split: hub_datasets[0] if hub_datasets and not record["finetune"].get(f"{split}_file") else table["name"]
        for split, table in data.get("splits", {}).items()
    }
    for metric in figures.reported_metrics(metrics):
        split = metric.key.partition("_")[0]
        name = metric.text or measured_on.get(split)
        if metric.task and name and math.isfinite(metrics[metric.key]):
            is_on_hub = name in hub_datasets and HUB_ID.fullmatch(name)
            on_hub = "nyu-mll/blimp" if metric.key == figures.BLIMP else name if is_on_hub else None
            # A split of a data set on the Hub is called as it is there.
            split = data["splits"][split]["name"].rpartition(", split ")[2] if on_hub and not metric.text else split
            results.append(
                EvalResult(
                    task_type=metric.task[0] or pipeline_tag,
                    task_name=metric.task[1],
                    dataset_type=on_hub or invented_id(name),
                    dataset_name=shown(name),
                    # Keeps the figures of `d2l-bert evaluate` apart from those of a run on a corpus of the same name.
                    dataset_split="evaluation" if metric.text else shown(split) if "splits" in data else None,
                    metric_type=shown(metric.metric_type),
                    metric_name=shown(metric.name),
                    metric_value=round(metrics[metric.key], 4),
                )
            )
    return results


def invented_id(name: str) -> str:
    """A name as the metadata want it of a data set that is not on the Hub: it follows the rules of the Hub's ids."""
    words = re.sub(r"[^A-Za-z0-9]*[^\w.-][^A-Za-z0-9]*|[-.]{2,}", "-", name[:200], flags=re.ASCII)
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9]+$", "", words[:96]).removesuffix(".git") or "text"


def portable(record: dict) -> dict:
    """
    The content of run_config.json without the paths of this machine, so that a run's folder can be published as it is.

    Args:
        record: the content with options as they were given, and with `local_paths`: by each path a dict with `name`,
            its `local_name`, and `fingerprint`, a hash of what the run read there, or None.

    Returns:
        The content with names in place of paths, and with `fingerprints`, the dicts of the paths that were read.
    """
    made = {name: entry for name, entry in record.items() if name != "local_paths"}
    for part in ("run", "finetune", "identity"):
        if part in record:
            made[part] = {option: _portable_option(option, value) for option, value in record[part].items()}
    return made | {"fingerprints": [known for known in record["local_paths"].values() if known["fingerprint"]]}


def _portable_option(option, value):
    """The value of an option, or its values, without the folders in which things lie."""
    if option not in (*PATHS, *NAMES) or value is None:
        return value
    if isinstance(value, list):
        return [_portable_option(option, one) for one in value]
    return base_name(value) if option in PATHS else local_name(value)


def local_name(name: str) -> str:
    """
    The name to show of a model, a tokenizer or a data set: an id on the Hub as it is; of what lies on this machine the
    last part of its path. A configuration of a data set, behind a colon, stays.
    """
    place, config = dataset_and_config(name)
    if config is not None and re.search(r"[/\\]", config):  # the colon of file:///folder
        place, config = name, None
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
        card = rendered_card(folder)
    else:
        with explained(f"{path}: cannot be read", "fix it, or delete it, and it is written again", *OF_CARDS):
            if path.stat().st_size > LARGEST_CARD:
                raise ValueError(f"it has more than {LARGEST_CARD:,} bytes")
            text = path.read_text(encoding="utf-8-sig")
            check_card(text)
            card = ModelCard(text)
            card.data.to_yaml()  # metadata that cannot be written again
    card.data.license = license or card.data.license
    return card


def rendered_card(folder: Path, name: str | None = None) -> ModelCard:
    """The card that follows from a folder's records, as `render_card` writes it, which raises `UserError`."""
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

    def copy(*files):
        for file in files:
            if found := find_file(source, file):
                shutil.copyfile(found, folder / file)

    copy(CARD_FILE, RUN_FILE, CURVES_FILE, *([METRICS_FILE] if has_figures else []))
    try:
        _write_carried_card(source, folder, name, export, copy)
    except UserError as error:  # of a file that was copied: it is the source's
        raise UserError(str(error).replace(str(folder), source)) from None


def _write_carried_card(source, folder, name, export, copy):
    """The card of a converted model, whose records are copied already; `copy` copies further files of the source."""
    metrics = read_record(folder / METRICS_FILE, Metrics, allow_nan=True)
    for picture in metrics.get("pictures", {}):
        if not re.fullmatch(PICTURE, picture):
            raise UserError(
                f"{source}: its {METRICS_FILE} names the picture {picture!r:.200}, and a picture is a .png, .jpg or "
                f".svg in the folder itself; take the name out"
            )
        copy(picture)
    if export:
        write_json(folder / METRICS_FILE, {**metrics, "export": export})
    before, card = read_card(folder).data, rendered_card(folder, name)
    for field in ("license", "language", "datasets", "base_model"):  # what the card lacks follows from the run
        setattr(card.data, field, getattr(before, field, None) or getattr(card.data, field, None))
    (folder / CARD_FILE).write_text(card.content, encoding="utf-8")


def count_parameters(folder: Path) -> int:
    """The number of weights in the safetensors files; a tied matrix counts once."""
    count = 0
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    return count
