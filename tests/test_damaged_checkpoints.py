"""A checkpoint that is cut, changed or tampered with is passed over, or refused in one line; it never ends a run."""

import hashlib
import json
import shutil

import pytest
import torch
from conftest import SMALL
from finetuning import rows_of
from safetensors.torch import load_file, save_file
from text_sources import write_table

from d2l_bert.__main__ import main
from d2l_bert.messages import UserError
from d2l_bert.training.checkpoint import checkpoints, delete, delete_old, read_checkpoint
from d2l_bert.training.finetuning import train, trainer


# ---------------------------------------------------------------------------------------------------------------------
# Of fine-tunings: Trainer's


@pytest.fixture(scope="module")
def stopped(trained, tmp_path_factory):
    """A fine-tuning that was killed after its third of four checkpoints: its folder, and its command."""
    place = tmp_path_factory.mktemp("stopped")
    table = write_table(place / "rows.csv", rows_of(24, 0))
    options = [f"--train_file={table}", f"--validation_file={table}", "--max_steps=8", "--eval_steps=2"]
    command = ["finetune", str(trained), "--task=text-classification", f"--output_dir={place / 'out'}", *options]
    on_save = trainer.Checkpoints.on_save

    def killed(self, args, state, control, **how):
        on_save(self, args, state, control, **how)
        if state.global_step == 6:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Checkpoints, "on_save", killed)
        assert main(command) == 130
    return place / "out", command


@pytest.fixture
def attempt(stopped, tmp_path):
    """A copy of the folder of the one model that was trained."""
    (folder,) = (stopped[0] / "attempts").iterdir()
    return shutil.copytree(folder, tmp_path / folder.name)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_checkpoint_of_a_fine_tuning_with_any_file_cut_is_passed_over(attempt, caplog):
    assert trainer.last_checkpoint(attempt)[0] == str(attempt / "checkpoint-6")
    saved = attempt.parent / "saved"
    shutil.copytree(attempt, saved)
    names = [path.name for path in sorted((saved / "checkpoint-6").iterdir())]
    assert len(names) >= 8
    for name in names:
        shutil.rmtree(attempt)
        shutil.copytree(saved, attempt)
        cut(attempt / "checkpoint-6" / name)
        caplog.clear()
        found, seconds = trainer.last_checkpoint(attempt)
        assert found == str(attempt / "checkpoint-4")
        assert seconds > 0
        assert "damaged" in caplog.text
        assert not (attempt / "checkpoint-6").exists()  # it is made again


def test_a_checkpoint_whose_best_one_is_damaged_is_passed_over(attempt):
    """At its end, Trainer loads the best one."""
    state = json.loads((attempt / "checkpoint-6" / "trainer_state.json").read_text())
    best = attempt / f"checkpoint-{state['best_global_step']}"
    (best / "model.safetensors").unlink()
    found, _ = trainer.last_checkpoint(attempt)
    assert found is None or trainer.Path(found).name < best.name


@pytest.mark.slow
def test_a_fine_tuning_without_a_whole_checkpoint_starts_anew_and_says_so(stopped, tmp_path, capsys):
    folder, command = stopped
    shutil.copytree(folder, tmp_path / "out")
    for path in (tmp_path / "out").rglob("checkpoint-*/optimizer.pt"):
        cut(path)
    again = [f"--output_dir={tmp_path / 'out'}" if word.startswith("--output_dir") else word for word in command]
    assert main([*again, "--resume_from_checkpoint=latest"]) == 0
    assert "starts anew" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"learning_rate": "x"}', '{"seed": {}}', "[" * 10_000, "\xff"])
def test_a_result_that_is_no_result_is_one_line(tmp_path, text):
    (tmp_path / train.RESULT_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=train.RESULT_FILE):
        train.read_record(tmp_path / train.RESULT_FILE, train.Result)


