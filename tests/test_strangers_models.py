"""A stranger's model folder: what it may not do, in whichever command reads it; one line for whatever is wrong."""

import base64
import contextlib
import io
import json
import logging
import os
import pickle
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
import transformers
from conftest import SMALL, write_books
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertForPreTraining

from d2l_bert.__main__ import main
from d2l_bert.inference import demo
from d2l_bert.messages import UserError
from d2l_bert.model_cards.card import carry_card
from d2l_bert.modeling import conversion
from d2l_bert.tokenization import tokenizer_files, weight_files
from d2l_bert.tokenization.existing_tokenizers import check_inputs
from d2l_bert.tokenization.patterns import is_endless
from d2l_bert.tokenization.wordpiece import save_tokenizer, stock_tokenizer


TUNING = ["--task=text-classification", "--train_file=rows.csv", "--num_train_epochs=1"]
DRY = ["--max_steps=1", "--dry_run", "--max_seq_length=48"]

# What each command is given; M is the stranger's model, and what the command writes begins with OUT.
COMMANDS = {
    "fill-mask": ["fill-mask", "M", "anna [MASK] it."],
    "next-sentence": ["next-sentence", "M", "anna.", "bob."],
    "embed": ["embed", "M", "lines.txt", "--nearest", "anna"],
    "attention": ["attention", "M", "anna sold it.", "bob sold it.", "--word", "sold"],
    "evaluate": ["evaluate", "M", "--corpus", "lines.txt", "--max_eval_pairs=8"],
    "finetune": ["finetune", "M", *TUNING, "--output_dir=OUT"],
    "pretrain": ["pretrain", "--init_from", "M", "--corpus=books", "--output_dir=OUT", *DRY],
    "prepare": ["prepare", "--tokenizer", "M", "--corpus=books", "--output_dir=OUT"],
    "prepare with a file": ["prepare", "--tokenizer", "M/tokenizer.json", "--corpus=books", "--output_dir=OUT"],
    "to bert": ["convert", "M", "OUT", "--to", "bert"],
    "to d2l": ["convert", "M", "OUT", "--to", "d2l"],
    "from bert": ["convert", "M", "OUT", "--from", "bert"],
    "export": ["export", "M", "OUT"],
    "publish": ["publish", "M", "me/x", "--dry_run", "--license=mit"],
    "predict": ["predict", "M", "rows.csv", "--output", "OUT.csv"],
}
OF_ENCODERS = ("fill-mask", "next-sentence", "embed", "attention", "evaluate", "finetune", "pretrain")
COMMANDS_OF = {
    "run": (*OF_ENCODERS, "prepare", "to bert", "publish", "export"),
    "bert": (*OF_ENCODERS, "from bert", "publish", "export"),
    "tuned": ("predict", "finetune", "embed", "to bert", "publish"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a pretrained model (`run`), a fine-tuned one (`tuned`), a stock BERT (`bert`) and texts."""
    folder = tmp_path_factory.mktemp("strangers")
    write_books(folder / "books", count=8)
    sold = [f"{number} of them sold it,a\n" for number in range(6)]
    lost = [f"{number} of them lost it,b\n" for number in range(6)]
    (folder / "rows.csv").write_text("".join(["text,label\n", *sold, *lost]))
    (folder / "lines.txt").write_text("anna sold the kettle.\nbob lost it.\n")
    with contextlib.chdir(folder):
        run = ["--corpus=books", "--output_dir=run", "--max_steps=2", "--license=mit", "--embedding_layer_norm=true"]
        assert main(["pretrain", *run, *SMALL]) == 0
        assert main(["finetune", "run", *TUNING, "--output_dir=tuned"]) == 0
        shutil.rmtree("tuned/attempts", ignore_errors=True)
        tokenizer = AutoTokenizer.from_pretrained("run")
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
        config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
        BertForPreTraining(config).save_pretrained("bert")
        save_tokenizer(tokenizer, "bert")
    return folder


@pytest.fixture
def model(world, monkeypatch):
    """Make a copy M of a model of the world, to be spoilt; returns its folder."""
    monkeypatch.chdir(world)

    def copy(kind):
        for path in Path().glob("OUT*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree("M", ignore_errors=True)
        return Path(shutil.copytree(kind, "M"))

    return copy


def edit(file, **entries):
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def files_in(folder):
    """Each file below a folder, with its size and the time of its last change."""
    found = {}
    for path in folder.rglob("*"):
        if not path.is_dir():
            status = path.lstat()
            found[path] = (status.st_size, status.st_mtime_ns)
    return found


def run(command):
    """Run a command in this process; returns its exit code and what it wrote on stdout and stderr."""
    demo.load.cache_clear()  # it keeps models by their names, and every one is called M here
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(COMMANDS[command])
    return code, out.getvalue(), err.getvalue()


def refusal(command):
    """The line by which a command refuses M; nothing is written."""
    code, _, said = run(command)
    lines = [line for line in said.splitlines() if "error:" in line]
    assert code == 2 and len(lines) == 1 and "Traceback" not in said, f"{command}: {code} {said}"
    assert not [*Path().glob("OUT*")], command
    return lines[0]


# ---------------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize(
    "name", ["../mine", ".bashrc", "/etc/hostname", "sub/x.png", "x.txt", "..", "a.png/../../mine"]
)
def test_a_picture_that_is_no_picture_in_the_folder_is_not_copied(name, model):
    folder = model("run")
    mine = Path("mine")
    mine.write_text("precious")
    (folder / ".bashrc").write_text("evil")
    edit(folder / "metrics.json", pictures={name: ""})
    assert "picture" in refusal("to bert")
    assert mine.read_text() == "precious" and not Path(".bashrc").exists()


def test_pictures_of_a_model_are_copied(model):
    folder = model("tuned")
    for name in ("confusion.png", "my curve.svg"):
        (folder / name).write_bytes(b"a picture")
    edit(folder / "metrics.json", pictures={"confusion.png": "a", "my curve.svg": "b"})
    Path("OUT").mkdir()
    shutil.copy(folder / "config.json", "OUT")
    shutil.copy(folder / "model.safetensors", "OUT")
    carry_card("M", Path("OUT"), "OUT")
    assert Path("OUT/confusion.png").exists() and Path("OUT/my curve.svg").exists()


READ = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "run_config.json", "vocab.txt")
COPIED = ("README.md", "metrics.json", "training_curves.png", "1_Pooling/config.json")


@pytest.mark.parametrize("name", [*READ, *COPIED, "LICENSE"])
def test_a_link_that_leaves_the_folder_is_followed_by_no_command(name, model):
    file = model("run") / name
    secret = Path("secret")
    file.parent.mkdir(exist_ok=True)
    secret.write_bytes(file.read_bytes() if file.exists() else b"{}")
    file.unlink(missing_ok=True)
    file.symlink_to(secret.resolve())
    commands = ["publish"]
    if name != "LICENSE":
        commands.append("to bert")
    if name in READ:
        commands += OF_ENCODERS
    for command in commands:
        assert "link that leads out" in refusal(command)


def test_a_link_in_a_module_of_an_exported_model_is_refused_and_the_cache_of_the_hub_is_read(model):
    """The Hub's client keeps a model as links from `snapshots/<commit>/` to `blobs/`."""
    folder = model("run")
    blobs = Path("cache/blobs").resolve()
    snapshot = Path("cache/snapshots/abc").resolve()
    shutil.rmtree("cache", ignore_errors=True)
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (file for file in folder.iterdir() if file.is_file()):
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / file.name, snapshot))
    assert main(["fill-mask", str(snapshot), "anna [MASK] it."]) == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "run_config.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name, model):
    folder = model("run")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for command in ("embed", "evaluate", "finetune", "to bert", "publish"):
        assert "regular file" in refusal(command)


