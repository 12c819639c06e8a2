"""How a released model is made: reads and checks `release.toml` of a release, and the texts that it needs."""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from d2l_bert import model_cards
from d2l_bert.errors import UserError
from d2l_bert.tokenization.cache import fingerprint
from d2l_bert.tokenization.sources import file_source


# Each folder here with a file of this name is a release.
RECIPE_FILE = "release.toml"
TEXTS_FILE = "texts.toml"
RELEASES = Path(model_cards.__file__).parent

# Options that decide the bytes of the weights or the speed, and whose defaults depend on a measurement.
EXPLICIT = {"torch_compile": ("true", "false"), "micro_batch_size": (int,)}

# Options that the release gives itself, or that would make the number of steps depend on the speed of the machine.
NOT_IN_PRETRAIN = (
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "push_to_hub"),
    *("max_minutes", "seed"),
)

# `$BOOKS/train` in an option stands for the folder `train` of the text BOOKS.
TEXT = re.compile(r"\$(?P<name>[A-Z][A-Z0-9_]*)(?:/(?P<path>.+))?")

Options = dict[str, str | int | float | bool | list[str]]


@dataclass(kw_only=True)
class Recipe:
    """
    The content of `release.toml`.

    Args:
        name: the name of the release and of its folder.
        about: a sentence or two for the top of the card: what the model is, and what it was trained on.
        device: `cpu` or `cuda`.
        threads: the number of threads of a process.
        seed: the seed of the released model.
        deviations: how far models of other seeds differ: standard deviations by the keys of metrics.json, and
            `source`, which says what they were measured on.
        pretrain: options of `d2l-bert pretrain`.
        evaluate: by a name, options of `d2l-bert evaluate`.
        finetune: by the name of a task, options of `d2l-bert finetune`.
    """

    name: str
    about: str
    device: str
    threads: int
    seed: int
    deviations: dict
    pretrain: Options
    evaluate: dict[str, Options] = field(default_factory=dict)
    finetune: dict[str, Options] = field(default_factory=dict)

    def texts(self) -> list[tuple[str, str]]:
        """What `texts_of` finds in all options, those of the training first."""
        tables = (self.pretrain, *self.evaluate.values(), *self.finetune.values())
        return list(dict.fromkeys(found for options in tables for found in texts_of(options)))


@dataclass(frozen=True, kw_only=True)
class Text:
    """
    An entry of `texts.toml`: a text that is not in the repository.

    Args:
        name: the variable that names its folder, as in `BOOKS=DIR`.
        what: what the folder holds.
        source: where it can be had.
        fingerprints: by folder below DIR (`.` for DIR), a hash of the files there, as in a run's `run_config.json`.
    """

    name: str
    what: str
    source: str
    fingerprints: dict[str, str]


def released(root: Path = RELEASES) -> list[str]:
    """The names of all releases, recorded or not."""
    return sorted(path.parent.name for path in root.glob(f"*/{RECIPE_FILE}"))


