"""Tests of devices and links that are run while the training is held (GREYHOUND §4.3): planned, measured, judged.

``plan``, ``suspects`` and ``judge`` are pure and run in the controller; ``worker`` runs the tests in the held process.
"""
