"""BERT as *Dive into Deep Learning* builds it, in the book's order (sections 11.5 to 11.7 and 15.8 to 15.10).

Arguments and outputs have Hugging Face's names (`input_ids`, `attention_mask`, `labels`), modules mostly the book's.

Shapes:
    B rows in the batch   T tokens in a row     P positions to predict in a row, unused slots included
    H hidden size         N attention heads     D = H / N, a head's width      V vocabulary size
    S sequences packed into a row
    Q queries in a row: T; in the last block S + P, if only the states of [CLS] and of P positions are read afterwards
    R slots: the positions to predict in all rows (B * P)                 M slots that are computed

With x the token ids, s the segment ids and t the positions; q, k and v are W_q h, W_k h and W_v h of one head; linear
layers have biases, too:

    h0  = E_token[x] + E_segment[s] + E_position[t]        then dropout(LayerNorm(h0)) if `embedding_layer_norm`
    a   = W_o concat_heads(dropout(softmax(q k^T / sqrt(D) + mask)) v)
    h'  = LayerNorm(h + dropout(a))
    h'' = LayerNorm(h' + dropout(W_2 act(W_1 h')))         the h of the next block
    MLM = W_d LayerNorm(act(W_m h_p))                      at the positions p to predict
    NSP = W_n tanh(W_c h_[CLS])
"""

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .configuration_d2l_bert import D2lBertConfig


NSP_LABELS = ("IsNext", "NotNext")  # 0: B follows A, as in Hugging Face's BERT. In the book 1 means that B follows A.


# `loss_and_gradients` holds at most this many logits in memory at a time. In bf16 the logits alone take 64 MB; their
# gradient takes as much again.
LOGITS_AT_ONCE = 2**25


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether code for a CPU computes a tensor, or code for a GPU. Tests replace this to run the latter on a CPU."""
    return tensor.device.type == "cpu"


def _unused_name(name: str) -> str:
    """
    A name for a PyTorch operator that no operator in this process has: `name`, `name_2`, `name_3` and so on.

    A process may import several copies of this file: the package's, and those in model folders. Each copy registers
    its operators, and PyTorch destroys an operator whose name is registered again: a call of it crashes. The name of
    this module cannot tell the copies apart: it holds the name of the folder, which may have characters that no
    operator's name can have.
    """
    candidate = name
    for number in itertools.count(2):
        if not hasattr(torch.ops.d2l_bert, candidate):
            return f"d2l_bert::{candidate}"
        candidate = f"{name}_{number}"


@torch.library.custom_op(_unused_name("dropout_mask"), mutates_args=())
def dropout_mask(anchor: torch.Tensor, shape: Sequence[int], dropped: int) -> torch.Tensor:
    """
    A dropout mask on the CPU, uint8: 0 with probability `dropped` / 2^16, else 1.

    On a CPU, PyTorch draws a whole random number for each value in one thread, which takes longer than the matrix
    products of the model. Here a value needs only 16 random bits of NumPy's SFC64, seeded by PyTorch's generator.

    The mask is drawn in a custom operator because PyTorch's compiler cannot trace NumPy. With the compiler's setting
    `aggressive_recomputation` the backward pass would draw another mask than the forward pass.

    Args:
        anchor: a new `torch.empty(0)` for each call. The compiler makes one call of several with the same arguments,
            so layers of one shape would share a mask. The masked tensor would tell the calls apart as well, but the
            compiler would have to store it first.
        shape: of the mask.
        dropped: how many of the 2^16 numbers of 16 bits mean "dropped".
    """
    seed = torch.randint(2**63 - 1, ()).item()
    count = torch.Size(shape).numel()
    numbers_of_64_bits = np.random.SFC64(seed).random_raw(math.ceil(count / 4))
    numbers = torch.from_numpy(numbers_of_64_bits.view(np.int16))[:count]  # four of 16 bits in each
    # Of the 2^16 signed numbers from -2^15 on, which are equally likely, the first `dropped` mean "dropped".
    kept = numbers >= dropped - 2**15
    # uint8 instead of bool: compiled CPU code reads and writes bool without vector instructions.
    return kept.view(torch.uint8).view(shape)


@dropout_mask.register_fake
def _(anchor, shape, dropped):
    return torch.empty(shape, dtype=torch.uint8, device=anchor.device)


class Dropout(nn.Dropout):
    """Dropout (section 5.6). On a CPU, training uses `dropout_mask`, with `p` rounded to a multiple of 2^-16."""

    def forward(self, values):
        dropped = round(self.p * 2**16)
        drops_some = self.training and 0 < dropped < 2**16
        if drops_some and is_on_cpu(values):
            mask = dropout_mask(torch.empty(0), values.shape, dropped)
            return values * mask * (2**16 / (2**16 - dropped))
        return super().forward(values)


class D2lBertEmbeddings(nn.Module):
    """The sum of token, segment and position embeddings (section 15.8.4)."""

    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        # The original BERT applies LayerNorm and dropout to the sum; the book does neither.
        self.LayerNorm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.embedding_layer_norm else None
        )
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids=None, token_type_ids=None, position_ids=None, inputs_embeds=None):
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)  # (B, T, H)
        if position_ids is None:
            length = inputs_embeds.shape[1]
            limit = self.position_embeddings.num_embeddings
            if length > limit:
                raise ValueError(f"a sequence of {length} tokens is longer than max_position_embeddings ({limit})")
            position_ids = torch.arange(length, device=inputs_embeds.device).unsqueeze(0)  # (1, T)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        hidden_states = (
            inputs_embeds + self.token_type_embeddings(token_type_ids) + self.position_embeddings(position_ids)
        )  # (B, T, H)
        if self.LayerNorm is not None:
            hidden_states = self.dropout(self.LayerNorm(hidden_states))
        return hidden_states


def dot_product_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """
    Scaled dot-product attention (section 11.3) in plain tensor operations: the "eager" kernel.

    Args:
        module: its `dropout` is applied to the attention probabilities.
        query: (B, N, Q, D).
        key, value: (B, N, T, D).
        attention_mask: added to the scores; broadcasts to (B, N, Q, T).
        kwargs: what other kernels need, such as the probability `dropout`; not read here.

    Returns:
        The output (B, Q, N, D), and the attention probabilities (B, N, Q, T).
    """
    scores = query @ key.transpose(-1, -2) * scaling  # (B, N, Q, T)
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = module.dropout(scores.softmax(dim=-1))
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


def is_plain(layer: nn.Linear) -> bool:
    """
    Whether a layer computes `states @ weight.T + bias` and nothing else, so that its weight may be read in its place.

    Other layers must be called: those with an adapter or a hook, without a bias, with a quantized or sharded weight.
    """
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or layer.bias is None:
        return False
    has_other_forward = "forward" in vars(layer)  # a function in place of the method, as some libraries put there
    return not has_other_forward and not hooks_of(layer) and not has_hook_of_all_modules()


def hooks_of(module):
    """The hooks of a module, for its forward and backward pass."""
    return [
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]


def has_hook_of_all_modules() -> bool:
    """Whether a hook is called for every module, as that of PyTorch's `FlopCounterMode` is."""
    return bool(torch.nn.modules.module._has_any_global_hook())


