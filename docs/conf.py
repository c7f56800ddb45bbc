"""How the documentation is built: `make docs`."""

from coterie._version import __version__

project = "Coterie"
author = "The Coterie developers"
copyright = "2026, the Coterie developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
html_theme = "furo"
html_title = "Coterie"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False

default_role = "literal"  # docstrings write `code` as Markdown does
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
