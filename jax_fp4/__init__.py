"""NVFP4 training for JAX: exact quantizers, three backward modes, layers that replace Flax's.

Neither Flax nor CUDA is needed to import this; `from jax_fp4 import linen, nnx` for the layers.
"""

from jax_fp4 import checkpoint_policies as checkpoint_policies
from jax_fp4 import checkpoints as checkpoints
from jax_fp4 import delayed as delayed
from jax_fp4 import diagnostics as diagnostics
from jax_fp4 import export as export
from jax_fp4._activations import Activation as Activation
from jax_fp4._array import QuantizedTensor as QuantizedTensor
from jax_fp4._choosing import Rules as Rules
from jax_fp4._choosing import autocast as autocast
from jax_fp4._dense import dense as dense
from jax_fp4._dot_general import DotGeneral as DotGeneral
from jax_fp4._errors import Support as Support
from jax_fp4._errors import UnsupportedError as UnsupportedError
from jax_fp4._errors import strict as strict
from jax_fp4._exchange import exchange_tokens as exchange_tokens
from jax_fp4._exchange import exchange_weights as exchange_weights
from jax_fp4._exchange import return_tokens as return_tokens
from jax_fp4._ffi import EXPORT_DISABLED_CHECKS as EXPORT_DISABLED_CHECKS
from jax_fp4._grouped_dense import grouped_dense as grouped_dense
from jax_fp4._grouped_mlp import grouped_mlp as grouped_mlp
from jax_fp4._layernorm_dense import layernorm_dense as layernorm_dense
from jax_fp4._mlp import layernorm_mlp as layernorm_mlp
from jax_fp4._moe import moe as moe
from jax_fp4._ops import dequantize as dequantize
from jax_fp4._ops import quantize as quantize
from jax_fp4._ops import quantize_transpose as quantize_transpose
from jax_fp4._ops import supported as supported
from jax_fp4._placement import Specs as Specs
from jax_fp4._placement import WeightGather as WeightGather
from jax_fp4._products import grouped_matmul as grouped_matmul
from jax_fp4._products import matmul as matmul
from jax_fp4._recipe import HIGH_PRECISION as HIGH_PRECISION
from jax_fp4._recipe import BackwardMode as BackwardMode
from jax_fp4._recipe import CustomRecipe as CustomRecipe
from jax_fp4._recipe import DelayedScaling as DelayedScaling
from jax_fp4._recipe import Float8BlockScaling as Float8BlockScaling
from jax_fp4._recipe import Float8CurrentScaling as Float8CurrentScaling
from jax_fp4._recipe import FourOverSix as FourOverSix
from jax_fp4._recipe import MXFP8BlockScaling as MXFP8BlockScaling
from jax_fp4._recipe import NVFP4BlockScaling as NVFP4BlockScaling
from jax_fp4._routing import combine_tokens as combine_tokens
from jax_fp4._routing import group_tokens as group_tokens
from jax_fp4._routing import group_weights as group_weights
from jax_fp4._routing import route as route
from jax_fp4._version import __version__ as __version__
from jax_fp4.report import report as report
