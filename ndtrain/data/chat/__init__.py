"""Conversations as training data (`data=chat`): rows of JSONL, a chat template, and the tokens that are learned."""
