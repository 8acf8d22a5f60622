"""The application that `samplestore dashboard` starts. A page is a file page_NAME.py and a line here."""

from __future__ import annotations

import streamlit as st

st.set_page_config(page_title="samplestore", page_icon="🧺", layout="wide")
st.navigation(
    [
        st.Page("page_overview.py", title="Overview", url_path="overview", default=True),
        st.Page("page_groups.py", title="Groups", url_path="groups"),
        st.Page("page_group.py", title="Group", url_path="group"),
        st.Page("page_trajectory.py", title="Sample", url_path="trajectory"),
        st.Page("page_aborts.py", title="Aborts", url_path="aborts"),
        st.Page("page_fleet.py", title="Workers and engines", url_path="fleet"),
        st.Page("page_batches.py", title="Batches", url_path="batches"),
        st.Page("page_data.py", title="Data", url_path="data"),
    ],
    position="top",
).run()
