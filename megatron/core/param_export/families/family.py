"""A family is a table of rules: semantic role -> Hugging Face tensor, its shape, and the place within it."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.core.param_export.pieces import Piece
from megatron.weight_sync.boxes import Box

_AXES = {"r": 0, "c": 1}
_FAMILIES: dict[str, Family] = {}
_MODULES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss")


@dataclass(frozen=True)
class Rule:
    """One role and the Hugging Face tensor it goes to.

    Args:
        role: semantic tensor, for example ``attn.q.weight``.
        name: Hugging Face name; ``{layer}`` and ``{expert}`` are filled in.
        shape: the tensor's shape, one entry per axis: products and sums of the family's sizes and of
            integers.
        index: where element (e, r, c) of the role goes, one entry per axis of ``shape``: a sum of terms, each
            a product of sizes and integers with at most one of ``e`` (expert), ``r`` (row), ``c`` (column).
            Default: ``r c`` or ``r``. A fused, transposed, interleaved tensor is ``e c 2*r+1``, for example.
        when: name of a condition of the family (see :class:`Family`); the rule holds for layers where it is
            true.
        layers: which layers have it: "layer", "mtp" or "both".
    """

    role: str
    name: str
    shape: str
    index: str | None = None
    when: str | None = None
    layers: str = "both"


def _terms(text: str, sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """``2*r+ffn`` -> ({"r": 2}, ffn)"""
    factors: dict[str, int] = {}
    constant = 0
    for term in text.split("+"):
        names = [f for f in term.split("*") if f in ("e", "r", "c")]
        value = math.prod(int(f) if f.isdigit() else sizes[f] for f in term.split("*") if f not in names)
        if len(names) > 1:
            raise ValueError(f"{text!r}: more than one axis in a term")
        if names:
            factors[names[0]] = factors.get(names[0], 0) + value
        else:
            constant += value
    return factors, constant


def _suffix_strides(shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


@dataclass(frozen=True)
class Family:
    """A table of rules for one ``model_type``.

    Args:
        model_type: ``config.model_type`` of the Hugging Face configuration.
        architecture: the model class that loads its checkpoints, for ``architectures`` of config.json.
        sizes: configuration -> named sizes used by the rules' shapes and indices.
        rules: the table.
        conditions: name -> ``f(config, layer)``, beside the built-in "untied", "moe" and "dense".
        is_moe: ``f(config, layer)``: whether the layer has routed experts.
        mtp_depths: configuration -> number of multi-token prediction layers that the checkpoint has.
    """

    model_type: str
    architecture: str
    sizes: Callable[[Any], dict[str, int]]
    rules: tuple[Rule, ...]
    conditions: Mapping[str, Callable[[Any, int], bool]] = ()
    is_moe: Callable[[Any, int], bool] = lambda config, layer: False
    mtp_depths: Callable[[Any], int] = lambda config: 0

    @cached_property
    def _by_role(self) -> dict[str, list[Rule]]:
        table: dict[str, list[Rule]] = {}
        for rule in self.rules:
            table.setdefault(rule.role, []).append(rule)
        return table

    def bind(self, config, mtp: bool = True) -> BoundFamily:
        """The family for one configuration; ``mtp``: whether the model has its prediction layers."""
        return BoundFamily(self, config, mtp)


class BoundFamily:
    """A family for one Hugging Face configuration."""

    def __init__(self, family: Family, config, mtp: bool):
        self.family = family
        self.config = config
        self.sizes = family.sizes(config)
        self.layers = config.num_hidden_layers
        self.mtp = family.mtp_depths(config) if mtp else 0
        self.tied = bool(getattr(config, "tie_word_embeddings", False))
        self._parsed: dict[Rule, tuple] = {}
        self._expected: dict[str, tuple[int, ...]] | None = None

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor of this configuration and its shape, in export order."""
        if self._expected is not None:
            return self._expected
        out: dict[str, tuple[int, ...]] = {}

        def add(rules: Iterator[Rule], layer=None, scope="model"):
            for rule in rules:
                if not self._holds(rule, scope, layer):
                    continue
                shape = self._parse(rule)[0]
                experts = range(self.sizes["experts"]) if "{expert}" in rule.name else (None,)
                for expert in experts:
                    out.setdefault(rule.name.format(layer=layer, expert=expert), shape)

        per_layer = [rule for rule in self.family.rules if "{layer}" in rule.name]
        head = [rule for rule in self.family.rules if rule not in per_layer]
        add(rule for rule in head if rule.role.startswith("embed"))
        for layer in range(self.layers + self.mtp):
            add(per_layer, layer, "mtp" if layer >= self.layers else "layer")
        add(rule for rule in head if not rule.role.startswith("embed"))
        self._expected = out
        return out

    def boxes(self, piece: Piece) -> list[tuple[Box, tuple[int, ...]]]:
        """The boxes of a piece, each with the shape of its Hugging Face tensor; none without a rule."""
        layer = piece.layer + self.layers if piece.scope == "mtp" and piece.layer is not None else piece.layer
        out = []
        for rule in self.family._by_role.get(piece.role, ()):
            if self._holds(rule, piece.scope, layer):
                out.append(self._place(rule, piece, layer))
        return out

    def _holds(self, rule: Rule, scope: str, layer: int | None) -> bool:
        if scope != "model" and rule.layers not in ("both", scope):
            return False
        match rule.when:
            case None:
                return True
            case "untied":
                return not self.tied
            case "moe":
                return self.family.is_moe(self.config, layer)
            case "dense":
                return not self.family.is_moe(self.config, layer)
            case name:
                return bool(dict(self.family.conditions)[name](self.config, layer))

    def _parse(self, rule: Rule):
        if rule not in self._parsed:
            shape = tuple(_terms(entry, self.sizes)[1] for entry in rule.shape.split())
            index = rule.index or " ".join("rc"[: len(shape)])
            places = [_terms(entry, self.sizes) for entry in index.split()]
            if len(places) != len(shape):
                raise ValueError(f"{rule.name}: index {index!r} does not fit shape {rule.shape!r}")
            stride = {"e": 0, "r": 0, "c": 0}
            offset = 0
            extent: dict[str, int] = {}
            for (factors, constant), step, size in zip(places, _suffix_strides(shape), shape, strict=True):
                offset += constant * step
                for axis, factor in factors.items():
                    stride[axis] += factor * step
                    extent[axis] = -(-(size - constant) // factor)
            self._parsed[rule] = shape, offset, stride, extent
        return self._parsed[rule]

    def _place(self, rule: Rule, piece: Piece, layer) -> tuple[Box, tuple[int, ...]]:
        shape, offset, stride, extent = self._parse(rule)
        name = rule.name.format(layer=layer, expert=piece.expert)
        for axis, k in _AXES.items():
            if k < len(piece.shape) and axis in extent and piece.shape[k] > extent[axis]:
                raise ValueError(
                    f"{name}: the configuration says {shape}, "
                    f"but {piece.role} has shape {piece.shape} in the model"
                )
        strides = (stride["r"], stride["c"])
        full_offset = offset + sum(s * strides[k] for k, s in enumerate(piece.start))
        if piece.expert is not None:
            full_offset += piece.expert * stride["e"]
        box = Box(
            full_name=name,
            size=tuple(loop.size for loop in piece.loops),
            local_offset=piece.local_offset,
            local_stride=tuple(loop.local_stride for loop in piece.loops),
            full_offset=full_offset,
            full_stride=tuple(strides[loop.axis] * loop.step for loop in piece.loops),
        )
        return box, shape


def register(family: Family) -> Family:
    """Make a family known under its ``model_type``."""
    _FAMILIES[family.model_type] = family
    return family


def family_of(config) -> Family:
    """The family of a Hugging Face configuration.

    Raises:
        ValueError: no family knows this ``model_type``; the message lists those that are known.
    """
    model_type = re.sub("[^a-z0-9_]", "", str(getattr(config, "model_type", None)).lower())
    if model_type not in _FAMILIES and model_type in _MODULES:
        importlib.import_module(f"megatron.core.param_export.families.{model_type}")
    if model_type not in _FAMILIES:
        known = ", ".join(sorted({*_FAMILIES, *_MODULES}))
        if not hasattr(config, "model_type"):
            kind = type(config).__name__
            raise ValueError(
                f"expected a Hugging Face configuration, an object with model_type ({known}), got {kind}"
            )
        raise ValueError(f"no export family for model_type {model_type!r}; known: {known}")
    return _FAMILIES[model_type]
