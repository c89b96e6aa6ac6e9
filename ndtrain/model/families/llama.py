"""Llama (Touvron et al., 2023, arXiv:2302.13971), versions 1 to 3."""

from ndtrain.model.families.family import Family
from ndtrain.plugins import register_family

LLAMA = register_family(Family("llama", "Llama"))
