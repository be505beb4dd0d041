"""mkdocs hook: pages of the manual may link to files of the repository; those become pages of the site as well.

A link is written relative to its page, as in a checkout. A target outside docs/ appears in the site under repository/:
Markdown as a page, source as a page with its code, other files as they are, a folder as a list of its files.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS, COPIES = "docs/", "repository/"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
ERRORS = "docs/operate/troubleshooting.md"  # as docstrings name the page
ERRORS_LINK = '<a href="../operate/troubleshooting.html#errors">troubleshooting</a>'
RULES = re.compile(r" \((?:[RD]\d+(?:\.\d+)?(?:, )?)+\)")  # of the protocol: for who changes the code
CODE = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".txt": "text", "": "text"}


def is_external(target: str) -> bool:
    """Return whether a link leaves the repository or stays on its page."""
    return target.startswith(("#", "mailto:")) or "://" in target


def in_repository(page: str, target: str) -> str:
    """Return the path from the root that a link of a page names; ValueError if it leaves the repository."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if path.startswith(".."):
        raise ValueError(f"{page} links to {target}, which lies outside the repository")
    return path


def in_site(path: str) -> str:
    """Return where a file of the repository stands in the site's tree of sources."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if (ROOT / path).is_dir():
        return f"{COPIES}{path}/index.md"
    suffix = Path(path).suffix
    return f"{COPIES}{path}.md" if suffix in CODE else COPIES + path


def links_of(text: str) -> Iterator[str]:
    """Yield the targets of a page's links within the repository, without their anchors."""
    for found in LINK.finditer(without_code(text)):
        target = found[2].partition("#")[0]
        if target and not is_external(found[2]):
            yield target


def without_code(text: str) -> str:
    """Return a page with its code blocks and code spans replaced by as many spaces."""
    return re.sub(r"`[^`\n]*`", _blank, re.sub(r"^(`{3,}).*?^\1$", _blank, text, flags=re.DOTALL | re.MULTILINE))


def _blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


def copy_of(path: str) -> str:
    """Return the Markdown that shows a file or folder of the repository."""
    source = ROOT / path
    if source.is_dir():
        names = sorted(child.name + "/" * child.is_dir() for child in source.iterdir() if child.name[0] not in "._")
        listed = "\n".join(f"- `{name}`" for name in names)
        return f"# {path}\n\n{listed}\n"
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text
    return f"# {path}\n\n````{CODE[source.suffix]}\n{text}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, and those that these link to."""
    waiting = [(DOCS + file.src_uri, file.content_string) for file in files.documentation_pages()]
    while waiting:
        page, text = waiting.pop()
        for target in links_of(text):
            path = in_repository(page, target)
            place = in_site(path)
            if path.startswith(DOCS) or files.get_file_from_path(place) is not None or not (ROOT / path).exists():
                continue
            if place.endswith(".md"):
                copy = copy_of(path)
                files.append(File.generated(config, place, content=copy))
                waiting.append((path, copy))
            else:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their copies."""
    here = page.file.src_uri
    source = here.removeprefix(COPIES) if here.startswith(COPIES) else DOCS + here
    plain, pieces, at = without_code(markdown), [], 0
    for found in LINK.finditer(plain):
        target, mark, anchor = found[2].partition("#")
        if target and not is_external(found[2]):
            place = posixpath.relpath(in_site(in_repository(source, target)), posixpath.dirname(here) or ".")
            pieces += [markdown[at : found.start(2)], place, mark, anchor]
            at = found.end(2)
    return "".join([*pieces, markdown[at:]])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the defaults of commands, and docstrings, as a user needs them."""
    html = html.replace("<code>Sentinel.UNSET</code>", "none")  # the name of no default since click 8.3
    if page.file.src_uri == "reference/api.md":
        html = RULES.sub("", html).replace(ERRORS, ERRORS_LINK)
    return html
