"""Islands: whole jobs, each on its own mesh, that train one model together. Any of them may be lost."""
