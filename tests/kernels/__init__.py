"""Tests that run in a process of their own: see test_interpreter.py in tests/engine."""