@pytest.mark.parametrize("name", ["onnx/model.onnx", "onnx/model_quantized.onnx", "LICENSE", "1_Pooling/config.json"])
def test_a_pipe_in_the_place_of_a_file_to_publish_is_not_waited_for(name, model):
    folder = model("run")
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    assert "regular file" in refusal("publish")


def test_a_folder_of_onnx_files_that_is_a_link_is_not_read(model):
    folder = model("run")
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    os.mkfifo(elsewhere / "model.onnx")  # whoever opens it waits for ever
    (folder / "onnx").symlink_to(elsewhere.resolve())
    assert "link that leads out" in refusal("publish")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["/dev/zero", "../secret", "../bert/model.safetensors", "gone.safetensors", 5])
def test_weights_that_an_index_names_lie_in_the_folder(place, model):
    folder = model("run")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"bert.embeddings.word_embeddings.weight": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for command in COMMANDS_OF["run"]:
        if command != "prepare":
            assert "model.safetensors.index.json" in refusal(command)


def test_an_index_without_metadata_which_transformers_needs_is_said(model):
    folder = model("bert")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks the entry 'metadata'" in refusal("embed")
    edit(folder / "model.safetensors.index.json", metadata={})
    assert run("embed")[0] == 0


@pytest.mark.slow
def test_a_bad_record_of_a_model_that_is_converted_is_said_by_its_own_name(model):
    for content in ('{"run": 5}', '{"run": {"language": "en", "learning_rate": 1e400}, "data": {}}'):
        (model("run") / "run_config.json").write_text(content)
        said = refusal("to bert")
        assert "M/run_config.json: cannot be read" in said and ".part" not in said
    (model("run") / "metrics.json").write_text('{"predictions": [{"text": "a", "output": []}]}')
    assert ".part" not in run("to bert")[2]


@pytest.mark.slow
@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_a_number_of_a_record_that_is_not_finite_is_on_no_card(number, model):
    for kind in ("run", "tuned"):
        file = model(kind) / "run_config.json"
        file.write_text(file.read_text().replace('"seed": ', f'"learning_rate": {number}, "seed": ', 1))
        for command in ("publish", "to bert", *(["predict"] if kind == "tuned" else [])):
            assert "is no finite number" in refusal(command)


