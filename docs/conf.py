"""How Sphinx builds the site: ``make docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "Paceline"
extensions = ["myst_parser", "page_links"]
exclude_patterns = ["_extensions"]

myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # output with "..." in place of some lines is no longer JSON

html_theme = "furo"
html_title = "Paceline"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
