"""Page file of the page of aborts; Streamlit runs it."""

from samplestore.dashboard import aborts, frame

frame.guarded(aborts.page)