# The libraries whose hooks do not mind that positions are left out: FSDP's gather weights; those of Transformers
# collect hidden states where these are asked for, and then no positions are left out.
LIBRARIES_OF_OTHER_HOOKS = ("torch.distributed.", "transformers.utils.")


def is_watched(module: nn.Module) -> bool:
    """Whether a hook on a module may read what the module takes or gives."""
    for hook in hooks_of(module):
        defined_in = str(getattr(hook, "__module__", None))
        if not defined_in.startswith(LIBRARIES_OF_OTHER_HOOKS):
            return True
    return False


def linear_together(layers, states):
    """
    The outputs (..., H) of several linear layers for the same states (..., H).

    On a GPU by one product, which is faster than several small ones. On a CPU it is not.

    Args:
        layers: `nn.Linear`, or what has taken its place, such as an adapter; each with H outputs.
    """
    if is_on_cpu(states) or not all(map(is_plain, layers)):
        return [layer(states) for layer in layers]
    weight = torch.cat([layer.weight for layer in layers])
    bias = torch.cat([layer.bias for layer in layers])
    return F.linear(states, weight, bias).chunk(len(layers), dim=-1)


class D2lBertMultiHeadAttention(nn.Module):
    """Multi-head self-attention (section 11.5), computed by the kernel that `config._attn_implementation` names."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        # Both are read by Transformers' kernels.
        self.layer_idx = layer_idx
        self.is_causal = False
        self.head_size = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_size**-0.5
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.attention_probs_dropout_prob)

    def forward(self, queries, hidden_states, attention_mask=None, **kwargs):
        """
        Hidden states `queries` (B, Q, H) attend to `hidden_states` (B, T, H), with a mask that broadcasts to
        (B, N, Q, T). If both are the same tensor, as where no position is left out, the layers of queries, keys and
        values are computed together.

        Returns:
            The output (B, Q, H), and the attention probabilities (B, N, Q, T) if the kernel gives them.
        """

        def heads(states):
            shape = (*states.shape[:-1], self.config.num_attention_heads, self.head_size)
            return states.view(shape).transpose(1, 2)  # (B, N, Q or T, D)

        if queries is hidden_states:
            query, key, value = linear_together((self.query, self.key, self.value), hidden_states)
        else:
            query = self.query(queries)
            key, value = linear_together((self.key, self.value), hidden_states)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, dot_product_attention)
        context, probabilities = attend(
            self,
            heads(query),
            heads(key),
            heads(value),
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout.p if self.training else 0.0,
            **kwargs,
        )
        return self.output(context.reshape(queries.shape)), probabilities  # (B, Q, H)


class D2lBertAddNorm(nn.Module):
    """Residual connection, then LayerNorm (section 11.7.3), as in the original Transformer (post-norm)."""

    def __init__(self, config):
        super().__init__()
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, residual, branch):
        states = self.LayerNorm(residual + self.dropout(branch))
        # Under autocast LayerNorm gives float32, and the branch is in bf16. With bf16 for both, a GPU writes and reads
        # 94 instead of 143 kB for each token in each layer of BERT-base. A CPU would gain 1 %, and keeps the exact
        # residual.
        return states if is_on_cpu(states) else states.to(branch.dtype)


class D2lBertPositionWiseFFN(nn.Module):
    """A two-layer perceptron, applied to each position separately (section 11.7.2)."""

    def __init__(self, config):
        super().__init__()
        self.dense1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dense2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.dense2(self.activation(self.dense1(hidden_states)))


class D2lBertEncoderBlock(GradientCheckpointingLayer):
    """A Transformer encoder block (section 11.7.4)."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention = D2lBertMultiHeadAttention(config, layer_idx)
        self.addnorm1 = D2lBertAddNorm(config)
        self.ffn = D2lBertPositionWiseFFN(config)
        self.addnorm2 = D2lBertAddNorm(config)

    def forward(self, hidden_states, attention_mask=None, positions=None, **kwargs):
        """
        Hidden states (B, T, H) -> (B, T, H), or (B, Q, H) at `positions` (B, Q).

        With `positions`, the other positions only get keys and values.
        """
        if positions is None:
            queries = hidden_states  # the same tensor: the attention looks for that
            return self.compute(queries, hidden_states, attention_mask, **kwargs)
        queries = states_at(hidden_states, positions)
        return self.compute(queries, hidden_states, mask_at(attention_mask, positions), **kwargs)

    def compute(self, queries, hidden_states, attention_mask, **kwargs):
        """
        The block for chosen queries (B, Q, H) of its input (B, T, H); gives (B, Q, H).

        A method of its own, as d2l_bert.training.compiling replaces it by a compiled one. `forward`, which modules are
        called by, stays.
        """
        attention, _ = self.attention(queries, hidden_states, attention_mask, **kwargs)
        attended = self.addnorm1(queries, attention)
        return self.addnorm2(attended, self.ffn(attended))


class D2lBertEncoder(nn.Module):
    """The blocks, one after the other (section 15.8.4)."""

    def __init__(self, config):
        super().__init__()
        self.layer = nn.ModuleList(D2lBertEncoderBlock(config, index) for index in range(config.num_hidden_layers))

    def forward(self, hidden_states, attention_mask=None, positions=None, **kwargs):
        """
        Hidden states (B, T, H) -> (B, T, H), or (B, Q, H) at `positions` (B, Q).

        Only the last block leaves out the other positions: every block before needs all positions of its input.
        """
        *blocks, last_block = self.layer
        for block in blocks:
            hidden_states = block(hidden_states, attention_mask, **kwargs)
        return last_block(hidden_states, attention_mask, positions, **kwargs)


