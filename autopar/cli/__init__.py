"""The command line: ``autopar dump | verify | compare``."""
