"""What a card says of a model in words: the rows of its tables, and its longer sentences, from the model's records."""

import re
from dataclasses import dataclass

from d2l_bert.messages import counted
from d2l_bert.model_cards import figures
from d2l_bert.model_cards.markdown import authored, cell, code, shown
from d2l_bert.pair_tasks import PAIR_TASKS, PairTask, unit


# An id on the Hub: an owner's name, if it has one, and the repository's, such as google/bert_uncased_L-2_H-128_A-2 and
# bert-base-uncased. A path such as ./models/bert or /data/bert is none.
HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)

# Of more classes than this, a card shows the first ones, or the largest.
MOST_CLASSES_SHOWN = 30

# The entries of a classification report that are no classes.
AVERAGES = ("micro avg", "macro avg", "weighted avg", "samples avg")


@dataclass(frozen=True, kw_only=True)
class Records:
    """
    The records in a model's folder, and what follows from them. There are three kinds of models:

        a model of                              is_tuned    run                              data
        `d2l-bert pretrain`                     False       `run` of run_config.json         the text
        `d2l-bert finetune`                     True        `finetune` of run_config.json    the rows
        another program; or of `finetune`,      False       empty                            empty
          but converted to another head

    Args:
        name: of the model, in the card.
        parameters: the number of weights.
        config, run_record, metrics, release: the contents of config.json, run_config.json, metrics.json and
            release.json; empty without the file.
        head: of the model's class: `ForMaskedLM` of `BertForMaskedLM`, `Model` of an encoder.
    """

    name: str
    parameters: int
    config: dict
    run_record: dict
    metrics: dict
    release: dict
    head: str

    @property
    def is_ours(self) -> bool:
        """Whether the code of the model's class is this package's."""
        return self.config["model_type"] == "d2l-bert"

    @property
    def is_tuned(self) -> bool:
        """Whether the model was fine-tuned, and still has the head that it was fine-tuned with."""
        return "finetune" in self.run_record and self.head == self.run_record["auto_class"].removeprefix("AutoModel")

    @property
    def run(self) -> dict:
        """The options of the run that has made the model; empty without a run."""
        return self.run_record.get("finetune" if self.is_tuned else "run", {})

    @property
    def data(self) -> dict:
        """The text or the rows of the run; empty without a run."""
        return self.run_record.get("data", {}) if self.run else {}

    @property
    def recipe(self) -> dict:
        """The recipe of a release."""
        return self.release.get("recipe", {})

    @property
    def pair_task(self) -> PairTask | None:
        """NSP or SOP, if the run has trained one of them beside MLM."""
        return PAIR_TASKS.get(self.run.get("objective"))

    @property
    def unit(self) -> str:
        """What a training example is called."""
        return unit(self.pair_task)

    @property
    def auto_class(self) -> str:
        """The class of Transformers that the card's code loads the model with, such as `AutoModelForMaskedLM`."""
        if self.is_tuned:
            return self.run_record["auto_class"]
        if self.head == "ForPreTraining":
            return "AutoModelForMaskedLM"
        return f"Auto{self.head.replace('For', 'ModelFor')}"  # AutoModel for the head `Model`

    @property
    def start(self) -> str | None:
        """The name of the model that the run began with; None for random weights."""
        return self.run_record["base_model"]["name"] if self.is_tuned else self.run.get("init_from")

    @property
    def start_is_on_hub(self) -> bool:
        """Whether the model that the run began with is one of the Hub, and not of the machine."""
        # A folder is recorded by the last part of its path, which may look like an id on the Hub. But what a run has
        # read on its machine is recorded with a fingerprint, too.
        read_here = [read["name"] for read in self.run_record.get("fingerprints", [])]
        return bool(self.start) and self.start not in read_here and HUB_ID.fullmatch(self.start) is not None

    @property
    def start_in_markdown(self) -> str:
        """The model that the run began with, as a link if it is on the Hub."""
        name = cell(self.start)
        return f"[{name}](https://huggingface.co/{self.start})" if self.start_is_on_hub else name

    @property
    def languages(self) -> list[str]:
        """The languages of the text, each as a BCP 47 tag; parts may have been prepared with a language each."""
        made_with = self.run_record["base_model"] if self.is_tuned else self.run
        return [tag for tag in shown(made_with.get("language") or "").split(", ") if tag]