class D2lBertPooler(nn.Module):
    """tanh(W_c h): the hidden layer that the book puts between [CLS] and next sentence prediction (15.8.6)."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, cls_states):
        return torch.tanh(self.dense(cls_states))


class MaskLM(nn.Module):
    """Logits over the vocabulary for hidden states (section 15.8.5.1): one hidden layer, LayerNorm, decoder."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        # For `loss_and_gradients`. Set by d2l_bert.training.compiling while a run trains with torch.compile.
        self.compiles_gradient = False

    def forward(self, hidden_states):
        return self.decoder(self.transform(hidden_states))

    def transform(self, hidden_states):
        """The input of the decoder (..., H) for hidden states (..., H)."""
        return self.LayerNorm(self.activation(self.dense(hidden_states)))

    def logits_and_loss(self, hidden_states, labels=None, num_items=None, skip_logits=False):
        """
        The logits (..., V) for hidden states (..., H), and their cross-entropy.

        With labels and `skip_logits` the logits are not kept, which saves memory, and on a CPU they are computed only
        where there is a label.

        Args:
            labels: token ids (...), -100 for none.
            num_items: what to divide the summed loss by, as in `cross_entropy`.

        Returns:
            The logits, None if skipped; and the loss, None without labels.
        """
        if labels is None:
            return self(hidden_states), None
        # `summed_loss` reads the decoder's weight, and calls neither the decoder nor this module.
        if not skip_logits or not is_plain(self.decoder) or hooks_of(self):
            logits = self(hidden_states)
            loss = cross_entropy(logits, labels, num_items)
            if skip_logits:
                return None, loss
            return logits, loss
        if num_items is None:
            num_items = (labels != -100).sum()
        return None, self.summed_loss(hidden_states, labels) / num_items

    def summed_loss(self, hidden_states, labels):
        """The cross-entropy of the logits for hidden states (..., H), summed over labels (...), by less memory."""
        states = self.transform(hidden_states).flatten(0, -2)  # (R, H)
        device = states.device.type
        if torch.is_autocast_enabled(device):
            # As autocast does for the decoder; in `loss_and_gradients` the logits have the dtype of the states.
            states = states.to(torch.get_autocast_dtype(device))
        weight = self.decoder.weight
        bias = self.decoder.bias
        loss, *_ = loss_and_gradients(states, weight, bias, as_int64(labels).flatten(), self.compiles_gradient)
        return loss


class NextSentencePred(nn.Module):
    """Does segment B follow segment A (section 15.8.5.2)? Two scores, in the order of `NSP_LABELS`."""

    def __init__(self, config):
        super().__init__()
        self.output = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled):
        return self.output(pooled)


def states_at(hidden_states, positions):
    """Gather hidden states (B, T, H) at positions (B, P) -> (B, P, H)."""
    index = checked_positions(positions, hidden_states.shape[0])
    return hidden_states.take_along_dim(index.unsqueeze(-1), dim=1)


def mask_at(attention_mask, positions):
    """
    What an attention mask says of the queries at positions (B, Q).

    The given mask broadcasts to (B, N, T, T), the returned mask to (B, N, Q, T). None, for no mask, stays None.
    """
    if attention_mask is None:
        return None
    is_same_for_all_queries = attention_mask.shape[2] == 1
    if is_same_for_all_queries:
        return attention_mask
    return attention_mask.take_along_dim(positions[:, None, :, None], dim=2)


def checked_positions(positions, rows):
    """Positions as int64; raises ValueError unless their shape is (B, P) with `rows` for B."""
    if positions.dim() != 2 or positions.shape[0] != rows:
        raise ValueError(f"positions are (B, P), here ({rows}, P); got the shape {tuple(positions.shape)}")
    return positions.long()


def labelled_positions(labels, rows_and_tokens):
    """
    The positions (B, P) at which labels (B, T) are not -100, and the labels there (B, P), -100 in unused slots.

    P is the largest number of labels in a row, rounded up to a multiple of 4, so that there are few tensor shapes. P
    depends on the values of the labels, so a GPU is synchronized once.

    Raises:
        ValueError: the shape of the labels is neither `rows_and_tokens`, which is (B, T), nor (B, T, 1).
    """
    if labels.shape != rows_and_tokens and labels.shape != (*rows_and_tokens, 1):
        raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit tokens of shape {tuple(rows_and_tokens)}")
    labels = labels.reshape(rows_and_tokens)
    is_labelled = labels != -100
    most_labels = max(1, int(is_labelled.sum(1).max()))  # at least 1: PyTorch's attention fails without a query
    slot_count = min(rows_and_tokens[1], 4 * math.ceil(most_labels / 4))
    # A stable sort of 1 and 0, the largest first, has the labelled positions in their order, then the others: for
    # 0 1 0 0 1, these are the positions 1 4 0 2 3.
    positions = is_labelled.int().argsort(dim=1, descending=True, stable=True)[:, :slot_count]
    return positions, labels.gather(1, positions)


def cross_entropy(logits, labels, num_items=None):
    """
    Cross-entropy of logits (..., C) over the labels (...), or (..., 1), that are not -100.

    Without `num_items` the loss is the mean over this batch. With `num_items` the loss is the sum divided by
    `num_items`: if that is the number of labels in the whole optimizer step, the losses of the step's micro-batches
    add up to the mean over the step, however the step is split. It is computed in float32; for logits in float64, in
    float64.

    Raises:
        ValueError: the labels do not have the shape of the logits without the last dimension, or are floats.
    """
    if labels.shape != logits.shape[:-1] and labels.shape != (*logits.shape[:-1], 1):
        raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}")
    exact = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(exact, as_int64(labels).flatten(), reduction="mean" if num_items is None else "sum")
    return loss if num_items is None else loss / num_items


def as_int64(labels):
    """Labels as int64; raises ValueError for floats, such as probabilities, which would all become 0."""
    if labels.is_floating_point():
        raise ValueError(f"labels are numbers of classes or tokens, whole numbers; got {labels.dtype}")
    return labels.long()