@pytest.mark.parametrize(
    "changes", [{"identity": 5}, {"finetune": []}, {"finetune": {"num_seeds": "3"}}, {"identity": None}]
)
def test_a_record_of_a_fine_tuning_with_other_types_is_one_line(stopped, tmp_path, fails, changes):
    folder, command = stopped
    shutil.copytree(folder, tmp_path / "out")
    record = json.loads((folder / "run_config.json").read_text())
    theirs = {"versions": {"d2l-bert": "99.0"}}
    (tmp_path / "out" / "run_config.json").write_text(json.dumps({**record, **changes, **theirs}))
    again = [f"--output_dir={tmp_path / 'out'}" if word.startswith("--output_dir") else word for word in command]
    said = fails(*again, "--resume_from_checkpoint=latest")
    assert "run_config.json" in said and "99.0" in said


# ---------------------------------------------------------------------------------------------------------------------
# Of pretraining: ours


@pytest.fixture
def saved(trained, tmp_path):
    """A copy of a checkpoint, alone."""
    return shutil.copytree(trained / "checkpoint-20", tmp_path / "checkpoint-20")


def sign(checkpoint, **more):
    """Compute the hashes of a checkpoint anew, which needs no secret."""
    files = [path for path in checkpoint.iterdir() if path.is_file() and not path.is_symlink()]
    names = [path.name for path in files if path.name != "manifest.json"]
    hashes = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}
    (checkpoint / "manifest.json").write_text(json.dumps({"sha256": {**hashes, **more}}))


def resumed(books, checkpoint, folder, fails):
    """What a run says that goes on from this checkpoint."""
    options = ["--max_steps=40", "--mixed_precision=no", f"--output_dir={folder}"]
    return fails("pretrain", f"--corpus={books}", *SMALL, *options, f"--resume_from_checkpoint={checkpoint}")


WRONG = [
    "x",
    -1,
    1.5,
    None,
    True,
    [],
    {},
    2**63,
    float("nan"),
    [[[[]]]],
    [0, 0],
    [0, 0, "0"],
    [0, 0, -1],
    [0, 0, True],
]


@pytest.mark.slow
def test_a_state_with_other_types_or_numbers_is_one_line(saved):
    state = json.loads((saved / "training_state.json").read_text())
    for name in ("step", "cursor", "max_steps", "identity", "skipped_in_a_row", "rows", "words_seen"):
        for value in WRONG:
            if (name, value) in [("words_seen", 1.5), ("words_seen", 2**63), ("identity", {})]:
                continue
            (saved / "training_state.json").write_text(json.dumps({**state, name: value}))
            sign(saved)
            with pytest.raises(UserError, match="checkpoint-20"):
                read_checkpoint(saved)
    for text in ("", "{", "[]", "5", "[" * 10_000, json.dumps({"step": 20})):
        (saved / "training_state.json").write_text(text)
        sign(saved)
        with pytest.raises(UserError, match="checkpoint-20"):
            read_checkpoint(saved)


def test_a_manifest_names_files_of_its_own_folder_alone(saved, tmp_path):
    (tmp_path / "secret").write_text("x")
    (saved / "link").symlink_to(tmp_path / "secret")
    (saved / "folder").mkdir()
    read_checkpoint(saved)
    sign(saved)
    read_checkpoint(saved)
    outside = ("../secret", str(tmp_path / "secret"), "link", "/dev/zero")
    for name in (*outside, "folder", "gone", "", ".", "a\0b", "a" * 300, "\ud800"):
        sign(saved, **{name: hashlib.sha256(b"x").hexdigest()})
        with pytest.raises(UserError, match="checkpoint-20"):
            read_checkpoint(saved)
    for text in ("", "{}", '{"sha256": []}', '{"sha256": {"a": 1}}', '{"sha256": {}}', "[" * 10_000):
        (saved / "manifest.json").write_text(text)
        with pytest.raises(UserError, match="checkpoint-20"):
            read_checkpoint(saved)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("how", ["name", "shape", "nan", "integers", "gone", "all of one gone", "all gone", "bytes"])
