"""`python -m ndtrain.preflight`: checks a run's ranks, hosts, links and storage before the run starts."""
