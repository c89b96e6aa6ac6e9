"""Factors that parameters get by shell patterns of their names, which are those of a checkpoint."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ndtrain.arguments import near
from ndtrain.config.schema import ConfigError, require

Factors = Mapping[str, float] | None  # shell pattern of names -> factor


def factor_of(factors: Factors, name: str) -> float:
    """That of the last pattern that the name matches, so that an override goes before what a recipe says; else 1."""
    matching = [factor for pattern, factor in (factors or {}).items() if fnmatchcase(name, pattern)]
    return matching[-1] if matching else 1.0


def check_factors(key: str, factors: Factors) -> None:
    """
    Raises:
        ConfigError: a factor of the key is negative, infinite or no number.
    """
    for pattern, factor in (factors or {}).items():
        fits = math.isfinite(factor) and factor >= 0
        require(fits, f"{key}: the factor of {pattern} is {factor}: must be finite and at least 0")


def check_patterns(key: str, factors: Factors, names: Iterable[str]) -> None:
    """A pattern has to match the name of a parameter. One with a factor of 1 need not: it takes back what a recipe says
    of another model.

    Raises:
        ConfigError: a pattern of the key does not, as a misspelt one would not.
    """
    names = list(names)
    for pattern, factor in (factors or {}).items():
        if factor != 1 and not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{key}: no parameter's name matches {pattern}; {near(pattern, names)}names are as in a checkpoint, "
                f"e.g. {names[-1]}; {key}=null takes back those of a recipe"
            )
