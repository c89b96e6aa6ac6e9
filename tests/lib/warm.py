"""Composes a configuration in the process that ranks are forked from, so that no rank does for the first time what is
done once a process: Hydra finds its plugins, and the schema is made. `ranks.py` has this imported after all else."""

import gc

from tests.lib.composed import _compose

_compose(["recipe=llama_debug"])
gc.collect()
gc.freeze()  # a collection in a rank then copies no page of what was there before
