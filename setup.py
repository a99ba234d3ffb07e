"""README as a package index shows it: links and pictures by the project's address. The rest is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
ADDRESS = re.findall(r'^Repository = "(.*)"$', (HERE / "pyproject.toml").read_text(), re.M)[0]


def absolute(link: re.Match) -> str:
    picture, text, path = link.groups()
    return f"{picture}{text}({ADDRESS}/{'raw' if picture else 'blob'}/HEAD/{path})"


README = re.sub(r"(!?)(\[[^]]+\])\((?!https?:|#)([^)]+)\)", absolute, (HERE / "README.md").read_text())
setup(long_description=README, long_description_content_type="text/markdown")
