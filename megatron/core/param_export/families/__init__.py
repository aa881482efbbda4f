"""Families: which Hugging Face tensor holds which semantic tensor, one table per model type."""

from megatron.core.param_export.families.family import Family, Rule, family_of, register

__all__ = ["Family", "Rule", "family_of", "register"]
