"""A reward module that cannot be imported (for test_rewards.py)."""

raise RuntimeError("this module is broken on purpose")
