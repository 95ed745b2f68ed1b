"""An unforked Hugging Face causal LM and its tree KV cache: the only file that touches cache and mask interfaces.

A row of the cache holds one sequence. Its first ``length`` slots are committed tokens in order; a forward appends the
nodes of a draft tree behind them, ``commit`` gathers the accepted nodes to the front, and the rest is forgotten by
not being counted. Buffers are allocated once and written in place (``docs/decisions/0003-cache.md``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from psutil import virtual_memory
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_lab.attention import PACKED_ATTENTION, causal_mark
from specdec_lab.errors import InputError, NoRoomError, UnsupportedModelError
from specdec_lab.tree import DraftTree, chain

Exact = Literal["off", "fixed_shape"]

QUERY_BUCKETS = (8, 16, 32)
"""Query rows that ``exact=fixed_shape`` pads a verify forward to; larger trees round up to a multiple of the last."""

KV_MULTIPLE = 512
"""KV length that ``exact=fixed_shape`` rounds up to, in slots."""

PREFILL_CHUNK = 512
"""Prompt tokens per prefill forward; chunk borders depend on the prompt alone."""

CAUSAL_CHUNK = 4096
"""Prompt tokens of the first prefill forward where it needs no mask, which is a quarter faster at this length."""

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

SLOT_BOUND_MODELS = {
    "doge": "its attention drops keys by their number of cache slots",
    "gpt_neo": "its local layers window by cache slot",
}
"""Models with a window that no mask can move to positions; the set-up's own check is too short to show it."""


