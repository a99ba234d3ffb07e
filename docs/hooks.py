"""Pages of the site beside docs/: every file of the repository that a page links to, under `repository/` with its own path.

Links in the pages are those of the repository, so that they lead somewhere in an editor, too. The site's address and the
repository's are those of `[project.urls]` in pyproject.toml.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
PREFIX = "repository/"


def on_config(config: Any) -> Any:
    urls = dict(re.findall(r'^(Repository|Documentation) = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M))
    config.repo_url, config.site_url = urls["Repository"], urls["Documentation"] + "/"
    return config


def target(page: str, link: str) -> str:
    """The path in the repository that a link on the page at `page`, a path in the repository, names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def to_repository(uri: str) -> str:
    return uri.removeprefix(PREFIX) if uri.startswith(PREFIX) else "docs/" + uri


def to_site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else PREFIX + path


def linked(path: str) -> set[str]:
    return {target(path, link) for _, link, _ in LINK.findall((ROOT / path).read_text())}


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link to outside of docs/, and what is linked from there."""
    waiting = [to_repository(file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        for path in sorted(linked(waiting.pop()) - seen):
            if path.startswith(("docs/", "../")) or not (ROOT / path).is_file():
                continue
            seen.add(path)
            files.append(File.generated(config, to_site(path), abs_src_path=str(ROOT / path)))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as those of the site. The tuning log, which only links lead to, stays out of the search."""
    here = page.file.src_uri
    if here.startswith("log/"):
        page.meta["search"] = {"exclude": True}

    def moved(match: re.Match[str]) -> str:
        found = to_site(target(to_repository(here), match[2]))
        return match[1] + posixpath.relpath(found, posixpath.dirname(here) or ".") + match[3]

    return LINK.sub(moved, markdown)
