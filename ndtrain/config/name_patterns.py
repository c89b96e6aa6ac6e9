"""Factors for parameters, chosen by shell patterns of their names in a checkpoint."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ndtrain.arguments import near
from ndtrain.config.schema import ConfigError, require

Factors = Mapping[str, float] | None  # shell pattern of names -> factor


def factor_of(factors: Factors, name: str) -> float:
    """Return the factor of the last pattern that matches the name, so an override beats a recipe; 1 if none matches."""
    matching = [factor for pattern, factor in (factors or {}).items() if fnmatchcase(name, pattern)]
    return matching[-1] if matching else 1.0


def check_factors(key: str, factors: Factors) -> None:
    """Check that every factor of a key is finite and not negative.

    Raises:
        ConfigError: a factor is negative, infinite or not a number.
    """
    for pattern, factor in (factors or {}).items():
        fits = math.isfinite(factor) and factor >= 0
        require(fits, f"{key}: the factor of {pattern} is {factor}: must be finite and at least 0")


def check_patterns(key: str, factors: Factors, names: Iterable[str]) -> None:
    """Check that every pattern of a key matches the name of a parameter, to detect misspelt patterns.

    Patterns with a factor of 1 are not checked: they may undo a recipe's pattern that was written for another model.

    Raises:
        ConfigError: a pattern matches no name.
    """
    names = list(names)
    for pattern, factor in (factors or {}).items():
        if factor != 1 and not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{key}: no parameter matches {pattern}; {near(pattern, names)}names are as in a checkpoint, "
                f"e.g. {names[-1]}; set {key}=null to discard the recipe's patterns"
            )
