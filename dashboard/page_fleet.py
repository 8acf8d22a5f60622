"""Page file of the page of workers and engines; Streamlit runs it."""

from samplestore.dashboard import fleet, frame

frame.guarded(fleet.page)
