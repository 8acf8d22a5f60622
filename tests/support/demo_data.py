"""The dashboard's demo, for tests: a run that is small and has some of everything."""

from __future__ import annotations

from samplestore.dashboard.demo_data import Demo, build
from samplestore.dashboard.demo_text import build_tokenizer

__all__ = ["Demo", "build", "build_tokenizer"]