def read_recipe(name: str, texts: dict[str, Text], root: Path = RELEASES) -> Recipe:
    """
    The recipe of a release.

    Args:
        texts: the texts of `texts.toml`, by their names.

    Raises:
        UserError: there is no such release, or its file is wrong.
    """
    path = root / name / RECIPE_FILE
    if name not in released(root):
        known = ", ".join(released(root)) or "none here, but some in a checkout of the repository"
        raise UserError(f"{name or 'MODEL is empty'}: no such release; give the name of one: {known}")
    content = _read_toml(path)
    needed = {"about", "device", "threads", "seed", "deviations", "pretrain"}
    optional = {"evaluate", "finetune"}
    for missing in sorted(needed - content.keys()):
        raise UserError(f"{path}: {missing} is missing; give it")
    for unknown in sorted(content.keys() - needed - optional):
        raise UserError(f"{path}: {unknown} is not known; the entries are {', '.join(sorted(needed | optional))}")
    tables = [(name, content[name]) for name in ("deviations", "pretrain")]
    for kind in optional:
        tables += [(f"{kind}.{entry}", value) for entry, value in content.get(kind, {}).items()]
    for entry, value in tables:
        if not isinstance(value, dict):
            raise UserError(f"{path}: {entry} is {value!r}; write a table [{entry}] with options")
    recipe = Recipe(name=name, **content)
    if recipe.device not in ("cpu", "cuda"):
        raise UserError(f"{path}: device is {recipe.device!r}; give cpu or cuda")
    for entry, least in (("threads", 1), ("seed", 0)):
        if type(value := getattr(recipe, entry)) is not int or value < least:
            raise UserError(f"{path}: {entry} is {value!r}; give a whole number of at least {least}")
    for option, allowed in EXPLICIT.items():
        value = recipe.pretrain.get(option)
        if value not in allowed and type(value) not in allowed:
            shown = " or ".join("a number" if one is int else one for one in allowed)
            raise UserError(f"{path}: {option} in [pretrain] is {value!r}, and the bytes depend on it; give {shown}")
    for option in NOT_IN_PRETRAIN:
        if option in recipe.pretrain:
            raise UserError(f"{path}: {option} does not belong into [pretrain]; take it out")
    if "source" not in recipe.deviations:
        raise UserError(f"{path}: [deviations] has no source; say what they were measured on")
    for text, below in recipe.texts():
        if text not in texts or not any(is_below(below, folder) for folder in texts[text].fingerprints):
            raise UserError(f"{path}: {TEXTS_FILE} has no fingerprint for ${text}/{below}; add it there")
    return recipe


def read_texts(root: Path = RELEASES) -> dict[str, Text]:
    """The texts of `texts.toml`, by their names; none in an installation without the file."""
    if not (root / TEXTS_FILE).exists():
        return {}
    return {name: Text(name=name, **entry) for name, entry in _read_toml(root / TEXTS_FILE).items()}


def _read_toml(path):
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{path}: cannot be read ({error}); mend the file") from None


# ---------------------------------------------------------------------------------------------------------------------
# Options with texts


def texts_of(options: Options) -> list[tuple[str, str]]:
    """The texts that options name: pairs of a name and a path below the text's folder, `.` for the folder."""
    values = [entry for value in options.values() for entry in (value if isinstance(value, list) else [value])]
    found = [TEXT.fullmatch(value) for value in values if isinstance(value, str)]
    return list(dict.fromkeys((match["name"], match["path"] or ".") for match in found if match))


def check_texts(options: Options, texts: dict[str, Text], given: dict[str, Path]) -> None:
    """
    Refuse texts that are missing, or are not those of the release.

    Args:
        given: the folder of each text, by its name.

    Raises:
        UserError: the first text that is missing or has other files.
    """
    for name, path in texts_of(options):
        text = texts[name]
        if name not in given:
            raise UserError(f"{name} is missing: give {name}=DIR with {text.what} (from {text.source})")
        below = next(below for below in sorted(text.fingerprints, reverse=True) if is_below(path, below))
        folder = given[name] / below
        if not folder.is_dir():
            raise UserError(
                f"{name}={given[name]}: there is no folder {folder}; give {name}=DIR with {text.what} (from "
                f"{text.source})"
            )
        found = fingerprint(file_source(folder).identity)
        if found != text.fingerprints[below]:
            raise UserError(
                f"{name}={given[name]}: the files in {folder} have the fingerprint {found}, and those of the release "
                f"{text.fingerprints[below]}; give {text.what} (from {text.source})"
            )


def is_below(path: str, folder: str) -> bool:
    """Whether a path is this folder, or lies in it; `.` is the folder of all paths."""
    return folder in (".", path) or path.startswith(f"{folder}/")


def flags(options: Options, given: dict[str, Path] | None = None) -> list[str]:
    """
    Options as words of a command line.

    Args:
        given: the folder of each text; without it, `$BOOKS/train` becomes `BOOKS/train`, as the card shows it.
    """
    words = []
    for name, value in options.items():
        words.append(f"--{name}")
        for entry in value if isinstance(value, list) else [value]:
            match = TEXT.fullmatch(entry) if isinstance(entry, str) else None
            if match:
                folder = Path(match["name"]) if given is None else given[match["name"]]
                entry = folder / (match["path"] or ".")
            words.append(str(entry).lower() if isinstance(entry, bool) else str(entry))
    return words
