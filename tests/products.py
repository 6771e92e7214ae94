"""What tests of products share: products expert by expert, a measure of error, the form of a refusal."""

import jax.numpy as jnp
import numpy as np
import pytest
from grouping import slices


def exact(a):
    return np.asarray(a, np.float64)


def error_of(got, want) -> float:
    """Relative, in the Frobenius norm; infinite where a zero is missed."""
    got, want = exact(got), exact(want)
    assert got.shape == want.shape
    off = np.linalg.norm(got - want)
    return float(off / np.linalg.norm(want)) if off else 0.0


def by_experts(x, w, sizes):
    """[m,n] = [m,k] @ [g,k,n] in plain NumPy or jax.numpy, the tail zero; differentiable as often as one likes."""
    xp = np if isinstance(x, np.ndarray) else jnp
    where = slices(sizes, len(x))
    tail = len(x) - (where[-1].stop if where else 0)
    parts = [x[r] @ w[e] for e, r in enumerate(where)]
    return xp.concatenate([*parts, xp.zeros((tail, w.shape[-1]), x.dtype)])


def contraction_by_experts(x_t, dy, sizes):
    """[g,k,n] = [k,m] @ [m,n] over the rows of each group."""
    xp = np if isinstance(dy, np.ndarray) else jnp
    parts = [x_t[:, r] @ dy[r] for r in slices(sizes, len(dy))]
    return xp.stack(parts) if parts else xp.zeros((0, len(x_t), dy.shape[-1]), dy.dtype)


def refused(call, error, says):
    """A message that names the argument, its value, what is needed and what to do."""
    with pytest.raises(error, match=says) as caught:
        call()
    text = str(caught.value)
    assert " is " in text and "; needs " in text and " because " in text and " Try " in text, text
