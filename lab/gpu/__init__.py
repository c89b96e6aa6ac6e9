"""`bench gpu`: a fixed suite of cases on one device, its goals and its report."""