def head_of(config: dict) -> str:
    """
    The head that the class in a config.json has.

    Raises:
        ValueError: it is no name of a class.
    """
    head = re.sub("^.*?(?=For|Model$)", "", config["architectures"][0])
    if not re.fullmatch(r"\w+", head):
        raise ValueError(f"config.json: {head!r:.100} is no class")
    return head


def in_cell(entries: dict, name: str) -> str:
    """An entry of a record in Markdown; "" where it is not written, as by an earlier version."""
    return cell(entries.get(name, ""))


def as_code(entries: dict, name: str) -> str:
    """As `in_cell`, as code."""
    return code(entries.get(name, ""))


def percent(share: str | float) -> str:
    """A share in percent, with three digits."""
    return f"{100 * float(share):.3g} %"


# ---------------------------------------------------------------------------------------------------------------------
# A pretrained model


def origin(records: Records) -> str:
    """How a model was made, after "A BERT of ... parameters,"."""
    if not records.data:
        return "saved"
    made = f"pretrained further from {records.start_in_markdown}" if records.start else "pretrained from scratch"
    return made if records.recipe.get("about") else f"{made} on {in_cell(records.data, 'corpus_name')}"


def departures(config: dict) -> str:
    """How the encoder differs from the book's, after the sentence that it is the book's."""
    found = []
    if config.get("embedding_layer_norm"):
        found.append("normalised embeddings")
    if config.get("tie_word_embeddings"):
        found.append("one matrix to embed and predict tokens")
    if config.get("hidden_act") != "relu":
        found.append(f"the activation {code(config.get('hidden_act', ''), in_table=False)}")
    return f", with {' and '.join(found)}, as in BERT" if found else ""


def summary_rows(records: Records) -> dict[str, str]:
    """The rows of the table at the top: what the model has read, and what it has learnt of it."""
    metrics = records.metrics
    task = records.pair_task
    rows = {"text": _text_read(records)}
    if seen := metrics.get("train_words_seen"):
        passes = seen / records.data["train_words"]
        rows["words seen in training"] = f"{seen:,.0f}: {passes:.1f} passes over the text"
    if "eval_mlm_accuracy" in metrics:
        rows["masked tokens predicted, on held-out text"] = figures.formatted(metrics["eval_mlm_accuracy"], "%")
    if task and (accuracy := metrics.get(f"eval_{task.key}_accuracy")):
        answers = f"{figures.formatted(accuracy, '%')} right"
        if one_segment := metrics.get(f"eval_{task.key}_one_segment_accuracy"):
            answers += f"; {figures.formatted(one_segment, '%')} by one segment alone"
        rows[f"{task.question} (chance: 50 %)"] = answers
    if records.release and figures.has_blimp(metrics):
        preferred = figures.formatted(metrics[figures.BLIMP], "%")
        rows["grammatical sentences preferred, BLiMP (chance: 50 %)"] = preferred
    return rows


def _text_read(records):
    """The training text: its name, unless the maker of a release has told it, and its size."""
    data = records.data
    is_split = (data.get("tokenizer") or {}).get("word_unit") == "tokenizer"
    words = "as the tokenizer splits them" if is_split else "between white space"
    size = f"{data['train_words']:,} words ({words}), {data['train_tokens']:,} tokens"
    name = "" if records.recipe.get("about") else f"{in_cell(data, 'corpus_name')}: "
    return f"{name}{size}, {counted(data['train_documents'], 'document')}"


def pretraining_rows(records: Records) -> dict[str, str]:
    """The rows of the table of a pretrained model and its training; only the model's without a run."""
    rows = {"model": _size(records.config), "tokenizer": _tokenizer(records)}
    run = records.run
    if run:
        rows |= _source_rows(records)
    if records.data:
        rows |= _held_out_rows(records)
    if run:
        rows[records.unit] = _examples(records)
        rows["masks"] = _masks(run)
        if records.start:
            rows["start"] = f"the weights, architecture and vocabulary of {records.start_in_markdown}"
        rows["steps"] = _steps(records)
        rows["optimizer"] = _optimizer(run)
        rows["dropout, precision, seed"] = _dropout(records)
    if "train_seconds" in records.metrics:
        rows["time"] = _time(records.metrics["train_seconds"], records.run_record.get("machine") or {})
    return rows


