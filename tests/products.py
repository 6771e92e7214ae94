"""What tests of products share: a measure of error, and the form of a refusal."""

import numpy as np
import pytest


def error_of(got, want) -> float:
    """Relative, in the Frobenius norm."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def refused(call, error, says):
    """A message that names the argument, its value, what is needed and what to do."""
    with pytest.raises(error, match=says) as caught:
        call()
    text = str(caught.value)
    assert " is " in text and "; needs " in text and " because " in text and " Try " in text, text
