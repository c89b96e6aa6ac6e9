"""Prints a set-up command of the README (`train`: the first, `test`: the second), so that CI runs what users read."""

import re
import sys
from pathlib import Path

text = Path(__file__).parent.parent.joinpath("README.md").read_text()
commands = re.findall(r"<!-- set-up: (\w+) -->\n```bash\n(.*?)```", text, flags=re.DOTALL)
assert [name for name, _ in commands] == ["train", "test"], "the README has exactly two set-up commands"
print(dict(commands)[sys.argv[1]], end="")