def _size(config):
    layers = counted(config["num_hidden_layers"], "layer")
    width = f"{in_cell(config, 'hidden_size')}, {in_cell(config, 'num_attention_heads')} heads"
    positions = f"{config['max_position_embeddings']:,} positions"
    return f"{layers} of {width}, feed-forward {config['intermediate_size']:,}, {positions}"


def _tokenizer(records):
    entries = f"WordPiece, {records.config['vocab_size']:,} entries"
    if added := records.run.get("extend_vocab"):
        entries += f", up to {added:,} of them added words of the text"
    report = records.data.get("tokenizer")
    if not report:
        return entries
    return f"{entries}; {report['pieces_per_word']:.2f} a word, {_unknown(report)}"


def _unknown(report):
    return f"{100 * report['unknown_share']:.2f} % of the characters in `[UNK]`"


def _source_rows(records):
    run = records.run
    rows = {}
    datasets = run.get("dataset")
    if datasets and len(datasets) == len(records.data.get("hub_datasets", [])):
        rows["data sets"] = f"{cell(', '.join(datasets))}; split {in_cell(run, 'dataset_split')}"
    if weights := run.get("source_weights"):
        rows["shares of the sources"] = cell(" : ".join(weights))
    if most := run.get("max_documents"):
        rows["at most"] = f"{most:,} documents of each source"
    return rows


def _held_out_rows(records):
    data = records.data
    validation = data.get("validation")
    blocks = data["held_out_documents"]
    documents = validation["texts"] if validation else blocks
    held_out = counted(documents, "document")
    if documents != blocks:
        held_out += f" in {blocks:,} blocks"
    held_out += f", {data['held_out_tokens']:,} tokens"
    if not validation:
        return {"held out": held_out}
    name = "" if records.recipe.get("about") else f"{in_cell(validation, 'corpus_name')}, "
    rows = {"held out": f"{name}a text of its own: {held_out}"}
    if shared := validation.get("texts_in_training"):
        rows["held out, but in the text, too"] = f"{shared:,} of {counted(documents, 'document')}"
    return rows


def _examples(records):
    """Training examples: how they are made, and how long they are."""
    run = records.run
    kind = as_code(run, "pairing") if records.pair_task else f"one {cell(run['pairing'].removesuffix('s'))} each"
    packed = "; several in a row, without attention between them" if run.get("packing") else ""
    return f"{kind}, at most {in_cell(run, 'max_seq_length')} tokens{_lengths(records)}{packed}"


def _lengths(records):
    """The shorter sequences of the first steps; entries of `length_schedule` are such as 128:0.9."""
    words = ""
    for entry in records.run.get("length_schedule") or []:
        length, share = entry.split(":")
        factor = records.run["max_seq_length"] // int(length)
        more = f"{factor} times as many" if factor > 1 else "as many"
        stage = "next" if words else "first"
        words += f"; {length}, and {more} {records.unit} a step, in the {stage} {percent(share)} of the steps"
    return words


def _masks(run):
    """How tokens are masked; `mlm_probability` is such as 0.15, or 0.3->0.15 where it falls over the run."""
    shares = str(run["mlm_probability"]).split("->")
    chosen = " falling to ".join(percent(share) for share in shares)
    masked = run.get("mask_replace_prob", 0.8)
    random = run.get("random_replace_prob", 0.1)
    kept = 1 - masked - random
    replaced = f"{percent(masked)} `[MASK]`, {percent(random)} random, {percent(kept)} kept"
    return f"{as_code(run, 'masking')}, {chosen} of the tokens: {replaced}"


def _steps(records):
    run = records.run
    step = records.run_record.get("checkpoint_step")
    taken = f"{step:,} of {run['max_steps']:,}" if step else f"{run['max_steps']:,}"
    words = f"{taken} of {run['global_batch_size']:,} {records.unit}{_batches(run)}"
    if skipped := records.metrics.get("train_skipped_steps"):
        words += f"; {skipped:,} skipped, as their loss or gradient was not finite"
    return words


def _batches(run):
    """The smaller batches of the first steps; entries of `batch_size_schedule` are such as 64:0.1."""
    words = ""
    for entry in run.get("batch_size_schedule") or []:
        size, share = entry.split(":")
        stage = f"{int(size):,} for {percent(share)}"
        words += f", then {stage}" if words else f"; first {stage} of the steps"
    return words


