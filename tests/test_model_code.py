"""Code that a model or a tokenizer brings is never run, and the user is not asked about it."""

import json
import shutil
import subprocess
import sys

import pytest
from huggingface_hub import HfApi
from local_hub import TOKEN, environment
from transformers import BertConfig, BertForMaskedLM

from d2l_bert.__main__ import main


RUN_ALL = """
import json, sys
from d2l_bert.__main__ import main
codes = []
for command in json.loads(sys.argv[1]):
    codes.append(main(command))
    print("-", file=sys.stderr)  # between the lines of two commands
print(json.dumps([codes, sys.stdin.read()]))
"""


@pytest.fixture
def with_code(trained, tmp_path):
    """Folders with a file of code that would create the file `ran` if it were run.

    `model` and `bert`: models whose tokenizer class is in that code. `tokenizer`: the same tokenizer without a model.
    `unknown`: a model whose configuration class is in that code, too. `stock`: a d2l-bert model whose config.json and
    tokenizer_config.json name that code, but which stock classes can load.
    """
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    tokenizer = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    own = {**tokenizer, "tokenizer_class": "MyTokenizer"}
    config = {"auto_map": {"AutoConfig": "code.Config", "AutoModelForMaskedLM": "code.Model"}}
    numbers = json.loads((trained / "config.json").read_text())
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    bert = BertForMaskedLM(BertConfig(**{name: numbers[name] for name in same}))
    folders = {}
    for name, tokenizer_changes, config_changes in (
        ("model", own, {}),
        ("bert", own, {}),
        ("tokenizer", own, {}),
        ("unknown", own, {**config, "model_type": "mine"}),
        ("stock", tokenizer, config),
    ):
        folder = folders[name] = tmp_path / name
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
        for file, changes in (("tokenizer_config.json", tokenizer_changes), ("config.json", config_changes)):
            (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **changes}))
        (folder / "code.py").write_text(code)
    bert.save_pretrained(folders["bert"])
    for file in ("config.json", "model.safetensors"):
        (folders["tokenizer"] / file).unlink()
    return folders


@pytest.mark.slow
def test_code_in_a_model_folder_is_never_run_and_the_user_is_not_asked(with_code, here, books, trained, tmp_path):
    """
    Standard input holds a `y` for each command. All must still be unread at the end: no command asked a question.
    """
    api = HfApi()
    for name in ("tokenizer", "model"):
        api.create_repo(f"someone/{name}")
        api.upload_folder(repo_id=f"someone/{name}", folder_path=with_code[name])
    out = str(tmp_path / "out")
    prepared = tmp_path / "prepared"
    assert main(["prepare", f"--corpus={books}", f"--tokenizer={trained}", f"--output_dir={prepared}"]) == 0
    for name in ("code.py", "tokenizer_config.json"):
        shutil.copy(with_code["tokenizer"] / name, prepared)
    run = [f"--output_dir={out}", "--max_steps=1", "--recipe=tiny"]
    text = [f"--corpus={books}", *run]
    no_code = "asks for code of its own"
    refused = [
        (["pretrain", f"--corpus={prepared}", *run], "damaged prepared folder"),
        (["publish", str(with_code["model"]), "someone/new"], "MyTokenizer"),
        (["publish", str(with_code["unknown"]), "someone/new"], "a mine model"),
        (["publish", str(with_code["stock"]), "someone/new"], "auto_map"),
        (["convert", str(with_code["bert"]), out, "--from=bert"], no_code),
        (["convert", str(with_code["unknown"]), out, "--from=bert"], no_code),
        (["convert", str(with_code["tokenizer"]), out, "--from=d2l", "--num_attention_heads=2"], "pretrained.params"),
    ]
    for name in (str(with_code["tokenizer"]), "someone/tokenizer"):
        refused.append((["pretrain", f"--tokenizer={name}", *text], no_code))
        refused.append((["prepare", f"--tokenizer={name}", f"--corpus={books}", f"--output_dir={out}"], no_code))
    for name in (str(with_code["model"]), "someone/model", str(with_code["unknown"])):
        refused.append((["pretrain", f"--init_from={name}", *text, "--max_seq_length=48"], no_code))
        refused.append((["fill-mask", name, "Anna [MASK]."], no_code))
        refused.append((["next-sentence", name, "Anna walked.", "Anna ran."], no_code))
        refused.extend((["convert", name, out, f"--to={kind}"], no_code) for kind in ("bert", "d2l"))
    stock = str(with_code["stock"])
    served = [
        ["fill-mask", stock, "Anna [MASK]."],
        ["next-sentence", stock, "Anna walked.", "Anna ran."],
        ["convert", stock, f"{out}-bert", "--to=bert"],
        ["prepare", f"--tokenizer={stock}", f"--corpus={books}", f"--output_dir={out}-tokens"],
    ]
    commands = [*(command for command, _ in refused), *served]
    answers = "y\n" * len(commands)
    process = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(commands)],
        input=answers,
        env={**environment(here, tmp_path / "home", TOKEN), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    codes, left = json.loads(process.stdout.splitlines()[-1])
    said = process.stderr.split("-\n")
    for (command, words), code, lines in zip(refused, codes, said, strict=False):
        assert code == 2 and len(lines.splitlines()) == 1 and words in lines, (command, code, lines)
        assert "trust_remote_code" not in lines and "Do you wish" not in process.stdout
    assert codes[len(refused) :] == [0] * len(served), process.stderr
    assert left == answers
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
    for folder in ("out-bert", "out-tokens"):
        assert "auto_map" not in (tmp_path / folder / "tokenizer_config.json").read_text()


def test_code_in_a_model_folder_is_not_run_in_this_process(fails, with_code, tmp_path):
    for name in ("model", "unknown"):
        assert "asks for code of its own" in fails("fill-mask", with_code[name], "Anna [MASK].")
    assert main(["fill-mask", str(with_code["stock"]), "Anna [MASK]."]) == 0
    assert not (tmp_path / "ran").exists()
