"""Families: which Hugging Face tensor holds which semantic tensor, one table per model type.

A new family is a module here that registers a :class:`Family`, and its name in ``family.py``. The roles that
a table can name (``weight``; also ``bias`` where the layer has one):

    model   embed, position, final_norm, lm_head
    layer   attn_norm, attn.q, attn.k, attn.v, attn.gate, attn.o, attn.q_norm, attn.k_norm, attn.sinks
            attn.q_down, attn.q_down_norm, attn.q_up, attn.kv_down, attn.kv_down_norm, attn.kv_up (latent
            attention) mlp_norm, mlp.gate, mlp.up, mlp.down
            moe.router, moe.expert_bias, moe.qb_beta, moe.experts.{gate,up,down},
            moe.shared.{gate,up,down,router}
    mtp     mtp.enorm, mtp.hnorm, mtp.eh_proj, mtp.final_norm, and all of a layer's

``attn.sinks``, ``moe.expert_bias`` and ``moe.qb_beta`` are bare names. What a table leaves out, the proof
reports.
"""

from megatron.core.param_export.families.family import Family, Rule, family_of, register

__all__ = ["Family", "Rule", "family_of", "register"]
