"""Random questions for a newcomer: which file does a change belong to, and what does a comment or docstring mean?

    python -m benchmarks.readability --seed 1 [--answers]

Prints ten changes from the list below, and thirty comments and docstrings of the package, all drawn at random. The
newcomer has CONTRIBUTING.md and the first line of each file, and names the file for each change. The newcomer also
restates each comment and docstring without reading the code around it. `--answers` prints the right files instead.
"""

import argparse
import ast
import io
import random
import tokenize
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tokenization", "training", "modeling", "model_cards", "src/d2l_bert")

CHANGES, COMMENTS = 10, 30
FEWEST_WORDS = 6  # shorter comments and docstrings are not drawn

# Changes, and the file that each change belongs to.
FILE_FOR = {
    "Read .docx files as text": "tokenization/sources.py",
    "Accept Parquet columns of lists of strings": "tokenization/tables.py",
    "Drop paragraphs that are mostly digits": "tokenization/sentences.py",
    "Hold out at least five documents instead of two": "tokenization/token_store.py",
    "Store token ids in 24 bits": "tokenization/token_store.py",
    "Let the WordPiece trainer ignore words longer than 40 characters": "tokenization/wordpiece.py",
    "Refuse a tokenizer from the Hub that has no [UNK] token": "tokenization/wordpiece.py",
    "Keep the cache in another folder than $HF_HOME": "tokenization/cache.py",
    "Also read the docstrings of numpy into the embedded corpus": "tokenization/python_docs.py",
    "Write a checksum of another kind into a prepared folder": "tokenization/prepared_folder.py",
    "A random second segment only from the same source as the first": "training/epochs.py",
    "Mask spans of at most five words": "training/masking.py",
    "Give random second segments to 30 % of the pairs instead of 50 %": "training/pairs.py",
    "Pad rows to a multiple of 16": "training/packing.py",
    "Add a learning rate schedule that falls like a polynomial": "training/optim.py",
    "Clip the gradient for each parameter instead of for all together": "training/step.py",
    "Write a row of the log for every tenth step by default": "training/schedule.py",
    "Keep the best checkpoint besides the last ones": "training/checkpoint.py",
    "React to SIGUSR1 as to SIGTERM": "training/interruption.py",
    "Try three micro-batch sizes more before choosing": "training/machine.py",
    "Compile the blocks with another mode of torch.compile": "training/machine.py",
    "Wait a minute for another run in the same output folder": "training/folder_lock.py",
    "Save the model at numbers of tokens seen, not of words": "training/checkpoint.py",
    "Count a tie of two sentences as an error": "training/evaluation/blimp.py",
    "Compute a sentence's score with only every second token masked": "training/evaluation/pseudo_likelihood.py",
    "Give the models of an evaluation a row each instead of a column": "training/evaluation/run.py",
    "Know the columns of the data set AG News": "training/finetuning/config.py",
    "Read Excel files of labelled rows": "training/finetuning/tables.py",
    "Let the tags of words also be written as BILOU": "training/finetuning/span_metrics.py",
    "Hold out the last rows for validation, not random ones": "training/finetuning/data.py",
    "Lower the learning rate of the embeddings only": "training/finetuning/trainer.py",
    "Freeze the encoder's first layers in a fine-tuning": "training/finetuning/start.py",
    "Keep the models of all seeds, not only the best": "training/finetuning/attempts.py",
    "Add the balanced accuracy to the figures of a classification": "training/finetuning/metrics.py",
    "Draw the confusion matrix in another colour": "training/finetuning/pictures.py",
    "Take the maximum over the tokens as the vector of a line": "training/vectors/embed.py",
    "Draw a head's attention as lines between two columns of tokens": "training/vectors/attention.py",
    "Explain standard errors on the card of a fine-tuned model": "model_cards/card.py",
    "Draw the learning rate into the picture of the losses": "training/curves.py",
    "Add a recipe with 6 layers of 384": "training/recipes.py",
    "Show ten filled masks at the end of a run instead of five": "training/run_report.py",
    "Count the floating-point operations of the embedding, too": "training/meter.py",
    "Give the model a fourth switch, RMSNorm": "modeling/modeling_d2l_bert.py",
    "Convert checkpoints of stock RoBERTa": "modeling/bert_checkpoints.py",
    "Say the CO2 of the electricity used on the card": "model_cards/card.py",
    "Accept a new licence identifier of the Hub": "model_cards/metadata.py",
    "Refuse to publish a folder without a curve picture": "model_cards/folder_rules.py",
    "Send a model in two commits instead of one": "model_cards/publish.py",
    "Add a command `d2l-bert info MODEL`": "src/d2l_bert/commands.py",
    "Let flags be shortened to their first letters": "src/d2l_bert/cli.py",
    "Exit with code 3 when the disk is full": "src/d2l_bert/cli.py",
    "Show a percentage beside the bar of long work": "src/d2l_bert/progress.py",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True, help="of the random questions")
    parser.add_argument("--answers", action="store_true", help="print the right files")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    for change, file in rng.sample(sorted(FILE_FOR.items()), CHANGES):
        print(f"{change}: {file}" if arguments.answers else f"{change}?")
    if arguments.answers:
        return
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    texts = [text for file in files for text in texts_of(file)]
    for where, text in rng.sample(texts, COMMENTS):
        print(f"\n{where}\n{text}")


def texts_of(file: Path) -> list[tuple[str, str]]:
    """(file and line, text) of each comment and docstring of a file. Adjacent comment lines are one comment."""
    source = file.read_text()
    name = file.relative_to(ROOT).as_posix()
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            texts.append((f"{name}:{node.lineno} ({node.name})", text))
    lines = [
        (token.start[0], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    blocks = []
    for number, text in lines:
        if blocks and blocks[-1][1] == number - 1:
            blocks[-1] = (blocks[-1][0], number, f"{blocks[-1][2]} {text}")
        else:
            blocks.append((number, number, text))
    texts += [(f"{name}:{first}", text) for first, _, text in blocks]
    return [(where, text) for where, text in texts if len(text.split()) >= FEWEST_WORDS and "-----" not in text]


if __name__ == "__main__":
    main()
