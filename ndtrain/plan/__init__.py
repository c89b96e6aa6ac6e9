"""What a run needs on machines that are not at hand."""