def _optimizer(run):
    rate = f"weight decay {in_cell(run, 'weight_decay')}, peak rate {run['learning_rate']:g}"
    schedule = f"{percent(run['warmup_ratio'])} warm-up, {as_code(run, 'lr_scheduler_type')}"
    words = f"{as_code(run, 'optim')}, {rate}, {schedule}"
    if decay := run.get("ema_decay"):
        words += f"; the weights are a moving average with decay {cell(decay)}"
    return words


def _dropout(records):
    config = records.config
    run = records.run
    rates = f"{config['hidden_dropout_prob']:g}, in attention {config['attention_probs_dropout_prob']:g}"
    precision = "float32" if run.get("mixed_precision") == "no" else in_cell(run, "mixed_precision")
    return f"{rates}; {precision}; {in_cell(run, 'seed')}"


def _time(seconds, machine):
    words = f"{seconds:,.0f} s"
    if (machine.get("processes") or 1) > 1:
        words += f", in {in_cell(machine, 'processes')} processes"
    if device := machine.get("accelerator") or machine.get("processor") or machine.get("device"):
        words += f" on {cell(device)}"
    return words


def example_rows(examples: list[dict]) -> list[list[str]]:
    """The cells of predictions: a text, and its likeliest tokens with their probabilities."""
    rows = []
    for example in examples:
        guesses = [f"{code(guess['label'])} ({guess['score']:.2f})" for guess in example["output"][:3]]
        rows.append([cell(example["text"]), ", ".join(guesses)])
    return rows


def comparison_rows(records: Records) -> list[list[str]]:
    """The cells of a release's table of other models, this one first."""
    comparison = records.recipe["comparison"]
    row = ["**this model**", _millions(records.parameters), _millions(records.data["train_words"])]
    for key, unit_of_figure in comparison["figures"]:
        row.append(figures.formatted(records.metrics[key], unit_of_figure) if key in records.metrics else "")
    rows = [row]
    for other in comparison["models"]:
        rows.append([authored(" | ".join(map(str, other)))])
    return rows


def _millions(count):
    return f"{count / 1e6:.1f}M"


# ---------------------------------------------------------------------------------------------------------------------
# A fine-tuned model


def finetuning_rows(records: Records) -> dict[str, str]:
    """The rows of the table of the data and the training of a fine-tuned model."""
    run = records.run
    run_record = records.run_record
    metrics = records.metrics
    rows = {cell(split): _rows_of(split, records) for split in records.data["splits"]}
    if classes := run_record["learnt"].get("classes"):
        rows["labels"] = _classes(classes)
    if held_out := records.data.get("held_out"):
        rows["held out"] = f"{held_out:.3g} of the training rows, as validation rows"
    rows["base model"] = _base_model(records)
    kept = _kept_seed(metrics)
    if kept:
        rows["peak rate"] = _peak_rate(metrics["learning_rate"], run_record["learning_rates"])
    if count := run_record.get("rows_per_step"):
        rows["rows in a step"] = f"{count:,}"
    if kept:
        rows["steps"] = f"{kept['steps']:,}; the checkpoint of step {kept['best_step']:,} was kept"
    rows["schedule"] = as_code(run, "lr_scheduler_type")
    if run.get("lr_scheduler_type") != "constant":
        rows["schedule"] += f", with {in_cell(run_record, 'warmup')} warm-up"
    betas = f"betas {in_cell(run, 'adam_beta1')} and {in_cell(run, 'adam_beta2')}"
    rows["optimizer"] = f"AdamW, {betas}, weight decay {run['weight_decay']:g}"
    if dropout := _rates_of_dropout(run_record.get("dropout") or {}):
        rows["dropout"] = dropout
    rows["precision"] = "bf16" if run.get("bf16") else "fp16" if run.get("fp16") else "float32"
    seeds = ", ".join(str(result.get("seed", "")) for result in metrics.get("seeds") or [])
    if seeds:
        rows["seeds"] = cell(seeds)
    if "train_seconds" in metrics:
        rows["time of all training"] = f"{metrics['train_seconds']:,.0f} s"
    return rows


def _kept_seed(metrics):
    """The results of the seed whose model was kept; None without results."""
    for result in metrics.get("seeds") or []:
        if result.get("seed") == metrics.get("kept_seed"):
            return result
    return None


def _rates_of_dropout(settings):
    return ", ".join(code(f"{name}={rate}") for name, rate in settings.items() if rate is not None)


