"""`python -m samplestore.cli`: the command without its script, e.g. for child processes."""

from samplestore.cli import main

main()
