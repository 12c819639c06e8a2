"""`release.json`, the record of a released model: writes it, shows it in the card, compares two models by it."""

import math
import subprocess
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from d2l_bert.model_cards.figures import FINETUNED_SD, ReportedMetric, formatted, reported_metrics
from d2l_bert.model_cards.release_recipe import Recipe, Text, flags, texts_of
from d2l_bert.tokenization.cache import fingerprint
from d2l_bert.tokenization.file_hashes import content_hash
from d2l_bert.tokenization.python_docs import required_distributions


RELEASE_FILE = "release.json"
WEIGHTS_FILE = "model.safetensors"

# Two models' figures agree if they differ by at most this many standard deviations of one model. The difference of two
# models has sqrt(2) standard deviations, so this is four of the difference: chance alone exceeds that in 1.6 % of the
# cases if the deviation was measured on five models, and in 5.7 % if on three.
DEVIATIONS = 4 * math.sqrt(2)

# Options of a run that say where its files lie, and do not change the weights.
PLACES = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint")

# The packages whose code decides the weights. Folders below them do not.
CODE = ("d2l_bert", "d2l_bert.tokenization", "d2l_bert.modeling", "d2l_bert.training")

CPUINFO = Path("/proc/cpuinfo")

# A message names at most this many differences.
DIFFERENCES_SHOWN = 6


def make_record(recipe: Recipe, texts: dict[str, Text], folder: Path) -> dict:
    """
    The content of `release.json` for a model that was just made, without `measured`.

    Args:
        texts: the texts of `texts.toml`, by their names.
        folder: holds the weights.
    """
    names = list(dict.fromkeys(name for name, _ in recipe.texts()))
    needed = dict.fromkeys(name for name, _ in texts_of(recipe.pretrain))
    return {
        "release": recipe.name,
        "command": " ".join(["make", "release", f"MODEL={recipe.name}", *(f"{name}=DIR" for name in needed)]),
        "recipe": asdict(recipe),
        "weights_sha256": content_hash(folder / WEIGHTS_FILE),
        "processor_details": processor_details(),
        "versions": installed_versions(),
        "commit": commit(),
        "code": code_fingerprint(),
        "texts": {name: asdict(texts[name]) for name in names},
    }


def installed_versions() -> dict[str, str]:
    """The versions of all packages that this package requires, directly or indirectly."""
    return {package.metadata["Name"]: package.version for package in required_distributions("d2l-bert")}


