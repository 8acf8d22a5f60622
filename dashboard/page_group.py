"""Page file of the page of one group; Streamlit runs it."""

from samplestore.dashboard import frame, group

frame.guarded(group.page)
