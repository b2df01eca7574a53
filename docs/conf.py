"""Settings of the documentation: `make docs` writes the pages that come from the code, and Sphinx makes HTML of all."""

project = "linattn_jax"
extensions = ["myst_parser"]
exclude_patterns = ["_build", "results"]
html_theme = "furo"
html_title = "linattn_jax"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 2
