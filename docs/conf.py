"""How Sphinx builds the documentation: `make docs`, where a warning is an error."""

from actoffload.version import __version__

project = "actoffload"
author = "actoffload developers"
copyright = author
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["upstream"]
html_theme = "furo"
html_title = "actoffload"
html_static_path = ["images"]

# The notebook is run at each build: a cell that raises fails it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True}
autoclass_content = "class"
