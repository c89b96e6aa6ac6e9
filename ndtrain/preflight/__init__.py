"""`python -m ndtrain.preflight`: what may be wrong with a run's ranks, hosts, links and storage, before it starts."""
