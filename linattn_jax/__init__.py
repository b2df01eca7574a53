"""Linear-attention sequence mixers for JAX: pure functions under one signature.

Every mixer is `output, final_state = mixer(q, k, v, <gates>, ...)` with arrays [B, T, heads, size]; beside it stand
`mixer_step`, one token, and `mixer_init`, the empty state.
"""

from linattn_jax.mixers.ccq import (
    ccq_gated_delta_rule,
    ccq_gated_delta_rule_init,
    ccq_gated_delta_rule_step,
    ccq_gla,
    ccq_gla_init,
    ccq_gla_step,
    ccq_kaczmarz,
    ccq_kaczmarz_init,
    ccq_kaczmarz_step,
)
from linattn_jax.mixers.curvature import curvature_query, curvature_query_init, curvature_query_step
from linattn_jax.mixers.delta import (
    delta_rule,
    delta_rule_init,
    delta_rule_step,
    gated_delta_rule,
    gated_delta_rule_init,
    gated_delta_rule_step,
    kaczmarz,
    kaczmarz_init,
    kaczmarz_step,
)
from linattn_jax.mixers.gla import gla, gla_init, gla_step
from linattn_jax.mixers.interdomain import interdomain, interdomain_init, interdomain_step
from linattn_jax.mixers.linear import (
    linear_attention,
    linear_attention_init,
    linear_attention_step,
    simple_gla,
    simple_gla_init,
    simple_gla_step,
)
from linattn_jax.mixers.longhorn import longhorn, longhorn_init, longhorn_step
from linattn_jax.mixers.s4d import s4d, s4d_init, s4d_step
from linattn_jax.mixers.softmax import softmax_attention, softmax_attention_init, softmax_attention_step
from linattn_jax.mixers.variational import (
    variational,
    variational_init,
    variational_refresh,
    variational_step,
)

__all__ = [
    "ccq_gated_delta_rule",
    "ccq_gated_delta_rule_init",
    "ccq_gated_delta_rule_step",
    "ccq_gla",
    "ccq_gla_init",
    "ccq_gla_step",
    "ccq_kaczmarz",
    "ccq_kaczmarz_init",
    "ccq_kaczmarz_step",
    "curvature_query",
    "curvature_query_init",
    "curvature_query_step",
    "delta_rule",
    "delta_rule_init",
    "delta_rule_step",
    "gated_delta_rule",
    "gated_delta_rule_init",
    "gated_delta_rule_step",
    "gla",
    "gla_init",
    "gla_step",
    "interdomain",
    "interdomain_init",
    "interdomain_step",
    "kaczmarz",
    "kaczmarz_init",
    "kaczmarz_step",
    "linear_attention",
    "linear_attention_init",
    "linear_attention_step",
    "longhorn",
    "longhorn_init",
    "longhorn_step",
    "s4d",
    "s4d_init",
    "s4d_step",
    "simple_gla",
    "simple_gla_init",
    "simple_gla_step",
    "softmax_attention",
    "softmax_attention_init",
    "softmax_attention_step",
    "variational",
    "variational_init",
    "variational_refresh",
    "variational_step",
]
