"""torchrun --nproc-per-node 8 ... -m ndtrain.preflight recipe=llama3_8b mesh.fsdp=8      # the overrides of the run"""

import logging

from ndtrain.preflight.run import preflight
from ndtrain.run import cli, usage

if __name__ == "__main__":
    logging.getLogger("ndtrain").addHandler(logging.NullHandler())  # an error is printed once, and there is no log file
    cli.run_and_exit(preflight, usage.preflight)
