"""Package metadata that pyproject.toml cannot express: recipes in the wheel, and the long description.

configs/ and studies/ are installed as poly_epo_jax/recipes/ and poly_epo_jax/recipes/studies/. In an editable
installation, they are only found in the repository.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PACKAGE = "poly_epo_jax"
# A Markdown or HTML link that does not begin with a scheme or an anchor.
LINK = re.compile(r"""(?P<before>\]\(|\b(?:href|src|srcset)=")(?P<path>(?![a-z]+:|#)[^)"\s]+)""")
IMAGES = (".png", ".svg", ".gif")


def description() -> str:
    """Returns README.md with absolute links, because package indexes have no other files of the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project["urls"]["Repository"]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["path"].endswith(IMAGES) else "blob"
        return f"{link['before']}{address}/{kind}/v{project['version']}/{link['path']}"

    return LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


setup(
    packages=[*find_packages(include=[PACKAGE, f"{PACKAGE}.*"]), f"{PACKAGE}.recipes", f"{PACKAGE}.recipes.studies"],
    package_dir={f"{PACKAGE}.recipes": "configs", f"{PACKAGE}.recipes.studies": "studies"},
    long_description=description(),
    long_description_content_type="text/markdown",
)
