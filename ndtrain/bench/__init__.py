"""`python -m ndtrain.bench <bench> key=value ...`: measurements of this trainer against its peers."""