def slots_to_compute(labels):
    """
    The numbers of the slots whose logits are computed, and their labels (M,), for the labels of all slots (R,).

    On a GPU these are all slots, as counting the labels would synchronize the GPU. On a CPU these are the slots with a
    label, and behind them slot 0, with the label -100, as often as it takes to make M a multiple of 32; from 2,048
    slots on of 64, from 4,096 on of 128, and so on. The CPU prepares its matrix products once for each shape: few
    shapes are faster.
    """
    if not is_on_cpu(labels):
        return torch.arange(len(labels), device=labels.device), labels
    slots = (labels != -100).nonzero().squeeze(1)
    step = max(32, 2 ** (len(slots).bit_length() - 6))  # 2,048 has 12 bits: 2^6 = 64
    repeated = -len(slots) % step
    return F.pad(slots, (0, repeated)), F.pad(labels[slots], (0, repeated), value=-100)


def padded_decoder(weight, bias):
    """
    A decoder with tokens of probability 0 added, up to a multiple of 64: a GPU then computes its products faster.

    Args:
        weight, bias: (V, H) and (V,).
    """
    added = -len(weight) % 64
    return F.pad(weight, (0, 0, 0, added)), F.pad(bias, (0, added), value=-torch.inf)


@torch.library.custom_op(_unused_name("loss_and_gradients"), mutates_args=())
def loss_and_gradients(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    labels: torch.Tensor,
    compiles_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The summed cross-entropy of the logits `hidden_states @ weight.T + bias`, and its gradients, without all logits in
    memory at once.

    Goes through the slots in parts: computes the logits of a part, replaces the logits by their gradient, and adds the
    part's share to the gradients. This is the idea of Liger Kernel's fused loss (Hsu et al., 2024), here in PyTorch's
    own operations for every device.

    Some of the slots that are computed have no label (`slots_to_compute`). Their label is replaced by token 0, so that
    all slots are computed alike, and each of the four results is made without them:

        the loss                          their losses are replaced by 0
        gradient of the weight            it is a product with the hidden states, and theirs are multiplied by 0
        gradient of the bias              it is a sum over the slots, in which they are multiplied by 0
        gradient of the hidden states     their rows are multiplied by 0

    All would follow from gradients of their logits that are replaced by 0, but that would read and write the largest
    tensor once more.

    A custom operator, because the number of slots with a label depends on the labels: the compiler would end its
    program there and begin another.

    Args:
        hidden_states: of R slots (R, H): the positions to predict in all rows of a batch. Their dtype is that of the
            logits.
        weight, bias: of the decoder, (V, H) and (V,).
        labels: token ids (R,), -100 for none.
        compiles_gradient: whether a GPU computes the gradient of the logits by a compiled program.

    Returns:
        The loss, and its gradients for hidden states, weight and bias.

    Raises:
        IndexError: on a CPU, for a label that is neither -100 nor a token id.
    """
    with torch.autocast(hidden_states.device.type, enabled=False):
        on_cpu = is_on_cpu(labels)
        dtype = hidden_states.dtype
        slots, labels = slots_to_compute(labels)
        has_label = labels != -100
        has_label_column = has_label.to(dtype).unsqueeze(1)  # (M, 1), 1 or 0
        labels = labels.where(has_label, 0)
        states = hidden_states[slots] * has_label_column  # (M, H)
        decoder_weight = weight.to(dtype)  # in the dtype of the logits; for a GPU with added tokens
        decoder_bias = bias.to(dtype)
        if on_cpu:
            gradient_of = gradient_by_softmax
        else:
            gradient_of = compiled_gradient_in_float32() if compiles_gradient else gradient_in_float32
            decoder_weight, decoder_bias = padded_decoder(decoder_weight, decoder_bias)
        exact = torch.promote_types(weight.dtype, torch.float32)  # float32, or float64 for weights in it
        loss = torch.zeros((), dtype=exact, device=weight.device)
        d_states = torch.empty_like(states)
        d_weight = None
        d_bias = torch.zeros_like(bias)
        at_once = max(1, LOGITS_AT_ONCE // len(decoder_weight))
        for first in range(0, max(1, len(labels)), at_once):  # once even without slots, so that d_weight is a tensor
            part = slice(first, first + at_once)
            # Of n of the M slots: (n,), (n, V). The logits have no name, so that their memory is freed here.
            losses, d_logits = gradient_of(F.linear(states[part], decoder_weight, decoder_bias), labels[part])
            loss += losses.where(has_label[part], 0).sum()
            torch.mm(d_logits, decoder_weight, out=d_states[part])
            # The rows behind V are of the tokens that `padded_decoder` added.
            d_weight_of_part = (d_logits.T @ states[part])[: len(weight)]  # (V, H)
            if d_weight is None:
                d_weight = d_weight_of_part.to(weight.dtype)
            else:
                d_weight += d_weight_of_part
            d_bias_of_part = (has_label_column[part].T @ d_logits).squeeze(0)[: len(bias)]  # (V,)
            d_bias += d_bias_of_part
        # Added, not written: `slots` may hold slot 0 with its label, and again without one, which adds 0.
        d_states *= has_label_column
        d_hidden_states = torch.zeros_like(hidden_states)
        d_hidden_states.index_add_(0, slots, d_states)
        return loss, d_hidden_states, d_weight, d_bias


@loss_and_gradients.register_fake
def _(hidden_states, weight, bias, labels, compiles_gradient):
    loss = weight.new_empty((), dtype=torch.promote_types(weight.dtype, torch.float32))
    return loss, torch.empty_like(hidden_states), torch.empty_like(weight), torch.empty_like(bias)


def _keep_gradients(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)  # a gradient that is not asked for is None, not zeros


def _scaled_gradients(ctx, d_loss, *d_gradients):
    # The operator gives the loss and its gradients. To differentiate something that was computed from the gradients
    # takes second derivatives, which are not known.
    if any(gradient is not None for gradient in d_gradients):
        raise RuntimeError(
            "the MLM loss with skip_logits, the default in training mode, has no second derivatives: give "
            "skip_logits=False for a gradient of a gradient"
        )
    d_states, d_weight, d_bias = (gradient * d_loss for gradient in ctx.saved_tensors)
    return d_states, d_weight, d_bias, None, None  # labels and compiles_gradient have no gradient


loss_and_gradients.register_autograd(_scaled_gradients, setup_context=_keep_gradients)


def gradient_by_softmax(logits, labels):
    """
    The cross-entropy -log p of each row, and its gradient for the logits, p for each token and p - 1 for the label.

    The rounded p is precise enough where p is at most 1/2 and a normal number. For a larger p too few digits of 1 - p
    are left: bf16 has no number between 0.996 and 1. In these rows both follow from the logits s in float32, with the
    odds (1 - p) / p against the label:

        p        = exp s_label / (exp s_label + the sum of exp s of the other tokens)
        log_odds = log (the sum of exp s of the other tokens) - s_label
        1 - p    = sigmoid(log_odds)
        -log p   = log(1 + odds) = softplus(log_odds)

    Args:
        logits: of some slots (n, V).
        labels: token ids (n,).

    Returns:
        The losses (n,) in float32 or float64, and the gradient (n, V) in the dtype of the logits.

    Raises:
        IndexError: a label is no token id.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    rows = torch.arange(len(logits))
    gradient = logits.softmax(dim=1)  # p of each token: of all but the label, this is the gradient
    chance_of_label = entry_of_label(gradient, labels).to(exact)
    losses = -chance_of_label.log()
    chance_of_others = 1 - chance_of_label
    is_large = chance_of_label > 0.5
    is_not_normal = chance_of_label < torch.finfo(logits.dtype).tiny
    imprecise = rows[is_large | is_not_normal]
    exact_logits = logits[imprecise].to(exact)
    columns = labels[imprecise].unsqueeze(1)
    logit_of_label = exact_logits.gather(1, columns).squeeze(1)
    logits_of_others = exact_logits.scatter_(1, columns, -torch.inf)
    log_odds = logits_of_others.logsumexp(dim=1) - logit_of_label
    losses[imprecise] = F.softplus(log_odds)
    chance_of_others[imprecise] = log_odds.sigmoid()
    gradient[rows, labels] = -chance_of_others.to(logits.dtype)  # p - 1
    return losses, gradient


def entry_of_label(values, labels):
    """
    The entry of each row (n,) in the column of its label, from values (n, V): `values[rows, labels]`.

    Indexing would take a label of -1 for the last column. `nll_loss` refuses it; in spite of its name it takes no
    logarithm, and gives these entries negated.

    Raises:
        IndexError: a label is no column.
    """
    return -F.nll_loss(values, labels, reduction="none")


def gradient_in_float32(logits, labels):
    """
    As `gradient_by_softmax`, in float32 or float64 for all rows, as selecting rows would synchronize a GPU.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    log_chances = logits.log_softmax(dim=1, dtype=exact)
    columns = labels.unsqueeze(1)
    log_chance_of_label = log_chances.gather(1, columns)  # (n, 1)
    entry_of_gradient = log_chance_of_label.expm1()  # p - 1
    gradient = log_chances.exp().to(logits.dtype)  # p
    gradient = gradient.scatter_(1, columns, entry_of_gradient.to(logits.dtype))
    return -log_chance_of_label.squeeze(1), gradient


@functools.cache
def compiled_gradient_in_float32():
    """`gradient_in_float32` as a compiled program, in which float32 numbers are never in memory."""
    return torch.compile(gradient_in_float32, dynamic=True)


def head_dropout(config):
    """Dropout before a classifier: `classifier_dropout`, or `hidden_dropout_prob` if `classifier_dropout` is None."""
    probability = config.classifier_dropout
    return Dropout(config.hidden_dropout_prob if probability is None else probability)


# The entry `auto_map` of config.json: the class that each Auto class loads with `trust_remote_code=True`.
AUTO_MAP = {
    "AutoConfig": "configuration_d2l_bert.D2lBertConfig",
    "AutoModel": "modeling_d2l_bert.D2lBertModel",
    "AutoModelForPreTraining": "modeling_d2l_bert.D2lBertForPreTraining",
    "AutoModelForMaskedLM": "modeling_d2l_bert.D2lBertForMaskedLM",
    "AutoModelForNextSentencePrediction": "modeling_d2l_bert.D2lBertForNextSentencePrediction",
    "AutoModelForSequenceClassification": "modeling_d2l_bert.D2lBertForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_d2l_bert.D2lBertForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_d2l_bert.D2lBertForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_d2l_bert.D2lBertForMultipleChoice",
}


def check_attention(name: str | dict | None) -> None:
    """
    Check the name of an attention implementation, before Transformers looks for it on the Hub.

    Raises:
        ValueError: it is one of Transformers' flash attentions, or a kernel of the Hub.
    """
    if isinstance(name, str) and ("/" in name or name.removeprefix("paged|").startswith("flash_attention")):
        raise ValueError(
            f"attn_implementation {name} cannot compute these models; give sdpa, which runs flash attention on GPUs "
            f"that have it (`d2l-bert pretrain` also has varlen, flash attention without padding)"
        )


class D2lBertPreTrainedModel(PreTrainedModel):
    """
    The base class of all models: configuration, initialisation, and the settings that Transformers reads.

    Initial weights are normally distributed with standard deviation `initializer_range`, biases are zero, and
    LayerNorms are the identity, as in BERT; Transformers does this by default.
    """

    config_class = D2lBertConfig
    base_model_prefix = "bert"
    _input_embed_layer = "word_embeddings"
    supports_gradient_checkpointing = True
    _no_split_modules = ["D2lBertEmbeddings", "D2lBertEncoderBlock"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Every class loads checkpoints of every other class, and ignores the weights of other heads without a warning.
    _keys_to_ignore_on_load_unexpected = [
        r"^mlm\.",
        r"^nsp\.",
        r"^bert\.pooler\.",
        r"^pooler\.",
        r"^classifier\.",
        r"^qa_outputs\.",
        r"^scorer\.",
    ]
    _can_record_outputs = {"hidden_states": D2lBertEncoderBlock, "attentions": D2lBertMultiHeadAttention}

    def __init__(self, config, *inputs, **kwargs):
        # Not `isinstance`: the copy of the configuration's file in a model folder has a class of its own.
        if not hasattr(config, "embedding_layer_norm"):
            raise TypeError(
                f"{type(self).__name__} takes a D2lBertConfig, got a {type(config).__name__}; d2l-bert convert --from "
                "bert makes a d2l-bert model of a stock BERT"
            )
        config.check()  # `from_pretrained(..., hidden_act=...)` changes fields of a configuration that was checked
        check_attention(config._attn_implementation)
        super().__init__(config, *inputs, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """
        As in Transformers; but an Auto class with `trust_remote_code=True` loads a class that the model brings.

        As our classes are registered, Transformers alone would load one of them and not the model's, which is derived
        from it.
        """
        config = kwargs.get("config")  # an Auto class has read it
        is_ours = cls.__module__ == __name__
        if kwargs.get("trust_remote_code") and config is not None and is_ours:
            auto_map = getattr(config, "auto_map", None) or {}
            reference = auto_map.get(cls._auto_class)  # file.Class, or repository--file.Class
            if reference is not None and reference.rpartition("--")[2] not in AUTO_MAP.values():
                of_hub = ("cache_dir", "force_download", "local_files_only", "revision", "token")
                options = {name: kwargs[name] for name in of_hub if name in kwargs}
                own_class = get_class_from_dynamic_module(reference, pretrained_model_name_or_path, **options)
                return own_class.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)

    def save_pretrained(self, *args, **kwargs):
        """As in Transformers; `auto_map` in config.json names all heads, and not this model's alone."""
        is_ours = type(self).__module__ == __name__
        if self.is_remote_code() and is_ours:  # Transformers then saves the file of this class, with all heads in it
            self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(*args, **kwargs)

    def set_attn_implementation(self, attn_implementation, *arguments, **named):
        check_attention(attn_implementation)
        super().set_attn_implementation(attn_implementation, *arguments, **named)

    def get_output_embeddings(self):
        return self.mlm.decoder if hasattr(self, "mlm") else None

    def set_output_embeddings(self, new_embeddings):
        self.mlm.decoder = new_embeddings

    def masked_lm(
        self, masked_positions, labels, num_items, skip_logits, return_dict, input_ids, inputs_embeds, **kwargs
    ):
        """
        Run the encoder and the MLM head, whose loss can leave out positions and logits that nobody reads.

        Args:
            masked_positions, labels, num_items, skip_logits: as in `D2lBertForPreTraining`.
            return_dict: False if a tuple will be returned.
            input_ids, inputs_embeds, kwargs: the arguments of `D2lBertModel`.

        Returns:
            The output of the encoder, with `last_hidden_state` at the positions that the head reads; the logits, None
            if skipped; and the loss, None without labels.
        """
        if skip_logits is None:
            skip_logits = self.training and return_dict  # in a tuple, what follows the logits has its place by them
        # A compiled program has fixed shapes, and P depends on the labels: it computes all positions.
        needs_labelled_only = skip_logits and masked_positions is None and labels is not None
        if needs_labelled_only and not torch.compiler.is_compiling() and not self.has_watched_states():
            tokens = input_ids if inputs_embeds is None else inputs_embeds
            masked_positions, labels = labelled_positions(labels, rows_and_tokens=tokens.shape[:2])
        outputs = self.base_model(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            positions=masked_positions,
            return_dict=True,
            **kwargs,
        )
        return outputs, *self.mlm.logits_and_loss(outputs.last_hidden_state, labels, num_items, skip_logits)

    def has_watched_states(self):
        """Whether a hook may read hidden states from which the loss would leave positions out."""
        encoder = self.base_model.encoder
        modules = [self.base_model, encoder, *encoder.layer[-1].modules(), *self.mlm.modules()]
        return has_hook_of_all_modules() or any(map(is_watched, modules))


class D2lBertModel(D2lBertPreTrainedModel):
    """The encoder alone (section 15.8.4), with the hidden layer for [CLS] on top unless `add_pooling_layer=False`."""

    def __init__(self, config: D2lBertConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = D2lBertEmbeddings(config)
        self.encoder = D2lBertEncoder(config)
        self.pooler = D2lBertPooler(config) if add_pooling_layer else None
        self.post_init()

    # Collects hidden states and attentions on request. Tied, the last hidden states would be `last_hidden_state`,
    # which has fewer positions if `positions` are given.
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        sequence_ids: torch.Tensor | None = None,
        cls_positions: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | BaseModelOutputWithPooling:
        """
        Args:
            input_ids: token ids (B, T); or give `inputs_embeds` (B, T, H).
            attention_mask: 1 for a real token, 0 for padding (B, T).
            token_type_ids: 0 in segment A, 1 in segment B (B, T).
            position_ids: positions (B, T); they restart with every sequence of a packed row.
            sequence_ids: in a packed row, the number of the sequence each token belongs to, from 1; 0 is padding
                (B, T). A token attends to its own sequence only, and `attention_mask` is not read.
            cls_positions: in a packed row, where each sequence's [CLS] stands (B, S). Unused slots may hold any
                position of the row.
            positions: the positions of the hidden states to return (B, P), by default all. The last block then
                computes these positions and [CLS] only, unless hidden states or attentions are requested.

        Returns:
            `last_hidden_state` (B, T, H), or (B, P, H) with `positions`, and `pooler_output` (B, H), or
            (B, S, H) with `cls_positions`.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds` is given, a row is longer than
                `max_position_embeddings`, or positions are not (B, P).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden_states = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
        same_sequence = None
        if sequence_ids is not None:
            # Padding, as the sequence 0, attends to itself. A padding mask would leave its queries without a key, for
            # which the attention of a GPU gives NaN.
            attention_mask = None

            def same_sequence(row, head, query, key):
                return sequence_ids[row, query] == sequence_ids[row, key]

        # A mask that masks nothing is left out. To look for padding makes the CPU wait for a GPU: there it is not done
        # in training, where rows without padding are to come without a mask.
        looks_for_padding = attention_mask is None or is_on_cpu(hidden_states) or not self.training
        mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            and_mask_function=same_sequence,
            allow_is_bidirectional_skip=looks_for_padding,
        )
        returns_hidden_states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        returns_attentions = kwargs.get("output_attentions", self.config.output_attentions)
        has_mask_at_positions = mask is None or isinstance(mask, torch.Tensor)  # flex attention's is no tensor
        needs_all_positions = returns_hidden_states or returns_attentions or not has_mask_at_positions
        if positions is not None and not needs_all_positions:
            cls_states, hidden_states = self.encode_at(positions, cls_positions, hidden_states, mask, **kwargs)
        else:
            hidden_states = self.encoder(hidden_states, mask, **kwargs)
            cls_states = hidden_states[:, :1] if cls_positions is None else states_at(hidden_states, cls_positions)
            if positions is not None:
                hidden_states = states_at(hidden_states, positions)
        pooled = None if self.pooler is None else self.pooler(cls_states)  # (B, S, H)
        if pooled is not None and cls_positions is None:
            pooled = pooled.squeeze(1)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def encode_at(self, positions, cls_positions, hidden_states, mask, **kwargs):
        """
        Run the encoder; its last block leaves out all positions but those of [CLS] and `positions` (B, P).

        Returns:
            The states of [CLS] (B, S, H), and those at `positions` (B, P, H).
        """
        rows = hidden_states.shape[0]
        if cls_positions is None:
            # [CLS] is at position 0. Without a pooler nothing reads its state: then S is 0.
            cls_count = 0 if self.pooler is None else 1
            cls_positions = positions.new_zeros((rows, cls_count))
        cls_and_positions = torch.cat([cls_positions, checked_positions(positions, rows)], 1)  # (B, S + P)
        states = self.encoder(hidden_states, mask, cls_and_positions, **kwargs)  # (B, S + P, H)
        cls_states, states_at_positions = states.tensor_split([cls_positions.shape[1]], 1)
        return cls_states, states_at_positions


@dataclass
class D2lBertForPreTrainingOutput(ModelOutput):
    """
    loss: the sum of `mlm_loss` and `nsp_loss`, or the only one whose labels were given.
    prediction_logits: (B, P, V) with `masked_positions`, else (B, T, V); None with labels and `skip_logits`.
    seq_relationship_logits: (B, 2), or (B, S, 2) for packed rows; column 0 says that B follows A.
    hidden_states: `num_hidden_layers + 1` tensors (B, T, H), on request.
    attentions: `num_hidden_layers` tensors (B, N, T, T), on request.
    mlm_loss, nsp_loss: the two terms of `loss`; None without labels, and not in a tuple (`return_dict=False`).
    """

    loss: torch.FloatTensor | None = None
    prediction_logits: torch.FloatTensor | None = None
    seq_relationship_logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    mlm_loss: torch.FloatTensor | None = None
    nsp_loss: torch.FloatTensor | None = None


class D2lBertForPreTraining(D2lBertPreTrainedModel):
    """The encoder with both pretraining heads (section 15.8.6): what the training loop trains and saves."""

    _tied_weights_keys = {"mlm.decoder.weight": "bert.embeddings.word_embeddings.weight"}
    # False: Transformers' Trainer passes no `num_items_in_batch`. It counts the labels of a step but not the pairs:
    # with one count alone, the weights of the two losses would depend on how a step is split into micro-batches.
    # `d2l_bert.PretrainingLoss` passes both.
    accepts_loss_kwargs = False

    def __init__(self, config: D2lBertConfig):
        super().__init__(config)
        self.bert = D2lBertModel(config)
        self.mlm = MaskLM(config)
        self.nsp = NextSentencePred(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        masked_positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
        sequence_ids: torch.Tensor | None = None,
        cls_positions: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        num_pairs_in_batch: torch.Tensor | int | None = None,
        skip_logits: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | D2lBertForPreTrainingOutput:
        """
        The arguments that are not here are as in `D2lBertModel`.

        Args:
            masked_positions: the positions to predict (B, P); the MLM head runs at these positions only. Without
                `masked_positions` the head runs at the labelled positions if `skip_logits`, else at all positions.
            labels: the true token ids, -100 where nothing is predicted: (B, P) with `masked_positions`, else (B, T).
            next_sentence_label: 0 if B follows A, 1 if B is random, -100 for none: (B,), or (B, S) for packed rows.
            num_items_in_batch, num_pairs_in_batch: the number of predicted tokens and of pairs in the whole optimizer
                step. Each loss is then a sum divided by its number, so that the losses of micro-batches add up.
            skip_logits: with `labels`, compute the MLM loss without keeping `prediction_logits`, which are then None:
                faster, and with less memory. By default true in training mode, false in evaluation mode and for a
                tuple.
            return_dict: False for a tuple, which has no place for what is None; by default `config.return_dict`.

        Returns:
            `D2lBertForPreTrainingOutput`, or a tuple.
        """
        # Not by `can_return_tuple`, as in other heads: `masked_lm` must know whether a tuple is returned.
        if return_dict is None:
            return_dict = self.config.return_dict
        outputs, prediction_logits, mlm_loss = self.masked_lm(
            masked_positions,
            labels,
            num_items_in_batch,
            skip_logits,
            return_dict,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            sequence_ids=sequence_ids,
            cls_positions=cls_positions,
            **kwargs,
        )
        seq_relationship_logits = self.nsp(outputs.pooler_output)
        nsp_loss = None
        loss = mlm_loss
        if next_sentence_label is not None:
            nsp_loss = cross_entropy(seq_relationship_logits, next_sentence_label, num_pairs_in_batch)
            loss = nsp_loss if loss is None else loss + nsp_loss
        if not return_dict:
            mlm_loss = nsp_loss = None  # a tuple has the entries of stock BERT's and no more
        found = D2lBertForPreTrainingOutput(
            loss=loss,
            mlm_loss=mlm_loss,
            nsp_loss=nsp_loss,
            prediction_logits=prediction_logits,
            seq_relationship_logits=seq_relationship_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return found if return_dict else found.to_tuple()


class D2lBertForMaskedLM(D2lBertPreTrainedModel):
    """The encoder with the MLM head (section 15.8.5.1): what `pipeline("fill-mask")` loads."""

    _tied_weights_keys = {"mlm.decoder.weight": "bert.embeddings.word_embeddings.weight"}

    def __init__(self, config: D2lBertConfig):
        super().__init__(config)
        self.bert = D2lBertModel(config, add_pooling_layer=False)
        self.mlm = MaskLM(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        masked_positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        skip_logits: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | MaskedLMOutput:
        """
        The arguments that are not here are as in `D2lBertModel`.

        Args:
            masked_positions, labels, num_items_in_batch, skip_logits, return_dict: as in `D2lBertForPreTraining`.

        Returns:
            `MaskedLMOutput`, or a tuple, with `logits` (B, P, V) if `masked_positions` are given, else (B, T, V), or
            None if `skip_logits`.
        """
        # Not by `can_return_tuple`, as in other heads: `masked_lm` must know whether a tuple is returned.
        if return_dict is None:
            return_dict = self.config.return_dict
        outputs, logits, loss = self.masked_lm(
            masked_positions,
            labels,
            num_items_in_batch,
            skip_logits,
            return_dict,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        found = MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
        return found if return_dict else found.to_tuple()


class D2lBertForNextSentencePrediction(D2lBertPreTrainedModel):
    """The encoder with the NSP head (section 15.8.5.2). `config.id2label` has the names of the two labels."""

    def __init__(self, config: D2lBertConfig):
        has_default_names = config.id2label == {0: "LABEL_0", 1: "LABEL_1"}  # which Transformers gives two labels
        if has_default_names:
            config = copy.deepcopy(config)
            config.update({"id2label": dict(enumerate(NSP_LABELS)), "label2id": {"IsNext": 0, "NotNext": 1}})
        super().__init__(config)
        self.bert = D2lBertModel(config)
        self.nsp = NextSentencePred(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | NextSentencePredictorOutput:
        """
        The arguments that are not here are as in `D2lBertModel`.

        Args:
            labels: 0 if B follows A, 1 if B is random (B,).

        Returns:
            `NextSentencePredictorOutput` with `logits` (B, 2); column 0 says that B follows A.
        """
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.nsp(outputs.pooler_output)
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return NextSentencePredictorOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class D2lBertClassifier(D2lBertPreTrainedModel):
    """What sequence and token classification share: the encoder and a linear layer, with a score for each class."""

    has_pooler = True

    def __init__(self, config: D2lBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = D2lBertModel(config, add_pooling_layer=self.has_pooler)
        self.dropout = head_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class D2lBertForSequenceClassification(D2lBertClassifier):
    """The encoder with a linear layer on the pooled [CLS] (section 16.6): classes or numbers for a text or a pair."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | SequenceClassifierOutput:
        """
        The arguments that are not here are as in `D2lBertModel`. C is `config.num_labels`.

        Args:
            labels: as `config.problem_type` says. `"single_label_classification"` (cross-entropy): classes (B,), -100
                for none. `"multi_label_classification"` (binary cross-entropy): 0 or 1 for each class (B, C).
                `"regression"` (squared error): numbers (B, C).
                If C is 1, labels may be (B,) instead of (B, 1). If `problem_type` is None, the first labels set it, as
                in Transformers: regression if C is 1, else single-label for integers and multi-label for floats.
            num_items_in_batch: labels in the whole optimizer step, as in `cross_entropy`.

        Returns:
            `SequenceClassifierOutput` with `logits` (B, C).

        Raises:
            ValueError: the labels have another shape.
        """
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.pooler_output))
        loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def loss(self, logits, labels, num_items=None):
        """The loss for logits (B, C) that `config.problem_type` names; sets `config.problem_type` if it is None."""
        if self.config.problem_type is None:
            if self.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.dtype in (torch.long, torch.int):
                self.config.problem_type = "single_label_classification"
            else:
                self.config.problem_type = "multi_label_classification"
        if self.config.problem_type == "single_label_classification":
            return cross_entropy(logits, labels, num_items)
        if labels.shape != logits.shape and not (self.num_labels == 1 and labels.shape == logits.shape[:1]):
            raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}")
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = labels.reshape(logits.shape).to(logits.dtype)
        if self.config.problem_type == "regression":
            losses = (logits - labels) ** 2
        else:
            losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return losses.mean() if num_items is None else losses.sum() / num_items