# ---------------------------------------------------------------------------------------------------------------------
# Code


@pytest.mark.slow
def test_foreign_code_that_config_json_names_is_neither_kept_nor_published(model):
    folder = model("bert")
    foreign = {"auto_map": {"AutoModel": "other/repo--evil.X"}, "custom_pipelines": {"x": {"impl": "evil.X"}}}
    edit(folder / "config.json", **foreign)
    assert "auto_map" in refusal("publish")
    assert run("finetune")[0] == 0
    assert not foreign.keys() & json.loads(Path("OUT/config.json").read_text()).keys()
    for kind in ("run", "bert"):
        edit(model(kind) / "config.json", custom_pipelines=foreign["custom_pipelines"])
        assert "custom_pipelines" in refusal("publish")


def test_a_kernel_of_the_hub_that_config_json_names_is_not_fetched(model):
    edit(model("bert") / "config.json", attn_implementation="evil/kernel", _attn_implementation="evil/kernel")
    code, _, said = run("embed")
    assert code == 0 and "kernel" not in said


def test_an_adapter_that_names_another_model_is_refused(model):
    (model("bert") / "adapter_config.json").write_text('{"base_model_name_or_path": "../run", "peft_type": "LORA"}')
    for command in COMMANDS_OF["bert"]:
        assert "adapter" in refusal(command)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["vocab", "merges", "init_inputs"])
def test_a_tokenizer_reads_no_file_that_its_settings_name(entry, model):
    edit(
        model("bert") / "tokenizer_config.json",
        **{entry: ["/etc/hostname"] if entry == "init_inputs" else "/etc/hostname"},
    )
    for command in COMMANDS_OF["bert"]:
        assert entry in refusal(command)


@pytest.mark.slow
def test_modules_of_sentence_transformers_name_no_other_code_and_no_other_folder(model):
    folder = model("bert")
    for wrong in (
        {"type": "evil.Module", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "../x"},
        5,
    ):
        (folder / "modules.json").write_text(json.dumps([wrong]))
        assert "modules.json" in refusal("from bert")


