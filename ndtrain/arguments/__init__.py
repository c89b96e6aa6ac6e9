"""Command lines of `key=value` words. A dataclass declares the options, and every mistake is reported in one line."""

from ndtrain.arguments.key_value import ArgumentError, help_lines, near, one_of, option, parse, unknown, wants_help
from ndtrain.arguments.pipe import status_of

__all__ = ["ArgumentError", "help_lines", "near", "one_of", "option", "parse", "status_of", "unknown", "wants_help"]
