"""Policies for jax.checkpoint that keep what was quantized, so that no backward quantizes anything again.

    from jax_fp4 import checkpoint_policies
    block = jax.checkpoint(block, policy=checkpoint_policies.save_quantized)   # nn.remat, nnx.remat: the same argument

The layers name three kinds of values, for these policies and for your own:

QUANTIZED       packed codes, block scales and amaxes of x and of the kernel, for forward and backward; and of experts
                what their rows are ordered by, a few int32 for each token, lest kept rows meet another order
HIGH_PRECISION  x in the compute dtype, as the weight gradient of backward mode "unquant" reads it
PRODUCT         what a product gives: y of a layer, and the activation's input of one with two products

Kept of them is only what the backward reads, or what it computes again reads; of frozen kernels nothing, they are
arguments. A WeightGather keeps the packed shard, never the gathered kernel: where y is computed again, the shard is
moved again, and not quantized again (with payload="high_precision" it is). Gradients are those without jax.checkpoint
bit for bit, draws of stochastic rounding included, where XLA rounds as is written: of bfloat16 it may leave out a
rounding in one of two programs, unless the compiler option xla_allow_excess_precision is False.

jax's own dot policies see `lax.dot_general` and nothing of a custom call. Beside one of ours nothing is missing:

    jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, save_products)
"""

from collections.abc import Callable

import jax

from jax_fp4._errors import message

QUANTIZED = "jax_fp4.quantized"
HIGH_PRECISION = "jax_fp4.high_precision"
PRODUCT = "jax_fp4.product"

Policy = Callable[..., object]

_only = jax.checkpoint_policies.save_only_these_names

save_quantized: Policy = _only(QUANTIZED)
"""Keep what was quantized. Products are computed again, of the kept operands, where their results are needed."""

save_products: Policy = _only(QUANTIZED, PRODUCT)
"""Keep what was quantized and what products gave: nothing that a tensor core computed is computed again."""

save_and_offload: Policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=(),
    names_which_can_be_offloaded=(QUANTIZED,),
    offload_src="device",
    offload_dst="pinned_host",
)
"""As save_quantized, kept in pinned host memory from the forward to the backward: GPUs have it, and the CPU backend.

Elsewhere JAX refuses the program. It answers with more than yes or no, so save_from_both_policies does not take it.
"""

_POLICIES = {"save_quantized": save_quantized, "save_products": save_products, "save_and_offload": save_and_offload}


def named(name: str) -> Policy:
    """The policy of this module with that name, for configuration files. Raises ValueError where there is none."""
    if not isinstance(name, str) or name not in _POLICIES:
        why, fix = "these are the policies of this module", "a name of jax.checkpoint_policies there"
        raise ValueError(message("checkpoint_policies.named", "name", repr(name), " or ".join(_POLICIES), why, fix))
    return _POLICIES[name]
