"""Batches in the shapes that other trainers want: TRL, verl, AReaL, prime-rl, SkyRL. None of them is imported.

Every converter takes a batch (`run.batch(...)`, `run.replay(...)`), or a list of its samples, and gives plain lists or
numpy arrays. docs/howto/interop.md says which were run against the real package.
"""
