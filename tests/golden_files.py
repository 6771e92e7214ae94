"""The golden files: what TransformerEngine's public references computed, and a few laws by themselves.

Files of the same families in the folder that JAX_FP4_GOLDEN names are found as well.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jax_fp4._formats import Quantization

FOLDER = Path(__file__).parent / "golden"
UNDERSTOOD = {"tile", "f46", "mode", "e4m3", "row_scaled", "rht", "sign"}
DESCRIPTIVE = {"name", "input", "tag"}


def golden_files(pattern: str) -> list[Path]:
    """Every file whose name matches, here and in JAX_FP4_GOLDEN; at least one is here."""
    here = sorted(FOLDER.glob(f"{pattern}.npz"))
    assert here, f"{FOLDER} holds no {pattern}.npz"
    more = os.environ.get("JAX_FP4_GOLDEN")
    return here + (sorted(Path(more).glob(f"{pattern}.npz")) if more else [])


def load(path: Path | str) -> dict[str, Any]:
    """A file's arrays, with `cfg` as a dict and `x` in the dtype `x_dtype` that was quantized. A str names one here."""
    with np.load(path if isinstance(path, Path) else FOLDER / f"{path}.npz") as file:
        arrays: dict[str, Any] = dict(file)
    if "cfg" in arrays:
        arrays["cfg"] = json.loads(str(arrays["cfg"]))
    if "x_dtype" in arrays:
        # np.dtype knows "bfloat16" once ml_dtypes is imported, which jax did.
        arrays["x"] = arrays["x"].astype(np.dtype(str(arrays["x_dtype"])))
    return arrays


def quantization(cfg: dict[str, Any], axis: int, compute_dtype: str = "float32") -> Quantization:
    """What a cfg describes along one axis. The Hadamard transform concerns the column-wise form only.

    `sign` (absent: true) is for the caller: ours has signs always.
    """
    unknown = set(cfg) - UNDERSTOOD - DESCRIPTIVE
    assert not unknown, f"cfg keys {unknown} are not understood"
    return Quantization(
        axis=axis,
        tile=cfg["tile"][0],
        row_scaled=cfg.get("row_scaled", False),
        hadamard=cfg.get("rht", False) and axis == 0,
        four_over_six=cfg.get("mode", "MAE") if cfg.get("f46") else "",
        bound=cfg.get("e4m3", 256 if cfg.get("f46") else 448),
        compute_dtype=compute_dtype,
    )


def without_negative_zero(packed: Any) -> np.ndarray:
    """Packed codes with code 8 as 0: the files have sign = x < 0, we copy the sign bit."""
    packed = np.asarray(packed)
    low, high = packed & 15, packed >> 4
    return np.where(low == 8, 0, low) | (np.where(high == 8, 0, high) << 4)
