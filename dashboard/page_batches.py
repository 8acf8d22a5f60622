"""Page file of the page of batches; Streamlit runs it."""

from samplestore.dashboard import batches, frame

frame.guarded(batches.page)
