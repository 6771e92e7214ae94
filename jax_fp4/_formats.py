"""The formats in numbers: block shapes, maxima, packing and padded shapes. Integers and names only."""

from dataclasses import dataclass
from typing import Literal

# The 8-bit formats: how they scale, and the format of their codes.
FLOAT8_FORMATS: dict[str, tuple[Literal["mxfp8", "float8_block", "float8"], Literal["e4m3", "e5m2"]]] = {
    "mxfp8": ("mxfp8", "e4m3"),
    "mxfp8_e5m2": ("mxfp8", "e5m2"),
    "float8_block": ("float8_block", "e4m3"),
    "float8_block_e5m2": ("float8_block", "e5m2"),
    "float8": ("float8", "e4m3"),
    "float8_e5m2": ("float8", "e5m2"),
}
FORMATS = ("nvfp4", *FLOAT8_FORMATS)
BLOCK = 16  # elements that share one E4M3 scale
PACK = 2  # codes a byte, even index in the low nibble

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what the 3-bit magnitudes mean
E2M1_MAX = 6
E4M3_MAX = 448
E5M2_MAX = 57344
FOUR_OVER_SIX_BOUNDS = (256, 448)

NAN_SCALE = 0x7F  # E4M3 NaN: the scale of a block that holds a non-finite element
NAN_AMAX_BITS = 0x7FC00000  # the one NaN an amax may be
INF_BITS = 0x7F800000

# H16 is preceded by these signs, so that no fixed direction of the data is favoured.
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4  # the tile in which Blackwell tensor cores read scales

INTERLEAVE = 64  # values of a row that the Hopper product kernel reads in an order of its own (gemm_decode.cuh)


E8M0_NAN = 255  # the scale of an MXFP8 block that holds a NaN
FLOAT8_BLOCKS = {"mxfp8": 32, "float8_block": 128}  # elements along the blocked axis that share a scale


@dataclass(frozen=True)
class Quantization:
    """The static facts of one quantize call, as the reference and the kernels take them.

    `axis` is the blocked axis of x [m, k]; `tile` the rows that share a scale (1, or 16 for weight tiles);
    `bound` the E4M3 bound B of the tensor scale; `compute_dtype` what x is rounded to before anything else;
    `m_total`, `k_total` the extents of the global tensor when x is a shard of it (-1: x is the whole).
    """

    axis: Literal[-1, 0] = -1
    tile: Literal[1, 16] = 1
    row_scaled: bool = False
    hadamard: bool = False
    four_over_six: Literal["", "MAE", "MSE"] = ""
    bound: int = E4M3_MAX
    compute_dtype: str = "float32"
    m_total: int = -1
    k_total: int = -1

    @property
    def column_bound(self) -> int:
        """B of the column-wise form: row scaling makes that copy without four-over-six."""
        return E4M3_MAX if self.row_scaled else self.bound

    @property
    def column_four_over_six(self) -> Literal["", "MAE", "MSE"]:
        return "" if self.row_scaled else self.four_over_six

    def bound_along(self, axis: int) -> int:
        return self.column_bound if axis == 0 else self.bound


@dataclass(frozen=True)
class Float8Quantization:
    """The static facts of one quantize call to 8-bit codes (numerics.md, section 3).

    `scaling`: "mxfp8", an E8M0 scale a block of 32; "float8_block", a float32 scale a block of 128; "float8", one a
    tensor. `codes`: their format. `axis`: the blocked axis of x [m, k] (for "float8": what is stored last). `tile`: the
    rows that share a scale, 1 or as many as the block is long. `power_of_two` and `eps`, the least amax that counts,
    concern float32 scales. `compute_dtype`: what x is rounded to before anything else.
    """

    scaling: Literal["mxfp8", "float8_block", "float8"]
    codes: Literal["e4m3", "e5m2"] = "e4m3"
    axis: Literal[-1, 0] = -1
    tile: Literal[1, 32, 128] = 1
    power_of_two: bool = False
    eps: float = 0.0
    compute_dtype: str = "float32"

    @property
    def block(self) -> int:
        """Elements along the blocked axis that share a scale; 1, no padding, where the whole tensor does."""
        return FLOAT8_BLOCKS.get(self.scaling, 1)

    @property
    def largest(self) -> int:
        return E4M3_MAX if self.codes == "e4m3" else E5M2_MAX


TILES_EXCLUDE_GROUPS = "tiles are for weights, groups are rows of activations and gradients"


def exclusion(q: Quantization, stochastic: bool, grouped: bool = False) -> tuple[str, str, str] | None:
    """The first pair of flags that one call cannot have, and why; None if there is none."""
    rows, chosen = "row_scaled=True", "four_over_six"
    transform, tiles, key, groups = "hadamard=True", "block=(16, 16)", "a key (stochastic rounding)", "group_sizes"
    given = {rows: q.row_scaled, transform: q.hadamard, tiles: q.tile != 1, key: stochastic, chosen: q.four_over_six}
    given[groups] = grouped
    pairs = (
        (rows, transform, "the transform mixes the rows that would be scaled"),
        (rows, tiles, "a tile shares its scale over 16 rows"),
        (rows, key, "row scaling is for activations, stochastic rounding for gradients"),
        (chosen, transform, "the choice compares errors of untransformed values"),
        (chosen, key, "the choice compares errors of nearest rounding"),
        (tiles, groups, TILES_EXCLUDE_GROUPS),
    )
    return next((pair for pair in pairs if given[pair[0]] and given[pair[1]]), None)


def padded(extent: int, multiple: int = BLOCK) -> int:
    """`extent` rounded up to whole blocks."""
    return -(-extent // multiple) * multiple


def stored(shape: tuple[int, ...], axis: int) -> tuple[int, int]:
    """Rows and blocked extent of the stored form of x [..., m, k]: blocks lie last."""
    m, k = shape[-2:]
    return (m, k) if axis == -1 else (k, m)


def grouped_extent(m: int, groups: int, block: int = BLOCK) -> int:
    """Columns that hold m rows column-wise where each group begins at a block of its own, whatever the sizes."""
    return (m + (block - 1) * groups) // block * block


def amax_shape(batch: tuple[int, ...], rows: int, q: Quantization, groups: int | None = None) -> tuple[int, ...]:
    """One amax for the tensor or each group, or for each stored row (of each group, column-wise)."""
    if groups is None:
        return (*batch, rows) if q.row_scaled else batch
    if not q.row_scaled:
        return (*batch, groups)
    return (*batch, rows) if q.axis == -1 else (*batch, groups, rows)


def codes_shape(batch: tuple[int, ...], rows: int, extent: int) -> tuple[int, ...]:
    return (*batch, rows, padded(extent) // PACK)


def scale_shape(batch: tuple[int, ...], rows: int, extent: int) -> tuple[int, ...]:
    return (*batch, rows, padded(extent) // BLOCK)
