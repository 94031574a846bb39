"""Puts ``actoffload.pth`` beside the installed packages: it makes ``ACTOFFLOAD=auto`` work in unchanged programs.

Everything else is in pyproject.toml, which has no place for such a file.
"""

import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

NAME = "actoffload.pth"
LINE = 'import os; os.environ.get("ACTOFFLOAD") and __import__("_actoffload_start")\n'


class BuildWithPth(build_py):
    """Builds the file with the packages."""

    def run(self):
        super().run()
        if not self.editable_mode:
            (Path(self.build_lib) / NAME).write_text(LINE)


class EditableWithPth(editable_wheel):
    """Adds the file to the wheel of an editable installation."""

    def run(self):
        super().run()
        (wheel,) = Path(self.dist_dir).glob("*.whl")
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr(NAME, LINE)


setup(cmdclass={"build_py": BuildWithPth, "editable_wheel": EditableWithPth})