def _rows_of(split, records):
    table = records.data["splits"][split]
    words = f"{counted(table['rows'], 'row')} of {in_cell(table, 'name')}, fingerprint {as_code(table, 'fingerprint')}"
    lost = (records.metrics.get("lost_to_length") or {}).get(split)
    return f"{words}; {cell(lost)}" if lost else words


def _classes(classes):
    words = ", ".join(code(name) for name in classes[:MOST_CLASSES_SHOWN])
    more = len(classes) - MOST_CLASSES_SHOWN
    return f"{words} and {more:,} more" if more > 0 else words


def _base_model(records):
    base = records.run_record["base_model"]
    revision = base.get("revision")
    version = f"revision {code(revision)}" if revision else f"fingerprint {as_code(base, 'fingerprint')}"
    unused = "; its weights were not used" if records.run.get("from_scratch") else ""
    return f"{records.start_in_markdown}, {version}{unused}"


def _peak_rate(rate, tried):
    if len(tried) == 1:
        return f"{rate:g}"
    all_tried = ", ".join(f"{each:g}" for each in tried)
    return f"{rate:g}, of {all_tried} the best on the validation rows"


def chosen_on_validation(metrics: dict) -> str:
    """What the validation rows of a fine-tuning have chosen."""
    if len(metrics["rates"]) > 1 and len(metrics["seeds"]) > 1:
        return "the checkpoint, the rate and the seed"
    if len(metrics["rates"]) > 1:
        return "the checkpoint and the rate"
    return "the checkpoint and the seed" if len(metrics["seeds"]) > 1 else "the checkpoint"


def seed_tables(metrics: dict) -> dict[str, list[list[str]]]:
    """The figures of each seed of several, their mean and standard deviation: by the split the cells of each row."""
    tables = {}
    kept = _kept_seed(metrics)
    for split in ("validation", "test"):
        if split not in (metrics.get("mean") or {}) or len(metrics["seeds"]) < 2:
            continue
        rows = tables[split] = []
        for result in metrics["seeds"]:
            label = in_cell(result, "seed")
            if result is kept:
                label += " (this model)"
            rows.append([label, *_shown_metrics(metrics, result[split])])
        rows.append(["mean", *_shown_metrics(metrics, metrics["mean"][split])])
        rows.append(["standard deviation", *_shown_metrics(metrics, metrics["sd"][split])])
    return tables


def _shown_metrics(metrics, values):
    return [figures.shown_metric(name, values[name]) for name in metrics["metrics_shown"]]


def class_tables(metrics: dict) -> dict[str, list[list[str]]]:
    """The figures of each class, those with the most rows first: by the split the cells of each row."""
    tables = {}
    for split, report in (metrics.get("classification_report") or {}).items():
        if not report:
            continue
        classes = [name for name, row in report.items() if isinstance(row, dict) and name not in AVERAGES]
        classes.sort(key=lambda name: report[name]["support"], reverse=True)
        tables[split] = [_row_of_class(name, report[name]) for name in classes]
    return tables


def _row_of_class(name, row):
    shares = [figures.formatted(row[key], "%") for key in ("precision", "recall", "f1-score")]
    return [code(name), *shares, f"{row['support']:,.0f}"]


# ---------------------------------------------------------------------------------------------------------------------
# What was measured after the run


@dataclass(frozen=True)
class Measured:
    """The figures on a text or a data set: a paragraph, and the cells of a table's rows, which BLiMP has none of."""

    paragraph: str
    rows: list[list[str]]


def own_rows(metrics: dict) -> list[list[str]]:
    """The cells of a run's own figures: name, value, and the baseline's value."""
    baseline = figures.baseline_figures(metrics)
    rows = []
    for figure in figures.own_figures(metrics):
        value = figures.formatted(metrics[figure.key], figure.unit)
        of_baseline = figures.formatted(baseline[figure.key], figure.unit) if figure.key in baseline else ""
        rows.append([cell(figure.name), value, of_baseline])
    return rows


def measured_on_texts(metrics: dict) -> list[Measured]:
    """The figures of `d2l-bert evaluate`, by the text or the data set, in the order of their names."""
    by_text: dict[str, list[figures.CardFigure]] = {}
    for figure in figures.evaluated_figures(metrics):
        if figure.origin == figures.Origin.EVALUATION:
            by_text.setdefault(figure.text.lower(), []).append(figure)
    return [_measured(of_text, metrics) for _, of_text in sorted(by_text.items())]


