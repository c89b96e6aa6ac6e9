"""`python -m ndtrain.bench <bench> key=value ...`: measures this trainer against its peers."""
