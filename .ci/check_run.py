"""Checks the run folder that the README's first command leaves: it learned, and everything promised is there."""

import json
import sys
from pathlib import Path

run = Path(sys.argv[1])
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
first, last = rows[0]["loss"], sum(r["loss"] for r in rows[-10:]) / 10
seconds = sum(r["step_time_s"] for r in rows)
print(f"loss {first:.2f} -> {last:.2f} (mean of the last 10 steps) in {len(rows)} steps, {seconds:.0f} s")
assert [r["step"] for r in rows] == list(range(1, len(rows) + 1)), "one row a step"
assert first > 8 and last < 4.5, "llama_small did not learn as it should"
for name in ("config.yaml", "wandb", "logs/rank-0.log"):
    assert (run / name).exists(), f"{run / name} is missing"
log = (run / "logs/rank-0.log").read_text()  # that of the host: both ranks write into it
for rank in (0, 1):
    assert f" rank {rank} INFO finished step" in log, f"rank {rank} did not finish in {run / 'logs/rank-0.log'}"
newest = max((run / "checkpoints").glob("step-*"))
for name in ("model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json", "state.json"):
    assert (newest / name).exists(), f"{newest / name} is missing"
print(f"{newest} is complete")
