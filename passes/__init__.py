"""One pass a file; their pipelines; the runner that verifies after each."""
