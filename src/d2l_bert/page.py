"""A page without a server: static files that run an exported model in the visitor's browser, by transformers.js."""

import base64
import hashlib
import io
import shutil
import tarfile
import urllib.request
from importlib.resources import files
from pathlib import Path

from d2l_bert.errors import UserError, explained
from d2l_bert.folders import read_json, write_json
from d2l_bert.modeling.export import INT8


# Packages of npm: version, SHA-512 of the archive as npm's lock files have it, and the files that the page needs.
# This is the onnxruntime-web that transformers.js 4.3.1 was built with.
TRANSFORMERS_JS = "4.3.1"
RUNTIME = {
    "@huggingface/transformers": (
        TRANSFORMERS_JS,
        "5+voSeUCFK6PCKlY15dPhNOKq3/zOTxDN7oC+Wy9dFb1QZ0TSQomZRRy7URRK8YRuUoE9fGMQTTPC5d/pWBJhA==",
        ("dist/transformers.min.js", "LICENSE"),
    ),
    "onnxruntime-web": (
        "1.31.0-dev.20260914-8d85527a0",
        "Iy7rtadoBgxS/LLvDr3QW38DB1PNXRnr0GJMcL0TAt7c9qjgVQl83UlGCVyeAnK2InpmW8Uc3PL8XIuqtDeF6g==",
        ("dist/ort-wasm-simd-threaded.asyncify.mjs", "dist/ort-wasm-simd-threaded.asyncify.wasm"),
    ),
}
REGISTRY = "https://registry.npmjs.org"
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", INT8)
TASKS = ("fill-mask", "text-classification")


def copy_runtime(folder: Path, runtime: str | None = None) -> None:
    """
    Put transformers.js and ONNX Runtime into the folder of a page.

    Args:
        folder: an empty folder.
        runtime: a folder in which npm has installed @huggingface/transformers; None to download the archives.

    Raises:
        UserError: the runtime is not there, cannot be downloaded, or is not the one whose hash is known.
    """
    (folder / "runtime").mkdir()
    for package, (version, expected, names) in RUNTIME.items():
        if runtime is not None:
            way_out = f"npm install --ignore-scripts @huggingface/transformers@{TRANSFORMERS_JS} there"
            with explained(f"runtime {runtime}: lacks files of {package}", way_out, OSError):
                for name in names:
                    shutil.copyfile(Path(runtime, "node_modules", package, name), folder / "runtime" / Path(name).name)
            continue
        address = f"{REGISTRY}/{package}/-/{package.rpartition('/')[2]}-{version}.tgz"
        with explained(address, "connect to the network, or give --runtime DIR", OSError):
            archive = urllib.request.urlopen(address, timeout=60).read()
        if base64.b64encode(hashlib.sha512(archive).digest()).decode() != expected:
            raise UserError(f"{address}: has another hash than the known one; try again, or give --runtime DIR")
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            for name in names:
                content = packed.extractfile(f"package/{name}").read()
                (folder / "runtime" / Path(name).name).write_bytes(content)


def write_page(exported: Path, folder: Path, name: str, task: str) -> None:
    """
    Write the page and the model into a folder that has the runtime.

    Args:
        exported: what `d2l-bert export` has written.
        name: the model's name.
        task: one of `TASKS`.
    """
    static = files("d2l_bert") / "page_files"
    (folder / "index.html").write_bytes((static / "index.html").read_bytes())
    (folder / "runtime/LICENSE-onnxruntime-web").write_bytes((static / "LICENSE-onnxruntime-web").read_bytes())
    for file in MODEL_FILES:
        (folder / "model" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(exported / file, folder / "model" / file)
    predictions = read_json(exported / "metrics.json").get("predictions", [])
    examples = [example["text"] for example in predictions] or ["Paris is the [MASK] of France."]
    text = min(examples, key=len) if task == "fill-mask" else ""
    write_json(folder / "page.json", {"name": name, "task": task, "text": text})
