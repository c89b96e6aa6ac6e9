"""The commands of `ndtrain`."""

COMMANDS = {  # command -> its module
    "train": "ndtrain.train",
    "data": "ndtrain.data",
    "checkpoint": "ndtrain.checkpoint",
    "evaluate": "ndtrain.evaluate",
    "generate": "ndtrain.generate",
    "schedule": "ndtrain.schedule",
    "plan": "ndtrain.plan",
    "bench": "ndtrain.bench",
    "preflight": "ndtrain.preflight",
    "report": "ndtrain.report",
    "torchrun": "ndtrain.runtime.torchrun",
}
CONFIGURED = ("train", "preflight", "plan", "torchrun")  # those that take a run's overrides
PLANS = ("dry",)  # what `ndtrain plan` makes
