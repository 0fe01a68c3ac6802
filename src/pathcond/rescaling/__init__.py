"""Writing a rescaling into a model and all that moves with it: verified, all or nothing."""

from .rescale import Rescaling, rescale_

__all__ = ["Rescaling", "rescale_"]