def _measured(of_text, metrics):
    if of_text[0].key == figures.BLIMP:
        return Measured(_blimp(metrics), [])
    rows = [[cell(each.name), figures.formatted(metrics[each.key], each.unit)] for each in of_text]
    return Measured(_text_measured_on(of_text[0].text, metrics), rows)


def _blimp(metrics):
    """The paragraph on BLiMP."""
    share = figures.formatted(metrics[figures.BLIMP], "%")
    if "eval_blimp_standard_error" in metrics:
        share += f" ± {100 * metrics['eval_blimp_standard_error']:.1f} %"
    pairs = metrics.get("eval_blimp_pairs")
    of_pairs = f"{pairs:,} minimal pairs" if pairs else "the minimal pairs"
    phenomena = _phenomena(metrics)
    clauses = [f"in {share} of {of_pairs} the grammatical sentence scores higher (chance: 50 %)"]
    if paradigms := metrics.get("eval_blimp_paradigms"):
        of_each = ", one of each phenomenon" if paradigms == len(phenomena) else ""
        clauses.append(f"{cell(paradigms)} of its 67 paradigms{of_each}")
    if figures.BLIMP_ONE_OF_EACH in metrics:
        one_of_each = figures.formatted(metrics[figures.BLIMP_ONE_OF_EACH], "%")
        clauses.append(f"by one paradigm of each phenomenon {one_of_each}")
    if score := figures.SCORES.get(metrics.get("eval_blimp_score")):
        clauses.append(f"the score is the {score}")
    paragraph = f"[BLiMP](https://arxiv.org/abs/1912.00582): {'; '.join(clauses)}."
    if not phenomena:
        return paragraph
    shown_phenomena = ", ".join(phenomena)
    if len(phenomena) > 4:
        shown_phenomena = f"best {', '.join(phenomena[:2])}; worst {', '.join(phenomena[-2:])}"
    return f"{paragraph} In percent, by phenomenon: {shown_phenomena}."


def _phenomena(metrics):
    """BLiMP's phenomena with their accuracies, the best first."""
    found = []
    for key, share in metrics.items():
        if key.startswith(figures.BLIMP_PHENOMENON):
            name = key.removeprefix(figures.BLIMP_PHENOMENON).replace("_", " ")
            found.append((share, f"{cell(name)} {100 * share:.1f}"))
    return [words for _, words in sorted(found, reverse=True)]


def _text_measured_on(text, metrics):
    """The paragraph on a text: how much of it was measured."""
    prefix = f"eval/{text}/"
    entries = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    unit_of_text = "pairs" if entries.get("pairs") else "sequences"
    count = entries.get(unit_of_text)
    masked = entries.get("masked_tokens")
    words = f"On {cell(text)}"
    if count and masked:
        words += f", {count:,} {unit_of_text} with {masked:,} masked tokens, always the same"
    if sentences := entries.get("pppl_sentences"):
        size = f"{sentences:,} of its sentences, {entries['pppl_words']:,} words"
        words += f"; the pseudo-perplexity (Salazar et al., 2020) on {size}"
    if pairs := entries.get("minimal_pairs_count"):
        error = f"{100 * entries['minimal_pairs_standard_error']:.1f} %"
        words += f"; {pairs:,} minimal pairs of this name (chance: 50 %, standard error {error})"
    return f"{words}:"


def rows_of_models_tuned_from_it(metrics: dict) -> list[list[str]]:
    """
    The cells of figures of models that were fine-tuned from this one, whose card it is: the task; the figure from this
    model, and from scratch, each with its standard deviation; and the number of seeds.
    """
    rows = []
    for figure in figures.evaluated_figures(metrics):
        if figure.origin == figures.Origin.FINETUNING:
            task = figure.key.split("/")[1]
            tuned = _with_deviation(figure.key, figure.unit, metrics)
            from_scratch = _with_deviation(f"{figure.key}{figures.FROM_SCRATCH}", figure.unit, metrics)
            seeds = cell(metrics.get(f"finetune/{task}/seeds", ""))
            rows.append([cell(figure.name), tuned, from_scratch, seeds])
    return rows


def _with_deviation(key, unit_of_figure, metrics):
    value = figures.formatted(metrics[key], unit_of_figure)
    deviation = metrics.get(f"{key}{figures.FINETUNED_SD}")
    if not isinstance(deviation, (int, float)):  # of one seed alone there is none
        return value
    return f"{value} ({figures.formatted(deviation, unit_of_figure)})"
