"""Tests of jobqueue: standard library only, run with `python -m unittest discover` at the top."""
