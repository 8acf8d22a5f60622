"""Page file of the page of the database's size; Streamlit runs it."""

from samplestore.dashboard import data, frame

frame.guarded(data.page)
