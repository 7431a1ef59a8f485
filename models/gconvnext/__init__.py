"""SGConvNeXt and MRConvNeXt: ConvNeXt with global convolutions. Importing it registers the models with timm."""

from . import mrconvnext, sgconvnext  # noqa: F401  registers the models
from .mrconvnext import MRConvNeXt
from .sgconvnext import SGConvNeXt

__version__ = "0.1.0"

__all__ = ["MRConvNeXt", "SGConvNeXt", "__version__"]
