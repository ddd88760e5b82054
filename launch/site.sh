#!/usr/bin/env bash
# Builds the documentation site in site/ and checks it: generated pages, links, and names that its search must find.
# The Python of .venv, if it exists, compares the generated pages with the code. The site itself is built in .venv-docs.
set -euo pipefail
cd "$(dirname "$0")/.."
export NO_MKDOCS_2_WARNING=1
python=${PYTHON:-python3}
[ ! -x .venv/bin/python ] || PYTHONPATH=. .venv/bin/python docs/generate.py --check
if [ ! -x .venv-docs/bin/mkdocs ]; then
  "$python" -m venv .venv-docs
  .venv-docs/bin/pip install --quiet --disable-pip-version-check \
    "mkdocs-material>=9.7,<10" "mkdocstrings[python]>=1,<2" ruff
fi
.venv-docs/bin/mkdocs build --strict # not --quiet, which would hide warnings and thereby disable --strict
.venv-docs/bin/python docs/check_search.py
echo "site: site/index.html; 'cd site && python3 -m http.server' serves it with its search"