def test_tensors_of_another_model_are_one_line(saved, books, trained, tmp_path, fails, file, how):
    tensors = load_file(saved / file)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    of_name = name.partition("|")[0]
    made = {
        "name": {**tensors, "other.weight": torch.zeros(2)},
        "shape": {**tensors, name: torch.zeros(2, 3)},
        "nan": {**tensors, name: torch.full_like(tensors[name], float("nan"))},
        "integers": {**tensors, name: tensors[name].int()},
        "gone": {other: tensor for other, tensor in tensors.items() if other != name},
        "all of one gone": {other: tensor for other, tensor in tensors.items() if of_name not in other},
        "all gone": {},
    }
    if how == "bytes":
        (saved / file).write_bytes(b"\x00" * 100)
    else:
        save_file(made[how], saved / file, {"format": "pt"})
    sign(saved)
    run_folder = shutil.copytree(trained, tmp_path / "model")
    shutil.copytree(saved, run_folder / "checkpoint-20", dirs_exist_ok=True)
    line = resumed(books, run_folder / "checkpoint-20", run_folder, fails)
    said = {"name": "no tensor", "shape": "(2, 3)", "nan": "not finite", "integers": "int32", "gone": "missing"}
    assert file in line and said.get(how, "") in line


@pytest.mark.parametrize("key", ["step", "exp_avg_sq"])
def test_numbers_of_an_optimizer_that_are_never_negative_are_refused(key, saved, books, trained, tmp_path, fails):
    tensors = load_file(saved / "optimizer.safetensors")
    name = next(name for name in tensors if name.endswith(f"|{key}"))
    save_file({**tensors, name: torch.full_like(tensors[name], -5)}, saved / "optimizer.safetensors")
    sign(saved)
    run_folder = shutil.copytree(trained, tmp_path / "model")
    shutil.copytree(saved, run_folder / "checkpoint-20", dirs_exist_ok=True)
    line = resumed(books, run_folder / "checkpoint-20", run_folder, fails)
    assert name in line and "negative" in line


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"cursor": cursor}
            for cursor in ([0, 10**6, 0], [0, 0, 10**6], [10**9, 0, 0], [2**62, 0, 0], [0, 2**62, 0])
        ),
        *({"words_seen": words} for words in (1e7, 1e308, 10**300)),
    ],
)
def test_a_place_that_no_run_has_reached_is_one_line_and_later_checkpoints_stay(
    saved, books, trained, tmp_path, fails, changes
):
    run_folder = shutil.copytree(trained, tmp_path / "model")
    state = json.loads((saved / "training_state.json").read_text())
    (run_folder / "checkpoint-20" / "training_state.json").write_text(json.dumps({**state, **changes}))
    sign(run_folder / "checkpoint-20")
    said = resumed(books, run_folder / "checkpoint-20", run_folder, fails)
    assert "training_state.json" in said and len(said) < 500
    assert (run_folder / "checkpoint-40").exists()


@pytest.mark.parametrize(
    "row",
    [
        *([], 5, {}, {"step": "1"}, {"step": 1}, {"step": 1, "event": 5}, {"step": 1, "event": "stage"}),
        *({"step": 1, "eval_mlm_loss": "x"}, {"step": 1, "eval_mlm_loss": 1e999}),
        {"seconds": 0.0},
        {"padding_share": 1.0},
        {"mfu": None},
        {"memory_mb": {}},
        {"loss": [1]},
    ],
)
def test_a_row_of_the_log_that_no_run_writes_is_one_line(books, trained, tmp_path, fails, row):
    run_folder = shutil.copytree(trained, tmp_path / "model")
    log = run_folder / "training_log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    trained_row = next(one for one in rows if "loss" in one)
    changed = {**trained_row, **row} if isinstance(row, dict) and "step" not in row and row else row
    log.write_text("".join(json.dumps(one) + "\n" for one in [changed, *rows]))
    assert "training_log.jsonl" in resumed(books, run_folder / "checkpoint-20", run_folder, fails)


def test_a_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path, monkeypatch, caplog):
    paths = [tmp_path / f"checkpoint-{step}" for step in (1, 2)]
    for path in paths:
        path.mkdir()

    def busy(path, *_, **__):
        raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    delete_old(paths)
    assert caplog.text.count("cannot be deleted") == 2 and not checkpoints(tmp_path)
    with pytest.raises(UserError, match="busy"):
        delete(next(tmp_path.glob(".*")))
