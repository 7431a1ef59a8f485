"""The layers: the global convolution, the two families' token mixers and the fused form."""

from .feed_forward import residual_feed_forward
from .global_conv import BACKENDS, Grid, fft_length, global_conv, local_kernel, resample_kernel
from .mrconv import KINDS, NORMS, MRConv, spectral_moments
from .sgconv import SGConv
from .token_mixer import FusedGlobalConv, TokenMixer, decode_grid

__all__ = [
    "BACKENDS",
    "KINDS",
    "NORMS",
    "FusedGlobalConv",
    "Grid",
    "MRConv",
    "SGConv",
    "TokenMixer",
    "decode_grid",
    "fft_length",
    "global_conv",
    "local_kernel",
    "resample_kernel",
    "residual_feed_forward",
    "spectral_moments",
]