class Evil:
    """An object whose pickle makes a file."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_pickle_with_code_is_refused_in_words_that_advise_nobody_to_run_it(model):
    folder = model("bert")
    (folder / "model.safetensors").unlink()
    torch.save({"bert.embeddings.word_embeddings.weight": Evil()}, folder / "pytorch_model.bin")
    (folder / "x.params").write_bytes(pickle.dumps(Evil()))
    said = [refusal(command) for command in COMMANDS_OF["bert"] if command != "publish"]
    with contextlib.redirect_stderr(io.StringIO()) as error:
        assert main(["convert", "M/x.params", "OUT", "--from", "d2l", "--num_attention_heads=2"]) == 2
    for line in (*said, error.getvalue()):
        assert "weights_only" not in line and "never run" in line
    assert not Path("ran").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_hidden_layers", 10**6), ("num_labels", 10**9), ("vocab_size", 10**12), ("hidden_size", 2 * 10**6)),
        *(("max_position_embeddings", 10**11), ("intermediate_size", 10**30), ("type_vocab_size", 10**11)),
    ],
)
def test_a_model_that_cannot_be_in_the_file_of_weights_is_not_built(field, value, model):
    for kind in ("run", "bert", "tuned"):
        edit(model(kind) / "config.json", **{field: value})
        for command in COMMANDS_OF[kind]:
            if command != "prepare":
                assert "config.json" in refusal(command) or field == "vocab_size"


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma2", "modernbert", "bert", "d2l-bert"])
def test_layers_beyond_any_model_s_are_refused_before_a_library_lists_them(model_type, model):
    edit(model("run") / "config.json", model_type=model_type, num_hidden_layers=3 * 10**8)
    for command in COMMANDS_OF["run"]:
        assert "num_hidden_layers" in refusal(command)


@pytest.mark.slow
def test_names_of_weights_beyond_any_model_s_are_not_read(model, monkeypatch):
    folder = model("bert")
    empty = {f"w{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(80_000)}
    header = json.dumps(empty).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "header" in refusal("embed")
    monkeypatch.setattr(weight_files, "MOST_WEIGHTS", 3)
    model("bert")
    assert "more than any model has" in refusal("embed")


def spoil_row(folder, word, value):
    """Set numbers of the vector of the first piece of a word alone, in the table of embeddings."""
    weights = load_file(folder / "model.safetensors")
    number = AutoTokenizer.from_pretrained(folder)(word)["input_ids"][1]
    weights["bert.embeddings.word_embeddings.weight"][number, :2] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("value", [1e30, 1e8, float("inf")])
def test_a_weight_beyond_any_trained_model_s_is_refused_whatever_text_it_is_for(value, model):
    for kind in ("run", "bert", "tuned"):
        spoil_row(model(kind), "anna", value)
        for command in COMMANDS_OF[kind]:
            if command != "prepare":
                assert "not finite" in refusal(command)


@pytest.mark.slow
def test_a_figure_that_is_not_finite_is_no_figure(model, monkeypatch):
    monkeypatch.setattr(conversion, "LARGEST_WEIGHT", float("inf"))
    for kind in ("run", "bert"):
        spoil_row(model(kind), "anna", 1e30)
        for command in ("fill-mask", "next-sentence", "embed", "evaluate"):
            assert "not finite" in refusal(command)


def test_whole_numbers_of_a_configuration_are_converted(model):
    folder = model("run")
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0)
    edit(folder / "config.json", layer_norm_eps=1, initializer_range=1, **rates)
    assert run("to bert")[0] == 0
    assert BertConfig.from_pretrained("OUT").layer_norm_eps == 1


@pytest.mark.slow
def test_a_head_that_is_lost_by_a_conversion_is_said(model):
    edit(model("run") / "config.json", tie_word_embeddings=False)
    _, said, _ = run("to bert")
    assert "left out" in said and "mlm.dense.weight" in said
    shutil.rmtree("OUT")
    folder = model("run")
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "pooler" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    _, said, _ = run("to bert")
    assert "left out" in said and "nsp.output.weight" in said
    model("run")
    assert "left out" not in run("to bert")[1]


@pytest.mark.slow
def test_an_encoder_without_heads_gets_fresh_ones_as_before(model):
    folder = model("bert")
    config = BertConfig.from_pretrained(folder)
    BertForPreTraining(config).bert.save_pretrained(folder)
    assert run("finetune")[0] == 0


@pytest.mark.slow
def test_the_form_of_outputs_that_config_json_asks_for_changes_nothing(model):
    entry = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    for kind in ("run", "bert", "tuned"):
        for command in COMMANDS_OF[kind]:
            if command not in ("finetune", "pretrain", "prepare", "export", "publish"):
                model(kind)
                code, expected, _ = run(command)
                edit(model(kind) / "config.json", **entry)
                assert run(command)[:2] == (code, expected), command


VALUES = [
    *({"architectures": [5]}, {"architectures": "x"}, {"num_attention_heads": -2}, {"layer_norm_eps": float("nan")}),
    *(
        {"hidden_dropout_prob": float("nan")},
        {"hidden_dropout_prob": "a"},
        {"id2label": {"5": "a"}},
        {"id2label": [1]},
    ),
    *({"dtype": "evil"}, {"dtype": 5}, {"pad_token_id": 10**9}, {"quantization_config": {"quant_method": "x"}}),
    *({"model_type": ["bert"]}, {"model_type": "\x1b[31mred"}, {"problem_type": 5}, {"hidden_act": "no"}),
]


@pytest.mark.parametrize("entry", VALUES, ids=str)
def test_a_value_that_no_configuration_has_is_refused_in_one_line(entry, model):
    for kind, commands in (("bert", OF_ENCODERS[:5]), ("tuned", ["predict"])):
        edit(model(kind) / "config.json", **entry)
        for command in commands:
            assert "\x1b" not in refusal(command)


ESCAPES = "\x1b]0;title\x07\x1b[2J\nsecond line"
PROPERTIES = ("sub_configs", "is_heterogeneous", "per_layer_attributes", "use_return_dict")


@contextlib.contextmanager
def heard():
    """Collect all that Transformers logs within the block."""
    said = []
    logger = logging.getLogger("transformers")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    "entry", [*PROPERTIES, "name_or_path", "torch_dtype", "attribute_map", "max_length", "to_dict"]
)
def test_what_a_library_logs_of_a_config_sends_nothing_of_it_to_the_terminal(entry, model):
    for kind, value in (("run", ESCAPES), ("bert", ESCAPES), ("run", {ESCAPES: 1})):
        edit(model(kind) / "config.json", **{entry: value})
        with heard() as logged:
            code, out, err = run("fill-mask")
        assert not logged and "\x1b" not in out + err and "\nsecond" not in out + err
        if entry in PROPERTIES or code:
            refusal("fill-mask")


@pytest.mark.parametrize("entry", ["tokenizer_class", "name_or_path", "clean_up_tokenization_spaces", "backend"])
def test_what_a_library_logs_of_a_tokenizer_sends_nothing_of_it_to_the_terminal(entry, model):
    for kind, command in (("run", "fill-mask"), ("bert", "fill-mask"), ("bert", "prepare")):
        edit(model(kind) / "tokenizer_config.json", **{entry: ESCAPES})
        with heard() as logged:
            _, out, err = run(command)
        assert not logged and "\x1b" not in out + err and "\nsecond" not in out + err


def test_a_decoder_is_refused_by_every_command(model):
    for kind in ("run", "bert", "tuned"):
        edit(model(kind) / "config.json", is_decoder=True)
        for command in COMMANDS_OF[kind]:
            if command != "prepare":  # which reads the tokenizer alone
                assert "decoder" in refusal(command)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [99999999], "tokens": ["[CLS]"]}},
}
RULES = {
    "long words": {"model.max_input_chars_per_word": 10**9},
    "an endless pattern": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    },
    "growth": {"normalizer": {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 1000)] * 5}},
    "nothing replaced": {"normalizer": replace({"String": ""}, "b")},
    "padding": {
        "padding": {
            "strategy": {"Fixed": 10**12},
            "direction": "Right",
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        }
    },
    "a template": {"post_processor": TEMPLATE},
    "an unknown token that is none": {"model.unk_token": "[NO]"},
    "a panic": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a decoder": {"decoder": {"type": "Strip", "content": "a", "start": 10**12, "stop": 10**12}},
    "an id": {"model.vocab": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 999_999_999}},
}


def change_rules(folder, changes):
    """Write values into tokenizer.json, by their places: the entry, or its part and the entry."""
    content = json.loads((folder / "tokenizer.json").read_text())
    for place, value in changes.items():
        part, _, entry = place.rpartition(".")
        (content[part] if part else content)[entry] = value
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize("what", RULES)
def test_a_hostile_tokenizer_is_refused_in_one_line_and_at_once(what, model, capfd):
    folder = model("bert")
    change_rules(folder, RULES[what])
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    for command in ("fill-mask", "embed", "evaluate", "finetune", "from bert"):
        refusal(command)
    assert "panicked" not in capfd.readouterr().err


PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
CLS = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
KNOWN = {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}}
ADDED = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}


def template(single, known=KNOWN):
    return {"type": "TemplateProcessing", "single": single, "pair": TEMPLATE["pair"], "special_tokens": known}


def table_of_characters(text):
    """The table of a `Precompiled` normalizer that puts a text in the place of each "e": a trie of one key."""
    trie = [0] * 1024
    trie[0] = 256 << 10
    node = 256 ^ ord("e")
    trie[node] = ord("e") | (1 << 8) | ((node ^ 512) << 10)
    packed = struct.pack("<1024I", *trie)
    table = struct.pack("<I", len(packed)) + packed + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


COSTLY = {
    "a table of characters": {"normalizer": table_of_characters("z " * 1000)},
    "a table of characters after another": {
        "normalizer": {"type": "Sequence", "normalizers": [table_of_characters("e" * 40)] * 2}
    },
    "a fixed padding": {"padding": {**PADDING, "strategy": {"Fixed": 10**5}}},
    "padding to a multiple": {"padding": {**PADDING, "pad_to_multiple_of": 10**5}},
    "a long token for padding": {"padding": {**PADDING, "pad_token": "x" * 5000}},
    "a long template": {"post_processor": template([TEXT, *[CLS] * 5000])},
    "a template that repeats the text": {
        "post_processor": {"type": "Sequence", "processors": [template([TEXT] * 30, {})] * 3}
    },
    "a special token of many ids": {
        "post_processor": template([CLS], {"[CLS]": {"id": "[CLS]", "ids": [2] * 5000, "tokens": ["[CLS]"] * 5000}})
    },
    "a long unknown token": {"model.unk_token": "x" * 5000},
    "a long prefix": {"model.continuing_subword_prefix": "#" * 5000},
    "a long prefix of the decoder": {"decoder": {"type": "WordPiece", "prefix": "#" * 5000, "cleanup": True}},
    "many normalizers": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * 5000}},
    "many splits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * 5000}},
    "many patterns": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "ab" * 200_000},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "many added tokens": {
        "added_tokens": [{"id": 100 + number, "content": f"<{number}>", **ADDED} for number in range(5000)]
    },
    "a long added token": {"added_tokens": [{"id": 99, "content": "x" * 5000, **ADDED}]},
    "many entries": {"model.vocab": {str(number): number for number in range(5000)}},
    "a long entry": {"model.vocab": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "x" * 5000: 5}},
}


@pytest.mark.parametrize("what", COSTLY)
def test_a_tokenizer_that_costs_much_is_refused_before_a_library_reads_it(what, model, monkeypatch):
    folder = model("bert")
    change_rules(folder, COSTLY[what])
    monkeypatch.setattr(tokenizer_files, "Tokenizer", None)  # nothing is made of it
    for command in ("fill-mask", "from bert"):
        said = refusal(command)
        assert "do not use this tokenizer" in said or "put back the model's own" in said


def test_a_usual_table_of_characters_is_read(model):
    folder = model("bert")
    rules = json.loads((folder / "tokenizer.json").read_text())
    steps = [table_of_characters("e" * 18), rules["normalizer"]]  # U+FDFA becomes 18 letters, the most of any
    edit(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": steps})
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert run("fill-mask")[0] == 0


def test_a_table_of_characters_in_another_file_than_tokenizer_json_is_refused(tmp_path, monkeypatch):
    """Transformers makes a tokenizer of a spiece.model where the library sentencepiece is installed."""
    table = base64.b64decode(table_of_characters("z " * 1000)["precompiled_charsmap"])
    entries = [(entry, 0.0) for entry in ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁", *"abcdefgz")]
    made = transformers.AlbertTokenizer(vocab=entries, _spm_precompiled_charsmap=table)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: made)
    with pytest.raises(UserError, match="times as long"):
        stock_tokenizer(str(tmp_path))


def piece(name, segment=0):
    """A piece of a template: a text, `A` or `B`, or a special token."""
    return {"Sequence" if name in "AB" else "SpecialToken": {"id": name, "type_id": segment}}


SINGLE = [piece("[CLS]"), piece("A"), piece("[SEP]")]
PAIR = [*SINGLE, piece("B", 1), piece("[SEP]", 1)]
TEMPLATES = {
    "a segment of texts beyond the model's": ([piece("[CLS]", 7), piece("A", 7)], PAIR, [2]),
    "a segment of pairs beyond the model's": (SINGLE, [*SINGLE, piece("B", 7)], [2]),
    "no text": ([piece("[CLS]")], PAIR, [2]),
    "no second text": (SINGLE, SINGLE, [2]),
    "a text twice": ([*SINGLE, piece("A")], PAIR, [2]),
    "the second text first": (SINGLE, [piece("[CLS]"), piece("B"), piece("[SEP]"), piece("A", 1)], [2]),
    "many special tokens": ([*[piece("[CLS]")] * 31, piece("A")], PAIR, [2] * 32),
    "a mask before the text": (SINGLE, PAIR, [4]),
    "none": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TEMPLATES)
def test_a_tokenizer_that_makes_other_inputs_than_an_encoder_reads_is_refused(what, model):
    folder = model("run")
    rules = None
    if TEMPLATES[what]:
        single, pair, ids = TEMPLATES[what]
        known = {name: {"id": name, "ids": [3], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
        known["[CLS]"] |= {"ids": ids, "tokens": ["[CLS]"] * len(ids)}
        rules = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}
    edit(folder / "tokenizer.json", post_processor=rules)
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    for command in ("fill-mask", "attention", "evaluate", "finetune", "to bert", "publish"):
        assert "put back the model's own tokenizer" in refusal(command) or command == "publish"
    assert run("prepare")[0] == 0  # which puts BERT's special tokens around texts itself


def stock_tokenizers():
    """A tokenizer of each kind of stock encoders, of letters."""
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    bert = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    bytes_of = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]

    def numbered(special, more=()):
        return {entry: number for number, entry in enumerate([*special, *letters, *more])}

    def scored(special):
        return [(entry, 0.0) for entry in [*special, "▁", *letters]]

    yield transformers.BertTokenizer(vocab=numbered(bert))
    yield transformers.DistilBertTokenizer(vocab=numbered(bert))
    yield transformers.RobertaTokenizer(vocab=numbered(bytes_of, "Ġ"), merges=[])
    yield transformers.DebertaTokenizer(vocab=numbered(bert, "Ġ"), merges=[])
    yield transformers.DebertaV2Tokenizer(vocab=scored(bert))
    yield transformers.AlbertTokenizer(vocab=scored(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]))
    yield transformers.XLMRobertaTokenizer(vocab=scored(bytes_of))
    yield transformers.T5Tokenizer(vocab=scored(["<pad>", "</s>", "<unk>"]))


def test_tokenizers_of_stock_encoders_are_taken_and_left_as_they_are():
    for tokenizer in stock_tokenizers():
        backend = tokenizer.backend_tokenizer
        backend.enable_truncation(128, stride=3)
        backend.enable_padding(length=128)
        before = backend.to_str()
        check_inputs(tokenizer, segments=2)
        tokenizer_files.check_steps(Path("a model"), json.loads(before))
        assert backend.to_str() == before


@pytest.mark.parametrize(
    ("role", "token"),
    [
        ("mask_token", "the"),
        ("mask_token", "[SEP]"),
        ("pad_token", "[MASK]"),
        ("pad_token", "the"),
        ("sep_token", "##s"),
    ],
)
def test_a_word_or_another_special_token_is_no_token_with_a_role_to_train_with(role, token, model):
    edit(model("bert") / "tokenizer_config.json", **{role: token})
    said = refusal("prepare")
    assert "special token" in said
    if role == "mask_token" and token == "[SEP]":
        assert "another special token" in refusal("fill-mask")


def test_a_tokenizer_of_the_class_that_looks_for_classes_is_refused(model):
    edit(model("bert") / "tokenizer_config.json", tokenizer_class="AutoTokenizer")
    for command in ("fill-mask", "from bert", "prepare"):
        assert "tokenizer_class 'AutoTokenizer'" in refusal(command)


def test_a_tokenizer_that_is_larger_than_any_is_not_read(model):
    for name in ("tokenizer.json", "vocab.txt"):
        folder = model("bert")
        (folder / "tokenizer.json").unlink()
        (folder / name).touch()
        os.truncate(folder / name, 10**9)
        assert "bytes" in refusal("fill-mask")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_tokens_that_settings_add_are_few_and_short(name, model):
    for entries in ({"extra_special_tokens": ["x" * 5000]}, {"extra_special_tokens": ["x"] * 40_000}):
        file = model("bert") / name
        file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **entries}))
        assert name in refusal("fill-mask")


def test_usual_paddings_and_truncations_of_a_tokenizer_are_read(model):
    folder = model("bert")
    cut = {"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0}
    edit(folder / "tokenizer.json", padding={**PADDING, "strategy": {"Fixed": 128}}, truncation=cut)
    edit(folder / "tokenizer_config.json", chat_template="x" * 5000)
    assert run("fill-mask")[0] == run("embed")[0] == 0


DAMAGED = {
    "half": {"model": {"type": "WordPiece"}},
    "no added tokens": {"added_tokens": None},
    "a number as a token": {"added_tokens": [5]},
    "no such part": {"post_processor": {"type": "x"}},
    "a list of entries": {"model": {"type": "WordPiece", "vocab": []}},
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_tokenizer_is_said_by_its_file_and_with_a_way_out(what, model):
    file = model("bert") / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **DAMAGED[what]}))
    for command in ("fill-mask", "prepare with a file", "publish"):
        said = refusal(command)
        assert "tokenizer.json" in said and ("fetch it again" in said or "put the right one back" in said)


@pytest.mark.parametrize(
    "entry",
    [
        *({"model_max_length": "x"}, {"model_max_length": -1}, {"model_max_length": float("inf")}),
        *({"truncation_side": "x"}, {"padding_side": 5}, {"model_input_names": []}, {"model_input_names": ["a"]}),
        *({"mask_token": ""}, {"mask_token": {"__type": "AddedToken", "content": ""}}, {"split_special_tokens": True}),
        *({"mask_token": 5}, {"do_lower_case": "x"}, {"added_tokens_decoder": {"x": {"content": "[X]"}}}),
    ],
    ids=str,
)
def test_settings_of_a_tokenizer_of_another_type_are_refused_in_one_line(entry, model):
    edit(model("bert") / "tokenizer_config.json", **entry)
    for command in ("fill-mask", "embed", "evaluate", "finetune", "from bert"):
        refusal(command)


def test_patterns_of_usual_tokenizers_are_read_and_endless_ones_are_not():
    usual = [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        # Qwen 2, DeepSeek V3, and o200k, of GPT-4o. ModernBERT and DeBERTa have the first one, DeBERTa V3 the next.
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+\n*",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]+[\p{Ll}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|\s*[\r\n]+|\s+",
        *(r" ?[^(\s|[.,!?…。，、।۔،])]+", "``|''", r"(?i)'s|'t| ?\p{L}+", r"(?<=\s)\w+(?!\w)", r"\w+?\s*+"),
        *(" {2,}", r"\d", ".{1,6}", r"(\s)([^\s])", r"[\[\]()*+]+", r"<\|startoftext\|>|'s|[\p{L}]+"),
    ]
    endless = [
        r"(a+)+$",
        "(a|aa)+$",
        "(a*)*b",
        "((a{1,9}){1,9}){1,9}",
        r"(a)\1",
        "a*a*a*a*a*b",
        "(?:a|b|ab)*c",
        "([a-z]+)*$",
        *("[a-w ]?" * 20 + "[a-w ]" * 20 + "[éè]", ".?" * 20, ".??" * 20, "(?:[a-z ]|.)" * 20, "(?:.?|b)" * 12),
        *("(?:a*|b)" * 5, "(?:(?:a|b)|c)?" * 12, "(?<n>a|b)" * 12, "(?=a|b)" * 12, "(?:a?b?){20}", "(?:x?){,9}"),
        *("[a-z]{1,9}{1,9}{1,9}", "[a-z ]{1,3}+é", "a*b*c*d", "(?#[)" + "a?" * 30 + "(?#])"),
        *("(?x)#[\n" + "a?" * 30 + "\n#]", "(?ix:#[\n" + "a?" * 30 + "\n#])", "(?~a)*", "(?Wx)#[\n" + "a?" * 30),
        *(
            r"\c[" + "a?" * 30 + r"\c]",
            r"\\p{" + "a?" * 30 + "}",
            ("a?" * 8 + "(?i)b|") * 5 + "c",
            "[]" + "a?" * 30 + "[]",
        ),
    ]
    assert not [pattern for pattern in usual if is_endless(pattern)]
    assert not [pattern for pattern in endless if not is_endless(pattern)]


def cased_model(folder, with_rules):
    """A stock BERT with a cased vocabulary, whose settings do not say so."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Orla", "orl", "##a", "o", "##r", "##l", "é", "e"]
    config = BertConfig(
        vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    BertForPreTraining(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    if with_rules:
        AutoTokenizer.from_pretrained(folder, do_lower_case=False, strip_accents=False).save_pretrained(folder)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizerFast"}')
        (folder / "vocab.txt").unlink()


@pytest.mark.parametrize("with_rules", [False, True])
def test_a_cased_vocabulary_keeps_its_capitals_where_no_setting_says_so(with_rules, tmp_path, capsys):
    cased_model(tmp_path / "model", with_rules)
    assert stock_tokenizer(str(tmp_path / "model")).tokenize("Orla") == ["Orla"]
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "ours"), "--from", "bert"]) == 0
    assert "do_lower_case" in capsys.readouterr().err
    assert json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())["do_lower_case"] is False
    assert stock_tokenizer(str(tmp_path / "ours")).tokenize("Orla") == ["Orla"]


