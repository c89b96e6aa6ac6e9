"""N-D parallel training of transformers on PyTorch: any mesh, the same training."""

__version__ = "0.1.0"
