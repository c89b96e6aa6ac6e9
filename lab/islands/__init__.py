"""Trials with real islands: losses and returns, slow links, partitions and recovery. They need minutes each.

Islands are processes of this machine. Trials of the network put each island into a network namespace, which needs root.
"""