def test_accents_are_kept_where_tokenizer_json_keeps_them(tmp_path):
    cased_model(tmp_path, True)
    assert stock_tokenizer(str(tmp_path)).tokenize("é") == ["é"]


def test_a_setting_that_is_there_is_followed(tmp_path):
    cased_model(tmp_path, False)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    assert stock_tokenizer(str(tmp_path)).tokenize("Orla") == ["orl", "##a"]


@pytest.mark.slow
def test_a_model_of_one_segment_reads_pairs_without_segments(model):
    folder = model("bert")
    config = BertConfig.from_pretrained(folder, type_vocab_size=1)
    BertForPreTraining(config).save_pretrained(folder)
    rows = [f"{n} left.,bob left.,a\n{n} left.,it.,b\n" for n in range(6)]
    Path("pairs.csv").write_text("".join(["text,text_pair,label\n", *rows]))
    for command in ("next-sentence", "evaluate", "attention", "embed"):
        assert run(command)[0] == 0
    with contextlib.redirect_stderr(io.StringIO()):
        assert main(["finetune", "M", *TUNING, "--train_file=pairs.csv", "--output_dir=OUT"]) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Control characters


@pytest.mark.slow
def test_control_characters_of_a_vocabulary_and_of_lines_are_not_sent_to_the_terminal(model):
    folder = model("run")
    content = (folder / "tokenizer.json").read_text().replace('"anna"', '"\\u001b[31manna\\u202e"')
    (folder / "tokenizer.json").write_text(content)
    shutil.copy("lines.txt", "lines.txt.before")
    try:
        Path("lines.txt").write_text("\x1b]0;title\x07anna\u202e sold it.\n")
        for command in ("embed", "fill-mask", "attention"):
            _, out, err = run(command)
            assert not set("\x1b\x07\u202e") & set(out + err), command
        assert "\\x1b" in run("embed")[1]
    finally:
        shutil.move("lines.txt.before", "lines.txt")


