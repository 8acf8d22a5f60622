"""Page file of the trajectory; Streamlit runs it."""

from samplestore.dashboard import frame, trajectory

frame.guarded(trajectory.page)
