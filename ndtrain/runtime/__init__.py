"""The process: command line, rendezvous, signals, exit status, hangs."""
