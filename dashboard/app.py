"""The application that `samplestore dashboard` starts. A page is a file here and a line below."""

from __future__ import annotations

import streamlit as st

st.set_page_config(page_title="samplestore", page_icon="🧺", layout="wide")
st.navigation(
    [
        st.Page("page_overview.py", title="Overview", url_path="overview", default=True),
        st.Page("page_trajectory.py", title="Trajectory", url_path="trajectory"),
    ],
    position="top",
).run()