def commit() -> str | None:
    """The commit of the checkout that the package is imported from; None if it is not in one."""
    git = ["git", "-C", str(Path(find_spec("d2l_bert.training").origin).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def code_fingerprint() -> str:
    """A hash of the Python files of the packages in `CODE`."""
    files = []
    for package in CODE:
        (folder,) = find_spec(package).submodule_search_locations
        files += [(package, path.name, content_hash(path)) for path in sorted(Path(folder).glob("*.py"))]
    return fingerprint(files)


def processor_details() -> str | None:
    """Family, model and stepping of the CPU, as its name may be that of many; None if the system does not say them."""
    if not CPUINFO.exists():
        return None
    first = CPUINFO.read_text().partition("\n\n")[0]
    told = dict(map(str.strip, line.split(":", 1)) for line in first.splitlines() if ":" in line)
    if not {"cpu family", "model", "stepping"} <= told.keys():
        return None
    return f"family {told['cpu family']}, model {told['model']}, stepping {told['stepping']}"


def deviations(release: dict, metrics: dict) -> dict[str, float]:
    """
    The standard deviations of a model's figures between models of other seeds, by their keys in metrics.json.

    Args:
        release: the content of release.json; its recipe has them for what was pretrained.
        metrics: the content of metrics.json; it has them for what was fine-tuned, over the seeds of the fine-tuning.
    """
    of_recipe = release["recipe"]["deviations"]
    found = {metric.key: metrics.get(f"{metric.key}{FINETUNED_SD}") for metric in reported_metrics(metrics)}
    found |= {key: value for key, value in of_recipe.items() if key in found}
    return {key: value for key, value in found.items() if value is not None}


# ---------------------------------------------------------------------------------------------------------------------
# The card


def make_again_section(release: dict, record: dict, metrics: dict) -> str:
    """
    The card's section that says how to make the model again; an empty string without a release.

    Args:
        release: the content of release.json.
        record: the content of run_config.json.
        metrics: the content of metrics.json.
    """
    if not release:
        return ""
    machine, recipe = record["machine"], release["recipe"]
    device = machine["accelerator"] or _processor(release, machine)
    versions = {"Python": record["versions"]["python"], **release["versions"]}
    rows = [
        ("SHA-256 of `model.safetensors`", f"`{release['weights_sha256']}`"),
        ("machine", f"{device}, {machine['threads']} {'thread' if machine['threads'] == 1 else 'threads'}"),
        ("trained with", f"`d2l-bert pretrain {' '.join(flags(recipe['pretrain']))} --seed {recipe['seed']}`"),
        (
            "code of d2l-bert",
            f"{record['versions']['d2l-bert']}, commit `{release['commit']}`, fingerprint `{release['code']}`",
        ),
    ]
    blocks = [
        "## Make it again",
        f"In a checkout of d2l-bert:\n\n```bash\n{release['command']}\n```",
        *(
            f"`{name}=DIR` is {text['what']}, from {text['source']}; "
            + ", ".join(f"{folder} has the fingerprint `{found}`" for folder, found in text["fingerprints"].items())
            + "."
            for name, text in release["texts"].items()
        ),
        "The same processor, number of threads, versions and code give the same bytes of the weights:",
        _table(("what", "here"), rows),
        "<details><summary>versions of all packages</summary>\n\n"
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + "\n\n</details>",
    ]
    known = deviations(release, metrics)
    rows = [
        (metric.name, formatted(metrics[metric.key], metric.unit), *_within(known[metric.key], metric.unit))
        for metric in reported_metrics(metrics)
        if metric.key in known
    ]
    if rows:
        blocks += [
            f"Elsewhere, or with other versions, the bytes are others, and the figures differ by chance. The standard "
            f"deviations are those of {recipe['deviations']['source']}; the last column is {DEVIATIONS:.1f} of them, "
            f"which is four standard deviations of the difference of two models.",
            _table(("figure", "this model", "standard deviation", "made again: at most apart"), rows),
        ]
    return "\n\n".join(blocks)


def _within(deviation, unit):
    return tuple(formatted(value, unit) for value in (deviation, DEVIATIONS * deviation))


def _processor(release, machine):
    details = release["processor_details"]
    return f"{machine['processor']} ({details})" if details else machine["processor"]


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


class Compared(NamedTuple):
    """A figure of the recorded model beside that of the model made again; `within` is None without a deviation."""

    metric: ReportedMetric
    recorded: float
    made: float
    within: bool | None


def differences(recorded: tuple[dict, dict], made: tuple[dict, dict]) -> list[str]:
    """
    What differs in how two models were made, as far as it may change the bytes of the weights.

    Args:
        recorded, made: the contents of release.json and of run_config.json, without paths of a machine, of each model.
    """
    before, now = conditions(*recorded), conditions(*made)
    return [
        f"{name} ({before.get(name, 'none')}, here {now.get(name, 'none')})"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]


def conditions(release: dict, record: dict) -> dict:
    """By its name, everything that may change the bytes of the weights."""
    machine, run, data = record["machine"], record["run"], record["data"]
    return {
        **{name: value for name, value in run.items() if name not in PLACES},
        **record["architecture"],
        "text": data["corpus_fingerprint"],
        "validation text": data.get("validation", {}).get("corpus_fingerprint"),
        "device": machine["accelerator"] or machine["device"],
        "processor": _processor(release, machine),
        "processes": machine["processes"],
        "threads": machine["threads"],
        "Python": record["versions"]["python"],
        **release["versions"],
        "code of d2l-bert": release["code"],
    }


def compare_figures(release: dict, recorded: dict, made: dict) -> list[Compared]:
    """
    The figures that both models have.

    Args:
        release: the content of release.json of the recorded model.
        recorded, made: the contents of metrics.json.
    """
    compared, known = [], deviations(release, recorded)
    for metric in reported_metrics(recorded):
        if metric.key in made:
            apart = abs(made[metric.key] - recorded[metric.key])
            within = apart <= DEVIATIONS * known[metric.key] if metric.key in known else None
            compared.append(Compared(metric, recorded[metric.key], made[metric.key], within))
    return compared


def verdict(name: str, are_same: bool, why: list[str], compared: list[Compared]) -> str:
    """One line: whether the bytes are the same; if not, why that may be, and whether the figures agree."""
    if are_same:
        return f"{name}: the same bytes as recorded"
    shown = ", ".join(why[:DIFFERENCES_SHOWN])
    more = f" and {len(why) - DIFFERENCES_SHOWN} more" if len(why) > DIFFERENCES_SHOWN else ""
    reason = f"different: {shown}{more}" if why else "nothing differs that the record knows, please report this"
    outside = [each.metric.name for each in compared if each.within is False]
    judged = sum(each.within is not None for each in compared)
    told = f"{', '.join(outside)} too far apart" if outside else f"all {judged} figures within their deviations"
    return f"{name}: other bytes than recorded ({reason}); {told}"


def figures_table(release: dict, recorded: dict, compared: list[Compared]) -> list[str]:
    """
    Lines with the recorded figures and the new ones beside each other.

    Args:
        release, recorded: the contents of release.json and metrics.json of the recorded model.
    """
    width = max((len(each.metric.name) for each in compared), default=0)
    lines = [f"  {'':{width}}  {'recorded':>13}  {'here':>13}  within the deviations"]
    known = deviations(release, recorded)
    for each in compared:
        unit, judged = each.metric.unit, ""
        if each.within is not None:
            most = formatted(DEVIATIONS * known[each.metric.key], unit)
            judged = f"{'yes' if each.within else 'NO'} (at most {most} apart)"
        values = f"{formatted(each.recorded, unit):>13}  {formatted(each.made, unit):>13}"
        lines.append(f"  {each.metric.name:{width}}  {values}  {judged}".rstrip())
    return lines