# ---------------------------------------------------------------------------------------------------------------------
# Any damage of a record

RECORDS = ("config.json", "run_config.json", "metrics.json", "tokenizer_config.json", "tokenizer.json")
ODD = [None, True, -2, 0, 10**9, 1.5, float("nan"), "x", "", [], {}, [5], {"a": 5}, "\x1b[31m", 10**30, "../x", [[]]]
DEEP = ["[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, '{"model_type":' * 900 + "1" + "}" * 900]


def places_in(value, place=()):
    """The places of all entries of a value of JSON, but for those of a vocabulary."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        if place != ("model", "vocab"):
            yield (*place, key)
            yield from places_in(entry, (*place, key))


def damaged(text, draw):
    """A record with something wrong in it."""
    kind = draw.choice(["cut", "deep", "whole", "gone", "more", "other", "other", "other"])
    if kind == "cut":
        return text[: draw.randrange(len(text))]
    if kind == "deep":
        return draw.choice(DEEP)
    if kind == "whole":
        return json.dumps(draw.choice(ODD))
    content = json.loads(text)
    *parents, last = draw.choice([*places_in(content)])
    at = content
    for key in parents:
        at = at[key]
    if kind == "gone":
        del at[last]
    elif kind == "more":
        names = (
            "pictures",
            "export",
            "learnt",
            "finetune",
            "predictions",
            "return_dict",
            "num_labels",
            "id2label",
            "vocab",
        )
        content[draw.choice(names)] = draw.choice(ODD)
    else:
        at[last] = draw.choice(ODD)
    return json.dumps(content)


def damage_and_run(seed, model):
    """Damage a record of a model, and run a command that reads it; a string that says what was wrong, or ""."""
    draw = random.Random(seed)
    kind = draw.choice([*COMMANDS_OF])
    name = draw.choice(RECORDS)
    folder = model(kind)
    if not (folder / name).exists():
        return ""
    slow = ("export", "finetune", "prepare")
    command = draw.choice([command for command in COMMANDS_OF[kind] if command not in slow])
    if name == "metrics.json":
        command = "publish" if kind == "bert" else draw.choice(["publish", "to bert"])
        (folder / "README.md").unlink(missing_ok=True)
    (folder / name).write_text(damaged((folder / name).read_text(), draw))
    before = files_in(folder)
    code, out, err = run(command)
    lines = [line for line in err.splitlines() if "error:" in line]
    is_refused = code == 2 and len(lines) == 1 and not any(Path().glob("OUT*"))
    is_right = code == 0 or is_refused
    is_quiet = "Traceback" not in err and "\x1b" not in out + err and files_in(folder) == before
    return "" if is_right and is_quiet else f"seed {seed}: {kind}, {name}, {command}: {code} {err[-600:]}"


@pytest.mark.slow
def test_any_damage_of_a_record_gives_one_line_and_writes_nothing(model):
    found = [damage_and_run(seed, model) for seed in range(25)]
    assert not [*filter(None, found)]


@pytest.mark.slow
def test_any_damage_of_a_record_gives_one_line_and_writes_nothing_at_length(model):
    found = [damage_and_run(seed, model) for seed in range(1000, 1600)]
    assert not [*filter(None, found)]
