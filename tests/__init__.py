"""The tests, and what they share: imported as ``tests.…``.

This file makes them a package of their own, so that no folder of that name elsewhere on Python's path is mixed in.
"""
