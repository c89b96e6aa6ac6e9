"""Token files in the formats of other programs, read in place. A format is one module with one `TokenFormat`."""

from ndtrain.data.formats.datatrove import DatatroveFormat
from ndtrain.data.formats.interface import FormatError, TokenFile, TokenFormat
from ndtrain.data.formats.llmc import LlmcFormat
from ndtrain.data.formats.megatron import MegatronFormat

__all__ = ["FORMATS", "FormatError", "TokenFile", "TokenFormat"]

FORMATS: dict[str, TokenFormat] = {f.name: f for f in (MegatronFormat(), LlmcFormat(), DatatroveFormat())}
