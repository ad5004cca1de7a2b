"""Requests over time, read from a trace or generated, and the scheduler that makes steps of them."""
