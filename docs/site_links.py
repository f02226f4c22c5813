"""mkdocs hooks that add pages from the repository's root and rewrite links out of docs/.

On disk, every link is relative to its file, so that it works in any viewer of the repository. The
root of the site is docs/. The hooks add MODEL_ZOO.md, CONTRIBUTING.md, CHANGELOG.md and the plots
of benchmarks/results, and replace links to any other file of the repository by their text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("MODEL_ZOO.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and plots from outside of docs/."""
    plots = [path.relative_to(ROOT) for path in ROOT.glob("benchmarks/results/**/*.png")]
    for path in (*PAGES, *map(str, plots)):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite each relative link from the repository's layout to the site's."""
    on_disk = page.file.src_uri if page.file.src_uri in PAGES else f"docs/{page.file.src_uri}"
    folder = posixpath.dirname(on_disk)

    def rewrite(link: re.Match[str]) -> str:
        path, hash_, anchor = link[3].partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        if not path or not (ROOT / target).exists():
            return link[0]
        on_site = target.removeprefix("docs/")
        if files.get_file_from_path(on_site) is None:
            return link[2]
        relative = posixpath.relpath(on_site, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}[{link[2]}]({relative}{hash_}{anchor})"

    return LINK.sub(rewrite, markdown)