@dataclass(frozen=True)
class LayerShape:
    """Shape of one attention layer's cache, as the model itself writes it."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class _ShapeProbe:
    """A cache that keeps nothing and remembers the shapes it was given."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class TreeCache:
    """Preallocated keys and values for a fixed number of rows, written in place at each row's own offset.

    Layers of one shape share one buffer ``[layers, rows, kv_heads, capacity, head_dim]``, so that a commit moves the
    accepted slots of all of them in one gather.
    """

    is_compileable = False

    def __init__(self, layers: Mapping[int, LayerShape], rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        members: dict[LayerShape, list[int]] = {}
        for layer_idx, shape in sorted(layers.items()):
            members.setdefault(shape, []).append(layer_idx)
        self._keys: dict[LayerShape, Tensor] = {}
        self._values: dict[LayerShape, Tensor] = {}
        self._home: dict[int, tuple[Tensor, Tensor]] = {}
        for shape, layer_ids in members.items():
            lead = (len(layer_ids), rows, shape.kv_heads, capacity)
            keys = torch.zeros(*lead, shape.key_dim, dtype=shape.dtype, device=shape.device)
            values = torch.zeros(*lead, shape.value_dim, dtype=shape.dtype, device=shape.device)
            self._keys[shape], self._values[shape] = keys, values
            for at, layer_idx in enumerate(layer_ids):
                self._home[layer_idx] = (keys[at], values[at])
        self._first, self._last, self._visible = 0, rows, 0
        self._starts: list[int | None] = [None] * rows
        self._ragged: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def _buffers(self) -> list[Tensor]:
        return [*self._keys.values(), *self._values.values()]

    @property
    def bytes(self) -> int:
        """Bytes of all key and value buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def holds(self, rows: int, capacity: int) -> bool:
        """Return whether there is room for so many rows of so many slots."""
        return self.rows >= rows and self.capacity >= capacity

    @property
    def address(self) -> tuple[int, ...]:
        """Where the buffers lie in memory: it changes only when they are allocated anew."""
        return tuple(buffer.data_ptr() for buffer in self._buffers)

    def aim(self, first: int, starts: Sequence[int | None], visible: int) -> None:
        """Set where the next forward writes.

        Args:
            first: the first row of the forward; the others follow it.
            starts: first slot to write per row; ``None`` for a row that only pads the forward and keeps what it holds.
            visible: slots that the forward sees.
        """
        self._first, self._last, self._starts, self._visible = first, first + len(starts), list(starts), visible
        self._ragged = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``[rows, kv_heads, nodes, head_dim]`` at each row's start and return the visible slots.

        transformers 5.17 and 5.24 call this with different further arguments, none of which matters here.
        """
        keys, values = (buffer[self._first : self._last] for buffer in self._home[layer_idx])
        nodes, start = key.shape[2], self._starts[0]
        if len(self._starts) == 1 and start is not None:
            keys[:, :, start : start + nodes] = key
            values[:, :, start : start + nodes] = value
        else:  # one indexed write of all rows takes a tenth of the time of a slice per row; scatter_ is far slower
            rows, slots = self._ragged_slots(nodes, keys.device)
            keys.transpose(1, 2)[rows[:, None], slots] = key[rows].transpose(1, 2)  # [rows, nodes, kv_heads, head_dim]
            values.transpose(1, 2)[rows[:, None], slots] = value[rows].transpose(1, 2)
        return keys[:, :, : self._visible], values[:, :, : self._visible]

    def _ragged_slots(self, nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows that are written, ``[rows]``, and their slots, ``[rows, nodes]``; made once per forward."""
        if device not in self._ragged:
            live = [(row, start) for row, start in enumerate(self._starts) if start is not None]
            rows, starts = torch.tensor(live, device=device).T
            self._ragged[device] = (rows, starts[:, None] + torch.arange(nodes, device=device))
        return self._ragged[device]

    def gather(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Move ``slots`` of a row, in order, to ``start, start + 1, ...`` in every layer."""
        for buffer in self._buffers:
            chosen = torch.tensor(slots, device=buffer.device)
            buffer[:, row, :, start : start + len(slots)] = buffer[:, row, :, chosen]

    @torch.inference_mode()  # the buffers may have been made in it
    def clear(self, row: int, start: int = 0) -> None:
        """Zero a row's slots from ``start`` on, so that a NaN left there reaches nobody through a masked slot."""
        for buffer in self._buffers:
            buffer[:, row, :, start:] = 0

    def committed(self, row: int, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return ``{layer: (keys, values)}`` of a row's first ``length`` slots, ``[kv_heads, length, head_dim]``."""
        return {layer: (keys[row, :, :length], values[row, :, :length]) for layer, (keys, values) in self._home.items()}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the slots before the next write of the first aimed row (models ask only when not told positions)."""
        return self._starts[0] or 0

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops old slots: windows are a matter of the mask, so that a rejected node can be forgotten."""
        return [False] * len(self._home)


@dataclass(frozen=True)
class TargetOutput:
    """Result of one forward over several rows.

    Attributes:
        logits: ``[rows, width, vocab]``; rows are padded to the widest tree, padding is never read.
        features: ``{layer: [rows, width, hidden]}`` for the layers that were asked for.
        at: index into the first axis per cache row.
        sizes: nodes per cache row.
    """

    logits: Tensor
    features: dict[int, Tensor]
    at: dict[int, int]
    sizes: dict[int, int]

    def row_logits(self, row: int) -> Tensor:
        """Return a row's logits, ``[nodes, vocab]``."""
        return self.logits[self.at[row], : self.sizes[row]]

    def row_features(self, row: int) -> dict[int, Tensor]:
        """Return a row's features, ``{layer: [nodes, hidden]}``."""
        return {layer: states[self.at[row], : self.sizes[row]] for layer, states in self.features.items()}


class Target:
    """A causal LM that checks draft trees.

    Args:
        model: any decoder-only ``transformers`` model with full or sliding-window attention, in evaluation mode.
        tokenizer: its tokenizer; ``None`` for work on token ids alone.
        name: how results call it.
        exact: ``fixed_shape`` pads query rows and KV length of every forward to fixed sizes, so that low-precision
            rounding does not depend on how many nodes a strategy offers.

    Raises:
        UnsupportedModelError: encoder-decoder, state-space or linear-attention layers, flash attention, or a model
            whose logits through the tree cache differ from its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "target",
        exact: Exact = "off",
    ) -> None:
        self.model, self.tokenizer, self.name, self.exact = model, tokenizer, name, exact
        refuse_unsupported(model)
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._can_keep_logits = "logits_to_keep" in parameters
        self._windows = _layer_windows(model.config)
        self._cache: TreeCache | None = None
        self._lengths: list[int] = []
        self._pending: dict[int, DraftTree] = {}
        self.lease = 0
        self._layers = self._probe_layers()
        self._groups = self._query_groups()
        self._check_against_plain_forward()

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where token ids go in and logits come out."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the attention, and so of the masks."""
        return next(iter(self._layers.values())).dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer, padding included; token ids are smaller."""
        return self.model.config.get_text_config().vocab_size

    @property
    def depth(self) -> int:
        """Decoder layers: its hidden states are 0, the embedding, to this one, after the last norm."""
        return self.model.config.get_text_config().num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        return self.model.config.get_text_config().hidden_size

    @property
    def max_length(self) -> int | None:
        """Most tokens of prompt and output that the model has positions for; ``None`` if it states no limit.

        A LongRoPE model rotates all keys anew once a text passes its original length, which cached keys cannot follow
        and which one row of a batch would do to all: here such a model ends at that length.
        """
        config = self.model.config.get_text_config()
        stated = getattr(config, "rope_parameters", None) or {}
        ropes = [stated, *(value for value in stated.values() if isinstance(value, dict))]  # one, or one per layer type
        limits = [rope.get("original_max_position_embeddings") for rope in ropes if rope.get("rope_type") == "longrope"]
        limits.append(getattr(config, "max_position_embeddings", None))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end an answer, from the generation config, the model config and the tokenizer."""
        stated = [
            getattr(self.model.generation_config, "eos_token_id", None),
            getattr(self.model.config.get_text_config(), "eos_token_id", None),
            getattr(self.tokenizer, "eos_token_id", None),
        ]
        ids = {token for value in stated for token in (value if isinstance(value, list) else [value])}
        return frozenset(token for token in ids if token is not None)

    @property
    def parameter_count(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, tied ones counted once."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    @property
    def kv_bytes(self) -> int:
        """Bytes of the allocated cache buffers."""
        return 0 if self._cache is None else self._cache.bytes

    def set_attention(self, implementation: str | None) -> None:
        """Switch the model's attention function, through transformers' own method; masks follow."""
        self.model.set_attn_implementation(implementation or "eager")
        refuse_unsupported(self.model)
        self._groups = self._query_groups()

    def synchronize(self) -> None:
        """Wait until the devices of all layers have done the work handed to them, so that a clock can be read."""
        for device in {self.device, *(shape.device for shape in self._layers.values())}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    # --- the cache --------------------------------------------------------------------------------------------------

    def allocate(self, rows: int, tokens: int, tree_nodes: int) -> None:
        """Make room for ``rows`` sequences of ``tokens`` tokens and one tree of ``tree_nodes`` behind each.

        Buffers that are already large enough are kept; every row is empty afterwards. ``lease`` counts the calls, so
        that whoever made an earlier one can tell that the rows are no longer its own.

        Raises:
            NoRoomError: the device has not enough free memory for the buffers.
        """
        self.lease += 1
        capacity = tokens + self._padded_nodes(tree_nodes)
        if self.exact == "fixed_shape":  # the last prefill chunk is padded too
            capacity = _round_up(tokens + max(self._padded_nodes(tree_nodes), QUERY_BUCKETS[-1]), KV_MULTIPLE)
        if self._cache is None or not self._cache.holds(rows, capacity):
            self._cache = None  # frees the old buffers before the new ones are made
            refuse_without_memory(self._layers.values(), rows, capacity)
            self._cache = TreeCache(self._layers, rows, capacity)
        self._lengths = [0] * self._cache.rows
        self._pending = {}

    @property
    def cache(self) -> TreeCache:
        """The allocated cache.

        Raises:
            RuntimeError: ``allocate`` was not called.
        """
        if self._cache is None:
            raise RuntimeError("the target has no cache yet; call allocate first")
        return self._cache

    def length(self, row: int) -> int:
        """Return how many tokens of a row are committed."""
        return self._lengths[row]

    def reset(self, row: int, *, clear: bool = False) -> None:
        """Forget a row; ``clear`` also zeroes it, which is needed only after non-finite values."""
        self._lengths[row] = 0
        self._pending.pop(row, None)
        if clear:
            self.cache.clear(row)

    def forget_drafts(self, row: int) -> None:
        """Zero what lies behind a row's committed tokens, where a draft has left values that are not finite."""
        self._pending.pop(row, None)
        self.cache.clear(row, self._lengths[row])

    @torch.inference_mode()
    def prefill(self, row: int, tokens: Sequence[int], feature_layers: Sequence[int] = ()) -> TargetOutput:
        """Run a prompt through an empty row in chunks and commit all of it.

        Returns:
            The last token's logits, ``[1, 1, vocab]``, and the features of every prompt token.

        Raises:
            NoRoomError: the prompt is empty or longer than the row.
        """
        if self._lengths[row]:
            raise RuntimeError(f"row {row} holds {self._lengths[row]} tokens; reset it before a new prompt")
        if not tokens:
            raise NoRoomError("the prompt has no tokens; give at least one")
        if len(tokens) > self.cache.capacity:
            raise NoRoomError(f"the prompt has {len(tokens)} tokens, the row {self.cache.capacity} slots")
        logits, parts = torch.empty(0), []
        start = 0
        while start < len(tokens):
            causal = start == 0 and self._prefills_causally
            part = tokens[start : start + (CAUSAL_CHUNK if causal else PREFILL_CHUNK)]
            tree = {row: chain(part[0], part[1:])}
            logits, features = self._forward(tree, feature_layers, last_logits_only=True, causal=causal)
            parts.append({layer: states[:, : len(part)] for layer, states in features.items()})
            start += len(part)
            self._lengths[row] = start
        joined = {layer: torch.cat([part[layer] for part in parts], dim=1) for layer in feature_layers}
        return TargetOutput(logits, joined, {row: 0}, {row: len(tokens)})

    @torch.inference_mode()
    def forward(self, trees: Mapping[int, DraftTree], feature_layers: Sequence[int] = ()) -> TargetOutput:
        """Run one tree per cache row behind that row's committed tokens.

        The nodes stay pending until ``commit``; a second ``forward`` forgets them.

        Raises:
            NoRoomError: a row has no room for its tree.
        """
        width = self._padded_nodes(max(len(tree) for tree in trees.values()))
        for row in trees:
            if self._lengths[row] + width > self.cache.capacity:
                raise NoRoomError(f"row {row} holds {self._lengths[row]} tokens and has no room for {width} nodes")
        logits, features = self._forward(trees, feature_layers)
        self._pending = dict(trees)
        first = min(trees)
        at = {row: row - first for row in trees}
        return TargetOutput(logits, features, at, {row: len(tree) for row, tree in trees.items()})

    @torch.inference_mode()
    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Keep these nodes of the last forward, root first, and forget the others.

        Raises:
            ValueError: a path that is not a path of the row's pending tree from its root.
        """
        for row, path in paths.items():
            tree = self._pending.get(row)
            if tree is None or tuple(path) != tree.path_to(path[-1]):
                raise ValueError(f"row {row} has no pending path {tuple(path)}")
            start = self._lengths[row]
            if path[-1] != len(path) - 1:  # accepted nodes are scattered
                self.cache.gather(row, start, [start + node for node in path])
            self._lengths[row] = start + len(path)
        self._pending = {}

    # --- whole texts ------------------------------------------------------------------------------------------------

    def states(
        self, ids: Tensor, lengths: Tensor, layers: Sequence[int], *, differentiable: bool = False
    ) -> dict[int, Tensor]:
        """Run whole texts side by side and return their hidden states, as a head is trained on them.

        The cache is neither used nor changed. The result is no tensor of inference mode, so that autograd can keep it.

        Args:
            ids: texts padded on the right, ``[rows, tokens]``; what stands in the padding has no influence.
            lengths: tokens of each row without padding, ``[rows]``, at least 1.
            layers: hidden states to return, counted as ``Drafter.feature_layers`` counts them.
            differentiable: whether they keep their graph, for weights of the model that are trained.

        Returns:
            ``{layer: [rows, tokens, hidden]}`` on the model's devices, zero in the padding.

        Raises:
            NoRoomError: the texts are longer than the model has positions for.
        """
        rows, width = ids.shape
        if self.max_length is not None and width > self.max_length:
            raise NoRoomError(f"a text of {width} tokens is longer than the model's {self.max_length} positions")
        at = torch.arange(width, device=ids.device)
        padding = at >= lengths.to(ids.device)[:, None]  # [rows, tokens]
        tokens = torch.where(padding, ids[:, :1], ids)  # padding is a token of the row's own text, as in _forward
        kept = {"logits_to_keep": 1} if self._can_keep_logits else {}
        with nullcontext() if differentiable else torch.inference_mode():
            masks = self._text_masks(rows, width)
            _, features = self._run(tokens, at.expand(rows, width), masks, layers, use_cache=False, **kept)
        return {
            layer: states.masked_fill(padding[:, :, None].to(states.device), 0) for layer, states in features.items()
        }

    def check_states(self, layers: Sequence[int], field: str) -> None:
        """Refuse hidden states that the model does not have.

        Args:
            layers: counted as ``Drafter.feature_layers`` counts them.
            field: the setting that names them.

        Raises:
            InputError: with that field.
        """
        strange = [layer for layer in layers if not -self.depth - 1 <= layer <= self.depth]
        if strange:
            remedy = (
                f"{self.name} has {self.depth} layers: name hidden states from 0 to {self.depth}, or from the end as -1"
            )
            raise InputError(field, strange, remedy)

    # --- one forward ------------------------------------------------------------------------------------------------

    def _forward(
        self,
        trees: Mapping[int, DraftTree],
        feature_layers: Sequence[int],
        *,
        last_logits_only: bool = False,
        causal: bool = False,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        first, last = min(trees), max(trees) + 1
        width = self._padded_nodes(max(len(tree) for tree in trees.values()))
        starts = [self._lengths[row] if row in trees else 0 for row in range(first, last)]
        visible = max(starts) + width
        if self.exact == "fixed_shape":
            visible = min(_round_up(visible, KV_MULTIPLE), self.cache.capacity)
        tokens = torch.zeros(last - first, width, dtype=torch.long)
        positions = torch.zeros(last - first, width, dtype=torch.long)
        blocks: list[Tensor | None] = []
        for at, row in enumerate(range(first, last)):
            tree = trees.get(row)
            if tree is None:
                blocks.append(None)
                continue
            tokens[at] = tree.tokens[0]  # padding is a token of the row's own text: token 0 could embed to NaN
            tokens[at, : len(tree)] = torch.tensor(tree.tokens)
            positions[at, : len(tree)] = torch.tensor(tree.depths) + starts[at]
            blocks.append(None if causal else tree.ancestor_mask())
        masks = causal_mark(self.device) if causal else self._masks(starts, blocks, positions, visible)
        kept: dict[str, Any] = {}
        if last_logits_only and self._can_keep_logits:
            kept["logits_to_keep"] = torch.tensor([len(trees[first]) - 1], device=self.device)
        self.cache.aim(first, [self._lengths[row] if row in trees else None for row in range(first, last)], visible)
        cached = {"use_cache": True, self._cache_argument: self.cache}
        logits, features = self._run(tokens, positions, masks, feature_layers, **cached, **kept)
        if last_logits_only and not self._can_keep_logits:
            logits = logits[:, len(trees[first]) - 1 : len(trees[first])]
        return logits, features

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Tensor | dict[str, Tensor],
        feature_layers: Sequence[int],
        **arguments: Any,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Call the model and return its logits and features: decoding and training read hidden states here alone."""
        output = self.model(
            input_ids=tokens.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=masks,
            output_hidden_states=bool(feature_layers),
            **arguments,
        )
        return output.logits, {layer: output.hidden_states[layer] for layer in feature_layers}

    def _masks(
        self, starts: Sequence[int], blocks: Sequence[Tensor | None], positions: Tensor, visible: int
    ) -> Tensor | dict[str, Tensor]:
        """Build the additive masks of one forward, ``[rows, 1, width, visible]``, one per kind of layer.

        A node sees the committed slots and its ancestors; a padding row sees itself alone, so that no softmax is over
        nothing. Masks are built anew each time: a reused buffer could show a node what an earlier tree left in it.
        """
        width = positions.shape[1]
        seen = torch.zeros(len(starts), width, visible, dtype=torch.bool)
        for at, (start, block) in enumerate(zip(starts, blocks, strict=True)):
            nodes = 0 if block is None else block.shape[0]
            if block is not None:
                seen[at, :nodes, :start] = True
                seen[at, :nodes, start : start + nodes] = block
            seen[at, nodes:, start + nodes : start + width] = torch.eye(width - nodes, dtype=torch.bool)
        masks: dict[str, Tensor] = {}
        for kind, window in self._windows.items():
            near = seen if window is None else seen & _within_window(starts, blocks, positions, visible, window)
            mask = torch.zeros(near.shape, dtype=self.dtype).masked_fill_(~near, torch.finfo(self.dtype).min)
            masks[kind] = mask.repeat(1, self._groups, 1)[:, None].to(self.device)  # [rows, 1, groups * width, visible]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _text_masks(self, rows: int, width: int) -> Tensor | dict[str, Tensor]:
        """Return the masks of whole texts side by side, ``[rows, 1, width, width]``; all rows share one in memory.

        Padding stands behind a text, where causal attention does not look, so that the mask need not know of it.
        """
        if self._attends_causally:
            return causal_mark(self.device)
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        masks = self._masks([0], [causal], torch.arange(width)[None], width)
        if isinstance(masks, Tensor):
            return masks.expand(rows, -1, -1, -1)
        return {kind: mask.expand(rows, -1, -1, -1) for kind, mask in masks.items()}

    @property
    def _attends_causally(self) -> bool:
        """Whether a text that starts in an empty row needs no mask."""
        windowed = any(window is not None for window in self._windows.values())
        return self.model.config._attn_implementation == PACKED_ATTENTION and not windowed

    @property
    def _prefills_causally(self) -> bool:
        """Whether a prompt's first chunk can run without a mask."""
        return self.exact == "off" and self._attends_causally

    def _padded_nodes(self, nodes: int) -> int:
        if self.exact == "off":
            return nodes
        return next((size for size in QUERY_BUCKETS if nodes <= size), _round_up(nodes, QUERY_BUCKETS[-1]))

    # --- set-up -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _probe_layers(self) -> dict[int, LayerShape]:
        probe = _ShapeProbe()
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        mask = torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=self.device)
        masks = mask if len(self._windows) == 1 else dict.fromkeys(self._windows, mask)
        try:
            self.model(
                input_ids=one, position_ids=one, attention_mask=masks, use_cache=True, **{self._cache_argument: probe}
            )
        except Exception as error:
            raise UnsupportedModelError(_unsupported(self.model, f"it cannot run on a tree cache ({error})")) from error
        if not probe.layers:
            raise UnsupportedModelError(_unsupported(self.model, "it never wrote keys and values to its cache"))
        return probe.layers

    def _query_groups(self) -> int:
        """How often a mask row is repeated: query heads per KV head where the packed attention runs, else 1."""
        if self.model.config._attn_implementation != PACKED_ATTENTION:
            return 1
        query_heads = self.model.config.get_text_config().num_attention_heads
        groups = {query_heads // shape.kv_heads for shape in self._layers.values()}
        return groups.pop() if len(groups) == 1 else 1

    @torch.inference_mode()
    def _check_against_plain_forward(self) -> None:
        """Compare a prefill and a forked tree with the model's own forward, so that no model is silently wrong."""
        ids = torch.randint(0, self.vocab_size, (6,), generator=torch.Generator().manual_seed(0)).tolist()
        if ids[4] == ids[5]:  # siblings carry different tokens
            ids[5] = (ids[5] + 1) % self.vocab_size
        tree = DraftTree((ids[3], ids[4], ids[5], ids[5]), (-1, 0, 0, 1))
        try:
            self.allocate(1, 8, 8)
            self.prefill(0, ids[:3])
            through_tree = self.forward({0: tree}).row_logits(0)[3].float()
            plain = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0, -1].float()
        except Exception as error:
            raise UnsupportedModelError(_unsupported(self.model, f"a tree forward failed ({error})")) from error
        finally:
            self._cache = None
        if not plain.isfinite().all():
            raise UnsupportedModelError(
                _unsupported(self.model, "its own logits are NaN or infinite; check dtype and weights")
            )
        difference = (through_tree - plain).abs().max().item()
        allowed = (1e-3 if self.dtype == torch.float32 else 0.1) * plain.abs().max().item()
        if not difference <= allowed:
            reason = f"its logits through the tree cache are off by {difference:.3g}, more than rounding explains"
            raise UnsupportedModelError(_unsupported(self.model, reason))


def refuse_without_memory(layers: Iterable[LayerShape], rows: int, capacity: int) -> None:
    """Refuse a cache of these layers that its devices have no room for.

    Raises:
        NoRoomError: names the device, and the bytes that are needed and free.
    """
    needed: dict[torch.device, int] = {}
    for shape in layers:
        numbers = rows * capacity * shape.kv_heads * (shape.key_dim + shape.value_dim)
        needed[shape.device] = needed.get(shape.device, 0) + numbers * shape.dtype.itemsize
    for device, count in needed.items():
        free = free_bytes(device)
        if count > free:
            raise NoRoomError(
                f"a cache of {rows} rows of {capacity} tokens takes {count / 1e9:.1f} GB and {device} has "
                f"{free / 1e9:.1f} GB free; use a smaller batch, fewer new tokens or shorter prompts"
            )


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a device can still give, those that PyTorch's allocator holds without use included."""
    if device.type != "cuda":
        return virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse by name what a tree of drafts cannot be verified on.

    Raises:
        UnsupportedModelError: see ``Target``.
    """
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(_unsupported(model, "it is an encoder-decoder; use a decoder-only causal LM"))
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(_unsupported(model, "its state-space layers cannot forget a rejected draft"))
    strange = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if strange:
        raise UnsupportedModelError(_unsupported(model, f"layers of type {sorted(strange)} have no tree mask"))
    if model.config.model_type in SLOT_BOUND_MODELS:
        raise UnsupportedModelError(_unsupported(model, SLOT_BOUND_MODELS[model.config.model_type]))
    if model.config._attn_implementation == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(_unsupported(model, "sdpa leaves out its attention soft cap; use attention=eager"))
    if "flash" in str(model.config._attn_implementation):
        reason = f"attention={model.config._attn_implementation} takes no tree mask; use auto, sdpa or eager"
        raise UnsupportedModelError(_unsupported(model, reason))


def _layer_windows(config: Any) -> dict[str, int | None]:
    """Return ``{kind of layer: window in tokens or None}``; one entry means that the model takes a single mask."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return {"full_attention": window} if window is not None else {"full_attention": None}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def _within_window(
    starts: Sequence[int], blocks: Sequence[Tensor | None], positions: Tensor, visible: int, window: int
) -> Tensor:
    """Return ``[rows, width, visible]``: whether a slot's *position* is less than ``window`` before the query's."""
    slot_positions = torch.arange(visible).repeat(len(starts), 1)
    for at, (start, block) in enumerate(zip(starts, blocks, strict=True)):
        nodes = 0 if block is None else block.shape[0]
        slot_positions[at, start : start + nodes] = positions[at, :nodes]
        slot_positions[at, start + nodes : start + positions.shape[1]] = positions[at, nodes:]
    return positions[:, :, None] - slot_positions[:, None, :] < window


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _unsupported(model: PreTrainedModel, reason: str) -> str:
    return f"{model.config.model_type} ({type(model).__name__}) is not supported: {reason}"
