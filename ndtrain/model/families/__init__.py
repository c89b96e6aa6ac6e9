"""What is particular to one model family, and Hugging Face's config.json."""
