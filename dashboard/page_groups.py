"""Page file of the page of groups; Streamlit runs it."""

from samplestore.dashboard import frame, groups

frame.guarded(groups.page)