class D2lBertForTokenClassification(D2lBertClassifier):
    """The encoder with a linear layer on every token (section 16.6.3): tagging."""

    has_pooler = False

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | TokenClassifierOutput:
        """
        The arguments that are not here are as in `D2lBertModel`. C is `config.num_labels`.

        Args:
            labels: the class of each token (B, T), -100 for none.
            num_items_in_batch: labels in the whole optimizer step, as in `cross_entropy`.

        Returns:
            `TokenClassifierOutput` with `logits` (B, T, C).
        """
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class D2lBertForQuestionAnswering(D2lBertPreTrainedModel):
    """The encoder with two scores for each token (section 16.6.4): for the start and for the end of the answer."""

    def __init__(self, config: D2lBertConfig):
        super().__init__(config)
        self.bert = D2lBertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | QuestionAnsweringModelOutput:
        """
        The arguments that are not here are as in `D2lBertModel`.

        Args:
            start_positions, end_positions: the first and the last token of the answer (B,). A position at T or beyond,
                where the row was truncated, does not count in the loss.
            num_items_in_batch: questions in the whole optimizer step, as in `cross_entropy`. Trainer does not count
                questions: under Trainer all micro-batches should have the same size.

        Returns:
            `QuestionAnsweringModelOutput` with `start_logits` and `end_logits` (B, T). The loss is the mean of the
            losses of start and end.
        """
        outputs = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)  # (B, T) each
        # By its name, Transformers gives this class the loss of question answering; None without positions.
        loss = self.loss_function(
            start_logits, end_logits, start_positions, end_positions, num_items_in_batch=num_items_in_batch
        )
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class D2lBertForMultipleChoice(D2lBertPreTrainedModel):
    """The encoder with one score on the pooled [CLS] of each choice; the highest score is the answer."""

    def __init__(self, config: D2lBertConfig):
        super().__init__(config)
        self.bert = D2lBertModel(config)
        self.dropout = head_dropout(config)
        # Not named "classifier", or other heads would load this layer, whose shape differs, as theirs.
        self.scorer = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | MultipleChoiceModelOutput:
        """
        The arguments that are not here are as in `D2lBertModel`, with C choices in each row: (B, C, T) for (B, T).

        Args:
            labels: the number of the right choice (B,), -100 for none.
            num_items_in_batch: labels in the whole optimizer step, as in `cross_entropy`.

        Returns:
            `MultipleChoiceModelOutput` with `logits` (B, C).
        """

        def flat(tensor):
            """Every choice as a row: (B * C, T)."""
            return None if tensor is None else tensor.flatten(0, 1)

        outputs = self.bert(
            input_ids=flat(input_ids),
            attention_mask=flat(attention_mask),
            token_type_ids=flat(token_type_ids),
            position_ids=flat(position_ids),
            inputs_embeds=flat(inputs_embeds),
            return_dict=True,
            **kwargs,
        )
        rows_and_choices = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        logits = self.scorer(self.dropout(outputs.pooler_output)).view(rows_and_choices)
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = [
    "D2lBertForMaskedLM",
    "D2lBertForMultipleChoice",
    "D2lBertForNextSentencePrediction",
    "D2lBertForPreTraining",
    "D2lBertForPreTrainingOutput",
    "D2lBertForQuestionAnswering",
    "D2lBertForSequenceClassification",
    "D2lBertForTokenClassification",
    "D2lBertModel",
    "D2lBertPreTrainedModel",
]
