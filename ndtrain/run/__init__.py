"""The life of a training process: command line, rendezvous, stop signals, hang watchdog, exit status."""
