"""The process that serves the pages: Streamlit, once it has imported what the first page needs. Left to the page, those
imports are half of what the first reader waits for."""

from __future__ import annotations

from streamlit.web.cli import main

from samplestore.dashboard import overview  # noqa: F401 - imported here so that the first page finds it

if __name__ == "__main__":
    main(prog_name="streamlit")
