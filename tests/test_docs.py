"""The code and commands in the documentation run, and the names in it exist."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.run import get_args_parser as torchrun_parser

import d2l_bert
from d2l_bert.flags import make_parser


ROOT = Path(__file__).parent.parent
LAUNCHING = ROOT / "docs" / "accelerate"

LAUNCHERS = {"accelerate": launch_command_parser, "torchrun": torchrun_parser}


def test_the_code_of_docs_d2l_runs_as_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "d2l.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(compile(block, "docs/d2l.md", "exec"), names)
    assert names["net"].config.vocab_size == len(names["tokenizer"])
    assert names["classifier"].config.type_vocab_size == 3


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))])
def test_a_page_names_only_options_files_and_classes_that_exist(page):
    text = (ROOT / page).read_text()
    for command, options in re.findall(r"^    d2l-bert (\S+)(.*)$", text, re.MULTILINE):
        assert set(re.findall(r"--\w+", options)) <= options_of(command), (command, options)
    for name in re.findall(r"\b(D2lBert\w+)\b", text):
        assert hasattr(d2l_bert, name), name
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def options_of(command):
    """The flags of one command."""
    return set(make_parser([command])._subparsers._group_actions[0].choices[command]._option_string_actions)


def test_every_launcher_takes_the_options_on_the_page():
    text = (ROOT / "docs" / "distributed.md").read_text().replace("\\\n        ", "")
    blocks = re.findall(r"^    (.*)$", text, re.MULTILINE)
    commands = [re.sub(r"^(\w+=\S+ )+", "", line) for line in blocks]
    tried = set()
    for launch, ours in (line.split(" -m d2l_bert pretrain ") for line in commands if " -m d2l_bert " in line):
        launcher, *arguments = shlex.split(launch)
        if launcher == "accelerate":
            assert arguments.pop(0) == "launch"
        parsed = LAUNCHERS[launcher]().parse_args([*arguments, "script"])
        if launcher == "accelerate":
            _validate_launch_command(parsed)
        assert set(re.findall(r"--\w+", ours)) <= options_of("pretrain"), ours
        tried.add(launcher)
    assert tried == set(LAUNCHERS)
    scripts = {"slurm.sh": options_of("pretrain"), "slurm_prepare.sh": {*options_of("prepare"), "--array"}}
    batches = [line for line in commands if line.startswith("sbatch")]
    assert len(batches) == len(scripts)
    for batch in batches:
        (script,) = re.findall(r"docs/accelerate/(\S+)", batch)
        assert set(re.findall(r"--\w+", batch)) <= scripts.pop(script)
    known = {*options_of("pretrain"), *launch_command_parser()._option_string_actions, "--signal"}
    known |= set(torchrun_parser()._option_string_actions)
    assert set(re.findall(r"`(--[\w-]+)", text)) <= known


def launched(name):
    """The environment variables that `accelerate launch` sets with one of the files in docs/accelerate."""
    options = ["--config_file", str(LAUNCHING / name), "--num_processes=2", "script"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(options))
    return prepare_multi_gpu_env(arguments)


@pytest.mark.parametrize("name", sorted(path.name for path in LAUNCHING.glob("*.yaml")))
def test_accelerate_knows_every_key_of_our_configuration_files(name):
    config = load_config_from_file(str(LAUNCHING / name))  # refuses unknown keys, except below fsdp_config
    known = {action.dest for action in launch_command_parser()._actions}
    assert set(config.fsdp_config) <= known
    wants_fsdp = launched(name).get("ACCELERATE_USE_FSDP") == "true"
    assert wants_fsdp == (name == "fsdp2.yaml") == bool(config.fsdp_config)


def test_fsdp2_is_requested_with_the_same_settings_everywhere(monkeypatch):
    environment = launched("fsdp2.yaml")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.transformer_cls_names_to_wrap) == (2, ["D2lBertEncoderBlock"])
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    script = "".join(re.findall(r"^# (export .*\n)", (LAUNCHING / "slurm.sh").read_text(), re.MULTILINE))
    program = re.findall(r'"(\w+)": "(\w+)"', (ROOT / "tests" / "on_fsdp.py").read_text())
    assert dict(re.findall(r"(\w+)=(\w+)", script)) == dict(program)
    assert dict(program).items() <= environment.items()


STAND_INS = {
    "scontrol": """echo "scontrol $*" >> calls; [ "$1" = show ] && printf 'node7\nnode8\n' """,
    "srun": """
shift  # --cpus-per-task
export SLURM_NTASKS=2
for SLURM_PROCID in 0 1; do export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID; "$@" || code=$?; done; exit ${code:-0}""",
    "d2l-bert": """IFS="|"; echo "$RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT $HF_HOME $*" >> calls
exit $LEAVES""",
}


@pytest.mark.parametrize("code", [0, 2, 143])
def test_the_slurm_script_starts_every_task_and_queues_the_job_again_when_its_time_is_up(tmp_path, code):
    script = LAUNCHING / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    for name, lines in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": "/shared",
        "SLURM_JOB_ID": "1234567",
    }
    environment |= {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_CPUS_PER_TASK": "8", "LEAVES": str(code)}
    command = ["bash", script, "--corpus", "my books", "--max_steps=3"]
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == code
    show, *tasks = (tmp_path / "calls").read_text().splitlines()
    assert show == "scontrol show hostnames node[7-8]"
    end = "node7:24567 /shared/hf pretrain|--resume_from_checkpoint|latest|--corpus|my books|--max_steps=3"
    assert tasks[:2] == [f"0/2 0 {end}", f"1/2 1 {end}"]
    assert tasks[2:] == (["scontrol requeue 1234567"] if code == 143 else [])


def test_the_slurm_script_that_prepares_makes_the_part_of_its_task_once(tmp_path):
    script = LAUNCHING / "slurm_prepare.sh"
    subprocess.run(["bash", "-n", script], check=True)
    (tmp_path / "d2l-bert").write_text('#!/bin/bash\nIFS="|"; echo "$HF_HOME $*" >> calls; exit $LEAVES\n')
    (tmp_path / "d2l-bert").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": "/shared"}
    environment |= {"SLURM_ARRAY_TASK_ID": "17", "SLURM_CPUS_PER_TASK": "8"}
    command = ["bash", script, "--tokenizer", "my tokenizer"]
    for code in (0, 2):
        done = subprocess.run(command, cwd=tmp_path, env={**environment, "LEAVES": str(code)})
        assert done.returncode == code
    call = "prepare|--corpus|shards/17|--output_dir|parts/17|--preprocessing_num_workers|8|--tokenizer|my tokenizer"
    assert (tmp_path / "calls").read_text().splitlines() == [f"/shared/hf {call}"] * 2
    (tmp_path / "parts" / "17").mkdir(parents=True)  # made by an earlier job
    assert subprocess.run(command, cwd=tmp_path, env={**environment, "LEAVES": "1"}).returncode == 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
