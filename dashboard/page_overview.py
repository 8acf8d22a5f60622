"""Page file of the overview; Streamlit runs it."""

from samplestore.dashboard import frame, overview

frame.guarded(overview.page)
