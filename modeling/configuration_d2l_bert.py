"""`D2lBertConfig`: the architecture of a model, which is saved and published as config.json."""

import dataclasses
import difflib

from transformers import PreTrainedConfig


ACTIVATIONS = ("relu", "gelu")

# The limits of `initializer_range` and `layer_norm_eps`.
SMALLEST = 2.0**-126  # below it a float32 loses digits or becomes 0
# PyTorch's own initial weights are about 1. With weights of about 50, attention scores exceed 1e6 and are rounded by 1
# or more; the backward pass computes them again in another order, and finds probabilities that overflow.
LARGEST = 10.0

PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")

# Fields that count something.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "num_labels",
)

# Keyword arguments that every configuration of Transformers takes, besides the dataclass fields.
_COMMON_ARGUMENTS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "torch_dtype",
}


class D2lBertConfig(PreTrainedConfig):
    r"""
    Configuration of a BERT encoder as *Dive into Deep Learning* builds it (sections 15.8 to 15.10).

    The defaults are the book's small BERT. Three fields tell the book's BERT from the original (Devlin et al., 2018):
    `hidden_act`, `embedding_layer_norm` and `tie_word_embeddings` are `relu`, `False`, `False` in the book, but
    `gelu`, `True`, `True` in the original.

    Args:
        vocab_size: tokens in the vocabulary (V). The book's WikiText-2 vocabulary has 20,256.
        hidden_size: width of every hidden state (H); a multiple of `num_attention_heads`.
        num_hidden_layers: number of Transformer encoder blocks.
        num_attention_heads: number of attention heads in each block.
        intermediate_size: width of the position-wise feed-forward network.
        hidden_act: `"relu"` or `"gelu"` (the exact GELU, not the tanh approximation).
        embedding_layer_norm: apply LayerNorm and dropout to the sum of the three embeddings. The book does neither.
        tie_word_embeddings: use one matrix as MLM decoder and token embedding. The book uses two matrices.
        hidden_dropout_prob: dropout on each residual branch, and on the embeddings with `embedding_layer_norm`.
        attention_probs_dropout_prob: dropout on attention probabilities.
        classifier_dropout: dropout before the linear layer of a fine-tuned head; `None` means `hidden_dropout_prob`.
        max_position_embeddings: longest sequence, in tokens. The book allows 1,000.
        type_vocab_size: number of segment embeddings; 2 for a pair of segments.
        initializer_range: standard deviation of the normal distribution of the initial weights, as in BERT. From
            1.2e-38, the smallest normal number of float32, to 10.
        layer_norm_eps: epsilon of every LayerNorm, 1e-5 in the book and 1e-12 in BERT. From 1.2e-38 to 10.
        pad_token_id: the token whose embedding is always zero.

    Raises:
        ValueError: a value is out of range, `hidden_size` is not a multiple of `num_attention_heads`, `hidden_act` has
            another value, or an argument is unknown. Unknown entries of a saved config.json are accepted.
    """

    model_type = "d2l-bert"
    # `Trainer` gathers all outputs of an evaluation as predictions, except these.
    keys_to_ignore_at_inference = ["mlm_loss", "nsp_loss"]

    vocab_size: int = 20256
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 256
    hidden_act: str = "relu"
    embedding_layer_norm: bool = False
    tie_word_embeddings: bool = False
    hidden_dropout_prob: float = 0.2
    attention_probs_dropout_prob: float = 0.2
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs):
        is_of_file = "model_type" in kwargs  # which Transformers passes from a saved config.json alone
        if not is_of_file:
            self._refuse_misspelt(kwargs)
        super().__post_init__(**kwargs)
        self.check()

    def _refuse_misspelt(self, arguments):
        known = {field.name for field in dataclasses.fields(self)} | _COMMON_ARGUMENTS
        for name in arguments:
            if name not in known and not name.startswith("_"):
                close = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"D2lBertConfig has no argument {name!r}{hint}")

    def check(self) -> None:
        """Raise ValueError if a value is out of range, or if values contradict each other."""
        self._require(SIZES, _is_size, "a whole number of at least 1")
        probabilities = ["hidden_dropout_prob", "attention_probs_dropout_prob"]
        if self.classifier_dropout is not None:
            probabilities.append("classifier_dropout")
        self._require(probabilities, _is_probability, "a probability of at least 0 and below 1")
        between = f"between {SMALLEST:.1e} and {LARGEST:g}"
        self._require(["initializer_range", "layer_norm_eps"], _is_in_range, between)
        self._require(["embedding_layer_norm", "tie_word_embeddings"], _is_truth, "True or False")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {self.hidden_act!r}")
        if self.problem_type is not None and self.problem_type not in PROBLEM_TYPES:
            raise ValueError(f"problem_type must be one of {', '.join(PROBLEM_TYPES)}, got {self.problem_type!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id ({self.pad_token_id}) must lie within the vocabulary ({self.vocab_size})")

    def _require(self, names, is_right, wanted):
        """Raise ValueError unless the value of each of these fields is right; `wanted` says in words what that is."""
        for name in names:
            value = getattr(self, name)
            if not is_right(value):
                raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_size(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_probability(value):
    return _is_number(value) and 0 <= value < 1


def _is_in_range(value):
    return _is_number(value) and SMALLEST <= value <= LARGEST


def _is_truth(value):
    return isinstance(value, bool)


__all__ = ["D2lBertConfig"]
